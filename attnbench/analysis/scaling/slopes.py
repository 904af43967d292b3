"""Slopes of many series at once: regression in log-log, at most one changepoint, intervals.

Arrays are S series × K sizes (× D draws). Weights are 1 where a size counts, else 0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import special

from attnbench.analysis.scaling.cells import Floats

# The scatter of single sizes around the line is known from a few residuals alone. What is known
# beforehand helps: one cell measured in fresh processes spreads by 1.4 to 2.6 % on a shared machine
# with one thread, which replicates within one process do not show. It counts as four residuals.
USUAL_SCATTER, USUAL_FREEDOM = 0.02, 4
# At a changepoint the constant changes, by a tenth at least, and departs from what the scatter of
# the rest allows by so many standard errors; fewer where the kernel's name changes there. One that
# is only this likely is not taken out, but a refutation must stand if it were.
CHANGE_FACTOR, CHANGE_SURE, CHANGE_SURE_SWITCHED, CHANGE_LIKELY = math.log(1.1), 4.0, 2.5, 2.0
_OCTAVE = math.log(2) * (1 + 1e-6)


@dataclass(frozen=True, kw_only=True)
class LogData:
    """Logarithms of sizes and of times less overhead, the weights, and the bootstrap's draws of y.

    `y_other` are the times less the most that an unmeasured overhead may be, `y` where it is
    measured. `amplified` is by how much subtracting the overhead magnifies relative errors.
    `switched` says where the kernel's name changes before the next size. `excess` is the logarithm
    of the factor by which a time may be too long.
    """

    x: Floats
    y: Floats
    y_other: Floats
    y_drawn: Floats
    weight: Floats
    amplified: Floats
    switched: NDArray[np.bool_]
    excess: Floats


@dataclass(frozen=True, kw_only=True)
class Line:
    """A slope with its 95 % interval, for each series; NaN where there is none."""

    slope: Floats
    low: Floats
    high: Floats


@dataclass(frozen=True, kw_only=True)
class Lines:
    """The result of the regression for each series.

    `change_after` is the index of the last size before the changepoint, −1 where there is none;
    `change_log` the logarithm of its factor, `change_in_top` whether it lies in the top octave.
    `intercept` is that of the sizes beyond it. `octaves` is the range of the sizes that count, less
    the changepoint's. `least` and `most` are the ends of the exponent's interval whichever likely
    changepoint were taken out. `curvature` is 1 where the slope surely rises with size, −1 where it
    falls, else 0. `lower` and `higher` are by how much the exponent may be off at most for what
    disturbed the times of large sizes, and of small ones.
    """

    whole: Line
    top: Line
    intercept: Floats
    octaves: Floats
    change_after: NDArray[np.int64]
    change_log: Floats
    change_in_top: NDArray[np.bool_]
    least: Floats
    most: Floats
    curvature: Floats
    lower: Floats
    higher: Floats


@dataclass(frozen=True, kw_only=True)
class _Changepoint:
    after: NDArray[np.int64]
    log: Floats
    least: Floats
    most: Floats


@dataclass(frozen=True, kw_only=True)
class _Split:
    """One slope through two groups of sizes, each with a constant of its own (or through one)."""

    slope: Floats
    coefficients: Floats  # S × K: the slope is their product with y
    spread: Floats  # Σ (x − mean of its group)²
    residual: Floats  # Σ of squares
    change: Floats
    change_leverage: Floats  # variance of the change in units of the scatter's
    intercept: Floats  # of the upper group


def fit(data: LogData) -> Lines:
    """Fit every series.

    The interval of a slope is the wider of two, side by side: the bootstrap's, from the replicates
    of each size (and of the overhead), and the regression's own, by Student's t from the scatter of
    the sizes around the line. Within one process the replicates say nothing about what differs
    from one process to the next, and that is most of it; the scatter holds it, and whatever the
    line does not describe. Its variance is moderated by the usual one, as in Smyth, "Linear models
    and empirical Bayes methods" (2004), since a few residuals may agree by chance. The slope of the
    top octave is a fact about its own sizes, whatever line the others follow: there the scatter is
    that of each size about the chord of its neighbours.
    """
    change = _changepoints(data)
    chosen = _split(data, change.after)
    freedom = data.weight.sum(1) - 2 - (change.after >= 0)
    whole = _line(data, chosen.coefficients, _half(data, chosen.residual, freedom, chosen.spread))
    coefficients, spread, change_in_top = _top(data, change.after)
    beyond = (np.arange(data.x.shape[1]) > change.after[:, None]) & (change.after[:, None] >= 0)
    level = data.y - np.where(beyond, change.log[:, None], 0.0)  # the changepoint taken out
    local, pieces = local_residual(data.x, level, data.weight)
    top = _line(data, coefficients, _half(data, local, pieces, spread))
    return Lines(
        whole=whole,
        top=top,
        intercept=chosen.intercept,
        octaves=_octaves(data, change.after),
        change_after=change.after,
        change_log=change.log,
        change_in_top=change_in_top,
        least=np.fmin(whole.low, change.least),
        most=np.fmax(whole.high, change.most),
        curvature=_curvature_sign(data, level, freedom),
        lower=_most(chosen.coefficients, data.excess),
        higher=_most(-chosen.coefficients, data.excess),
    )


def _most(coefficients: Floats, excess: Floats) -> Floats:
    """The most that the slope may change by if each time is shorter by its excess, or is not."""
    raises = coefficients > 0  # an excess may be infinite
    changes = np.multiply(coefficients, excess, where=raises, out=np.zeros_like(coefficients))
    most: Floats = changes.sum(1)
    return most


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
    return _Split(
        slope=slope,
        coefficients=coefficients,
        spread=spread,
        residual=((centred - slope[:, None] * around) ** 2).sum(1),
        change=y_mean[0] - y_mean[1] - slope * x_step,
        change_leverage=ratio(1.0, counts[0]) + ratio(1.0, counts[1]) + ratio(x_step**2, spread),
        intercept=y_mean[0] - slope * x_mean[0],
    )


def _changepoints(data: LogData) -> _Changepoint:
    """Where the constant of each series changes (−1: nowhere), and by how much (as a logarithm).

    At each interval in turn the line gets another constant beyond it; the interval where that
    constant is surest is the changepoint, if it is sure at all, and describes the series better
    than curvature does. Four sizes at least. A smallest size above the line of the others is the
    effect of an overhead or of terms of lower order, and no changepoint unless the kernel changes
    there.
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
        better = possible & (freedom >= 1) & (sure > needed) & (sure > best)
        better &= split.residual < curved
        best = np.where(better, sure, best)
        after = np.where(better, index, after)
        log = np.where(better, split.change, log)
    return _Changepoint(after=after, log=log, least=least, most=most)


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


