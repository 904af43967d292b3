"""Exponents and their verdicts, from replayed times: what is true holds, what lies is refuted."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from attnbench.analysis.scaling.exponents import fit_many
from attnbench.analysis.scaling.results import NOTHING_KNOWN, ExponentFit, Series, Uncertain
from attnbench.base.stats import median
from attnbench.theory.law import parse

FOUR_OCTAVES = (128, 256, 512, 1024, 2048)
OVERHEAD_US = 16.0
Time = Callable[[float], float]


def replayed(
    time: Time,
    law: str | None = "n^2 d",
    sizes: Sequence[float] = FOUR_OCTAVES,
    *,
    scatter: float = 0.01,
    overhead_us: float | None = OVERHEAD_US,
    seed: int = 0,
    **fields: Any,
) -> Series:
    """Times as a run leaves them: floor + time (300 µs at the smallest), two levels of noise."""
    random = np.random.default_rng(seed)

    def times(us: float) -> tuple[float, ...]:
        process = us * math.exp(random.normal(0, scatter))
        return tuple(process * np.exp(random.normal(0, 0.004, 7)))

    scale = 300 / time(sizes[0])
    values: dict[str, Any] = {
        "impl": "it", "workload": "attention", "axis": "n", "same": "attention forward",
        "sizes": tuple(map(float, sizes)),
        "times_us": tuple(times((overhead_us or 0) + scale * time(n)) for n in sizes),
        "overhead_us": None if overhead_us is None else times(overhead_us),
        "law": law and parse(law),
    }  # fmt: skip
    return Series(**(values | fields))


def power(p: float) -> Time:
    return lambda n: n**p


def step(factor: float, after: float) -> Time:
    """n^2 whose constant changes."""
    return lambda n: n**2 * (factor if n > after else 1)


def power_and(factor: float, p: float) -> Time:
    """n^2 beside a term of lower order."""
    return lambda n: n**2 + factor * n**p


def fitted(series: Series, draws: int = 300) -> ExponentFit:
    return fit_many([series], draws=draws)[0]


def verdict(fit: ExponentFit) -> str:
    assert fit.finding is not None
    return fit.finding.verdict


def reason(fit: ExponentFit) -> str:
    assert fit.finding is not None
    return fit.finding.reason


def ends(found: Uncertain | None) -> tuple[float, float, float]:
    assert found is not None
    return found.value, *found.ends


def judged(time: Time, law: str, **how: Any) -> Counter[str]:
    many = [replayed(time, law, seed=seed, **how) for seed in range(40)]
    return Counter(verdict(fit) for fit in fit_many(many, draws=300))


# What is true, and what is not.


@pytest.mark.parametrize(
    ("time", "law"),
    [
        *((power(p), f"n^{p:g}") for p in (1, 1.5, 1.8, 2, 2.3, 3)),
        (power(1.5), "O(n^2)"),  # less than an upper bound
        (power(1), "O(n log n)"),  # a bound that would hold without its logarithm
        (step(1.05, 700), "n^2"),
    ],
)
def test_what_is_true_holds(time, law):
    found = judged(time, law, scatter=0.015)
    assert found["refuted"] == 0
    assert found["holds"] >= 36


@pytest.mark.parametrize(
    ("true", "claimed"),
    [
        (2, "n d"), (2, "O(n)"), (1, "n^2 d"), (3, "n^2 d"), (3, "O(n^2)"), (1.8, "n^2"),
        (2.3, "n^2"), (1.5, "n^2"), (2.3, "O(n^2 d)"), (1.5, "O(n)"), (2, "n^1.8"), (2, "1"),
        (3, "n d^2 + n^2 d"), (2, "n log n"),
    ],
)  # fmt: skip
def test_a_law_that_is_wrong_is_refuted_over_four_octaves(true, claimed):
    found = judged(power(true), claimed, scatter=0.015)
    assert found["holds"] == 0
    assert found["refuted"] >= 36


@pytest.mark.parametrize("law", ["n log n", "n^2 log n"])
def test_log_factors_are_unresolved_never_held_nor_refuted(law):
    p = float(parse(law).degree("n"))
    assert judged(lambda n: n**p * math.log(n), law) == {"inconclusive": 40}
    assert judged(power(p), law) == {"inconclusive": 40}


SHORT = {"sizes": FOUR_OCTAVES[:3], "scatter": 0.003}
COVERED = {"overhead_us": 300 * 16**2}  # as much as the largest size takes
VERDICTS: dict[str, tuple[Time, str, dict[str, Any], str, str]] = {
    "two octaves do not hold": (power(2), "n^2", SHORT, "inconclusive", "confirming a law takes 3"),
    "two octaves refute": (power(1), "n^2", SHORT, "refuted", "more slowly than n^2"),
    "one says nothing": (power(1), "n^2", {"sizes": (128, 256)}, "inconclusive", "too few sizes"),
    "so many blocks that a mask cuts": (
        power(1.75), "n^2", {"flops": tuple(round(1e3 * n**1.75) for n in FOUR_OCTAVES)},
        "holds", ""),
    "and not so few": (
        power(1.75), "n^2", {"flops": tuple(n**2 for n in FOUR_OCTAVES)}, "refuted", ""),
    "sizes need not double": (
        power(2), "n^2", {"sizes": (100, 150, 300, 450, 900, 1000, 1600)}, "holds", ""),
    "flat below the overhead, n": (power(2), "O(n)", COVERED, "inconclusive", "overhead"),
    "flat below the overhead, 1": (power(2), "1", COVERED, "inconclusive", "too few sizes"),
    "half of it": (step(0.5, 1024), "O(n)", {}, "inconclusive", "between n = 1024 and 2048"),
    "no way of going on makes that O(n)": (step(2, 1024), "O(n)", {}, "refuted", ""),
    "terms of lower order": (
        power_and(350, 1), "n^2", {"scatter": 0.003}, "inconclusive",
        "still rising towards n^2"),
    "several terms are a bound": (
        power_and(4000, 1), "n d^2 + n^2 d", {"scatter": 0.003}, "holds", ""),
    "equal sizes": (power(2), "n^2", {"sizes": (512,) * 5}, "inconclusive", "too few sizes"),
    "one size": (power(2), "n^2", {"sizes": (512,)}, "inconclusive", "too few sizes"),
    "a time of which nothing is known": (
        power(2), "n^2", {"sizes": FOUR_OCTAVES[:4], "allowed_us": (None,) * 3 + (NOTHING_KNOWN,),
        "doubts": (None,) * 3 + ("unsteady (meddles)",)}, "inconclusive",
        "the last: unsteady (meddles)"),
    "and the others decide": (
        step(20, 1024), "n^2", {"allowed_us": (None,) * 4 + (NOTHING_KNOWN,)}, "holds", ""),
}  # fmt: skip


@pytest.mark.parametrize(
    ("time", "law", "how", "expected", "says"), VERDICTS.values(), ids=VERDICTS
)
def test_a_verdict_follows_the_rule_and_says_why(time, law, how, expected, says):
    fit = fitted(replayed(time, law, **how))
    assert verdict(fit) == expected
    assert says in reason(fit)


def wide(series: Series, *factors: float) -> Series:
    """Each time may be as much shorter and as much longer as its factor says."""
    middle = [median(times) for times in series.times_us]
    allowed = [(t / f, t * f) for t, f in zip(middle, factors, strict=True)]
    return replace(series, allowed_us=tuple(allowed))


@pytest.mark.parametrize(("true", "law", "factor", "expected"), [
    (3, "n^2", 1.6, "refuted"),  # no error by so much makes n^3 of n^2
    (3, "O(n^2)", 1.6, "refuted"),
    (1, "n^2", 1.6, "refuted"),
    (3, "n^2", 4.0, "inconclusive"),
    (1, "O(n^2)", 1.3, "holds"),  # nor n of more than n^2
    (2.3, "n^2", 1.25, "inconclusive"),  # a little off, and a little uncertain
    (1.7, "n^2", 1.25, "inconclusive"),
    (2.3, "n^2", 1.02, "refuted"),
    (2, "n^2", 1.02, "holds"),
    (2, "n^2", 1.2, "inconclusive"),
    (3, "n^2", (4.0, 1.0, 1.0, 1.0, 1.0), "refuted"),
    (2, "n^2", (1.0, 1.0, 1.0, 1.0, 1.2), "holds"),
    (2, "n^2", (1.0, 1.0, 1.0, 1.0, 1.4), "inconclusive"),  # the last two doublings may be off
])  # fmt: skip
def test_what_no_allowed_times_follow_is_refuted_and_what_none_breaks_holds(
    true, law, factor, expected
):
    factors = factor if isinstance(factor, tuple) else (factor,) * len(FOUR_OCTAVES)
    fit = fitted(wide(replayed(power(true), law), *factors))
    assert verdict(fit) == expected
    assert bool(fit.missing) == (expected == "inconclusive")


def test_what_is_missing_names_the_size_and_what_decides():
    """And with so much precision the same times decide."""
    series = replayed(power(2), "n^2", scatter=0.003)
    fit = fitted(wide(series, 1.8, 1.0, 1.0, 1.0, 1.01))
    (missing,) = fit.missing
    assert missing.index == 0
    assert missing.known == pytest.approx(math.log(1.8), abs=0.05)
    assert "n = 128 is hardly known, ± 19" in reason(fit)
    enough = math.exp(missing.needed)
    assert verdict(fitted(wide(series, enough, 1.0, 1.0, 1.0, 1.01))) == "holds"
    overhead = replace(series, overhead_allowed_us=(0.0, 150.0))
    assert [one.index for one in fitted(overhead).missing] == [-1]


def rounds(p: float, *, slow: float = 1.5, count: int = 12) -> tuple[Any, ...]:
    """Times of n^p in shared rounds, in half of which the core is slow and other work runs."""
    random, found = np.random.default_rng(0), []
    for n in FOUR_OCTAVES:
        slowness = np.where(np.arange(count) % 2, slow, 1.0)
        times = 300 * (n / FOUR_OCTAVES[0]) ** p * slowness**0.6 * random.normal(1, 0.03, count)
        pairs = zip(times.tolist(), slowness.tolist(), strict=True)
        found.append({("a", 0, number): pair for number, pair in enumerate(pairs)})
    return tuple(found)


@pytest.mark.parametrize(("true", "law", "expected"), [
    (2, "n^2", "holds"), (2.5, "n^2", "refuted"), (1.5, "n^2", "refuted"), (2.5, "n^3", "refuted"),
])  # fmt: skip
def test_rounds_that_all_sizes_share_decide_what_single_times_leave_open(true, law, expected):
    """Each time may be twice as long by itself; what slows a round slows all of its sizes."""
    alone = wide(replayed(power(true), law, overhead_us=None, least_overhead_us=0.1), *(2.0,) * 5)
    assert verdict(fitted(alone)) == "inconclusive"
    assert verdict(fitted(replace(alone, rounds=rounds(true)))) == expected
    assert verdict(fitted(replace(alone, rounds=rounds(true, count=5)))) == "inconclusive"
    assert verdict(fitted(replace(alone, rounds=rounds(true, slow=50.0)))) == "inconclusive"


def test_what_scatters_counts_once():
    """In the scatter about the line, or in what each time may be; what processes differ by, too."""

    def width(*factors: float) -> float:
        _, low, high = ends(fitted(wide(series, *factors)).exponent)
        return high - low

    series = replayed(power(2), "n^2", scatter=0.0)
    assert width(*(1.03,) * 5) == pytest.approx(width(*(1.0,) * 5))
    off = (1.0, 1.0, 1.3, 1.0, 1.0)  # the middle, whose own error turns no line
    times = tuple(tuple(t * f for t in ts) for ts, f in zip(series.times_us, off, strict=True))
    series = replace(series, times_us=times)
    assert width(1.0, 1.0, 1.4, 1.0, 1.0) < 0.6 * width(*(1.0,) * 5)


def test_an_overhead_is_subtracted_and_not_fitted():
    """The floor equals the cost at 2048: the plain slope over the range would be 1.3."""
    sizes = [2.0**k for k in range(7, 17)]
    fit = fitted(replayed(power(2), sizes=sizes, overhead_us=300 * 16**2))
    assert [n for n, why in zip(sizes, fit.left_out, strict=True) if why is None] == sizes[5:]
    assert "3 × the measured overhead" in str(fit.left_out[0])
    assert ends(fit.exponent)[0] == pytest.approx(2, abs=0.06)
    assert verdict(fit) == "holds"


@pytest.mark.parametrize(("factor", "after"), [(0.5, 256), (0.65, 512), (1.6, 256), (2.5, 512)])
def test_a_kernel_switch_changes_the_constant_and_not_the_verdict(factor, after):
    switched = step(factor, after)
    found = judged(switched, "n^2", scatter=0.01)
    assert found["refuted"] == 0
    assert found["holds"] >= 36
    assert judged(switched, "n", scatter=0.01)["refuted"] >= 30
    fit = fitted(replayed(switched))
    assert fit.changepoint == pytest.approx((after, factor), rel=0.1)
    assert fit.octaves == pytest.approx(3)


FRESH_US = (0.0, 0.0, 0.0, 0.0, 40_000.0)  # of 300 µs · 16² · 2


def test_a_size_that_page_faults_hide_does_not_count_and_the_others_decide():
    fit = fitted(replayed(step(2, 1024), page_faults_us=FRESH_US))
    assert "page faults" in str(fit.left_out[-1])
    assert verdict(fit) == "holds"
    assert "--allocator keep" in reason(fit)
    late = judged(lambda n: n**2 + n**3 / 2048, "n^2", page_faults_us=FRESH_US)
    assert late["holds"] == 0


def test_faults_at_half_of_the_sizes_are_part_of_the_time():
    fit = fitted(replayed(power(2), page_faults_us=tuple(30.0 * 4**k for k in range(5))))
    assert fit.left_out == (None,) * 5


@pytest.mark.parametrize(
    ("time", "expected"), [(step(1.6, 512), "inconclusive"), (power(2.3), "refuted")]
)
def test_the_reason_names_the_cache_that_ends_where_a_constant_may_change(time, expected):
    sizes = (256, 512, 1024, 2048)
    cache: dict[str, Any] = {"working_set_bytes": (2.0**18, 2.0**19, 2.0**21, 2.0**23)}
    cache["caches_bytes"] = {"L2 cache": 2.0**20}
    fit = fitted(replayed(time, "n^2", sizes, scatter=0.0, **cache))
    assert verdict(fit) == expected
    assert "passes the L2 cache (1.0 MiB) between n = 512 and 1024" in reason(fit)


def test_the_reason_says_that_executed_flops_lower_the_least_exponent():
    flops = tuple(round(1e3 * (n + 512)) for n in FOUR_OCTAVES)
    fit = fitted(
        replayed(lambda n: n + 512, "n d", flops=flops, overhead_us=None, least_overhead_us=1.0)
    )
    assert "executed FLOPs grow as n^0.50: from 0.35 on an exponent agrees" in reason(fit)


def test_a_refutation_stands_whichever_changepoint_is_taken_out():
    """Three sizes cannot tell n^2.5 from n² with a kernel switch."""
    times = tuple((t + OVERHEAD_US,) * 7 for t in (300.0, 300 * 4, 300 * 4 * 8))
    series = replace(replayed(power(2), sizes=FOUR_OCTAVES[:3]), times_us=times)
    assert verdict(fitted(replace(series, overhead_us=(OVERHEAD_US,) * 7))) == "inconclusive"


def test_launch_bound_sizes_do_not_count():
    fit = fitted(replace(replayed(power(2)), launch_bound=(True, *[False] * 4)))
    assert "launch-bound" in str(fit.left_out[0])
    assert fit.left_out[1:] == (None,) * 4


NO_TIMES: dict[str, tuple[tuple[float, ...], ...]] = {
    "none": ((), (), (), (), ()),
    "nan": ((math.nan,) * 7,) * 5,
    "some zero": ((500.0,) * 7, (0.0, 1.0), (math.nan,), (math.inf,), (-3.0,) * 7),
}


@pytest.mark.parametrize("times", NO_TIMES.values(), ids=NO_TIMES)
@pytest.mark.parametrize("overhead", [None, (), (0.0,), (math.nan,), (16.0,)])
def test_times_that_are_none_are_inconclusive(times, overhead):
    fit = fitted(replace(replayed(power(2)), times_us=times, overhead_us=overhead))
    assert verdict(fit) == "inconclusive"
    assert [why for why in fit.left_out if why], "each has a reason"
