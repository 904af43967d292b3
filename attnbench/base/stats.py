"""Medians and their intervals; the standard library alone."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction
from functools import lru_cache
from typing import Any, TypeVar

T = TypeVar("T", bound=Any)  # whatever can be ordered


def median(values: Iterable[float]) -> float:
    """Return the middle value, or the mean of the two middle ones; the unit of `values`.

    Raises:
        ValueError: there are no values.
    """
    return float(statistics.median(values))


def median_interval(
    values: Iterable[float], confidence: float = 0.95
) -> tuple[float, float] | None:
    """Return the interval (low, high) that covers the population's median, or None.

    The k-th smallest and the k-th largest value, with the largest k whose coverage is still at
    least `confidence`. Whatever the distribution, a value lies below its median with probability
    1/2, so the interval misses with probability 2·P(Binomial(n, 1/2) < k): no normality, no
    symmetry and no resampling is assumed, only independent samples. Source: Conover, "Practical
    Nonparametric Statistics", 3rd ed. (1999), §3.2; also Le Boudec, "Performance Evaluation of
    Computer and Communication Systems" (2010), theorem 2.1.

    None where even the smallest and the largest value cover too little: n < 6 at 95 %.
    """
    ordered = sorted(values)
    rank = interval_rank(len(ordered), confidence)
    return None if rank is None else (ordered[rank - 1], ordered[-rank])


@lru_cache(maxsize=4096)
def interval_rank(n: int, confidence: float = 0.95) -> int | None:
    """Return k ≥ 1 such that the k-th smallest and k-th largest of n values are the interval.

    Counted in whole numbers (of the 2^n ways to fall above or below), so that no rounding decides.
    """
    allowed = (1 - Fraction(str(confidence))) * 2**n / 2  # ways that one side may miss
    missed, ways = 0, 1  # missed: P(Bin < k) · 2^n; ways: C(n, k)
    for k in range(n // 2 + 1):
        missed += ways
        if missed > allowed:
            return k or None
        ways = ways * (n - k) // (k + 1)
    return None  # only n = 0 gets here: for n > 0 half of all ways exceeds what is allowed


@lru_cache(maxsize=4096)
def sequence_rank(n: int, confidence: float = 0.95) -> int | None:
    """As `interval_rank`, of intervals that may be looked at after every value.

    With k of n values below it, the median has the martingale 2^n / ((n + 1)·C(n, k)): the mixture
    over all shares of the likelihood that a value lies below, against 1/2. It exceeds 1/α at any n
    with a probability of at most α (Ville), so the interval holds all medians for which it does
    not. Source: Robbins, "Statistical methods related to the law of the iterated logarithm", Ann.
    Math. Stat. 41 (1970); Howard & Ramdas, Bernoulli 28(3) (2022), for quantiles. None for n < 8.
    """
    least = (n + 1) / (1 - Fraction(str(confidence)))
    ranks = (k for k in range(n // 2 + 1) if 2**n < math.comb(n, k) * least)
    return next(ranks, n // 2 + 1) or None


# For either end of an interval that knows one process. Two of the same code differ, persistently
# (address layout, page placement): by 1.4 to 2.6 % in the median of eight cells in ten runs.
PROCESS_MARGIN = 1.03
CLOSE = 1.05  # two whose ratio is known to lie within this of 1 are not worth telling apart


def quotient_interval(
    above: tuple[float, float] | None, below: tuple[float, float] | None
) -> tuple[float, float] | None:
    """Return where a quotient of two positive values lies, given where each does; None unknown."""
    if above is None or below is None:
        return None
    return above[0] / below[1], above[1] / below[0]


# Student's t, 97.5 % quantile by degrees of freedom: below six processes.
T_975 = {1: 12.7062, 2: 4.3027, 3: 3.1824, 4: 2.7764}


def processes_interval(medians: Sequence[float]) -> tuple[float, float] | None:
    """Return the 95 % interval over the medians of fresh processes, or None below two.

    By order statistics from six processes on, as `median_interval`. Below there are too few for
    them: Student's t on the logarithms, whose mean is exponentiated, as errors multiply. Source:
    Student (1908), "The probable error of a mean"; for times on computers, Kalibera & Jones,
    "Rigorous benchmarking in reasonable time" (ISMM 2013), §3.
    """
    freedom = len(medians) - 1
    if freedom not in T_975:
        return median_interval(medians)
    logs = [math.log(value) for value in medians]
    middle = statistics.mean(logs)
    half = T_975[freedom] * statistics.stdev(logs) / math.sqrt(len(logs))
    return math.exp(middle - half), math.exp(middle + half)


def robust_least(values: Iterable[T], key: Callable[[T], Any] | None = None) -> T:
    """The least value that does not stand alone: the second least, of 20 and more the 10th centile.

    Other work only ever adds to a time, so that the low end is what a call takes. But a clock that
    stood still or stepped back takes away, and one such reading must not become the result.
    """
    ordered = sorted(values, key=key)
    return ordered[min(max(1, len(ordered) // 10), len(ordered) - 1)]


def fastest_of_windows(times: Sequence[T], width: int) -> list[T]:
    """The fastest of each `width` consecutive times; what is left over joins the last window.

    Other work on the machine only ever adds to a time, for tenths of a second at a stretch: the
    fastest of a few is what the work itself takes, and the median over windows does not hang on
    one lucky time as a minimum does. Fewer times than `width` are one window.
    """
    if width == 1:
        return list(times)  # the usual case, of runs of many cells
    starts = list(range(0, len(times) - width + 1, width)) or [0] * bool(times)
    ends = [*starts[1:], len(times)]
    return [min(times[start:end]) for start, end in zip(starts, ends, strict=bool(times))]
