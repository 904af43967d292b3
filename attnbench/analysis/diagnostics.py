"""Whether times drift, come in two speeds, or depend on the ones before; the standard library."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise
from statistics import fmean

from attnbench.base.stats import median

# Fewer values than these show nothing.
ENOUGH = 20
# Standard errors from which on a rank correlation is taken for real, and the effects that matter.
SURE = 3.5
DRIFT = 0.03
GAP = 0.05
SPLIT = 0.85
SMALLER_SIDE = 0.1
DEPENDS = 0.4


def drift(times: Sequence[float]) -> float | None:
    """Relative change from the first third to the last, or None where there is no trend.

    A trend is a rank correlation of time with order (Spearman) beyond 3.5 standard errors, with a
    change of the thirds' medians of 3 % at least.
    """
    if len(times) < ENOUGH:
        return None
    order = list(range(len(times)))
    if abs(_correlation(order, _ranks(times))) * math.sqrt(len(times) - 1) < SURE:
        return None
    third = len(times) // 3
    change = median(times[-third:]) / median(times[:third]) - 1
    return change if abs(change) >= DRIFT else None


def two_speeds(times: Sequence[float]) -> tuple[float, float, float] | None:
    """Return (fast, slow, share of slow ones) where the times fall into two groups, or None.

    The cut that explains most variance (Otsu, "A threshold selection method from gray-level
    histograms", 1979) explains 85 % of it: a uniform distribution reaches 75 %, a normal one
    64 %. Either side holds a tenth of the samples, and the medians differ by 5 %.
    """
    ordered = sorted(times)
    n = len(ordered)
    if n < ENOUGH:
        return None
    sums, middle = list(accumulate(ordered)), fmean(ordered)
    total = sum((value - middle) ** 2 for value in ordered)

    def between(cut: int) -> float:
        low, high = sums[cut - 1] / cut, (sums[-1] - sums[cut - 1]) / (n - cut)
        return cut * (low - middle) ** 2 + (n - cut) * (high - middle) ** 2

    edge = math.ceil(SMALLER_SIDE * n)
    cut = max(range(edge, n - edge + 1), key=between)
    fast, slow = median(ordered[:cut]), median(ordered[cut:])
    if total == 0 or between(cut) < SPLIT * total or slow < (1 + GAP) * fast:
        return None
    return fast, slow, (n - cut) / n


def dependence(observations: Sequence[float]) -> float | None:
    """Rank correlation of each observation with the next, or None where it is no matter.

    With correlation r the interval of a median that takes them for independent is too narrow by
    about √((1 + r)/(1 − r)), as for the mean of a first-order autoregressive series.
    """
    if len(observations) < ENOUGH // 2:
        return None
    ranks = _ranks(observations)
    r = _correlation(ranks[:-1], ranks[1:])
    return r if r >= DEPENDS and r * math.sqrt(len(ranks)) >= SURE else None


def widening(r: float) -> float:
    """By how much an interval widens for a correlation r of neighbours."""
    return math.sqrt((1 + r) / (1 - r)) if r < 1 else math.inf


def _ranks(values: Sequence[float]) -> list[float]:
    """Ranks from 0, equal values sharing their mean rank."""
    order = sorted(range(len(values)), key=values.__getitem__)
    breaks = [i for i, (a, b) in enumerate(pairwise(order), start=1) if values[a] != values[b]]
    ranks = [0.0] * len(values)
    for first, last in pairwise([0, *breaks, len(order)]):
        for index in order[first:last]:
            ranks[index] = (first + last - 1) / 2
    return ranks


def _correlation(xs: Sequence[float], ys: Sequence[float]) -> float:
    """Pearson's; 0 where either does not vary."""
    mx, my = fmean(xs), fmean(ys)
    covariance = sum((x - mx) * (y - my) for x, y in zip(xs, ys, strict=True))
    scale = math.sqrt(sum((x - mx) ** 2 for x in xs) * sum((y - my) ** 2 for y in ys))
    return covariance / scale if scale else 0.0
