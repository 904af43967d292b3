"""Imagined runs for the claims: cells as theory has them, and ways to make them lie."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from attnbench.claims import ledger
from attnbench.claims.claim import CLAIMS
from attnbench.claims.evidence import Evidence
from attnbench.execution.store import Run
from attnbench.schema.case import Case, Position, parse_mask
from attnbench.schema.finding import Finding
from attnbench.schema.record import Cell, Record
from tests import synthetic

assert ledger.SUBJECTS  # importing it is what registers the claims
OF_RUN = [name for name, claim in CLAIMS.items() if claim.kind in ("counted", "timed")]


def ask(name: str, run: Run | None = None) -> Finding:
    return CLAIMS.get(name).finding(None if run is None else Evidence(run))


WIDE = 256


def cell(case: Case, impl: str, time_us: float, **metrics: Any) -> Record:
    samples = synthetic.samples(time_us, f"{case.case_id}{impl}")
    return Record(cell=Cell(case=case, impl=impl), status="ok", samples=samples, metrics=metrics)


def run_of(records: Iterable[Record]) -> Run:
    kept = list(records)
    return Run(path=Path("run"), info=synthetic.run_info("run", kept), records=kept, parts=kept)


def attention_cells() -> list[Record]:
    """n from 128 to 4096 at two heads, and 1 to 16 heads at the same width."""
    sizes = [(2, 64, 2**power) for power in range(7, 13)]
    sizes += [(h, WIDE // h, 1024) for h in (1, 2, 4, 8, 16)]
    records = []
    for h, d, n in sizes:
        case = Case(heads=h, head_dim=d, seq_len=n)
        scores, flops = h * n * n, 4 * h * n * n * d
        time = 10 + flops / 1e5 + scores / 1e3
        records += [
            cell(case, "naive", time, flops_counted=flops, memory_workspace_bytes=8 * scores),
            cell(case, "naive-heads", 0.8 * time),
            cell(case, "chunked", time, memory_workspace_bytes=2**16 + 8 * h * n),
            cell(case, "sdpa", time / 2, memory_workspace_bytes=8 * h * n),
        ]
        roped = Case(heads=h, head_dim=d, seq_len=n, position=Position(name="rope"))
        records.append(cell(roped, "sdpa", time / 2 * (1 + 40 / n)))
    return records


def layer_cells(device: Any = "cpu") -> list[Record]:
    """n and E varied together, three projections, and a recurrent network beside."""
    records = []
    for n, e in product((64, 256, 1024, 2048), (256, 512)):
        shape = {"width": e, "heads": 4, "head_dim": e // 4, "seq_len": n, "device": device}
        flops = 8 * n * e * e + 4 * n * n * e
        for projection, more in (("fused", 1.0), ("separate", 1.0), ("per-head", 1.4)):
            case = Case(workload="layer", projection=projection, **shape)
            time = (5 + flops / 1e5) * more
            records += [cell(case, i, time, flops_counted=flops) for i in ("naive", "sdpa")]
        case = Case(workload="recurrent", **shape | {"heads": 1, "head_dim": e})
        records.append(cell(case, "gru", n * (2 + 12 * e * e / 1e5)))
    return records


def decode_cells(first: int = 8, last: int = 13) -> list[Record]:
    """Contexts of 2^first to 2^last (256 to 8192) with the four caches."""
    records = []
    for power, cache in product(range(first, last + 1), synthetic.CACHES):
        n = 2**power
        case = synthetic.decode_case(n, cache, mask=parse_mask("causal"))
        e, keys = WIDE, [n + t + 1 for t in range(8)]
        flops = {
            "rerun": sum(8 * t * e * e + 4 * t * t * e for t in keys) // 8,
            "none": sum(4 * t * e * e + 4 * e * e + 4 * t * e for t in keys) // 8,
        }.get(cache, sum(8 * e * e + 4 * t * e for t in keys) // 8)
        held = 2 * e * 4
        metrics = {
            "flops_counted": flops,
            "memory_prepared_bytes": held * (n + 8),
            "memory_workspace_bytes": 2 * held * n if cache == "concat" else 16 * n,
        }
        records += [cell(case, impl, 20 + flops / 1e4, **metrics) for impl in ("naive", "sdpa")]
    return records


def changed(records: list[Record], change: Callable[[Record], Record]) -> Run:
    return run_of([change(record) for record in records])


def metric(name: str, value: Callable[[Case, float], float], **where: Any) -> Any:
    """Replace a metric of the cells whose case or implementation is as in `where`."""

    def change(record: Record) -> Record:
        row = record.cell.case.to_json() | {"impl": record.cell.impl}
        if not where.items() <= row.items() or name not in record.metrics:
            return record
        new = value(record.cell.case, record.metrics[name])
        return replace(record, metrics=record.metrics | {name: new})

    return change


def slower(factor: Callable[[Case], float], **where: Any) -> Any:
    """Multiply the times of the cells whose case or implementation is as in `where`."""

    def change(record: Record) -> Record:
        row = record.cell.case.to_json() | {"impl": record.cell.impl}
        by = factor(record.cell.case) if where.items() <= row.items() else 1.0
        samples = (replace(s, time_us=s.time_us * by, blocks_us=()) for s in record.samples)
        return replace(record, samples=tuple(samples))

    return change
