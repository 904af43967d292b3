"""The median and its distribution-free interval; the standard library alone."""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction
from functools import lru_cache
from statistics import median as _median


def median(values: Iterable[float]) -> float:
    """Return the middle value, or the mean of the two middle ones; the unit of `values`.

    Raises:
        ValueError: there are no values.
    """
    ordered = sorted(values)
    if not ordered:
        raise ValueError("no median of no values")
    return float(_median(ordered))


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

    Raises:
        ValueError: a confidence outside (0, 1).
    """
    ordered = sorted(values)
    rank = interval_rank(len(ordered), confidence)
    return None if rank is None else (ordered[rank - 1], ordered[-rank])


@lru_cache(maxsize=4096)
def interval_rank(n: int, confidence: float = 0.95) -> int | None:
    """Return k ≥ 1 such that the k-th smallest and k-th largest of n values are the interval.

    Counted in whole numbers (of the 2^n ways to fall above or below), so that no rounding decides.
    """
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must lie between 0 and 1, not {confidence}")
    allowed = (1 - Fraction(str(confidence))) * 2**n / 2  # ways that one side may miss
    missed, ways = 0, 1  # missed: P(Bin < k) · 2^n; ways: C(n, k)
    for k in range(n // 2 + 1):
        missed += ways
        if missed > allowed:
            return k or None
        ways = ways * (n - k) // (k + 1)
    return None  # only n = 0 gets here: for n > 0 half of all ways exceeds what is allowed


def ratio_interval(
    numerator: Iterable[float], denominator: Iterable[float], confidence: float = 0.95
) -> tuple[float, float] | None:
    """Return an interval for median(numerator) / median(denominator), or None.

    Each median gets an interval that misses half as often as allowed, and the ends are divided
    crosswise: by Bonferroni's inequality both hold together with at least `confidence`, however
    the two sets of samples depend on each other. It is wide, and it contains the ratio of the
    sample medians. Values must be positive. None where either set is too small (n < 7 at 95 %).
    """
    each = 1 - (1 - confidence) / 2
    above = median_interval(numerator, each)
    below = median_interval(denominator, each)
    if above is None or below is None:
        return None
    return above[0] / below[1], above[1] / below[0]
