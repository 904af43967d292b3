"""Replicates of times, and the slope of one series in log-log: regression with its intervals.

Arrays have the K sizes of a series, or K × D draws.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import special

from attnbench.analysis.scaling.results import LineSlope, Slope, Uncertain
from attnbench.analysis.times import Interval, are_times
from attnbench.base.stats import median, processes_interval

Floats = NDArray[np.float64]
_SEED = 20_260

# The scatter of single sizes around the line is known from a few residuals alone. What is known
# beforehand helps: one cell measured in fresh processes spreads by 1.4 to 2.6 % on a shared machine
# with one thread, which replicates within one process do not show. It counts as four residuals.
USUAL_SCATTER, USUAL_FREEDOM = 0.02, 4
USUAL_WIDTH = 2 * USUAL_SCATTER  # of the half of an interval that holds this scatter alone
# At a changepoint the constant changes, by a tenth at least, and departs from what the scatter of
# the rest allows by so many standard errors; fewer where the kernel's name changes there. One that
# is only this likely is not taken out, but a refutation must stand if it were.
CHANGE_FACTOR, CHANGE_SURE, CHANGE_SURE_SWITCHED, CHANGE_LIKELY = math.log(1.1), 4.0, 2.5, 2.0
MOST_PASSAGE = math.log(3)  # where a cache ends: the ratio of two caches' bandwidths for one core
_OCTAVE = math.log(2) * (1 + 1e-6)
TOP_OCTAVES = 2  # two sizes alone weigh twice as much on their slope as three do


@dataclass(frozen=True, kw_only=True)
class Time(Uncertain):
    """A time in µs, and the factors by which it may be shorter and longer than its replicates show.

    1 where it may not. The value is NaN where there is no time.
    """

    shorter: float = 1.0
    longer: float = 1.0


def known_time(times_us: tuple[float, ...] | None, allowed_us: Interval | None) -> Time:
    """The median of replicates, with what they show (`stats.processes_interval`) and what may be.

    `allowed_us` has the ends of what the time may be, or is None. These contain what processes
    differ by, which the scatter about the line has as well. There is no interval where neither
    gives one, or the time may be anything.
    """
    if not times_us or not are_times(times_us):
        return Time(value=math.nan)
    middle, ends = median(times_us), processes_interval(times_us)
    if allowed_us is None:
        low, high = ends or (None, None)
        return Time(value=middle, low=low, high=high)
    (low, high), (least, most) = ends or (middle, middle), allowed_us
    beyond = math.exp(USUAL_WIDTH)
    return Time(
        value=middle,
        low=None if math.isinf(most) else min(low, least),
        high=None if math.isinf(most) else max(high, most),
        shorter=max(1.0, min(low, middle) / least / beyond) if least else math.inf,
        longer=max(1.0, most / max(high, middle) / beyond),
    )


def drawn_medians(many: Sequence[tuple[float, ...]], draws: int, *, seed: int = 0) -> Floats:
    """Medians of bootstrap samples of each set of replicates: sets × draws; NaN without times.

    The k-th smallest of R numbers drawn with replacement from R ordered ones is the ⌊R·U⌋-th of
    those, where U is the k-th smallest of R uniform numbers, that is, of distribution
    Beta(k, R − k + 1): one random number makes the median of a draw, or two if R is even.
    """
    found = np.full((len(many), draws), np.nan)
    for index, times_us in enumerate(many):
        if times_us and are_times(times_us):
            ordered = np.sort(times_us)
            lower, upper = _ranks(len(ordered), len(many), draws, seed)
            found[index] = ordered[lower[index]]
            if len(ordered) % 2 == 0:
                found[index] = (found[index] + ordered[upper[index]]) / 2
    return found


@lru_cache(maxsize=64)
def _ranks(count: int, sets: int, draws: int, seed: int) -> tuple[NDArray[np.int64], ...]:
    """Indices of the middle value of each draw, or of the two middle ones: sets × draws each."""
    random = np.random.default_rng((_SEED, seed, count))
    middle = (count + 1) // 2
    first = random.beta(middle, count - middle + 1, (sets, draws))
    rest = max(1, count - middle)
    second = 1 - (1 - first) * random.random((sets, draws)) ** (1 / rest)
    return tuple(np.minimum((count * u).astype(np.int64), count - 1) for u in (first, second))


@dataclass(frozen=True, kw_only=True)
class LogData:
    """Logarithms of the sizes that count and of their times less overhead, with K × D draws of y.

    `y_other` are the times less the most that an unmeasured overhead may be, `y` where it is
    measured. `amplified` is by how much subtracting the overhead magnifies relative errors.
    `switched` says where the kernel's name changes before the next size, `passes` where the working
    set passes a cache. By `too_long` a time may lie above the truth beyond what its replicates
    show, by `too_short` below it: what other work may have taken, which no repetition averages out.
    """

    x: Floats
    y: Floats
    y_other: Floats
    y_drawn: Floats
    amplified: Floats
    switched: Sequence[bool]
    passes: Sequence[bool]
    too_long: Floats
    too_short: Floats

    def reach(self, coefficients: Floats) -> tuple[float, float]:
        """By how much less and more Σ coefficient · y may be: each time at one of its ends."""
        up, down = np.maximum(coefficients, 0.0), np.maximum(-coefficients, 0.0)
        less = up @ self.too_long + down @ self.too_short
        return float(less), float(up @ self.too_short + down @ self.too_long)

    def scatter(self, residual: float, freedom: int) -> tuple[float, float]:
        """The scatter's standard deviation, moderated by the usual one, and Student's t for 95 %.

        The moderation is as in Smyth, "Linear models and empirical Bayes methods" (2004), since a
        few residuals may agree by chance.
        """
        usual = USUAL_FREEDOM * USUAL_SCATTER**2 * float((self.amplified**2).mean())
        own = max(freedom, 0)
        variance = (usual + residual * (own > 0)) / (USUAL_FREEDOM + own)
        return math.sqrt(variance), float(special.stdtrit(USUAL_FREEDOM + own, 0.975))

    def line(self, weights: Floats, residual: float, freedom: int) -> LineSlope:
        """The slope Σ weight · y with the ends of its 95 % interval."""
        slope, other = float(weights @ self.y), float(weights @ self.y_other)
        half = math.prod(self.scatter(residual, freedom)) * float(np.linalg.norm(weights))
        drawn = np.sort(weights @ self.y_drawn).tolist()
        cut = int(0.025 * len(drawn))
        less, more = self.reach(weights)
        return LineSlope(
            value=slope,
            low=min(slope - half, other - half, drawn[cut]) - less,
            high=max(slope + half, other + half, drawn[-1 - cut]) + more,
            scatter=half,
            weights=tuple(np.abs(weights).tolist()),
        )

    def least_squares(self, y: Floats, *columns: NDArray[Any]) -> tuple[Floats, Floats]:
        """Weights on y, a row for the coefficient of x and of each column, and y less the fit.

        The weights of a column of zeros are zeros.
        """
        design = np.column_stack([self.x, *columns])
        weights = np.linalg.pinv(design)
        return weights, y - design @ (weights @ y)


def fit(data: LogData) -> Slope:
    """Fit a series.

    The interval of a slope is the wider of two, side by side: the bootstrap's, from the replicates
    of each size (and of the overhead), and the regression's own, by Student's t from the scatter of
    the sizes around the line. Within one process the replicates say nothing about what differs
    from one process to the next, and that is most of it; the scatter holds it, and whatever the
    line does not describe. Around both lies what the times may be off by beyond their replicates: a
    slope is linear in the logarithms, so that its extremes are sums at the ends of their ranges,
    and scatter that the ranges explain does not count a second time. The slope of the top octaves
    is a fact about its own sizes, whatever line the others follow: there the scatter is that of
    each size about the chord of its neighbours.
    """
    if len(set(data.x.tolist())) < 2:
        return Slope(exponent=None, top=None, octaves=0.0)
    after, log, least, most = _changepoint(data)
    upper = np.arange(len(data.x)) > after
    weights, rest = data.least_squares(data.y, upper, ~upper)
    rest -= np.clip(rest, -data.too_short, data.too_long)
    freedom = len(data.x) - 2 - (after >= 0)
    whole = data.line(weights[0], float(rest @ rest), freedom)
    level = data.y - log * upper  # the changepoint taken out
    largest, next_largest = data.x.max(), np.sort(data.x)[-2]
    in_last = data.x >= min(largest - _OCTAVE, next_largest)
    in_top = in_last | (upper & (data.x >= largest - TOP_OCTAVES * _OCTAVE))
    top, last = (_slope_within(data, level, within) for within in (in_top, in_last))
    low, high = np.quantile(data.y_drawn, (0.025, 0.975), axis=1, method="nearest")
    groups = data.x[~upper], data.x[upper]
    return Slope(
        exponent=whole,
        top=top,
        last=last,
        octaves=sum(float(np.ptp(x)) for x in groups if len(x)) / math.log(2),
        intercept=float(weights[1] @ data.y),
        change_after=after,
        change_log=log,
        change_in_top=bool((in_last & ~upper).any()),
        lowest=min(whole.ends[0], least),
        highest=max(whole.ends[1], most),
        curvature=_curvature_sign(data, level, freedom),
        precision=tuple(((data.too_long + data.too_short + high - low) / 2).tolist()),
    )


def _slope_within(data: LogData, level: Floats, within: NDArray[np.bool_]) -> LineSlope | None:
    around = within * (data.x - data.x[within].mean())
    if not any(around):
        return None
    return data.line(around / (around @ around), *_local_residual(data, level))


def _changepoint(data: LogData) -> tuple[int, float, float, float]:
    """Where the constant of the series changes (−1: nowhere), and by how much (as a logarithm).

    With the ends of the exponent's interval whichever likely changepoint, or passage of a cache,
    were taken out. At each interval in turn the line gets another constant beyond it; the interval
    where that constant is surest is the changepoint, if it is sure at all whatever the times are
    within their ranges, and describes the series better than curvature does. Four sizes at least. A
    smallest size above the line of the others is the effect of an overhead or of terms of lower
    order, and no changepoint unless the kernel changes there.
    """
    after, log, best, least, most = -1, 0.0, 0.0, math.inf, -math.inf
    freedom = len(data.x) - 3
    if len(set(data.x.tolist())) < 3:
        return after, log, least, most
    *_, curved = _parabola(data, data.y)
    for index in range(len(data.x) - 1):
        upper = np.arange(len(data.x)) > index
        (slope, above, below), rest = data.least_squares(data.y, upper, ~upper)
        change, residual = float((above - below) @ data.y), float(rest @ rest)
        size, switched = abs(change), data.switched[index]
        if size <= CHANGE_FACTOR or (index == 0 and not switched and change < 0):
            continue
        deviation, student = data.scatter(residual, freedom)
        sure = size / (deviation * float(np.linalg.norm(above - below)))
        if sure > CHANGE_LIKELY or (data.passes[index] and 0 < change <= MOST_PASSAGE):
            half = deviation * student * float(np.linalg.norm(slope))
            least = min(least, float(slope @ data.y) - half)
            most = max(most, float(slope @ data.y) + half)
        explained = data.reach(above - below)[change < 0]
        needed = CHANGE_SURE_SWITCHED if switched else CHANGE_SURE
        certain = sure * (1 - explained / size) > needed
        if freedom >= 1 and certain and sure > best and residual < curved:
            best, after, log = sure, index, change
    return after, log, least, most


def _curvature_sign(data: LogData, level: Floats, freedom: int) -> float:
    """The sign of the curvature where Student's t is sure of it at 95 %, else 0."""
    if freedom < 1 or len(set(data.x.tolist())) < 3:
        return 0.0
    curvature, spread, residual = _parabola(data, level)
    least = math.prod(data.scatter(residual, freedom - 1)) * spread
    return math.copysign(1.0, curvature) if abs(curvature) > least else 0.0


