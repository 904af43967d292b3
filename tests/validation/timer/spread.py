"""How far apart the reports of several runs are, and how soon a run comes to its final value."""

from __future__ import annotations

import math
from collections.abc import Sequence

from attnbench.base.stats import median
from tests.validation.timer.programs import Reading
from tests.validation.timer.raw import Raw

# The median absolute deviation of a normal distribution, times this, is its standard deviation:
# 1 / Φ⁻¹(3/4). Source: Rousseeuw & Croux, JASA 88 (1993), 1273.
_NORMAL = 1.4826
WITHIN = 0.02
MOST_RUNS = 0.9
_MOST_POINTS = 60

Curve = list[tuple[float, float]]  # (seconds, the time in µs that would be reported then)


def mad_cv(values: Sequence[float]) -> float:
    """The spread relative to the median: 1.4826 · MAD / median. Values must be positive.

    Raises:
        ValueError: there are no values.
    """
    middle = median(values)
    return _NORMAL * median([abs(value - middle) for value in values]) / middle


def p95_deviation(values: Sequence[float]) -> float:
    """The 95th percentile of |x / median − 1|. Values must be positive.

    Raises:
        ValueError: there are no values.
    """
    middle = median(values)
    return quantile([abs(value / middle - 1) for value in values], 0.95)


def quantile(values: Sequence[float], share: float) -> float:
    """The quantile of a share from 0 to 1, linear between neighbours (type 7 of Hyndman & Fan).

    Raises:
        ValueError: there are no values.
    """
    ordered = sorted(values)
    if not ordered:
        raise ValueError("no quantile of no values")
    place = share * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


def curve(reading: Reading, raws: Sequence[Raw]) -> Curve:
    """What a run would have reported had it been stopped earlier; seconds with start-up.

    Looked at after up to 60 numbers of samples, evenly apart in their logarithm, in each of the
    run's processes; those come one after the other, and their start-ups add up.
    """
    points: Curve = []
    finished: list[float] = []
    begin_s = 0.0
    for raw in raws:
        for count in checkpoints(len(raw.times_us)):
            now_us = reading.of_first(raw, count)
            points.append((begin_s + raw.ended_s[count - 1], median([*finished, now_us])))
        finished.append(reading.of(raw))
        begin_s += raw.ended_s[-1]
    return points


def checkpoints(count: int, most: int = _MOST_POINTS) -> list[int]:
    """Whole numbers from 1 to `count`, at most `most`, evenly apart in their logarithm."""
    if count <= most:
        return list(range(1, count + 1))
    step = math.log(count) / (most - 1)
    return sorted({round(math.exp(step * index)) for index in range(most)})


def settled_s(points: Curve, target: float, within: float = WITHIN) -> float:
    """Seconds from which on a run stays within the share `within` of `target`; inf for never."""
    since = math.inf
    for seconds, value in reversed(points):
        if abs(value / target - 1) > within:
            return since
        since = seconds
    return since


def seconds_needed(
    curves: Sequence[Curve], target: float, *, within: float = WITHIN, share: float = MOST_RUNS
) -> float:
    """The fewest seconds from which on at least `share` of the runs stay within; inf for none.

    Raises:
        ValueError: there are no runs.
    """
    if not curves:
        raise ValueError("no runs")
    settled = sorted(settled_s(points, target, within) for points in curves)
    # Rounded first: 0.9 · 10 must stay 9 whatever its last bit is.
    return settled[math.ceil(round(share * len(settled), 9)) - 1]
