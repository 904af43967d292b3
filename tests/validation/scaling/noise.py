"""The noise of a shared machine, imagined: as the CPU runs that come with attnbench show it.

Within one process the observations of a cell (what is left of its windows) scatter lognormally.
How much differs from cell to cell: 1.2 % in the middle, 0.3 to 5 % for nine cells in ten. One
observation in twelve is late, by a quarter on average. On top lies what no repetition within a
process shows: each process runs each size at a speed of its own, 1 to 2 % off.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from attnbench.base.stats import median

WITHIN_MIDDLE, WITHIN_FACTOR = 0.012, 2.3  # median over cells, and the factor of one deviation
LATE_SHARE, LATE_BY = 1 / 12, 0.25
PERSISTENT = (0.01, 0.02)
OBSERVATIONS = 7
PROCESSES = 3

Replicates = tuple[float, ...]


def one_process(times_us: Sequence[float], rng: np.random.Generator) -> tuple[Replicates, ...]:
    """Seven observations of each time, from one process."""
    return tuple(tuple(row) for row in _observed(times_us, rng).tolist())


def several_processes(
    times_us: Sequence[float], rng: np.random.Generator
) -> tuple[Replicates, ...]:
    """Of each time the medians of three processes."""
    found = [_observed(times_us, rng) for _ in range(PROCESSES)]
    medians = [[median(row) for row in rows.tolist()] for rows in found]
    return tuple(zip(*medians, strict=True))


def _observed(times_us: Sequence[float], rng: np.random.Generator) -> NDArray[np.float64]:
    """One process: cells × observations, in µs."""
    cells = len(times_us)
    speed = np.exp(rng.uniform(*PERSISTENT) * rng.standard_normal(cells))
    within = WITHIN_MIDDLE * np.exp(math.log(WITHIN_FACTOR) * rng.standard_normal(cells))
    scatter = np.exp(within[:, None] * rng.standard_normal((cells, OBSERVATIONS)))
    late = rng.random(scatter.shape) < LATE_SHARE
    lateness = np.where(late, rng.exponential(LATE_BY, scatter.shape), 0.0)
    clean = np.array(times_us, dtype=np.float64) * speed
    found: NDArray[np.float64] = clean[:, None] * scatter * (1 + lateness)
    return found
