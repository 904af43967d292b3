"""Plausible runs on disk, for tests of all that reads one. Deterministic; nothing is measured."""

from __future__ import annotations

import functools
import json
import math
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from attnbench.base.jsontext import sealed
from attnbench.report.documents import sweep
from attnbench.report.files import write_files
from attnbench.schema.case import Case, Mask, Position, parse_position
from attnbench.schema.record import SCHEMA, Cell, Record, Sample
from attnbench.store.runs import load_run, new_run

CPU = {
    "device": "cpu", "device_name": "AMD EPYC 9B14", "cores": 2, "threads": 2,
    "torch": "2.13.0+cpu", "python": "3.11.7", "platform": "Linux-6.1.0-x86_64-with-glibc2.36",
    "memory_bytes": 8 * 2**30, "caches": {"L1d": 32768, "L2": 1048576, "L3": 33554432},
    "matmul_precision": "highest",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Model:
    """How an imagined implementation behaves: time = overhead + FLOPs/rate + pairs · cost."""

    overhead_us: float
    flops_per_us: float
    pair_us: float = 0.0
    square: bool = True  # keeps the n² score matrix
    skips_hidden: bool = False  # multiplies only what a mask admits


MODELS = {
    "naive": Model(overhead_us=60, flops_per_us=6e4, pair_us=1.6e-3),
    "naive-heads": Model(overhead_us=180, flops_per_us=6e4, pair_us=1.3e-3),
    "sdpa": Model(
        overhead_us=35, flops_per_us=9e4, pair_us=1.5e-4, square=False, skips_hidden=True
    ),
    "sdpa-math": Model(overhead_us=90, flops_per_us=6e4, pair_us=2.1e-3),
    "chunked": Model(overhead_us=140, flops_per_us=6e4, pair_us=1.1e-3, square=False),
}
CACHES = ("rerun", "none", "concat", "static")


def write_run(
    folder: Path, name: str, records: Iterable[Record], info: dict[str, Any] | None = None
) -> Path:
    """Write a run as the store does, and return its folder."""
    kept = list(records)
    with new_run(folder, name, run_info(name, kept) | (info or {})) as made:
        made.append(*(record.to_line() for record in kept))
        return made.path


def edit(file: Path, change: Callable[[Any], Any]) -> None:
    """Change the JSON of a sealed file, as its writer would: what is in it is to be judged."""
    row = json.loads(file.read_text())
    row.pop("checksum", None)
    file.write_text(sealed(json.dumps(change(row))))


def run_info(name: str, records: list[Record]) -> dict[str, Any]:
    """What run.json holds for these records."""
    stages: dict[str, float] = {}
    for record in records:
        for stage, seconds in record.spent_s.items():
            stages[stage] = stages.get(stage, 0.0) + seconds
    return {
        "schema": SCHEMA,
        "run_id": name,
        "created": "2026-11-21T01:02:03+00:00",
        "attnbench": "0.1.0",
        "options": {"--preset": "quick", "--seq-lens": [128, 256, 512, 1024, 2048], "--seed": 0},
        "environment": CPU,
        "plan": [record.cell.to_json() for record in records],
        "implementations": [
            {"name": impl, "doc": f"The {impl} way.", "time": "n^2 d", "memory": None}
            for impl in sorted({record.cell.impl for record in records})
        ],
        "spent": {"wall_s": 1.1 * sum(stages.values()) + 3, "start-up": 2.5} | stages,
    }


def ok(case: Case, impl: str, **metrics: Any) -> Record:
    """A cell that was measured; `metrics` replace what the model says."""
    model = MODELS.get(impl, MODELS["naive"])
    values = modelled_metrics(case, model) | metrics
    return Record(
        cell=Cell(case=case, impl=impl),
        status="ok",
        samples=samples(modelled_time_us(case, model), f"{case.case_id}{impl}"),
        metrics=values,
        spent_s={"build": 0.01, "check": 0.2, "probe": 0.1, "warm-up": 0.1, "samples": 0.6},
    )


def timed(case: Case, impl: str, times_us: Iterable[float], **metrics: Any) -> Record:
    """A cell with these samples, and nothing but these metrics."""
    kept = [
        Sample(round=i, position=0, calls=1, time_us=t, e2e_us=t) for i, t in enumerate(times_us)
    ]
    return Record(
        cell=Cell(case=case, impl=impl), status="ok", samples=tuple(kept), metrics=metrics
    )


def failed(case: Case, impl: str, status: Any, reason: str) -> Record:
    """A cell without a result."""
    return Record(
        cell=Cell(case=case, impl=impl), status=status, reason=reason, spent_s={"check": 0.05}
    )


def samples(time_us: float, seed: str, count: int = 15) -> tuple[Sample, ...]:
    """Skewed samples whose median is close to `time_us`."""
    rng = random.Random(seed)
    noise = [rng.lognormvariate(0, 0.02) * (1 + 0.1 * rng.random() ** 6) for _ in range(count)]
    return tuple(
        Sample(round=i, position=i % 5, calls=3, time_us=time_us * f, e2e_us=time_us * f + 4)
        for i, f in enumerate(noise)
    )


def pairs(case: Case) -> int:
    """Admitted pairs, by counting; the average token of a decode sees about the context."""
    if case.workload == "decode":
        return case.seq_len + 4
    return _pairs_of_mask(case.mask, case.seq_len, case.kv_len)


@functools.cache
def _pairs_of_mask(mask: Mask, seq_len: int, kv_len: int) -> int:
    spans = (mask.span(i, seq_len, kv_len) for i in range(seq_len))
    return sum(last - first for first, last in spans)


def _flops(case: Case, pair_count: int) -> int:
    factor = {"forward": 2, "backward": 5, "both": 7}[case.pass_]
    return 2 * case.batch * case.heads * pair_count * case.head_dim * factor


def modelled_time_us(case: Case, model: Model) -> float:
    """Time a call, or a token, in µs."""
    shown = pairs(case) if model.skips_hidden or case.workload == "decode" else case.seq_len**2
    work = _flops(case, shown) / model.flops_per_us
    work += model.pair_us * case.batch * case.heads * shown
    rotary = 1 + 0.6 * 128 / (case.seq_len + 128) if case.position.name == "rope" else 1.0
    time_us = (model.overhead_us + work) * rotary
    if case.cache in ("rerun", "none"):
        again = case.seq_len if case.cache == "rerun" else math.sqrt(case.seq_len)
        time_us *= 1 + again / 20
    return time_us * (1.3 if case.cache == "concat" else 1.0)


def modelled_metrics(case: Case, model: Model) -> dict[str, Any]:
    """What the probes would leave for this case."""
    rows = case.batch * case.heads * case.seq_len
    useful = _flops(case, pairs(case))
    workspace = 4 * rows + 2**14
    if model.square and case.workload != "decode":
        workspace = 2 * rows * case.seq_len * case.element_bytes
    output = rows * case.head_dim * case.element_bytes
    return {
        "flops_useful": useful,
        "flops_executed": useful if model.skips_hidden else _flops(case, case.seq_len**2),
        "flops_counted": useful,
        "flops_counted_source": "dispatched",
        "bytes_min": 4 * output,
        "memory_peak_bytes": workspace + 4 * output,
        "memory_inputs_bytes": 3 * output,
        "memory_outputs_bytes": output,
        "memory_prepared_bytes": 0,
        "memory_workspace_bytes": workspace + 3 * 64,
        "memory_predicted_bytes": workspace,
        "error_max": 3e-7,
        "error_rmse": 4e-8,
        "error_ratio": 0.41,
        "kernel": "aten::bmm",
        "kernel_count": 5,
        "l2": "warm",
    }


def quick_records() -> list[Record]:
    """A CPU run: attention and decode, with and without RoPE, and a few failures."""
    rope = parse_position("rope")
    records = [
        ok(Case(seq_len=n, heads=h, position=p), impl)
        for h, p, n in product((4, 8), (Position(), rope), (128, 512, 1024, 2048))
        for impl in MODELS
        if not (impl == "sdpa-math" and (h, n) == (8, 2048))
    ]
    records += [
        ok(decode_case(n, cache), impl)
        for n, cache, impl in product((128, 256, 512, 1024), CACHES, ("naive", "sdpa"))
    ]
    huge = [Case(seq_len=2048, heads=8, position=p) for p in (Position(), rope)]
    records += [failed(c, "sdpa-math", "oom", "1.0 GiB wanted, 0.4 GiB free") for c in huge]
    records += [
        failed(Case(seq_len=n), "flex", "unsupported", "flex has no CPU backward in torch 2.13")
        for n in (128, 256, 512, 1024, 2048)
    ]
    return records


def decode_case(context: int, cache: str) -> Case:
    """One decoding case of a small layer."""
    return Case(
        workload="decode", seq_len=context, cache=cache, width=256, new_tokens=8,
        projection="separate",
    )  # fmt: skip


def failed_records() -> list[Record]:
    """Nothing but failures, one of every kind."""
    reasons = {
        "unsupported": "needs a GPU", "incorrect": "error 3.1e-2, 12 × the allowed 2.6e-3",
        "oom": "9.0 GiB wanted", "timeout": "no result within 60 s", "crashed": "signal 11",
        "error": "RuntimeError: shape mismatch", "skipped": "kv-heads 3 do not divide 4 heads",
    }  # fmt: skip
    return [failed(Case(seq_len=256), f"bad-{s}", s, reason) for s, reason in reasons.items()]


def bare_records() -> list[Record]:
    """Measured cells whose probes all failed: times, and no metric at all."""
    return [
        Record(cell=record.cell, status="ok", samples=record.samples[:4])
        for record in (ok(Case(seq_len=n), impl) for n in (64, 96) for impl in ("naive", "mine"))
    ]


def hostile_records() -> list[Record]:
    """Texts that would break a page or a table that does not escape them."""
    reason = '<script>alert(1)</script> | a & b\nsecond line `tick` "quoted"'
    case = Case(seq_len=128)
    return [ok(case, "naive"), ok(case, "<b>x</b>|y"), failed(case, "bad", "error", reason)]


RUNS = {
    "quick": quick_records, "failed": failed_records,
    "one": lambda: [ok(Case(seq_len=128), "sdpa")], "bare": bare_records,
    "hostile": hostile_records, "empty": list,
}  # fmt: skip


def write_named(folder: Path, name: str) -> Path:
    """Write one of `RUNS`."""
    return write_run(folder, name, RUNS[name]())


def write_report(path: Path) -> Path:
    """Write the page, the Markdown and the plots of a run; return the page."""
    write_files(path, sweep.document(load_run(path)))
    return path / "report.html"
