"""Two unpaired samples, exactly: the Mann-Whitney test, and the interval of a shift from it."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from math import comb


def p_greater(above: Sequence[float], below: Sequence[float]) -> Fraction:
    """The probability to see `above` so far above `below`, or farther, if both were alike.

    Exact, from the number of pairs in which the first is greater: H. B. Mann & D. R. Whitney, "On
    a test of whether one of two random variables is stochastically larger than the other", Annals
    of Mathematical Statistics 18 (1947). Equal values count as if they spoke against it, so that
    ties make the test less ready to reject, never more.
    """
    wins = sum(a > b for a in above for b in below)
    ways = _ways(len(above), len(below))
    return Fraction(sum(ways[wins:]), comb(len(above) + len(below), len(above)))


def least_p(above: int, below: int) -> Fraction:
    """The smallest probability that samples of these sizes can give."""
    return Fraction(1, comb(above + below, above))


def shift_interval(
    above: Sequence[float], below: Sequence[float], confidence: float = 0.95
) -> tuple[float, float] | None:
    """Where the shift from `below` to `above` lies; None for samples too small to say.

    Of all differences between a value of one and a value of the other, the k-th smallest and the
    k-th largest, with the largest k that the exact test allows: P. K. Sen, "On the estimation of
    relative potency in dilution (-direct) assays by distribution-free methods", Biometrics 19
    (1963), 532.
    """
    differences = sorted(a - b for a in above for b in below)
    all_ways = comb(len(above) + len(below), len(above))
    allowed = (1 - Fraction(str(confidence))) / 2 * all_ways
    rank, missed = 0, 0
    for ways in _ways(len(above), len(below)):
        missed += ways
        if missed > allowed:
            break
        rank += 1
    return (differences[rank - 1], differences[-rank]) if rank else None


@lru_cache(maxsize=64)
def _ways(above: int, below: int) -> tuple[int, ...]:
    """In how many orders of all values each number of won pairs comes about, from 0 wins on.

    The coefficients of the Gaussian binomial: the product of (1 - x^(below + i)) / (1 - x^i).
    """
    top = above * below
    ways = [1] + [0] * top
    for i in range(1, above + 1):
        for wins in range(top, below + i - 1, -1):
            ways[wins] -= ways[wins - below - i]
        for wins in range(i, top + 1):
            ways[wins] += ways[wins - i]
    return tuple(ways)
