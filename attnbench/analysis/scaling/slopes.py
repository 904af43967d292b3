"""Replicates of times, and slopes of many series at once: regression in log-log, intervals.

Arrays are S series × K sizes (× D draws). Weights are 1 where a size counts, else 0.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import special

from attnbench.analysis.scaling.results import Slope, Uncertain
from attnbench.base.stats import interval_rank

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


class Replicates:
    """Many sets of replicates, sorted, those of equal count together in one array.

    A set is treated as empty if one of its replicates is not above 0, or not finite.
    """

    def __init__(self, many: Sequence[tuple[float, ...]]) -> None:
        members: dict[int, list[int]] = defaultdict(list)
        for index, times_us in enumerate(many):
            if times_us:
                members[len(times_us)].append(index)
        self.size = len(many)
        self.alike: dict[int, tuple[NDArray[np.int64], Floats]] = {}
        for count, where in members.items():
            values = np.array([many[i] for i in where], dtype=np.float64)
            fine = ((values > 0) & (values < np.inf)).all(axis=1)
            self.alike[count] = np.array(where)[fine], np.sort(values[fine], axis=1)

    def intervals(self) -> tuple[Floats, Floats, Floats]:
        """Median, low and high of each set; NaN where it is empty, or has no interval.

        As `stats.processes_interval`: order statistics from six replicates on, below that
        Student's t on the logarithms.
        """
        middle, low, high = (np.full(self.size, np.nan) for _ in range(3))
        for count, (where, ordered) in self.alike.items():
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

    def drawn_medians(self, draws: int, cycle: int, *, seed: int = 0) -> Floats:
        """Medians of bootstrap samples of each set: sets × draws; NaN where a set is empty.

        Sets whose indices agree modulo `cycle` share their random numbers, so that the sets of one
        series are independent. The k-th smallest of R numbers drawn with replacement from R ordered
        ones is the ⌊R·U⌋-th of those, where U is the k-th smallest of R uniform numbers, that is,
        of distribution Beta(k, R − k + 1): one random number makes the median of a draw, or two if
        R is even.
        """
        found = np.full((self.size, draws), np.nan)
        for count, (where, ordered) in self.alike.items():
            lower, upper = _ranks(count, cycle, draws, seed)
            turn = where % cycle
            found[where] = np.take_along_axis(ordered, lower[turn], axis=1)
            if count % 2 == 0:
                found[where] = (found[where] + np.take_along_axis(ordered, upper[turn], axis=1)) / 2
        return found


def beyond(known: Sequence[Floats], allowed: Sequence[Any]) -> tuple[Floats, ...]:
    """Factors by which times may be shorter, and longer, than is known otherwise; 1 if not.

    `known` are median, low and high of the replicates; `allowed`, in their shape, has the ends of
    what each time may be, or None. These contain what processes differ by, which the scatter about
    the line has as well. Beside the factors, the low and the high ends of both together, NaN where
    there are none or the time may be anything.
    """
    middle, low, high = known
    rows = allowed if middle.ndim > 1 else [allowed]
    ends = np.array([[pair or (np.nan, np.nan) for pair in row] for row in rows])
    least, most = ends[..., 0].reshape(middle.shape), ends[..., 1].reshape(middle.shape)
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


@lru_cache(maxsize=8)
def _ranks(count: int, cycle: int, draws: int, seed: int) -> tuple[NDArray[np.int64], ...]:
    """Indices of the middle value of each draw, or of the two middle ones: cycle × draws each."""
    random = np.random.default_rng((_SEED, seed, count))
    middle = (count + 1) // 2
    first = random.beta(middle, count - middle + 1, (cycle, draws))
    rest = max(1, count - middle)
    second = 1 - (1 - first) * random.random((cycle, draws)) ** (1 / rest)
    return tuple(np.minimum((count * u).astype(np.int64), count - 1) for u in (first, second))


@dataclass(frozen=True, kw_only=True)
class LogData:
    """Logarithms of sizes and of times less overhead, the weights, and the bootstrap's draws of y.

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
    weight: Floats
    amplified: Floats
    switched: NDArray[np.bool_]
    too_long: Floats
    too_short: Floats

    def reach(self, coefficients: Floats) -> tuple[Floats, Floats]:
        """By how much less and more Σ coefficient · y may be: each time at one of its ends."""
        up, down = np.maximum(coefficients, 0.0), np.maximum(-coefficients, 0.0)
        less = (up * self.too_long + down * self.too_short).sum(1)
        return less, (up * self.too_short + down * self.too_long).sum(1)

    def precision(self) -> Floats:
        """Relative half-widths of what is known of each time, but for the usual scatter."""
        low, high = np.quantile(self.y_drawn, (0.025, 0.975), axis=2, method="nearest")
        known: Floats = (self.too_long + self.too_short + high - low) / 2
        return known

    def unexplained(self, rest: Floats) -> Floats:
        """Σ of squares of what the times' own ranges leave of distances from a line."""
        beyond: Floats = rest - np.clip(rest, -self.too_short, self.too_long)
        squares: Floats = (beyond**2).sum(1)
        return squares


