"""Counted FLOPs and workspace against formula and law: whole numbers, free of noise."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from attnbench.analysis.scaling.growth import Check, grown, top_power
from attnbench.analysis.scaling.laws import Laws
from attnbench.analysis.scaling.measured import Measured
from attnbench.analysis.scaling.remarks import NOUNS, size_text
from attnbench.analysis.scaling.results import ExactFit, Quantity
from attnbench.analysis.scaling.series import Group
from attnbench.base import units
from attnbench.schema.case import Case
from attnbench.schema.finding import Finding, Verdict
from attnbench.theory.law import Law

MISS = 0.02  # of what is predicted
ROUNDING_BYTES = 4096  # allocators hand out whole blocks: 64 bytes on CPU, 512 on CUDA


@dataclass(frozen=True, kw_only=True)
class _Row:
    """One quantity: where it is found, its tolerance, how it is written, and whose law it has."""

    measured: str
    predicted: str
    rounding: float
    miss: float
    text: Callable[[float], str]
    law: Callable[[Laws, str, Case], Law | None]
    noun: str


QUANTITIES: dict[Quantity, _Row] = {
    "flops": _Row(
        measured="flops_counted",
        predicted="flops_executed",
        rounding=0.0,
        miss=0.0,
        text=lambda value: units.count(round(value)),
        law=Laws.flops,
        noun="FLOPs",
    ),
    "workspace": _Row(
        measured="memory_workspace_bytes",
        predicted="memory_predicted_bytes",
        rounding=ROUNDING_BYTES,
        miss=MISS,
        text=units.size,
        law=Laws.memory,
        noun="workspace",
    ),
}


def exact_fits(groups: Iterable[Group], laws: Laws) -> list[ExactFit]:
    """FLOPs and workspace of every series in which any was counted."""
    found = []
    for group in groups:
        for quantity, row in QUANTITIES.items():
            fit = _exact(group, quantity, row, laws)
            if fit is not None:
                found.append(fit)
    return found


def _exact(group: Group, quantity: Quantity, row: _Row, laws: Laws) -> ExactFit | None:
    series = group.series
    measured = tuple(_number(cell, row.measured) for cell in group.cells)
    if all(value is None for value in measured):
        return None
    predicted = tuple(_number(cell, row.predicted) for cell in group.cells)
    law = row.law(laws, series.impl, group.case)
    known = [(s, m) for s, m in zip(series.sizes, measured, strict=True) if m is not None]
    growth = top_power(known)
    against_formula = _formula(group, row, measured, predicted)
    against_law = None if law is None else grown(law, series.axis, quantity, known, group.case)
    finding = None
    if against_formula or against_law:
        verdict, reason = _both(against_formula, against_law)
        finding = Finding(
            subject=series.subject,
            question=f"{row.noun} in {series.axis}",
            law=str(law) if law else "the formula",
            verdict=verdict,
            reason=reason,
            figures={"largest_miss": _largest_miss(measured, predicted), "growth": growth},
        )
    return ExactFit(
        impl=series.impl, workload=series.workload, quantity=quantity, axis=series.axis,
        same=series.same, sizes=series.sizes, measured=measured, predicted=predicted, law=law,
        growth=growth, finding=finding,
    )  # fmt: skip


def _number(cell: Measured, name: str) -> float | None:
    value = cell.record.metrics.get(name) if cell.record.status == "ok" else None
    return float(value) if isinstance(value, (int, float)) and 0 <= value < math.inf else None


def _both(*checks: Check) -> tuple[Verdict, str]:
    """Refuted if either is, inconclusive if neither holds."""
    done = [check for check in checks if check is not None]
    order: tuple[Verdict, ...] = ("refuted", "holds", "inconclusive")
    verdict = next(v for v in order if any(found == v for found, _ in done))
    return verdict, "; ".join(reason for _, reason in done)


def _formula(
    group: Group,
    row: _Row,
    measured: tuple[float | None, ...],
    predicted: tuple[float | None, ...],
) -> Check:
    pairs = [
        (size, is_, should)
        for size, is_, should in zip(group.series.sizes, measured, predicted, strict=True)
        if is_ is not None and should is not None
    ]
    if not pairs:
        return None
    wrong = [pair for pair in pairs if not _agrees(pair[1], pair[2], row)]
    if wrong:
        size, is_, should = max(wrong, key=lambda pair: _miss(pair[1], pair[2]))
        at = f"{NOUNS[group.series.axis]} = {size_text(size)}"
        said = f"{row.noun} at {at}: {row.text(is_)} where its formula says {row.text(should)}"
        if _priced(group, row):
            return "inconclusive", f"{said}{_priced(group, row)}"
        return "refuted", said
    largest = max(_miss(is_, should) for _, is_, should in pairs)
    sizes = "1 size" if len(pairs) == 1 else f"all {len(pairs)} sizes"
    exact = (
        "exactly as the formula"
        if largest == 0
        else f"within {units.percent(largest)} of the formula"
    )
    return "holds", f"{row.noun} {exact} at {sizes}{_priced(group, row)}"


def _priced(group: Group, row: _Row) -> str:
    """Said where the count is itself a formula, of one op whatever it skips: it refutes nothing."""
    sources = {cell.record.metrics.get(f"{row.measured}_source") for cell in group.cells}
    return ", where the count is the price of an opaque op" if "formula" in sources else ""


def _agrees(measured: float, predicted: float, row: _Row) -> bool:
    return abs(measured - predicted) <= max(row.miss * predicted, row.rounding)


def _miss(measured: float, predicted: float) -> float:
    """Relative to what is predicted."""
    if measured == predicted:
        return 0.0
    return abs(measured / predicted - 1) if predicted else math.inf


def _largest_miss(
    measured: tuple[float | None, ...], predicted: tuple[float | None, ...]
) -> float | None:
    pairs = zip(measured, predicted, strict=True)
    return max((_miss(m, p) for m, p in pairs if m is not None and p is not None), default=None)
