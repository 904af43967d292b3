"""Non-negative least squares on relative error, the choice of terms, and how sure it all is.

Rows are divided by the measured time: a residual of 5 % counts the same at 10 µs and at 1 s.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from itertools import product

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from attnbench.analysis.scaling.exact import NNLS_STEPS
from attnbench.analysis.scaling.model_terms import Bools, ModelCells
from attnbench.analysis.scaling.slopes import Floats

# Two processes of identical code differ persistently by one to several percent: what one process
# says of a cell is at least so uncertain, however its samples agree.
PERSISTENT = 0.015
FEWEST_N = 3  # sizes of n, of which the largest is held out
MOST_DRAWS, LEAST_DRAWS = 400, 100  # many cells get fewer, as their means need fewer
_ADEQUATE = 1.25  # times the residual of the best fit, beside what is noise
_COLLINEAR = 1e-7  # of the largest eigenvalue of unit columns: below, terms are one term
_MOST_OFF = 1e6  # the factor by which a time may be off
_CELLS_AT_ONCE = 60_000  # cells × draws


@dataclass(frozen=True, kw_only=True)
class FittedModel:
    """A model as fitted: coefficients by candidate (0 where left out), and of every resampling.

    `held_out` is the relative error (root mean square over the cells of the largest n) of the
    model that was fitted without them; None below three sizes of n. `spread` is the relative
    error of one cell, process to process or by the model's own fault. `collinear` are pairs of
    candidates that the sizes cannot tell apart.
    """

    coefficients: Floats  # p
    draws: Floats  # p × draws
    held_out: float | None
    spread: float
    collinear: tuple[tuple[int, int], ...]


def fit(cells: ModelCells) -> FittedModel:
    """Choose the terms, fit them, and do both again for every resampling of the observations.

    The terms are those that predict the largest n best when fitted without it, among the fits that
    describe the smaller sizes at all; where others predict it as well within noise, the fewest.
    """
    relative = cells.design / cells.times_us[:, None]
    n = cells.sizes["n"]  # where it has too few sizes to fit to the others, none is held out
    largest = np.equal(n, n.max()) & (len(np.unique(n)) >= FEWEST_N)
    whole = Subsets(relative)
    rest = Subsets(relative[~largest])
    one = np.ones((len(relative), 1))
    noise = _noise(cells)
    index, held_out = _choose(rest, relative, largest, one, noise)
    chosen = whole.members[index[0]]
    coefficients = np.zeros(len(chosen))
    coefficients[chosen] = (
        nnls(whole.rows[:, chosen], one[:, 0], maxiter=NNLS_STEPS)[0] / whole.scale[chosen]
    )
    # How far a cell lies from the model: of the fit, or where it had to predict, if that is more;
    # at least what processes differ by, where there was one.
    freedom = max(1, len(relative) - int((coefficients > 0).sum()))
    own = math.sqrt(((relative @ coefficients - 1) ** 2).sum() / freedom)
    spread = max(own, held_out or 0.0, 0.0 if cells.between else PERSISTENT)
    targets = _resampled(cells, spread)
    # A draw holds the noise of the times it is drawn from beside its own.
    many, _ = _choose(rest, relative, largest, targets, math.sqrt(2) * noise)
    return FittedModel(
        coefficients=coefficients,
        draws=_refitted(whole, targets, many),
        held_out=held_out,
        spread=spread,
        collinear=whole.collinear,
    )


def _noise(cells: ModelCells) -> float:
    """The relative error of a cell's time that has nothing to do with the model."""
    known = np.isfinite(cells.interval_us).all(axis=0)
    low, high = cells.interval_us[:, known]
    own = float(np.median((high - low) / (4 * cells.times_us[known]))) if known.any() else 0.0
    return own if cells.between else math.hypot(own, PERSISTENT)


def _choose(
    subsets: Subsets, relative: Floats, largest: Bools, targets: Floats, noise: float
) -> tuple[NDArray[np.intp], float | None]:
    """The subset chosen in each draw, and the held-out error of the first draw's.

    `subsets` are those of the rows that are not held out.
    """
    if not largest.any():
        return np.full(targets.shape[1], len(subsets.members) - 1), None
    found, residual = subsets.solve(targets[~largest])
    described = np.sqrt(residual / len(subsets.rows))
    error = _missed(relative[largest] / subsets.scale, found, targets[largest])
    adequate = described <= np.hypot(_ADEQUATE * described.min(axis=0), noise)
    error = np.where(adequate & np.isfinite(residual), error, np.inf)
    tied = error <= np.hypot(error.min(axis=0), noise)
    # Few terms first, then the smaller error; an error above 1e3 would be one of 100 000 %.
    rank = subsets.members.sum(axis=1)[:, None] * 1e3 + np.minimum(error, 999.0)
    index = np.where(tied, rank, np.inf).argmin(axis=0)
    return index, float(error[index[0], 0])


