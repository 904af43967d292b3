"""Whether a machine is fit to measure: its self-tests, what works on its GPU, what to do."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from attnbench.base.units import counted
from attnbench.errors import ExitCode
from attnbench.machine.host import ranges
from attnbench.machine.symptoms import Finding as Symptom
from attnbench.machine.symptoms import Level
from attnbench.report import document as doc

GPU = {
    "capability": "compute capability", "processors": "SMs", "l2_bytes": "L2 cache",
    "memory_free_bytes": "free memory", "memory_total_bytes": "memory", "driver": "driver",
    "cuda": "CUDA", "cudnn": "cuDNN", "compute_mode": "compute mode", "mig": "instance of MIG",
}  # fmt: skip
SIGNS: dict[Level, doc.Sign] = {"ok": "good", "warning": "open", "fail": "bad"}


def document(diagnosis: dict[str, Any], found: Sequence[Symptom]) -> doc.Document:
    """What the worker found out, plain JSON, and what follows; a warning is not a failure."""
    known, gpu = diagnosis["facts"], diagnosis["gpu"]
    failed = [one.name for one in found if one.level == "fail"]
    warnings = counted(sum(one.level == "warning" for one in found), "warning")
    tests = [(doc.Finding(sign=SIGNS[one.level], verdict=one.level, subject=one.name,
                          reason=one.fact, test=("doctor", one.name)),
              one.name, one.fact, one.limit or "")
             for one in found if one.kind == "test"]  # fmt: skip
    advice = [
        doc.Finding(sign=SIGNS[one.level], verdict=one.level, subject=one.name,
                    reason=f"{one.fact} → {one.remedy}", test=("doctor", one.name))
        for one in found if one.level != "ok"
    ]  # fmt: skip
    tried = {f"{test}, {name}": value for test, outcome in diagnosis["tests"].items()
             for name, value in _flat(outcome)}  # fmt: skip
    sections = [
        doc.Section("Self-tests", [doc.Table(
            columns={"verdict": "verdict", "test": "self-test", "measured": "measured",
                     "limit": "limit"},
            rows=tests,
        )]),
        doc.Section("GPU", _of_the_gpu(gpu, known.get("cuda")) if gpu else []),
        doc.Section("What to do", advice),
        doc.Section(
            "Facts", [doc.facts(known | diagnosis["meanwhile"]), doc.numbers(tried)], folded=True
        ),
    ]  # fmt: skip
    machine = (
        known["device_name"],
        f"{counted(known['threads'], 'thread')} on CPUs {ranges(known['affinity']) or 'unknown'}",
        f"torch {known['torch']}" + (f" ({known['blas']})" if known.get("blas") else ""),
        f"python {known['python']}",
    )
    return doc.Document(
        kind="doctor", exit_code=ExitCode.ENVIRONMENT if failed else ExitCode.OK,
        conclusion=doc.Finding(
            sign="bad" if failed else "good", subject="this machine",
            verdict="not fit to measure" if failed else "fit to measure",
            reason=", ".join([*failed, warnings]),
        ),
        about=[" · ".join(machine)],
        sections=sections,
        spent_s=diagnosis["meanwhile"]["wall_s"],
    )  # fmt: skip


def _flat(outcome: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Figures of a self-test by name, those of its parts, too."""
    for name, value in outcome.items():
        if isinstance(value, Mapping):
            yield from ((f"{name} {part}", number) for part, number in _flat(value))
        else:
            yield name, value


def _of_the_gpu(gpu: dict[str, Any], cuda: str | None) -> list[doc.Part]:
    """What it is, then what works on it: a row for each kernel and for each reason against it."""
    known = doc.facts(gpu | {"cuda": cuda})
    found: dict[tuple[str, str | None], list[str]] = {}
    answers = {"NVML": gpu["problem"], "energy counter": None if gpu["energy_counter"] else "none"}
    tried = [{"name": name, "reason": why, "dtype": None} for name, why in answers.items()]
    for trial in (*tried, *gpu["works"]):
        found.setdefault((trial["name"], trial["reason"]), []).append(trial["dtype"] or "")
    rows = [
        (doc.Finding(sign="bad" if why else "good", verdict="no" if why else "yes", subject=name),
         name, ": ".join(filter(None, (", ".join(dtypes), why))))
        for (name, why), dtypes in found.items()
    ]  # fmt: skip
    columns = {"verdict": "works", "what": "what", "found": "found"}
    return [
        {head: known[name] for name, head in GPU.items()},
        doc.Table(columns=columns, rows=rows),
    ]
