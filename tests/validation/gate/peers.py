"""The rules by which other tools call a benchmark slower, each on the times of two processes.

Every rule takes the times of the base and of the candidate (a sample is one block; nanoseconds),
and says whether it would fail the candidate. Only the rules are theirs: their own harnesses
measure otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Times = NDArray[np.float64]
Rule = Callable[[Times, Times], bool]
_DRAWS = 1000  # of criterion's bootstrap; its own default is 100,000


@dataclass(frozen=True, kw_only=True)
class Peer:
    """A tool with one of its rules."""

    label: str
    slower: Rule


def pytest_benchmark(statistic: Callable[[Times], Any], percent: float) -> Rule:
    """`--benchmark-compare-fail STATISTIC:PERCENT%`: the statistic has grown by more than that.

    Source: pytest-benchmark, `utils.py` (`PercentageRegressionCheck`) and docs/comparing.rst.
    """

    def slower(base: Times, candidate: Times) -> bool:
        return bool(statistic(candidate) / statistic(base) * 100 - 100 > percent)

    return slower


def google_benchmark(base: Times, candidate: Times) -> bool:
    """compare.py: two-sided Mann-Whitney U test, p < 0.05 (--alpha); and the median is larger.

    Source: google/benchmark, tools/gbench/report.py, `calc_utest` and `print_utest`.
    """
    return _u_test(base, candidate) < 0.05 and bool(np.median(candidate) > np.median(base))


def pyperf(base: Times, candidate: Times) -> bool:
    """compare_to: Student's two-sample t-test of equal variances at 95 %; and the mean is larger.

    Source: pyperf, `_utils.py`, `is_significant`.
    """
    from scipy.stats import t

    critical = t.ppf(0.975, len(base) + len(candidate) - 2)
    pooled = (_squares(base) + _squares(candidate)) / (len(base) + len(candidate) - 2)
    error = math.sqrt(pooled * (1 / len(base) + 1 / len(candidate)))
    return bool(candidate.mean() - base.mean() >= critical * error)


def criterion(base: Times, candidate: Times) -> bool:
    """A bootstrapped t-test, p < 0.05; and the 95 % interval of the change of means lies above 1 %.

    Source: criterion.rs, src/analysis/compare.rs and src/report.rs (`compare_to_threshold`), with
    its defaults `significance_level` 0.05, `noise_threshold` 0.01 and `confidence_level` 0.95.
    """
    chance = np.random.default_rng(0)
    pooled = np.concatenate([candidate, base])
    drawn = pooled[chance.integers(0, len(pooled), (_DRAWS, len(pooled)))]
    under_null = _welch(drawn[:, : len(candidate)], drawn[:, len(candidate) :])
    below = np.mean(under_null < _welch(candidate[None], base[None])[0])
    if 2 * min(below, 1 - below) >= 0.05:
        return False
    changes = _means(candidate, chance) / _means(base, chance) - 1
    return bool(np.quantile(changes, 0.025) > 0.01)


def asv(base: Times, candidate: Times) -> bool:
    """Compare: the median is larger by more than the factor 1.1, and the two sides differ.

    They differ by the U test at p < 0.002; with too few times for it, where their intervals of
    99 % do not meet. Source: asv, commands/compare.py (`_is_result_better`, `--factor`) and
    statistics.py (`is_different`).
    """
    if np.median(candidate) <= 1.1 * np.median(base):
        return False
    if 1 / math.comb(len(base) + len(candidate), min(len(base), len(candidate))) < 0.002:
        return _u_test(base, candidate) < 0.002
    return bool(_laplace_99(base)[1] < _laplace_99(candidate)[0])


PEERS = (
    Peer(label="pytest-benchmark mean:5%", slower=pytest_benchmark(np.mean, 5)),
    Peer(label="pytest-benchmark median:10%", slower=pytest_benchmark(np.median, 10)),
    Peer(label="pytest-benchmark min:5%", slower=pytest_benchmark(np.min, 5)),
    Peer(label="google/benchmark U test", slower=google_benchmark),
    Peer(label="pyperf t-test", slower=pyperf),
    Peer(label="criterion.rs", slower=criterion),
    Peer(label="asv", slower=asv),
)


def _u_test(base: Times, candidate: Times) -> float:
    from scipy.stats import mannwhitneyu

    return float(mannwhitneyu(base, candidate, alternative="two-sided").pvalue)


def _laplace_99(times: Times) -> tuple[float, float]:
    """The 99 % credible interval of a location under exponential noise, and no less than all times.

    The density is (Σ |time − location|)^−n. Source: asv, statistics.py (`LaplacePosterior`).
    """
    middle, size = float(np.median(times)), float(np.abs(times - np.median(times)).mean())
    if size == 0:
        return middle, middle
    grid = np.sinh(np.linspace(-12, 12, 2001))  # heavy tails: fine in the middle, far outside
    away = np.abs((times[:, None] - middle) / size - grid).sum(axis=0)
    steps = away ** -float(len(times)) * np.gradient(grid)
    below = np.cumsum(steps) / steps.sum()
    low, high = (middle + size * float(np.interp(q, below, grid)) for q in (0.005, 0.995))
    return min(low, float(times.min())), max(high, float(times.max()))


def _squares(times: Times) -> float:
    return float(((times - times.mean()) ** 2).sum())


def _welch(one: Times, other: Times) -> Times:
    """Welch's t of each row; no scatter at all is no difference, or an endless one."""
    error = one.var(axis=1, ddof=1) / one.shape[1] + other.var(axis=1, ddof=1) / other.shape[1]
    difference = one.mean(axis=1) - other.mean(axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(np.nan_to_num(difference / np.sqrt(error)))


def _means(times: Times, chance: np.random.Generator) -> Times:
    drawn = times[chance.integers(0, len(times), (_DRAWS, len(times)))]
    return np.asarray(drawn.mean(axis=1))
