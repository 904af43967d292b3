"""Slopes of many series at once: regression in log-log, one jump at most, and their intervals.

Arrays are S series × K sizes (× D draws). Weights are 1 where a size counts, else 0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import special

from attnbench.analysis.scaling.scatter import Floats, local_residual, parabola, ratio

# The scatter of single sizes around the line is known from a few residuals alone. What is known
# beforehand helps: one cell measured in fresh processes spreads by 1.4 to 2.6 % on a shared machine
# with one thread, which replicates within one process do not show. It counts as four residuals.
USUAL_SCATTER, USUAL_FREEDOM = 0.02, 4
# A jump is one change of the constant, by a tenth at least, that departs from what the scatter of
# the rest allows by so many standard errors; fewer where the kernel's name changes there. One that
# is only this likely is not taken out, but a refutation must stand if it were.
JUMP_FACTOR, JUMP_SURE, JUMP_SURE_SWITCHED, JUMP_LIKELY = math.log(1.1), 4.0, 2.5, 2.0
_OCTAVE = math.log(2) * (1 + 1e-6)


@dataclass(frozen=True, kw_only=True)
class Data:
    """Logarithms of sizes and of times less floor, the weights, and the bootstrap's draws of y.

    `y_other` are the times less the most that an unmeasured floor may be, `y` where it is measured.
    `amplified` is by how much subtracting the floor magnifies relative errors. `switched` says
    where the kernel's name changes before the next size. `excess` is the logarithm of the factor
    by which a time may be too long.
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
    """What the regression says of each series.

    `jump_after` is the index of the last size before the jump, −1 where there is none;
    `jump_log` the logarithm of its factor. `intercept` is that of the sizes beyond the jump.
    `octaves` is the range of the sizes that count, less the jump's. `least` and `most` are the ends
    of the exponent's interval whichever likely jump were taken out. `bend` is 1 where the slope
    surely rises with size, −1 where it falls, else 0. `lower` and `higher` are by how much the
    exponent may be off at most for what disturbed the times of large sizes, and of small ones.
    """

    whole: Line
    top: Line
    intercept: Floats
    octaves: Floats
    jump_after: NDArray[np.int64]
    jump_log: Floats
    jump_last: NDArray[np.bool_]
    least: Floats
    most: Floats
    bend: Floats
    lower: Floats
    higher: Floats


@dataclass(frozen=True, kw_only=True)
class _Jump:
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
    jump: Floats
    jump_leverage: Floats  # variance of the jump in units of the scatter's
    intercept: Floats  # of the upper group


def fit(data: Data) -> Lines:
    """Fit every series.

    The interval of a slope is the wider of two, side by side: the bootstrap's, from the replicates
    of each size (and of the floor), and the regression's own, by Student's t from the scatter of
    the sizes around the line. Within one process the replicates say nothing about what differs
    from one process to the next, and that is most of it; the scatter holds it, and whatever the
    line does not describe. Its variance is moderated by the usual one, as in Smyth, "Linear models
    and empirical Bayes methods" (2004), since a few residuals may agree by chance. The slope of the
    top octave is a fact about its own sizes, whatever line the others follow: there the scatter is
    that of each size about the chord of its neighbours.
    """
    jump = _jumps(data)
    chosen = _split(data, jump.after)
    freedom = data.weight.sum(1) - 2 - (jump.after >= 0)
    whole = _line(data, chosen.coefficients, _half(data, chosen.residual, freedom, chosen.spread))
    coefficients, spread, jump_last = _top(data, jump.after)
    level = _without(data, jump)
    local, pieces = local_residual(data.x, level, data.weight)
    top = _line(data, coefficients, _half(data, local, pieces, spread))
    return Lines(
        whole=whole,
        top=top,
        intercept=chosen.intercept,
        octaves=_octaves(data, jump.after),
        jump_after=jump.after,
        jump_log=jump.log,
        jump_last=jump_last,
        least=np.fmin(whole.low, jump.least),
        most=np.fmax(whole.high, jump.most),
        bend=_bend(data, level, freedom),
        lower=_most(chosen.coefficients, data.excess),
        higher=_most(-chosen.coefficients, data.excess),
    )


def _most(coefficients: Floats, excess: Floats) -> Floats:
    """The most that the slope may change by if each time is shorter by its excess, or is not."""
    raises = coefficients > 0  # an excess may be infinite
    changes = np.multiply(coefficients, excess, where=raises, out=np.zeros_like(coefficients))
    most: Floats = changes.sum(1)
    return most


def _half(data: Data, residual: Floats, freedom: Floats, spread: Floats) -> Floats:
    """Half the width of a slope's 95 % interval."""
    variance, moderated = _variance(data, residual, freedom)
    quantile: Floats = special.stdtrit(moderated, 0.975)
    return quantile * np.sqrt(ratio(variance, spread))


def _without(data: Data, jump: _Jump) -> Floats:
    """The values with the jump taken out."""
    beyond = (np.arange(data.x.shape[1]) > jump.after[:, None]) & (jump.after[:, None] >= 0)
    level: Floats = data.y - np.where(beyond, jump.log[:, None], 0.0)
    return level


