"""How far sizes lie off a smooth curve: parabola, local scatter, quotients of arrays.

Arrays are S series × K sizes. Weights are 1 where a size counts, else 0.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def ratio(above: Any, below: Any) -> Floats:
    """Quotient; NaN where the divisor is 0."""
    with np.errstate(divide="ignore", invalid="ignore"):
        quotient = np.divide(above, below)
    found: Floats = np.where(np.isfinite(quotient), quotient, np.nan)
    return found


def local_residual(x: Floats, level: Floats, weight: Floats) -> tuple[Floats, Floats]:
    """Sum of squares of each size about the chord of its neighbours, scaled to the scatter; count.

    The pseudo-residuals of Gasser, Sroka and Jennen-Steinmetz, "Residual variance and residual
    pattern in nonlinear regression" (1986).
    """
    order = np.argsort(-weight, axis=1, kind="stable")  # what counts first, still ascending
    x, y, w = (np.take_along_axis(a, order, axis=1) for a in (x, level, weight))
    if x.shape[1] < 3:
        return np.zeros(len(x)), np.zeros(len(x))
    share = np.nan_to_num(ratio(x[:, 2:] - x[:, 1:-1], x[:, 2:] - x[:, :-2]))
    off = share * y[:, :-2] + (1 - share) * y[:, 2:] - y[:, 1:-1]
    squares = w[:, 2:] * off**2 / (share**2 + (1 - share) ** 2 + 1)
    return squares.sum(1), w[:, 2:].sum(1)


def parabola(x: Floats, level: Floats, weight: Floats) -> tuple[Floats, Floats, Floats]:
    """Curvature, the spread it rests on, and the residual sum of squares of a parabola."""
    count = weight.sum(1)[:, None]

    def part(values: Floats, of: Floats) -> Floats:
        return ratio((weight * values * of).sum(1)[:, None], (of**2).sum(1)[:, None]) * of

    flat = weight
    along = weight * x - np.nan_to_num(part(x, flat))
    along = np.where(count > 0, along, 0.0)
    squared = weight * along**2
    square = squared - np.nan_to_num(part(squared, flat)) - np.nan_to_num(part(squared, along))
    spread = (square**2).sum(1)
    curvature = ratio((square * level).sum(1), spread)
    fitted = np.nan_to_num(part(level, flat)) + np.nan_to_num(part(level, along))
    rest = weight * level - fitted - np.nan_to_num(curvature)[:, None] * square
    return curvature, spread, (rest**2).sum(1)