@dataclass(frozen=True, kw_only=True)
class _Split:
    """One slope through two groups of sizes, each with a constant of its own (or through one)."""

    slope: Floats
    coefficients: Floats  # S × K: the slope is their product with y
    spread: Floats  # Σ (x − mean of its group)²
    rest: Floats  # S × K: y less the line
    change: Floats
    change_coefficients: Floats  # S × K: the change is their product with y
    change_leverage: Floats  # variance of the change in units of the scatter's
    intercept: Floats  # of the upper group

    @property
    def residual(self) -> Floats:
        """Σ of squares."""
        squares: Floats = (self.rest**2).sum(1)
        return squares


def fit(data: LogData) -> list[Slope]:
    """Fit every series.

    The interval of a slope is the wider of two, side by side: the bootstrap's, from the replicates
    of each size (and of the overhead), and the regression's own, by Student's t from the scatter of
    the sizes around the line. Within one process the replicates say nothing about what differs
    from one process to the next, and that is most of it; the scatter holds it, and whatever the
    line does not describe. Its variance is moderated by the usual one, as in Smyth, "Linear models
    and empirical Bayes methods" (2004), since a few residuals may agree by chance. Around both lies
    what the times may be off by beyond their replicates: a slope is linear in the logarithms, so
    that its extremes are sums at the ends of their ranges, and scatter that the ranges explain does
    not count a second time. The slope of the
    top octave is a fact about its own sizes, whatever line the others follow: there the scatter is
    that of each size about the chord of its neighbours.
    """
    after, log, least, most = _changepoints(data)
    chosen = _split(data, after)
    freedom = data.weight.sum(1) - 2 - (after >= 0)
    half = _half(data, data.unexplained(chosen.rest), freedom, chosen.spread)
    whole = _line(data, chosen.coefficients, half)
    coefficients, spread, change_in_top = _top(data, after)
    beyond = (np.arange(data.x.shape[1]) > after[:, None]) & (after[:, None] >= 0)
    level = data.y - np.where(beyond, log[:, None], 0.0)  # the changepoint taken out
    local, pieces = local_residual(data, level)
    top_half = _half(data, local, pieces, spread)
    top = _line(data, coefficients, top_half)
    columns = {
        "octaves": _octaves(data, after),
        "intercept": chosen.intercept,
        "change_after": after,
        "change_log": log,
        "change_in_top": change_in_top,
        "lowest": np.fmin(whole[1], least),
        "highest": np.fmax(whole[2], most),
        "curvature": _curvature_sign(data, level, freedom),
        "precision": data.precision(),
        "scatter": half,
        "weights": np.abs(chosen.coefficients),
        "top_scatter": top_half,
        "top_weights": np.abs(coefficients),
    }
    rows = zip(*(values.tolist() for values in columns.values()), strict=True)
    lines = [
        [one if one.value == one.value else None for one in estimates(*line)]
        for line in (whole, top)
    ]
    return [
        Slope(exponent=slope, top=end if slope else None, **dict(zip(columns, row, strict=True)))
        for slope, end, row in zip(*lines, rows, strict=True)
    ]


def _half(data: LogData, residual: Floats, freedom: Floats, spread: Floats) -> Floats:
    """Half the width of a slope's 95 % interval."""
    variance, moderated = _variance(data, residual, freedom)
    quantile: Floats = special.stdtrit(moderated, 0.975)
    return quantile * np.sqrt(ratio(variance, spread))


def _curvature_sign(data: LogData, level: Floats, freedom: Floats) -> Floats:
    """The sign of the curvature where Student's t is sure of it at 95 %, else 0."""
    curvature, spread, residual = parabola(data.x, level, data.weight)
    variance, moderated = _variance(data, residual, freedom - 1)
    sure = np.abs(curvature) * np.sqrt(spread) > special.stdtrit(moderated, 0.975) * np.sqrt(
        variance
    )
    return np.where(sure & (freedom >= 1), np.sign(np.nan_to_num(curvature)), 0.0)


