"""Counted FLOPs and workspace against formula and law: whole numbers, free of noise."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np
from scipy.optimize import brentq, nnls

from attnbench.analysis.scaling.decide import LEAST_SIZES, TOLERANCE, Decision
from attnbench.analysis.scaling.results import (
    NOUNS,
    Axis,
    ExactFit,
    Measured,
    Quantity,
    Series,
    plain_size,
    power_text,
)
from attnbench.analysis.scaling.series import Laws
from attnbench.analysis.scaling.slopes import Floats
from attnbench.base import units
from attnbench.schema.axes import AXES
from attnbench.schema.case import Case
from attnbench.schema.finding import WORST_FIRST, LawFinding
from attnbench.theory.law import Law

MISS = 0.02  # of what is predicted, and of what the terms of a law have to reproduce
ROUNDING_BYTES = 4096  # allocators hand out whole blocks: 64 bytes on CPU, 512 on CUDA
LEAST_SHARE = 1e-3  # of a declared term at the size where it weighs most
LEADING_SHARE = 0.1  # of the declared term at the largest size, where others still weigh more
NNLS_STEPS = 10_000  # scipy raises where it is not done by then; its default is 3 a column
_Known = tuple[float, float]  # a size and what was measured there


@dataclass(frozen=True, kw_only=True)
class _Exact:
    """One quantity: its law, metrics and tolerance, and how it is written."""

    noun: str
    law: Literal["flops", "memory"]
    measured: str
    predicted: str
    rounding: float = 0.0
    miss: float = 0.0
    text: Callable[[float], str]


QUANTITIES: dict[Quantity, _Exact] = {
    "flops": _Exact(
        noun="FLOPs", law="flops", measured="flops_counted", predicted="flops_executed",
        text=lambda value: units.count(round(value)),
    ),
    "workspace": _Exact(
        noun="workspace", law="memory", measured="memory_workspace_bytes",
        predicted="memory_predicted_bytes", rounding=ROUNDING_BYTES, miss=MISS, text=units.size,
    ),
}  # fmt: skip


def exact_fits(many: Iterable[Series], laws: Laws) -> tuple[ExactFit, ...]:
    """FLOPs and workspace of every series in which any was counted."""
    fits = (_exact(one, name, row, laws) for one in many for name, row in QUANTITIES.items())
    return tuple(fit for fit in fits if fit is not None)


def _exact(series: Series, quantity: Quantity, row: _Exact, laws: Laws) -> ExactFit | None:
    rows = tuple(
        (size, _number(cell, row.measured), _number(cell, row.predicted))
        for size, cell in zip(series.sizes, series.cells, strict=True)
    )
    known = [(s, m) for s, m, _ in rows if m is not None]
    if not known:
        return None
    both = [(s, m, p) for s, m, p in rows if m is not None and p is not None]
    case = series.cells[0].record.cell.case
    law = laws.of(series.impl, row.law, case)
    checks = [_formula(series, row, both)] if both else []
    if law and (grown := _grown(law, series.axis, quantity, known, case)):
        checks.append(grown)
    growth, finding = top_power(known), None
    if checks:  # refuted if either is, inconclusive if neither holds
        finding = LawFinding(
            subject=series.subject, impl=series.impl, workload=series.workload, quantity=quantity,
            axis=series.axis, question=f"{row.noun} in {series.axis}",
            law=str(law) if law else "the formula",
            verdict=min((verdict for verdict, _ in checks), key=WORST_FIRST.index),
            reason="; ".join(reason for _, reason in checks),
            figures={
                "largest_miss": max((_miss(m, p) for _, m, p in both), default=None),
                "growth": growth,
            },
        )  # fmt: skip
    return ExactFit(
        impl=series.impl, workload=series.workload, quantity=quantity, axis=series.axis,
        same=series.same, rows=rows, growth=growth, finding=finding,
    )  # fmt: skip


def _number(cell: Measured, name: str) -> float | None:
    value = cell.record.metrics.get(name) if cell.record.status == "ok" else None
    return float(value) if isinstance(value, (int, float)) and 0 <= value < math.inf else None


def _miss(measured: float, predicted: float) -> float:
    """Relative to what is predicted."""
    if measured == predicted:
        return 0.0
    return abs(measured / predicted - 1) if predicted else math.inf


def _formula(series: Series, row: _Exact, both: Sequence[tuple[float, float, float]]) -> Decision:
    """Whether what was measured is what the formula predicts, at each size."""
    # Where the count is itself a formula, of one op whatever it skips, it refutes nothing.
    sources = {cell.record.metrics.get(f"{row.measured}_source") for cell in series.cells}
    opaque = ", where the count is the price of an opaque op" if "formula" in sources else ""
    wrong = [(s, m, p) for s, m, p in both if abs(m - p) > max(row.miss * p, row.rounding)]
    if wrong:
        size, counted, formula = max(wrong, key=lambda found: _miss(*found[1:]))
        at = f"{row.noun} at {NOUNS[series.axis]} = {plain_size(size)}"
        reason = f"{at}: {row.text(counted)} where its formula says {row.text(formula)}{opaque}"
        return "inconclusive" if opaque else "refuted", reason
    largest = max(_miss(m, p) for _, m, p in both)
    sizes = "1 size" if len(both) == 1 else f"all {len(both)} sizes"
    within = f"within {units.percent(largest)} of" if largest else "exactly as"
    return "holds", f"{row.noun} {within} the formula at {sizes}{opaque}"


def _grown(
    law: Law, axis: Axis, quantity: Quantity, known: Sequence[_Known], case: Case
) -> Decision | None:
    """Whether exact values grow along the axis as the law says; None where it says nothing.

    The exponent is that of the last three sizes, a constant aside, which has to lie within 0.15 of
    the law's; workspace is too steep only where the largest octave is, too. A bound is refuted only
    if every octave is too steep, or the last sizes are a sum of powers that is: buffers that depend
    on the block size take a step now and then. FLOPs of several terms must be a sum of just these.
    Workspace is the largest of several moments, so that
    of several terms the largest bounds it and the smallest is the least it grows by; it need not
    grow with heads or batch, which may be served one after another, nor with a d that its law does
    not name.
    """
    powers = _law_powers(law, axis, quantity, case)
    if not powers:
        return None
    least, most, noun = min(powers), max(powers), NOUNS[axis]
    bound = law.bound or (quantity == "workspace" and axis not in ("n", "d"))
    if len(known) < LEAST_SIZES:
        return "inconclusive", f"{len(known)} sizes show no growth, three do"
    if least != most and not bound and quantity == "flops":
        return _sum_of_terms(law, axis, known)
    growth = increments_power(known)
    found = f"grows as {noun}^{growth:.2f}"

    def declared(power: float) -> str:
        return str(law) if axis in ("n", "d") else power_text(noun, power)

    if growth > most + TOLERANCE:
        octave = top_power(known) or 0.0
        if quantity == "workspace" and not bound and octave <= most + TOLERANCE:
            # The largest of several moments has a corner, where the next term takes over.
            larger = plain_size(2 * known[-1][0])
            corner = f"{noun}^{octave:.2f} over the last doubling: {noun} = {larger} would decide"
            return "inconclusive", f"{found} over the last three sizes, as {corner}"
        if not bound or _keeps_growing(known, most + TOLERANCE):
            return "refuted", f"{found}, faster than {declared(most)}"
        if octave <= most + TOLERANCE:
            return "holds", f"the last doubling grows as {noun}^{octave:.2f}"
        return "inconclusive", f"{noun}^{octave:.2f} in the last doubling: measure larger sizes"
    if not bound and growth < least - TOLERANCE:
        if _leads(least, known[-LEAST_SIZES:]):
            return "holds", f"{found} so far: {noun}^{least:g} beside terms of lower order"
        return "refuted", f"{found}, more slowly than {declared(least)}"
    return "holds", f"{found}, as {declared(most)}"


def _law_powers(law: Law, axis: Axis, quantity: Quantity, case: Case) -> list[float]:
    """The powers that the law's terms give the axis; none where the law says nothing of it."""
    if axis in ("n", "d"):
        powers = [float(term.degree(axis)) for term in law.terms]
        return powers if axis == "n" or quantity == "flops" or any(powers) else []
    if axis == "batch":
        return [1.0]
    if AXES["width"].applies(case.workload):
        return []  # d is the width there, which heads may or may not widen
    return [1.0] if axis == "heads" else [1.0 - float(term.degree("d")) for term in law.terms]


