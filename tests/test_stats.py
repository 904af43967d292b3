"""The median's interval: by hand for small n, by simulation for skewed data."""

import random

import pytest

from attnbench.base.stats import interval_rank, median, median_interval, ratio_interval


def found(interval: tuple[float, float] | None) -> tuple[float, float]:
    """The interval, which must be there."""
    assert interval is not None
    return interval


def test_median_is_the_middle_value_or_the_mean_of_two():
    assert median([3.0, 1.0, 2.0]) == 2.0
    assert median([4.0, 1.0, 2.0, 3.0]) == 2.5
    assert median(iter([7.0])) == 7.0


def test_no_values_have_no_median():
    with pytest.raises(ValueError, match="no median"):
        median([])


@pytest.mark.parametrize("n", range(6))
def test_fewer_than_six_values_give_no_interval_at_95_percent(n):
    assert median_interval(range(n)) is None


@pytest.mark.parametrize(
    ("n", "rank"),
    # Conover's table of the sign test: 2·P(Bin(n, 1/2) < k) <= 0.05.
    [(6, 1), (8, 1), (9, 2), (11, 2), (12, 3), (15, 4), (20, 6), (25, 8), (50, 18), (100, 40)],
)
def test_ranks_are_those_of_the_sign_test(n, rank):
    assert interval_rank(n) == rank


def test_a_confidence_that_is_met_exactly_is_met():
    # Two values: both sides miss in 1 of 4 ways each, so exactly 50 % are covered.
    assert median_interval([1.0, 2.0], confidence=0.5) == (1.0, 2.0)
    assert median_interval([1.0, 2.0], confidence=0.51) is None


@pytest.mark.parametrize("confidence", [0.0, 1.0, 95])
def test_a_confidence_outside_0_and_1_is_refused(confidence):
    with pytest.raises(ValueError, match="between 0 and 1"):
        median_interval(range(10), confidence)


@pytest.mark.parametrize("n", [6, 10, 25])
def test_coverage_holds_on_skewed_data(n):
    rng = random.Random(n)
    trials, covered = 4000, 0
    for _ in range(trials):
        low, high = found(median_interval([rng.lognormvariate(0, 1.5) for _ in range(n)]))
        covered += low <= 1.0 <= high  # the median of a lognormal with mu = 0
    assert covered / trials >= 0.95 - 3 * (0.95 * 0.05 / trials) ** 0.5


def test_the_interval_is_not_wider_than_it_must_be():
    # One rank further in would cover less than 95 %: P(Bin(25, 1/2) < 9) · 2 = 0.108.
    low, high = found(median_interval(range(25)))
    assert (low, high) == (7, 17)


def test_a_ratio_needs_seven_samples_on_both_sides():
    assert ratio_interval([2.0] * 7, [1.0] * 6) is None
    assert ratio_interval([2.0] * 7, [1.0] * 7) == (2.0, 2.0)


def test_the_interval_of_a_ratio_divides_the_ends_crosswise():
    # Seven values each: at 97.5 % the interval runs from the smallest to the largest.
    assert ratio_interval(range(10, 17), range(1, 8)) == (10 / 7, 16.0)


def test_the_interval_of_a_ratio_covers_at_least_95_percent():
    rng = random.Random(3)
    trials, covered = 2000, 0
    for _ in range(trials):
        slow = [2 * rng.lognormvariate(0, 1) for _ in range(15)]
        fast = [rng.lognormvariate(0, 1) for _ in range(15)]
        low, high = found(ratio_interval(slow, fast))
        covered += low <= 2.0 <= high
    assert covered / trials >= 0.95
