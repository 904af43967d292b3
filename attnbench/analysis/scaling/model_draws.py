"""Times as another run might have found them: of the same cells, in other processes."""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np

from attnbench.analysis.scaling.medians import drawn_medians
from attnbench.analysis.scaling.model_cells import Cells
from attnbench.analysis.scaling.model_terms import Array

MOST, LEAST = 400, 100  # draws; many cells get fewer, as their means need fewer
_CELLS_AT_ONCE = 60_000  # cells × draws


def resampled(cells: Cells, spread: float) -> Array:
    """Times of each cell relative to the measured one, m × draws; the same for the same cells.

    The median of its observations drawn again, times what a fresh process or the model's own
    fault would change. That has the size `spread`; a third of its variance is shared by cells of
    one n, a third by those of one d: caches and tiles move whole rows of a table.
    """
    count = len(cells.times_us)
    draws = max(LEAST, min(MOST, _CELLS_AT_ONCE // count))
    found = drawn_medians(cells.replicates_us, draws, count)
    error = _normal(2, count, draws).copy()
    for stream, name in enumerate(("n", "d")):
        levels, place = np.unique(cells.sizes[name], return_inverse=True)
        error += _normal(stream, len(levels), draws)[place]
    error *= spread / math.sqrt(3)
    found *= np.exp(error)
    found /= cells.times_us[:, None]
    return found


@lru_cache(maxsize=8)
def _normal(stream: int, rows: int, draws: int) -> Array:
    """Standard normal numbers, the same each time: models then differ by their times alone."""
    return np.random.default_rng((stream, rows)).standard_normal((rows, draws))
