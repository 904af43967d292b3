"""How fast the core was while a process measured, and how much of that a call's time shows.

A fixed loop before and after each batch tells. A core may have two speeds or more, for milliseconds
or for seconds: its clock is lowered, or its other hyperthread works for someone else. No reading of
the loop decides alone: a thread's processor clock was seen to stand still.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

from attnbench.base.stats import median, robust_least

BIN = math.log(1.05)  # the width of the histogram's bins
# Slopes of calls differ: between 0.3 (bound by memory) and 0.9 (by dispatch) on three hosts.
SPREAD = 0.2
FEWEST = 20  # batches for a slope
LEAST_SCATTER = 0.03  # of the loop's times, relative: below it they tell nothing of a slope


class Reading(NamedTuple):
    """When the loop was timed, in ns, and what it took, in µs."""

    at_ns: int
    us: float


class Speed(NamedTuple):
    """A speed of the core: the loop's time at it in µs, its share of the time, its mean stay."""

    loop_us: float
    share: float
    stay_ms: float


def speeds(readings: Sequence[Reading]) -> list[Speed]:
    """The speeds that the loop's times show, the fastest first; none without readings.

    Each is a peak of their histogram, with a valley before the next. `loop_us` is the low end of
    its readings: those in which the speed changed are longer. A stay is no shorter than the gap
    between two readings.
    """
    bins = [math.floor(math.log(us) / BIN) for _, us in readings]
    ends = _valleys(bins)
    of = [sum(place >= end for end in ends) for place in bins]
    spent_ns, stays = Counter[int](), Counter(of[:1])
    for (at, then), (now, after) in pairwise(zip(of, readings, strict=True)):
        spent_ns[at] += max(0, after.at_ns - then.at_ns)
        stays[now] += now != at
    return [
        Speed(
            loop_us=robust_least(r.us for n, r in zip(of, readings, strict=True) if n == at),
            share=spent_ns[at] / max(1, spent_ns.total()),
            stay_ms=spent_ns[at] / stays[at] / 1e6,
        )
        for at in sorted(stays)
    ]


def _valleys(bins: Sequence[int]) -> list[int]:
    """The bins at which one peak ends and the next begins, in ascending order.

    Either peak rises above the valley by half of its height, by three times what counts scatter by
    (√n), and by one in 200 readings.
    """
    counts, ends, peak, valley, end = Counter(bins), list[int](), 0, 0, 0

    def rises(height: int) -> bool:
        return height - valley >= max(height / 2, 3 * math.sqrt(height), len(bins) / 200)

    for place in range(min(bins, default=0), max(bins, default=0) + 1):
        count = counts[place]
        if rises(peak) and rises(count):
            ends.append(end)
            peak = valley = count
        elif count > peak:
            peak = valley = count
        elif count < valley:
            valley, end = count, place
    return ends


def most_slope(calls: Iterable[Sequence[tuple[float, float]]]) -> float:
    """How steeply a call's time follows the loop's at most, as a slope of logarithms, 0 to 1.

    From the batches of some calls of one process, each as (the loop's time around it, its own), by
    least squares around each call's medians: that slope, two standard errors, and what slopes of
    calls differ by. 1 where the loop's times scatter too little to tell: a call then loses to a
    slow core what the loop does.
    """
    xs, ys = list[float](), list[float]()
    for batches in filter(None, calls):
        for into, of in ((xs, 0), (ys, 1)):
            logs = [math.log(batch[of]) for batch in batches]
            middle = median(logs)
            into += [value - middle for value in logs]
    square = sum(x * x for x in xs)
    if len(xs) < FEWEST or square < len(xs) * LEAST_SCATTER**2:
        return 1.0
    slope = sum(x * y for x, y in zip(xs, ys, strict=True)) / square
    rest = sum((y - slope * x) ** 2 for x, y in zip(xs, ys, strict=True)) / (len(xs) - 2)
    return min(1.0, max(0.0, slope) + 2 * math.sqrt(rest / square) + SPREAD)
