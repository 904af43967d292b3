"""Identities in float64: drawing, comparing, and deciding from the error alone."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from attnbench.claims.claim import Answer
from attnbench.schema.finding import Figure

Array = NDArray[np.float64]

# Sums of a few thousand terms of order 1 in float64 err by about 1e-12, and an angle of 10⁴
# radians by as much; a hundredfold of that is still nothing that a wrong formula would give.
TOLERANCE = 1e-10
VISIBLE = 1e-3  # relative; from here on a formula is wrong, not badly rounded
HALF_UNIT = 0.005  # of the last of two printed decimals
_SEED = 2017


def draws(*stream: int) -> np.random.Generator:
    """A generator whose numbers depend on `stream` alone."""
    return np.random.default_rng((_SEED, *stream))


def error(found: Array, wanted: Array) -> float:
    """Largest deviation relative to the largest wanted value; infinite where shapes differ."""
    if found.shape != wanted.shape:
        return float("inf")
    scale = float(np.max(np.abs(wanted))) or 1.0
    return float(np.max(np.abs(found - wanted))) / scale


def decide(
    printed: float, corrected: float | None = None, *, of: str = "relative error", **figures: Figure
) -> Answer:
    """The verdict on a statement from its own error and, where it is wrong, from the corrected.

    It holds up to rounding and is refuted by a visible error. Where a correction is given, it
    must hold, or nothing is decided.
    """
    shown: dict[str, Figure] = {"error_printed": printed, **figures}
    if corrected is not None:
        shown["error_corrected"] = corrected
        if not corrected <= TOLERANCE:
            reason = f"the correction does not hold either: {of} {corrected:.2g}"
            return Answer(verdict="inconclusive", reason=reason, figures=shown)
    beside = "" if corrected is None else f"; corrected {corrected:.1g}"
    if printed <= TOLERANCE:
        return Answer(verdict="holds", reason=f"{of} {printed:.1g}{beside}", figures=shown)
    if printed > VISIBLE:
        reason = f"{of} as printed {printed:.2g}{beside}"
        return Answer(verdict="refuted", reason=reason, figures=shown)
    reason = f"{of} {printed:.2g}: neither rounding nor a visible difference"
    return Answer(verdict="inconclusive", reason=reason, figures=shown)


def rounded(printed: Array, exact: Array, **figures: Figure) -> Answer:
    """The verdict on figures printed with two decimals: each within half a unit of the last."""
    off = float(np.max(np.abs(printed - exact)))
    shown: dict[str, Figure] = {
        "printed": listed(printed),
        "computed": listed(exact, digits=4),
        "largest_difference": off,
        **figures,
    }
    right = off <= HALF_UNIT + TOLERANCE
    reason = f"printed {listed(printed)}, computed {listed(exact)}"
    return Answer(verdict="holds" if right else "refuted", reason=reason, figures=shown)


def said(true: bool, reason: str, **figures: Figure) -> Answer:
    """The verdict of a comparison that is true or false."""
    return Answer(verdict="holds" if true else "refuted", reason=reason, figures=figures)


def listed(values: Array, digits: int = 2) -> str:
    """Numbers as in a note: `[0.70, 0.21, 0.09]`."""
    return "[" + ", ".join(f"{value:.{digits}f}" for value in np.ravel(values)) + "]"
