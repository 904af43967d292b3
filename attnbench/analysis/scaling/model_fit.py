"""Non-negative least squares on relative error, the choice of terms, and how sure it all is.

Rows are divided by the measured time, so that a misfit of 5 % counts the same at 10 µs and at 1 s.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from attnbench.analysis.scaling.growth import NNLS_STEPS
from attnbench.analysis.scaling.model_cells import Cells
from attnbench.analysis.scaling.model_draws import resampled
from attnbench.analysis.scaling.model_parts import Parts, parts_within
from attnbench.analysis.scaling.model_terms import Array, Bools

# Two processes of identical code differ persistently by one to several percent: what one process
# says of a cell is at least so uncertain, however its samples agree.
PERSISTENT = 0.015
FEWEST_N = 3  # sizes of n, of which the largest is held out
_ADEQUATE = 1.25  # times the misfit of the best fit, beside what is noise


@dataclass(frozen=True, kw_only=True)
class Fit:
    """A model as fitted: coefficients by candidate (0 where left out), and of every resampling.

    `held_out` is the relative error (root mean square over the cells of the largest n) of the
    model that was fitted without them; None below three sizes of n. `spread` is the relative
    error of one cell, process to process or by the model's own fault. `twins` are pairs of
    candidates that the sizes cannot tell apart.
    """

    chosen: Bools
    coefficients: Array  # p
    draws: Array  # p × draws
    held_out: float | None
    spread: float
    twins: tuple[tuple[int, int], ...]


def fit(cells: Cells) -> Fit:
    """Choose the terms, fit them, and do both again for every resampling of the observations.

    The terms are those that predict the largest n best when fitted without it, among the fits that
    describe the smaller sizes at all; where others predict it as well within noise, the fewest.
    """
    relative = cells.design / cells.times_us[:, None]
    largest = _held_out(cells.sizes["n"])
    whole = Parts(relative)
    rest = Parts(relative[~largest])
    one = np.ones((len(relative), 1))
    noise = _noise(cells)
    index, held_out = _choose(rest, relative, largest, one, noise)
    chosen = whole.parts[index[0]]
    coefficients = np.zeros(len(chosen))
    coefficients[chosen] = (
        nnls(whole.rows[:, chosen], one[:, 0], maxiter=NNLS_STEPS)[0] / whole.scale[chosen]
    )
    spread = _spread(relative @ coefficients, int((coefficients > 0).sum()), held_out, cells)
    targets = resampled(cells, spread)
    # A draw holds the noise of the times it is drawn from beside its own.
    many, _ = _choose(rest, relative, largest, targets, math.sqrt(2) * noise)
    return Fit(
        chosen=chosen,
        coefficients=coefficients,
        draws=_refitted(whole, targets, many),
        held_out=held_out,
        spread=spread,
        twins=_twins(whole),
    )


def _held_out(n: Array) -> Bools:
    """The cells of the largest n; none where too few sizes would be left to fit to."""
    largest: Bools = np.equal(n, n.max())
    return largest if len(np.unique(n)) >= FEWEST_N else np.zeros_like(largest)


def _noise(cells: Cells) -> float:
    """The relative error of a cell's time that has nothing to do with the model."""
    known = np.isfinite(cells.interval_us).all(axis=0)
    low, high = cells.interval_us[:, known]
    own = float(np.median((high - low) / (4 * cells.times_us[known]))) if known.any() else 0.0
    return own if cells.between else math.hypot(own, PERSISTENT)


def _choose(
    parts: Parts, relative: Array, largest: Bools, targets: Array, noise: float
) -> tuple[NDArray[np.intp], float | None]:
    """The part chosen in each draw, and the held-out error of the first draw's.

    `parts` are those of the rows that are not held out.
    """
    if not largest.any():
        return np.full(targets.shape[1], len(parts.parts) - 1), None
    found, misfit = parts.solve(targets[~largest])
    described = np.sqrt(misfit / len(parts.rows))
    error = _missed(parts, relative[largest] / parts.scale, found, targets[largest])
    adequate = described <= np.hypot(_ADEQUATE * described.min(axis=0), noise)
    error = np.where(adequate & np.isfinite(misfit), error, np.inf)
    tied = error <= np.hypot(error.min(axis=0), noise)
    # Few terms first, then the smaller error; an error above 1e3 would be one of 100 000 %.
    rank = parts.parts.sum(axis=1)[:, None] * 1e3 + np.minimum(error, 999.0)
    index = np.where(tied, rank, np.inf).argmin(axis=0)
    return index, float(error[index[0], 0])


def _missed(parts: Parts, rows: Array, found: Array, targets: Array) -> Array:
    """Root mean square error at the held-out rows, parts × draws, from their moments alone."""
    gram, moments = rows.T @ rows, rows.T @ targets
    squares = np.einsum("spd,spd->sd", found, gram @ found)
    squares += (targets**2).sum(axis=0) - 2 * np.einsum("spd,pd->sd", found, moments)
    error: Array = np.sqrt(np.maximum(squares, 0.0) / len(rows))
    return error


def _refitted(whole: Parts, targets: Array, index: NDArray[np.intp]) -> Array:
    """Non-negative least squares of all rows over each draw's own terms, p × draws."""
    found, misfit = whole.solve(targets)
    within = parts_within(len(whole.scale))[index].T  # parts × draws
    best = np.where(within, misfit, np.inf).argmin(axis=0)
    draws = np.arange(targets.shape[1])
    coefficients: Array = found[best, :, draws].T / whole.scale[:, None]
    return coefficients


def _spread(fitted: Array, terms: int, held_out: float | None, cells: Cells) -> float:
    """How far a cell lies from the model: of the fit, or where it had to predict, if that is more.

    At least what processes differ by, where there was one.
    """
    freedom = max(1, len(fitted) - terms)
    own = math.sqrt(((fitted - 1) ** 2).sum() / freedom)
    return max(own, held_out or 0.0, 0.0 if cells.between else PERSISTENT)


def _twins(whole: Parts) -> tuple[tuple[int, int], ...]:
    """Pairs of candidates whose columns are one but for a factor."""
    pairs = {
        tuple(np.flatnonzero(p).tolist()): ok
        for p, ok in zip(whole.parts, whole.usable, strict=True)
    }
    return tuple((pair[0], pair[1]) for pair, fine in pairs.items() if len(pair) == 2 and not fine)
