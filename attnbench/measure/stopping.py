"""When a cell has been measured enough."""

from __future__ import annotations

from dataclasses import dataclass

from attnbench.base.stats import median, median_interval

FEWEST = 3  # samples of a call that is too slow for more


@dataclass(frozen=True, kw_only=True)
class StoppingRule:
    """Stop when the interval of the median is narrow enough, or when the budget is spent.

    `precision` is the half-width of the 95 % interval relative to the median; `min_time_s` and
    `max_time_s` bound the time in samples. A slow call still gets `min_samples`, the fewest that
    give intervals of the median (6) and of a ratio of two (7), unless that takes more than
    `patience` times the budget: then three.
    """

    precision: float = 0.02
    min_time_s: float = 0.1
    max_time_s: float = 1.0
    min_samples: int = 7
    patience: float = 20.0

    def done(self, times_us: list[float], spent_s: float) -> bool:
        """Decide from the samples that count so far and the seconds spent on all."""
        if self.out_of_patience(spent_s) and len(times_us) >= FEWEST:
            return True
        if len(times_us) < self.min_samples or spent_s < self.min_time_s:
            return False
        return spent_s >= self.max_time_s or achieved(times_us) <= self.precision

    def out_of_patience(self, spent_s: float) -> bool:
        """True when so much time was spent that nothing more is waited for."""
        return spent_s >= self.max_time_s * self.patience


def achieved(times_us: list[float]) -> float:
    """Half-width of the interval relative to the median; infinite where there is none."""
    interval = median_interval(times_us)
    middle = median(times_us)
    if interval is None or middle <= 0:
        return float("inf")
    return (interval[1] - interval[0]) / 2 / middle
