"""Replicates of times, and the slope of one series in log-log: regression with its intervals.

Arrays have the K sizes of a series, or K × D draws.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from scipy import special

from attnbench.analysis.scaling.results import Slope, Uncertain
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
_OCTAVE = math.log(2) * (1 + 1e-6)


def intervals(many: Sequence[tuple[float, ...]]) -> tuple[Floats, Floats, Floats]:
    """Median, low and high of each set of replicates (`stats.processes_interval`).

    NaN where a set is empty or has no interval, or one of it is not above 0, or not finite.
    """

    def known(times_us: tuple[float, ...]) -> tuple[float, float, float]:
        if not times_us or not are_times(times_us):
            return math.nan, math.nan, math.nan
        return median(times_us), *(processes_interval(times_us) or (math.nan, math.nan))

    middle, low, high = np.array([known(times_us) for times_us in many]).reshape(-1, 3).T
    return middle, low, high


def drawn_medians(many: Sequence[tuple[float, ...]], draws: int, *, seed: int = 0) -> Floats:
    """Medians of bootstrap samples of each set of replicates: sets × draws; NaN as `intervals`.

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


def beyond(
    known: Sequence[Floats], allowed: Sequence[Interval | None]
) -> tuple[Floats, Floats, Floats, Floats]:
    """Factors by which times may be shorter, and longer, than is known otherwise; 1 if not.

    `known` are median, low and high of the replicates; `allowed` has the ends of what each time may
    be, or None. These contain what processes differ by, which the scatter about the line has as
    well. Beside the factors, the low and the high ends of both together, NaN where there are none
    or the time may be anything.
    """
    middle, low, high = known
    least, most = np.array([pair or (np.nan, np.nan) for pair in allowed]).reshape(-1, 2).T
    with np.errstate(divide="ignore"):  # a time that may be nothing
        shorter = np.fmax(1.0, np.fmin(low, middle) / least / math.exp(USUAL_WIDTH))
    longer = np.fmax(1.0, most / np.fmax(high, middle) / math.exp(USUAL_WIDTH))
    bounded = np.where(np.isinf(most), np.nan, 1.0)
    return shorter, longer, np.fmin(low, least) * bounded, np.fmax(high, most) * bounded


def estimates(middle: Floats, low: Floats, high: Floats) -> list[Uncertain]:
    """Values with their intervals; those with an end that is NaN have none."""
    rows = zip(middle.tolist(), low.tolist(), high.tolist(), strict=True)
    return [
        Uncertain(value=row[0], low=row[1], high=row[2])
        if row[1] == row[1] and row[2] == row[2]
        else Uncertain(value=row[0])
        for row in rows
    ]


@dataclass(frozen=True, kw_only=True)
class LogData:
    """Logarithms of the sizes that count and of their times less overhead, with K × D draws of y.

    `y_other` are the times less the most that an unmeasured overhead may be, `y` where it is
    measured. `amplified` is by how much subtracting the overhead magnifies relative errors.
    `switched` says where the kernel's name changes before the next size. By `too_long` a time may
    lie above the truth beyond what its replicates show, by `too_short` below it: what other work
    may have taken, which no repetition averages out.
    """

    x: Floats
    y: Floats
    y_other: Floats
    y_drawn: Floats
    amplified: Floats
    switched: Sequence[bool]
    too_long: Floats
    too_short: Floats

    def reach(self, coefficients: Floats) -> tuple[float, float]:
        """By how much less and more Σ coefficient · y may be: each time at one of its ends."""
        up, down = np.maximum(coefficients, 0.0), np.maximum(-coefficients, 0.0)
        less = up @ self.too_long + down @ self.too_short
        return float(less), float(up @ self.too_short + down @ self.too_long)

    def variance(self, residual: float, freedom: int) -> tuple[float, int]:
        """The scatter's variance, moderated by the usual one, and its degrees of freedom."""
        usual = USUAL_FREEDOM * USUAL_SCATTER**2 * float((self.amplified**2).mean())
        own = max(freedom, 0)
        return (usual + residual * (own > 0)) / (USUAL_FREEDOM + own), USUAL_FREEDOM + own

    def half(self, residual: float, freedom: int, spread: float) -> float:
        """Half the width of a slope's 95 % interval."""
        variance, moderated = self.variance(residual, freedom)
        return float(special.stdtrit(moderated, 0.975)) * math.sqrt(variance / spread)

    def line(self, around: Floats, half: float) -> Uncertain:
        """The slope by distances from the mean size, with the ends of its 95 % interval."""
        coefficients = around / (around @ around)
        slope, other = float(coefficients @ self.y), float(coefficients @ self.y_other)
        drawn = np.sort(coefficients @ self.y_drawn).tolist()
        cut = int(0.025 * len(drawn))
        less, more = self.reach(coefficients)
        low = min(slope - half, other - half, drawn[cut]) - less
        high = max(slope + half, other + half, drawn[-1 - cut]) + more
        return Uncertain(value=slope, low=low, high=high)