def _parabola(data: LogData, level: Floats) -> tuple[float, float, float]:
    """Curvature, its standard deviation for a scatter of 1, and the residual sum of squares."""
    squares = (data.x - data.x.mean()) ** 2
    (*_, weights), rest = data.least_squares(level, np.ones(len(data.x)), squares)
    return float(weights @ level), float(np.linalg.norm(weights)), float(rest @ rest)


def _local_residual(data: LogData, level: Floats) -> tuple[float, int]:
    """Sum of squares of each size about the chord of its neighbours, scaled to the scatter; count.

    The pseudo-residuals of Gasser, Sroka and Jennen-Steinmetz, "Residual variance and residual
    pattern in nonlinear regression" (1986); less what the times' ranges explain.
    """
    x, y, long, short = data.x, level, data.too_long, data.too_short
    if len(x) < 3:
        return 0.0, 0
    share = (x[2:] - x[1:-1]) / (x[2:] - x[:-2])

    def chord(of: Floats) -> Floats:
        return np.asarray(share * of[:-2] + (1 - share) * of[2:])

    off = chord(y) - y[1:-1]
    off -= np.clip(off, -(chord(short) + long[1:-1]), chord(long) + short[1:-1])
    return float((off**2 / (share**2 + (1 - share) ** 2 + 1)).sum()), len(off)