def _bend(data: Data, level: Floats, freedom: Floats) -> Floats:
    """The sign of the curvature where Student's t is sure of it at 95 %, else 0."""
    curvature, spread, residual = parabola(data.x, level, data.weight)
    variance, moderated = _variance(data, residual, freedom - 1)
    sure = np.abs(curvature) * np.sqrt(spread) > special.stdtrit(moderated, 0.975) * np.sqrt(
        variance
    )
    return np.where(sure & (freedom >= 1), np.sign(np.nan_to_num(curvature)), 0.0)


def _variance(data: Data, residual: Floats, freedom: Floats) -> tuple[Floats, Floats]:
    """The scatter's variance, moderated, and its degrees of freedom."""
    count = np.maximum(data.weight.sum(1), 1)
    amplified = (data.weight * data.amplified**2).sum(1) / count
    own = np.maximum(freedom, 0)
    usual = USUAL_FREEDOM * USUAL_SCATTER**2 * amplified
    return (usual + np.where(own > 0, residual, 0.0)) / (USUAL_FREEDOM + own), USUAL_FREEDOM + own


def _split(data: Data, after: NDArray[np.int64]) -> _Split:
    """Least squares with one slope; the sizes beyond index `after` have their own constant."""
    upper = np.arange(data.x.shape[1]) > after[:, None]
    groups = [data.weight * upper, data.weight * ~upper]
    counts = [group.sum(1) for group in groups]
    x_mean = [ratio((g * data.x).sum(1), n) for g, n in zip(groups, counts, strict=True)]
    y_mean = [ratio((g * data.y).sum(1), n) for g, n in zip(groups, counts, strict=True)]
    filled = [np.nan_to_num(x)[:, None] for x in x_mean]
    around = data.weight * (data.x - np.where(upper, filled[0], filled[1]))
    spread = (around**2).sum(1)
    coefficients = ratio(around, spread[:, None])
    slope = (coefficients * data.y).sum(1)
    y_filled = [np.nan_to_num(y)[:, None] for y in y_mean]
    centred = data.weight * (data.y - np.where(upper, y_filled[0], y_filled[1]))
    x_step = x_mean[0] - x_mean[1]
    return _Split(
        slope=slope,
        coefficients=coefficients,
        spread=spread,
        residual=((centred - slope[:, None] * around) ** 2).sum(1),
        jump=y_mean[0] - y_mean[1] - slope * x_step,
        jump_leverage=ratio(1.0, counts[0]) + ratio(1.0, counts[1]) + ratio(x_step**2, spread),
        intercept=y_mean[0] - slope * x_mean[0],
    )


def _jumps(data: Data) -> _Jump:
    """Where each series jumps (−1: nowhere), and by how much (as a logarithm).

    At each interval in turn the line gets another constant beyond it; the interval where that
    constant is surest is the jump, if it is sure at all, and describes the series better than a
    bend does. Four sizes at least. A smallest size above the line of the others is what floors and
    terms of lower order do, and no jump unless the kernel changes there.
    """
    series, sizes = data.x.shape
    best, log = np.zeros(series), np.zeros(series)
    after = np.full(series, -1)
    least, most = np.full(series, np.nan), np.full(series, np.nan)
    freedom = data.weight.sum(1) - 3
    last = sizes - 1 - np.argmax(data.weight[:, ::-1] > 0, axis=1)
    first = np.argmax(data.weight > 0, axis=1)
    _, _, bent = parabola(data.x, data.y, data.weight)
    for index in range(sizes - 1):
        split = _split(data, np.full(series, index))
        variance, _ = _variance(data, split.residual, freedom)
        sure = np.nan_to_num(np.abs(ratio(split.jump, np.sqrt(variance * split.jump_leverage))))
        possible = (data.weight[:, index] > 0) & (index < last) & (freedom >= 0)
        possible &= np.abs(split.jump) > JUMP_FACTOR
        possible &= (split.jump > 0) | (index > first) | data.switched[:, index]
        half = _half(data, split.residual, freedom, split.spread)
        likely = possible & (sure > JUMP_LIKELY)
        least = np.where(likely, np.fmin(least, split.slope - half), least)
        most = np.where(likely, np.fmax(most, split.slope + half), most)
        needed = np.where(data.switched[:, index], JUMP_SURE_SWITCHED, JUMP_SURE)
        better = possible & (freedom >= 1) & (sure > needed) & (sure > best)
        better &= split.residual < bent
        best = np.where(better, sure, best)
        after = np.where(better, index, after)
        log = np.where(better, split.jump, log)
    return _Jump(after=after, log=log, least=least, most=most)


def _top(data: Data, after: NDArray[np.int64]) -> tuple[Floats, Floats, NDArray[np.bool_]]:
    """Coefficients and spread of the top octave's slope, and whether a jump lies within it.

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


def _line(data: Data, coefficients: Floats, half: Floats) -> Line:
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


def _octaves(data: Data, after: NDArray[np.int64]) -> Floats:
    upper = np.arange(data.x.shape[1]) > after[:, None]
    total = np.zeros(len(data.x))
    for group in (data.weight * upper, data.weight * ~upper):
        inside = group > 0
        longest = np.where(inside, data.x, -np.inf).max(1)
        span = longest - np.where(inside, data.x, np.inf).min(1)
        total += np.where(inside.any(1), span, 0.0)
    return total / math.log(2)
