"""Medians of many sets of replicates at once: their intervals, and their bootstrap."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from scipy import special

from attnbench.base.stats import interval_rank

Floats = NDArray[np.float64]
_SEED = 20_260


class Sets:
    """Sets of replicates, in ascending order, those of as many replicates together.

    A set counts as empty if one of its replicates is no time: not above 0, or not finite.
    """

    def __init__(self, many: Sequence[tuple[float, ...]]) -> None:
        members: dict[int, list[int]] = defaultdict(list)
        for index, times in enumerate(many):
            if times:
                members[len(times)].append(index)
        self.size = len(many)
        self.alike: dict[int, tuple[NDArray[np.int64], Floats]] = {}
        for count, where in members.items():
            values = np.array([many[i] for i in where], dtype=np.float64)
            fine = ((values > 0) & (values < np.inf)).all(axis=1)
            self.alike[count] = np.array(where)[fine], np.sort(values[fine], axis=1)


Replicates = Sets | Sequence[tuple[float, ...]]


def _sets(replicates: Replicates) -> Sets:
    return replicates if isinstance(replicates, Sets) else Sets(replicates)


def intervals(many: Replicates) -> tuple[Floats, Floats, Floats]:
    """Median, low and high of each set; NaN where it is empty, or has no interval.

    As `stats.processes_interval`: order statistics from six replicates on, below that Student's t
    on the logarithms.
    """
    sets = _sets(many)
    middle, low, high = (np.full(sets.size, np.nan) for _ in range(3))
    for count, (where, ordered) in sets.alike.items():
        middle[where] = np.median(ordered, axis=1)
        rank = interval_rank(count)
        if rank is not None:
            low[where], high[where] = ordered[:, rank - 1], ordered[:, -rank]
        elif count > 1:
            logs = np.log(ordered)
            half = special.stdtrit(count - 1, 0.975) * logs.std(axis=1, ddof=1) / np.sqrt(count)
            low[where] = np.exp(logs.mean(axis=1) - half)
            high[where] = np.exp(logs.mean(axis=1) + half)
    return middle, low, high


def drawn_medians(many: Replicates, draws: int, cycle: int, *, seed: int = 0) -> Floats:
    """Medians of bootstrap samples of each set: sets × draws; NaN where a set is empty.

    Sets whose indices agree modulo `cycle` share their random numbers, so that the sets of one
    series are independent. The k-th smallest of R numbers drawn with replacement from R ordered
    ones is the ⌊R·U⌋-th of those, where U is the k-th smallest of R uniform numbers, that is, of
    distribution Beta(k, R − k + 1): one random number makes the median of a draw, or two if R is
    even.
    """
    sets = _sets(many)
    found = np.full((sets.size, draws), np.nan)
    for count, (where, ordered) in sets.alike.items():
        lower, upper = _ranks(count, cycle, draws, seed)
        turn = where % cycle
        found[where] = np.take_along_axis(ordered, lower[turn], axis=1)
        if count % 2 == 0:
            found[where] = (found[where] + np.take_along_axis(ordered, upper[turn], axis=1)) / 2
    return found


@lru_cache(maxsize=8)
def _ranks(count: int, cycle: int, draws: int, seed: int) -> tuple[NDArray[np.int64], ...]:
    """Indices of the middle value of each draw, or of the two middle ones: cycle × draws each."""
    random = np.random.default_rng((_SEED, seed, count))
    middle = (count + 1) // 2
    first = random.beta(middle, count - middle + 1, (cycle, draws))
    rest = max(1, count - middle)
    second = 1 - (1 - first) * random.random((cycle, draws)) ** (1 / rest)
    return tuple(np.minimum((count * u).astype(np.int64), count - 1) for u in (first, second))