@dataclass(frozen=True, kw_only=True)
class _Split:
    """One slope through two groups of sizes, each with a constant of its own (or through one)."""

    slope: float
    around: Floats  # x less the mean of its group
    rest: Floats  # y less the line
    intercept: float  # of the upper group
    change: float = math.nan
    change_coefficients: Floats | None = None  # the change is their product with y
    change_leverage: float = math.nan  # variance of the change in units of the scatter's

    @property
    def spread(self) -> float:
        return float(self.around @ self.around)


def fit(data: LogData) -> Slope:
    """Fit a series.

    The interval of a slope is the wider of two, side by side: the bootstrap's, from the replicates
    of each size (and of the overhead), and the regression's own, by Student's t from the scatter of
    the sizes around the line. Within one process the replicates say nothing about what differs
    from one process to the next, and that is most of it; the scatter holds it, and whatever the
    line does not describe. Its variance is moderated by the usual one, as in Smyth, "Linear models
    and empirical Bayes methods" (2004), since a few residuals may agree by chance. Around both lies
    what the times may be off by beyond their replicates: a slope is linear in the logarithms, so
    that its extremes are sums at the ends of their ranges, and scatter that the ranges explain does
    not count a second time. The slope of the top octave is a fact about its own sizes, whatever
    line the others follow: there the scatter is that of each size about the chord of its
    neighbours.
    """
    if len(set(data.x.tolist())) < 2:
        return Slope(exponent=None, top=None, octaves=0.0)
    after, log, least, most = _changepoint(data)
    chosen, freedom = _split(data, after), len(data.x) - 2 - (after >= 0)
    unexplained = chosen.rest - np.clip(chosen.rest, -data.too_short, data.too_long)
    half = data.half(float(unexplained @ unexplained), freedom, chosen.spread)
    whole = data.line(chosen.around, half)
    places = np.arange(len(data.x))
    level = data.y - log * (places > after)  # the changepoint taken out
    # The top octave: the sizes from half the largest on, at least the two largest.
    last = data.x.max()
    top = data.x >= min(last - _OCTAVE, np.sort(data.x)[-2])
    around = top * (data.x - data.x[top].mean())
    top_slope, top_half, spread = None, math.nan, float(around @ around)
    if spread > 0:
        top_half = data.half(*local_residual(data, level), spread)
        top_slope = data.line(around, top_half)
    low, high = np.quantile(data.y_drawn, (0.025, 0.975), axis=1, method="nearest")
    groups = [data.x[places <= after], data.x[places > after]]
    return Slope(
        exponent=whole,
        top=top_slope,
        octaves=sum(float(np.ptp(x)) for x in groups if len(x)) / math.log(2),
        intercept=chosen.intercept,
        change_after=after,
        change_log=log,
        change_in_top=bool((top & (places <= after)).any()),
        lowest=float(np.fmin(whole.ends[0], least)),
        highest=float(np.fmax(whole.ends[1], most)),
        curvature=_curvature_sign(data, level, freedom),
        precision=tuple(((data.too_long + data.too_short + high - low) / 2).tolist()),
        scatter=half,
        weights=tuple(np.abs(chosen.around / chosen.spread).tolist()),
        top_scatter=top_half,
        top_weights=tuple(np.abs(around / spread).tolist()) if top_slope else (),
    )