def _variance(data: LogData, residual: Floats, freedom: Floats) -> tuple[Floats, Floats]:
    """The scatter's variance, moderated, and its degrees of freedom."""
    count = np.maximum(data.weight.sum(1), 1)
    amplified = (data.weight * data.amplified**2).sum(1) / count
    own = np.maximum(freedom, 0)
    usual = USUAL_FREEDOM * USUAL_SCATTER**2 * amplified
    return (usual + np.where(own > 0, residual, 0.0)) / (USUAL_FREEDOM + own), USUAL_FREEDOM + own


def _split(data: LogData, after: NDArray[np.int64]) -> _Split:
    """Least squares with one slope; the sizes beyond index `after` have their own constant."""
    upper = np.arange(data.x.shape[1]) > after[:, None]
    groups = [data.weight * upper, data.weight * ~upper]
    counts = [group.sum(1) for group in groups]

    def means_and_rest(values: Floats) -> tuple[list[Floats], Floats]:
        means = [ratio((g * values).sum(1), n) for g, n in zip(groups, counts, strict=True)]
        filled = [np.nan_to_num(mean)[:, None] for mean in means]
        return means, data.weight * (values - np.where(upper, *filled))

    (x_mean, around), (y_mean, centred) = means_and_rest(data.x), means_and_rest(data.y)
    spread = (around**2).sum(1)
    coefficients = ratio(around, spread[:, None])
    slope = (coefficients * data.y).sum(1)
    x_step = x_mean[0] - x_mean[1]
    sides = [ratio(group, n[:, None]) for group, n in zip(groups, counts, strict=True)]
    return _Split(
        slope=slope,
        coefficients=coefficients,
        spread=spread,
        rest=centred - slope[:, None] * around,
        change=y_mean[0] - y_mean[1] - slope * x_step,
        change_coefficients=sides[0] - sides[1] - coefficients * x_step[:, None],
        change_leverage=ratio(1.0, counts[0]) + ratio(1.0, counts[1]) + ratio(x_step**2, spread),
        intercept=y_mean[0] - slope * x_mean[0],
    )


def _changepoints(data: LogData) -> tuple[NDArray[np.int64], Floats, Floats, Floats]:
    """Where the constant of each series changes (−1: nowhere), and by how much (as a logarithm).

    With the ends of the exponent's interval whichever likely changepoint were taken out.
    At each interval in turn the line gets another constant beyond it; the interval where that
    constant is surest is the changepoint, if it is sure at all whatever the times are within their
    ranges, and describes the series better than curvature does. Four sizes at least. A smallest
    size above the line of the others is the effect of an overhead or of terms of lower order, and
    no changepoint unless the kernel changes there.
    """
    series, sizes = data.x.shape
    best, log = np.zeros(series), np.zeros(series)
    after = np.full(series, -1)
    least, most = np.full(series, np.nan), np.full(series, np.nan)
    freedom = data.weight.sum(1) - 3
    last = sizes - 1 - np.argmax(data.weight[:, ::-1] > 0, axis=1)
    first = np.argmax(data.weight > 0, axis=1)
    _, _, curved = parabola(data.x, data.y, data.weight)
    for index in range(sizes - 1):
        split = _split(data, np.full(series, index))
        variance, _ = _variance(data, split.residual, freedom)
        sure = np.nan_to_num(np.abs(ratio(split.change, np.sqrt(variance * split.change_leverage))))
        possible = (data.weight[:, index] > 0) & (index < last) & (freedom >= 0)
        possible &= np.abs(split.change) > CHANGE_FACTOR
        possible &= (split.change > 0) | (index > first) | data.switched[:, index]
        half = _half(data, split.residual, freedom, split.spread)
        likely = possible & (sure > CHANGE_LIKELY)
        least = np.where(likely, np.fmin(least, split.slope - half), least)
        most = np.where(likely, np.fmax(most, split.slope + half), most)
        needed = np.where(data.switched[:, index], CHANGE_SURE_SWITCHED, CHANGE_SURE)
        less, more = data.reach(split.change_coefficients)
        explained = np.where(split.change > 0, less, more)
        certain = sure * (1 - np.nan_to_num(ratio(explained, np.abs(split.change))))
        better = possible & (freedom >= 1) & (certain > needed) & (sure > best)
        better &= split.residual < curved
        best = np.where(better, sure, best)
        after = np.where(better, index, after)
        log = np.where(better, split.change, log)
    return after, log, least, most