def _missed(rows: Floats, found: Floats, targets: Floats) -> Floats:
    """Root mean square error at the held-out rows, subsets × draws, from their moments alone."""
    gram, moments = rows.T @ rows, rows.T @ targets
    squares = np.einsum("spd,spd->sd", found, gram @ found)
    squares += (targets**2).sum(axis=0) - 2 * np.einsum("spd,pd->sd", found, moments)
    error: Floats = np.sqrt(np.maximum(squares, 0.0) / len(rows))
    return error


def _refitted(whole: Subsets, targets: Floats, index: NDArray[np.intp]) -> Floats:
    """Non-negative least squares of all rows over each draw's own terms, p × draws."""
    found, residual = whole.solve(targets)
    members = whole.members
    outside: Bools = np.any(members[None, :, :] & ~members[:, None, :], axis=2)  # [of, within]
    best = np.where(outside[index].T, np.inf, residual).argmin(axis=0)
    coefficients: Floats = found[best, :, np.arange(targets.shape[1])].T / whole.scale[:, None]
    return coefficients


def _resampled(cells: ModelCells, spread: float) -> Floats:
    """Times of each cell relative to the measured one, m × draws; the same for the same cells.

    The median of its observations drawn again, or what else it may truly be, times what a fresh
    process or the model's own fault would change. That has the size `spread`; a third of its
    variance is shared by cells of one n, a third by those of one d: caches and tiles move whole
    rows of a table.
    """
    count = len(cells.times_us)
    draws = max(LEAST_DRAWS, min(MOST_DRAWS, _CELLS_AT_ONCE // count))
    found = cells.replicates_us.drawn_medians(draws, count)
    error = _normal(2, count, draws).copy()
    for stream, name in enumerate(("n", "d")):
        levels, place = np.unique(cells.sizes[name], return_inverse=True)
        error += _normal(stream, len(levels), draws)[place]
    error *= spread / math.sqrt(3)
    shorter, longer = np.log(np.minimum(cells.beyond, _MOST_OFF))[:, :, None]
    uniform = np.random.default_rng((3, count)).random((count, draws))  # the same each time, too
    error += uniform * (shorter + longer) - shorter
    found *= np.exp(error)
    found /= cells.times_us[:, None]
    return found


@lru_cache(maxsize=8)
def _normal(stream: int, rows: int, draws: int) -> Floats:
    """Standard normal numbers, the same each time: models then differ by their times alone."""
    return np.random.default_rng((stream, rows)).standard_normal((rows, draws))


class Subsets:
    """Least squares over every subset of the terms at once, and with that the non-negative ones.

    The least squares over any set of terms with no coefficient negative are the plain least squares
    over some subset of it: with at most seven terms every subset is tried, and for hundreds of
    resamplings at once, since the matrices do not change with them. `relative` are the rows, m × p;
    `members` says which terms are in which subset.
    """

    def __init__(self, relative: Floats) -> None:
        self.scale = np.sqrt((relative**2).mean(axis=0))
        self.rows = relative / self.scale
        self.gram = self.rows.T @ self.rows
        self.members = _subsets_of(relative.shape[1])
        # The inverse of each subset's own block of the Gram matrix, zero elsewhere.
        self.inverses = np.zeros((len(self.members), *self.gram.shape))
        self.usable = np.zeros(len(self.members), dtype=bool)
        sizes = self.members.sum(axis=1)
        for size in range(1, sizes.max() + 1):
            where = np.flatnonzero(sizes == size)
            inside = np.nonzero(self.members[where])[1].reshape(len(where), size)
            rows, columns = inside[:, :, None], inside[:, None, :]
            values, vectors = np.linalg.eigh(self.gram[rows, columns])
            fine = values[:, 0] > _COLLINEAR * values[:, -1]
            values = np.where(fine[:, None], values, np.inf)  # its inverse is 0
            self.usable[where] = fine
            self.inverses[where[:, None, None], rows, columns] = np.einsum(
                "sik,sk,sjk->sij", vectors, 1 / values, vectors
            )

    def solve(self, targets: Floats) -> tuple[Floats, Floats]:
        """Coefficients (subsets × p × draws, of the scaled columns) and squared residual.

        `targets` are m × draws; the residual is infinite where a coefficient is negative or the
        subset's terms cannot be told apart.
        """
        moments = self.rows.T @ targets
        found = self.inverses @ moments
        residual = (targets**2).sum(axis=0) - np.einsum("spd,pd->sd", found, moments)
        bad = (found < 0).any(axis=1) | ~self.usable[:, None]
        return found, np.where(bad, np.inf, np.maximum(residual, 0.0))

    @property
    def collinear(self) -> tuple[tuple[int, int], ...]:
        """Pairs of terms whose columns are one but for a factor."""
        pairs = self.members[(self.members.sum(axis=1) == 2) & ~self.usable]
        columns = (np.flatnonzero(pair).tolist() for pair in pairs)
        return tuple((first, second) for first, second in columns)


@lru_cache(maxsize=8)
def _subsets_of(count: int) -> Bools:
    """Every subset of `count` terms but the empty one, the smallest first."""
    found = [subset for subset in product((False, True), repeat=count) if any(subset)]
    return np.array(sorted(found, key=sum))