def _leads(power: float, known: Sequence[_Known]) -> bool:
    """Whether the values are size^power beside whole powers below it.

    Those of the last sizes alone, since workspace is the largest of several moments, and small
    sizes may have another one.
    """
    powers = [power, *range(math.ceil(power))]
    shares = _shares([[size**p for p in powers] for size, _ in known], known)
    return _off(shares) <= MISS and bool(shares[-1, 0] >= LEADING_SHARE)


def _keeps_growing(known: Sequence[_Known], limit: float) -> bool:
    """Whether every octave is too steep, or the last sizes are a sum of powers that is.

    Buffers that depend on a block size take steps, at times two in a row: in log-log they curve as
    no sum of powers does.
    """
    if len(known) <= LEAST_SIZES:  # two octaves may lie within one block
        return False
    octaves = [top_power(pair) or 0.0 for pair in pairwise(known)]
    first = math.floor(limit) + 1
    # One size more than there are coefficients: as many can be made to fit anything.
    return min(octaves) > limit or any(
        len(known) >= power + 2 and _leads(power, known[-power - 2 :])
        for power in (first, first + 1)
    )


def _sum_of_terms(law: Law, axis: Axis, known: Sequence[_Known]) -> Decision:
    """Non-negative least squares on relative error, over the law's terms and a constant."""
    variable = "n" if axis == "n" else "d"
    terms = law.along(variable).terms
    rows = [[*(term.value({variable: size}) for term in terms), 1.0] for size, _ in known]
    shares = _shares(rows, known)
    miss = _off(shares)
    if miss > MISS:
        return "refuted", f"no sum of the terms of {law}: off by {units.percent(miss)}"
    idle = [str(t) for t, s in zip(terms, shares.T, strict=False) if s.max() < LEAST_SHARE]
    if idle:
        return "refuted", f"nothing grows as {' or '.join(idle)}, which {law} has"
    return "holds", f"a sum of the terms of {law}, within {units.percent(miss)}"


