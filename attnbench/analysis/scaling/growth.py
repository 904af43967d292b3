"""Whether exact values, whole numbers free of noise, grow as a law says."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq, nnls

from attnbench.analysis.scaling.decide import TOLERANCE
from attnbench.analysis.scaling.remarks import NOUNS, power_text
from attnbench.analysis.scaling.results import Axis, Quantity
from attnbench.base import units
from attnbench.schema.case import Case
from attnbench.schema.finding import Verdict
from attnbench.theory.law import Law
from attnbench.theory.traits import TRAITS

MISS = 0.02  # of what the terms of a law have to reproduce
LEAST_SHARE = 1e-3  # of a declared term at the size where it weighs most
LEADING_SHARE = 0.1  # of the declared term at the largest size, where others still weigh more
LEAST_SIZES = 3
NNLS_STEPS = 10_000  # scipy raises where it is not done by then; its default is 3 a column
Check = tuple[Verdict, str] | None
Known = tuple[float, float]  # a size and what was measured there


def grown(law: Law, axis: Axis, quantity: Quantity, known: list[Known], case: Case) -> Check:
    """Whether exact values grow along the axis as the law says; None where it says nothing.

    The exponent is that of the last three sizes, a constant aside, which has to lie within 0.15 of
    the law's. A bound is refuted only if every octave is too steep, or the last sizes are a sum of
    powers that is: buffers that depend on the block size take a step now and then. FLOPs of
    several terms must be a sum of just these. Workspace is the largest of several moments, so that
    of several terms the largest bounds it and the smallest is the least it grows by; it need not
    grow with heads or batch, which may be served one after another, nor with a d that its law does
    not name.
    """
    powers = _powers(law, axis, quantity, case)
    if powers is None:
        return None
    least, most, bound = powers
    noun = NOUNS[axis]
    if len({size for size, _ in known}) < LEAST_SIZES:
        return "inconclusive", f"{len(known)} sizes show no growth, three do"
    if least != most and not bound and quantity == "flops":
        return _sum_of_terms(law, axis, known)
    growth = increments_power(known)
    said = f"grows as {noun}^{growth:.2f}"
    if growth > most + TOLERANCE:
        if bound and not _keeps_growing(known, most + TOLERANCE):
            return _settled(top_power(known) or 0.0, most, noun)
        return "refuted", f"{said}, faster than {_law_text(law, axis, most)}"
    if not bound and growth < least - TOLERANCE:
        if _leads(least, known):
            return "holds", f"{said} so far: {noun}^{least:g} beside terms of lower order"
        return "refuted", f"{said}, more slowly than {_law_text(law, axis, least)}"
    return "holds", f"{said}, as {_law_text(law, axis, most)}"


def _leads(power: float, known: list[Known], last: int = LEAST_SIZES) -> bool:
    """Whether the `last` values are size^power beside whole powers below it.

    Not all of them, since workspace is the largest of several moments, and small sizes may have
    another one.
    """
    known = known[-last:]
    powers = [power, *(float(lower) for lower in range(math.ceil(power)))]
    shares = _shares([[size**p for size, _ in known] for p in powers], known)
    reproduced = float(np.abs(shares.sum(axis=1) - 1).max()) <= MISS
    return reproduced and bool(shares[-1, 0] >= LEADING_SHARE)


def _keeps_growing(known: list[Known], limit: float) -> bool:
    """Whether every octave is too steep, or the last sizes are a sum of powers that is.

    Buffers that depend on a block size take steps, at times two in a row: in log-log they bend as
    no sum of powers does.
    """
    octaves = [top_power(known[:end]) or 0.0 for end in range(2, len(known) + 1)]
    first = math.floor(limit) + 1
    # One size more than there are coefficients: as many can be made to fit anything.
    return min(octaves) > limit or any(
        len(known) >= power + 2 and _leads(power, known, power + 2) for power in (first, first + 1)
    )


def _settled(step: float, most: float, noun: str) -> Check:
    if step <= most + TOLERANCE:
        return "holds", f"the largest octave grows as {noun}^{step:.2f}"
    return "inconclusive", f"one step of {noun}^{step:.2f} at the end: measure larger sizes"


def _law_text(law: Law, axis: Axis, power: float) -> str:
    return str(law) if axis in ("n", "d") else power_text(NOUNS[axis], power)


def _powers(
    law: Law, axis: Axis, quantity: Quantity, case: Case
) -> tuple[float, float, bool] | None:
    """The least and the largest power that the law's terms give the axis, and if they bound it."""
    wide = "widths" in TRAITS.get(case.workload).axes
    bound = law.bound or (quantity == "workspace" and axis not in ("n", "d"))
    if axis in ("n", "d"):
        powers = [float(term.degree(axis)) for term in law.terms]
        if axis == "d" and quantity == "workspace" and not any(powers):
            return None
    elif axis == "batch":
        powers = [1.0]
    elif wide:
        return None  # d is the width there, which heads may or may not widen
    elif axis == "heads":
        powers = [1.0]
    else:
        powers = [1.0 - float(term.degree("d")) for term in law.terms]
    return min(powers), max(powers), bound