def _top(data: LogData, after: NDArray[np.int64]) -> tuple[Floats, Floats, NDArray[np.bool_]]:
    """Coefficients and spread of the top octave's slope, and whether a changepoint lies within it.

    The sizes from half the largest on; the two largest where sizes are further apart.
    """
    counted = np.where(data.weight > 0, data.x, -np.inf)
    ordered = np.sort(counted, axis=1)
    last = ordered[:, -1]
    second = ordered[:, -2] if data.x.shape[1] > 1 else last
    from_x = np.minimum(last - _OCTAVE, second)
    member = data.weight * (counted >= from_x[:, None])
    mean = ratio((member * data.x).sum(1), member.sum(1))
    around = member * (data.x - np.nan_to_num(mean)[:, None])
    spread = (around**2).sum(1)
    below = data.weight * (np.arange(data.x.shape[1]) <= after[:, None])
    return ratio(around, spread[:, None]), spread, (below * member).sum(1) > 0


def _line(data: LogData, coefficients: Floats, half: Floats) -> tuple[Floats, Floats, Floats]:
    """Slopes with the ends of their 95 % intervals; NaN where there is none."""
    slope = (coefficients * data.y).sum(1)
    other = (coefficients * data.y_other).sum(1)
    drawn = np.sort(np.einsum("sk,skd->sd", coefficients, data.y_drawn), axis=1)
    draws = drawn.shape[1]
    low, high = drawn[:, int(0.025 * draws)], drawn[:, -1 - int(0.025 * draws)]
    low = np.minimum(np.minimum(slope, other) - half, low)
    high = np.maximum(np.maximum(slope, other) + half, high)
    less, more = data.reach(coefficients)
    return slope, low - less, high + more


def _octaves(data: LogData, after: NDArray[np.int64]) -> Floats:
    upper = np.arange(data.x.shape[1]) > after[:, None]
    total = np.zeros(len(data.x))
    for group in (data.weight * upper, data.weight * ~upper):
        inside = group > 0
        longest = np.where(inside, data.x, -np.inf).max(1)
        span = longest - np.where(inside, data.x, np.inf).min(1)
        total += np.where(inside.any(1), span, 0.0)
    return total / math.log(2)


def ratio(above: Any, below: Any) -> Floats:
    """Quotient; NaN where the divisor is 0."""
    with np.errstate(divide="ignore", invalid="ignore"):
        quotient = np.divide(above, below)
    found: Floats = np.where(np.isfinite(quotient), quotient, np.nan)
    return found


def local_residual(data: LogData, level: Floats) -> tuple[Floats, Floats]:
    """Sum of squares of each size about the chord of its neighbours, scaled to the scatter; count.

    The pseudo-residuals of Gasser, Sroka and Jennen-Steinmetz, "Residual variance and residual
    pattern in nonlinear regression" (1986); less what the times' ranges explain.
    """
    order = np.argsort(-data.weight, axis=1, kind="stable")  # what counts first, still ascending
    x, y, w, long, short = (
        np.take_along_axis(a, order, axis=1)
        for a in (data.x, level, data.weight, data.too_long, data.too_short)
    )
    if x.shape[1] < 3:
        return np.zeros(len(x)), np.zeros(len(x))
    share = np.nan_to_num(ratio(x[:, 2:] - x[:, 1:-1], x[:, 2:] - x[:, :-2]))

    def chord(of: Floats) -> Floats:
        found: Floats = share * of[:, :-2] + (1 - share) * of[:, 2:]
        return found

    off = chord(y) - y[:, 1:-1]
    off -= np.clip(off, -(chord(short) + long[:, 1:-1]), chord(long) + short[:, 1:-1])
    squares = w[:, 2:] * off**2 / (share**2 + (1 - share) ** 2 + 1)
    return squares.sum(1), w[:, 2:].sum(1)


def parabola(x: Floats, level: Floats, weight: Floats) -> tuple[Floats, Floats, Floats]:
    """Curvature, the spread it rests on, and the residual sum of squares of a parabola."""
    count = weight.sum(1)[:, None]

    def part(values: Floats, of: Floats) -> Floats:
        return ratio((weight * values * of).sum(1)[:, None], (of**2).sum(1)[:, None]) * of

    flat = weight
    along = weight * x - np.nan_to_num(part(x, flat))
    along = np.where(count > 0, along, 0.0)
    squared = weight * along**2
    square = squared - np.nan_to_num(part(squared, flat)) - np.nan_to_num(part(squared, along))
    spread = (square**2).sum(1)
    curvature = ratio((square * level).sum(1), spread)
    fitted = np.nan_to_num(part(level, flat)) + np.nan_to_num(part(level, along))
    rest = weight * level - fitted - np.nan_to_num(curvature)[:, None] * square
    return curvature, spread, (rest**2).sum(1)