def _shares(rows: list[list[float]], known: Sequence[_Known]) -> Floats:
    """Sizes × columns: what each contributes, relative to the value; none is negative."""
    columns, values = np.array(rows), np.array([max(value, 1.0) for _, value in known])
    return np.asarray(columns * least_squares(columns, values) / values[:, None])


def _off(shares: Floats) -> float:
    """By how much the sum of shares misses a value at most, relative to it."""
    return float(np.abs(shares.sum(axis=1) - 1).max())


def least_squares(rows: Floats, values: Floats) -> Floats:
    """Coefficients of the columns, none negative, with the least relative error."""
    relative = rows / values[:, None]
    scale = relative.max(axis=0)
    return np.asarray(nnls(relative / scale, np.ones(len(rows)), maxiter=NNLS_STEPS)[0] / scale)


def top_power(known: Sequence[_Known]) -> float | None:
    """The power of the largest octave: log of the ratio over log of the sizes' ratio."""
    if len(known) < 2:
        return None
    (small, low), (large, high) = known[-2:]
    if low <= 0 or high <= 0:
        return 0.0 if low == high else None
    return math.log(high / low) / math.log(large / small)


def increments_power(known: Sequence[_Known]) -> float:
    """The p of constant + coefficient · size^p through the last three sizes; 0 if none grows.

    Where the sizes are x, r x and r² x, the increments have the ratio r^p.
    """
    (x0, y0), (x1, y1), (x2, y2) = known[-3:]
    if y2 <= y1:
        return 0.0
    if y1 <= y0:
        return top_power(known) or 0.0  # it only began to grow

    def off(power: float) -> float:
        rise = (x2**power - x1**power) / (x1**power - x0**power)
        return float((y2 - y1) / (y1 - y0) - rise)

    least, most = 1e-6, 8.0
    if off(least) <= 0:
        return 0.0
    return most if off(most) > 0 else float(brentq(off, least, most))