def _line(data: LogData, coefficients: Floats, half: Floats) -> Line:
    slope = (coefficients * data.y).sum(1)
    other = (coefficients * data.y_other).sum(1)
    drawn = np.sort(np.einsum("sk,skd->sd", coefficients, data.y_drawn), axis=1)
    draws = drawn.shape[1]
    low, high = drawn[:, int(0.025 * draws)], drawn[:, -1 - int(0.025 * draws)]
    return Line(
        slope=slope,
        low=np.minimum(np.minimum(slope, other) - half, low),
        high=np.maximum(np.maximum(slope, other) + half, high),
    )


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


def local_residual(x: Floats, level: Floats, weight: Floats) -> tuple[Floats, Floats]:
    """Sum of squares of each size about the chord of its neighbours, scaled to the scatter; count.

    The pseudo-residuals of Gasser, Sroka and Jennen-Steinmetz, "Residual variance and residual
    pattern in nonlinear regression" (1986).
    """
    order = np.argsort(-weight, axis=1, kind="stable")  # what counts first, still ascending
    x, y, w = (np.take_along_axis(a, order, axis=1) for a in (x, level, weight))
    if x.shape[1] < 3:
        return np.zeros(len(x)), np.zeros(len(x))
    share = np.nan_to_num(ratio(x[:, 2:] - x[:, 1:-1], x[:, 2:] - x[:, :-2]))
    off = share * y[:, :-2] + (1 - share) * y[:, 2:] - y[:, 1:-1]
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