def _sum_of_terms(law: Law, axis: Axis, known: list[Known]) -> Check:
    """Non-negative least squares on relative error, over the law's terms and a constant."""
    variable = "n" if axis == "n" else "d"
    terms = law.along(variable).terms
    others = dict.fromkeys(("n", "d", "w"), 1.0)
    columns = [[term.value(others | {variable: size}) for size, _ in known] for term in terms]
    shares = _shares([*columns, [1.0] * len(known)], known)
    miss = float(np.abs(shares.sum(axis=1) - 1).max())
    if miss > MISS:
        return "refuted", f"no sum of the terms of {law}: off by {units.percent(miss)}"
    idle = [str(t) for t, s in zip(terms, shares.T, strict=False) if s.max() < LEAST_SHARE]
    if idle:
        return "refuted", f"nothing grows as {' or '.join(idle)}, which {law} has"
    return "holds", f"a sum of the terms of {law}, within {units.percent(miss)}"


def _shares(columns: list[list[float]], known: list[Known]) -> NDArray[np.float64]:
    """Sizes × columns: what each contributes, relative to the value; none is negative."""
    values = np.array([max(value, 1.0) for _, value in known])
    design = np.array(columns).T / values[:, None]
    scale = design.max(axis=0)
    coefficients, _ = nnls(design / scale, np.ones(len(known)), maxiter=NNLS_STEPS)
    shares: NDArray[np.float64] = (design / scale) * coefficients
    return shares


def top_power(known: list[Known]) -> float | None:
    """The power of the largest octave: log of the ratio over log of the sizes' ratio."""
    if len(known) < 2:
        return None
    (small, low), (large, high) = known[-2:]
    if small == large or low <= 0 or high <= 0:
        return 0.0 if low == high else None
    return math.log(high / low) / math.log(large / small)


def increments_power(known: list[Known]) -> float:
    """The p of constant + coefficient · size^p through the last three sizes; 0 if none grows.

    Where the sizes are x, r x and r² x, the increments have the ratio r^p.
    """
    (x0, y0), (x1, y1), (x2, y2) = known[-3:]
    if y2 <= y1:
        return 0.0
    if y1 <= y0:
        return top_power(known) or 0.0  # it only began to grow
    if not x0 < x1 < x2:
        return 0.0
    ratio, first, second = (y2 - y1) / (y1 - y0), math.log(x1 / x0), math.log(x2 / x1)
    if math.isclose(first, second):
        return max(0.0, math.log(ratio) / first)

    def off(power: float) -> float:
        if abs(power) < 1e-9:
            return ratio - second / first
        return ratio - float((x2**power - x1**power) / (x1**power - x0**power))

    low, high = -8.0, 8.0
    if off(low) * off(high) > 0:
        return high if off(high) > 0 else 0.0
    return max(0.0, float(brentq(off, low, high)))