def _split(data: LogData, after: int) -> _Split:
    """Least squares with one slope; the sizes beyond index `after` have their own constant."""
    upper = np.arange(len(data.x)) > after
    around, rest = data.x.copy(), data.y.copy()
    for group in (upper, ~upper)[: 1 + (after >= 0)]:
        around[group] -= data.x[group].mean()
        rest[group] -= data.y[group].mean()
    spread = around @ around
    slope = float(around @ data.y / spread)
    rest -= slope * around
    x_mean, y_mean = data.x[upper].mean(), data.y[upper].mean()
    split = {"slope": slope, "around": around, "rest": rest, "intercept": y_mean - slope * x_mean}
    if after < 0:
        return _Split(**split)
    x_step = x_mean - data.x[~upper].mean()
    sides = upper / upper.sum() - ~upper / (~upper).sum()
    return _Split(
        **split,
        change=float(y_mean - data.y[~upper].mean() - slope * x_step),
        change_coefficients=sides - around / spread * x_step,
        change_leverage=float(1 / upper.sum() + 1 / (~upper).sum() + x_step**2 / spread),
    )


def _changepoint(data: LogData) -> tuple[int, float, float, float]:
    """Where the constant of the series changes (−1: nowhere), and by how much (as a logarithm).

    With the ends of the exponent's interval whichever likely changepoint were taken out.
    At each interval in turn the line gets another constant beyond it; the interval where that
    constant is surest is the changepoint, if it is sure at all whatever the times are within their
    ranges, and describes the series better than curvature does. Four sizes at least. A smallest
    size above the line of the others is the effect of an overhead or of terms of lower order, and
    no changepoint unless the kernel changes there.
    """
    after, log, best, least, most = -1, 0.0, 0.0, math.nan, math.nan
    freedom = len(data.x) - 3
    if freedom < 0:
        return after, log, least, most
    *_, curved = parabola(data.x, data.y)
    for index in range(len(data.x) - 1):
        split = _split(data, index)
        residual, size = float(split.rest @ split.rest), abs(split.change)
        first = index == 0 and not data.switched[index]
        if not size > CHANGE_FACTOR or (first and split.change < 0):
            continue
        variance, _ = data.variance(residual, freedom)
        sure = size / math.sqrt(variance * split.change_leverage)
        if sure > CHANGE_LIKELY:
            half = data.half(residual, freedom, split.spread)
            least = float(np.fmin(least, split.slope - half))
            most = float(np.fmax(most, split.slope + half))
        assert split.change_coefficients is not None, "there are two groups"
        explained = data.reach(split.change_coefficients)[split.change < 0]
        needed = CHANGE_SURE_SWITCHED if data.switched[index] else CHANGE_SURE
        certain = sure * (1 - explained / size) > needed
        if freedom >= 1 and certain and sure > best and residual < curved:
            best, after, log = sure, index, split.change
    return after, log, least, most


def _curvature_sign(data: LogData, level: Floats, freedom: int) -> float:
    """The sign of the curvature where Student's t is sure of it at 95 %, else 0."""
    if freedom < 1:
        return 0.0
    curvature, spread, residual = parabola(data.x, level)
    variance, moderated = data.variance(residual, freedom - 1)
    least = float(special.stdtrit(moderated, 0.975)) * math.sqrt(variance)
    return math.copysign(1.0, curvature) if abs(curvature) * math.sqrt(spread) > least else 0.0


def local_residual(data: LogData, level: Floats) -> tuple[float, int]:
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


def parabola(x: Floats, level: Floats) -> tuple[float, float, float]:
    """Curvature, the spread it rests on, and the residual sum of squares of a parabola."""
    along = x - x.mean()

    def off_line(values: Floats) -> Floats:
        rest = values - values.mean()
        return np.asarray(rest - (rest @ along) / (along @ along) * along)

    square = off_line(along**2)
    spread = float(square @ square)
    curvature = float(square @ level) / spread if spread > 0 else 0.0
    rest = off_line(level) - curvature * square
    return curvature, spread, float(rest @ rest)
