"""Exponents and their verdicts, from replayed times: what is true holds, what lies is refuted."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attnbench.analysis.scaling.cells import Replicates
from attnbench.analysis.scaling.decide import ExponentEvidence, decide
from attnbench.analysis.scaling.exponents import fit_many, fit_series
from attnbench.analysis.scaling.results import Estimate, ExponentFit, Series
from attnbench.base.stats import processes_interval
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


def verdict(fit: ExponentFit) -> str:
    assert fit.finding is not None
    return fit.finding.verdict


def reason(fit: ExponentFit) -> str:
    assert fit.finding is not None
    return fit.finding.reason


def judged(time: Time, law: str, **how: Any) -> Counter[str]:
    many = [replayed(time, law, seed=seed, **how) for seed in range(40)]
    return Counter(verdict(fit) for fit in fit_many(many, draws=300))


def test_times_disturbed_without_bound_refute_nothing_and_say_where() -> None:
    doubts = (None, None, None, "unsteady (busy-machine)", None)
    assert verdict(fit_series(replayed(power(3), "n^2"))) == "refuted"
    fit = fit_series(replayed(power(3), "n^2", doubts=doubts))
    assert verdict(fit) == "inconclusive"
    assert f"n = {FOUR_OCTAVES[3]:g} were disturbed" in reason(fit)
    assert verdict(fit_series(replayed(power(2), "n^2", doubts=doubts))) == "holds"


ALL_DOUBTED = ("unsteady (busy-machine)",) * len(FOUR_OCTAVES)


@pytest.mark.parametrize(
    ("true", "law", "excess", "expected"),
    [
        (3, "n^2", 2.0, "refuted"),  # no disturbance by a factor of two makes n^3 of n^2
        (3, "O(n^2)", 3.0, "refuted"),
        (1, "n^2", 3.0, "refuted"),
        (2, "n^3", 3.0, "refuted"),
        (3, "n^2", 20.0, "inconclusive"),  # large sizes may have been that much slower
        (3, "n^2", math.inf, "inconclusive"),
        (2.3, "n^2", 1.5, "inconclusive"),  # a little off, and a little disturbed
        (1.7, "n^2", 1.5, "inconclusive"),
        (2.3, "n^2", 1.02, "refuted"),
        (2, "n^2", 3.0, "holds"),
    ],
)
def test_a_disturbance_that_is_bounded_changes_an_exponent_by_so_much_at_most(
    true: float, law: str, excess: float, expected: str
) -> None:
    how: dict[str, Any] = {"doubts": ALL_DOUBTED, "excess": (excess,) * len(FOUR_OCTAVES)}
    fit = fit_series(replayed(power(true), law, **how))
    assert verdict(fit) == expected
    if expected == "refuted":
        assert "disturbed or unsteady, which changes the exponent by" in reason(fit)


def test_only_what_disturbed_large_sizes_makes_a_kernel_look_steeper() -> None:
    excess = (20.0, 20.0, 1.0, 1.0, 1.0)
    steep = fit_series(replayed(power(3), "n^2", doubts=ALL_DOUBTED, excess=excess))
    flat = fit_series(replayed(power(1), "n^2", doubts=ALL_DOUBTED, excess=excess))
    assert (verdict(steep), verdict(flat)) == ("refuted", "inconclusive")


def test_a_changepoint_among_disturbed_times_is_not_taken_out_for_good() -> None:
    def stalled(n: float) -> float:
        return n**2 * (20 if n > 600 else 1)

    doubts = (None,) * 4 + ("unsteady (busy-machine)",)
    assert verdict(fit_series(replayed(stalled, "n^2", doubts=doubts))) == "inconclusive"


# What is true, and what is not.


@pytest.mark.parametrize("p", [1, 1.5, 1.8, 2, 2.3, 3])
def test_a_true_power_holds(p: float) -> None:
    found = judged(power(p), f"n^{p:g}", scatter=0.015)
    assert found["refuted"] == 0
    assert found["holds"] >= 36


@pytest.mark.parametrize(
    ("true", "claimed"),
    [
        (2, "n d"), (2, "O(n)"), (1, "n^2 d"), (3, "n^2 d"), (3, "O(n^2)"), (1.8, "n^2"),
        (2.3, "n^2"), (1.5, "n^2"), (2.3, "O(n^2 d)"), (1.5, "O(n)"), (2, "n^1.8"), (2, "1"),
    ],
)  # fmt: skip
def test_a_law_that_is_wrong_is_refuted_over_four_octaves(true: float, claimed: str) -> None:
    found = judged(power(true), claimed, scatter=0.015)
    assert found["holds"] == 0
    assert found["refuted"] >= 36


def test_less_than_an_upper_bound_holds() -> None:
    assert judged(power(1.5), "O(n^2)", scatter=0.015)["holds"] >= 36


def test_an_overhead_is_subtracted_and_not_fitted() -> None:
    """The floor equals the cost at 2048: the plain slope over the range would be 1.3."""
    sizes = [2.0**k for k in range(7, 17)]
    fit = fit_series(replayed(power(2), sizes=sizes, overhead_us=300 * 16**2))
    assert [n for n, why in zip(sizes, fit.left_out, strict=True) if why is None] == sizes[5:]
    assert "3 × the measured overhead" in str(fit.left_out[0])
    assert fit.exponent is not None
    assert fit.exponent.value == pytest.approx(2, abs=0.06)
    assert verdict(fit) == "holds"


def test_an_overhead_that_covers_the_range_is_never_taken_for_a_flat_law() -> None:
    for law in ("O(n)", "1", "n^2"):
        fit = fit_series(replayed(power(2), law, overhead_us=300 * 16**2))
        assert verdict(fit) == "inconclusive"
        assert "too short" in reason(fit)
        assert "overhead" in reason(fit)


def test_without_any_overhead_a_flat_series_does_not_hold_either() -> None:
    series = replace(replayed(power(2), "O(n)", overhead_us=300 * 16**2), overhead_us=None)
    assert verdict(fit_series(series)) == "inconclusive"
    assert verdict(fit_series(replace(series, least_overhead_us=4e4))) == "inconclusive"


def test_where_the_overhead_is_not_known_the_interval_takes_in_what_it_may_be() -> None:
    known = fit_series(replayed(power(2), scatter=0.002))
    unknown = fit_series(
        replayed(power(2), scatter=0.002, overhead_us=None, least_overhead_us=14.0)
    )
    assert known.exponent is not None
    assert unknown.exponent is not None
    assert known.exponent.high is not None
    assert unknown.exponent.high is not None
    assert unknown.exponent.high > known.exponent.high + 0.05
    assert unknown.overhead_us == 0


def test_a_step_of_five_percent_does_not_matter() -> None:
    found = judged(lambda n: n**2 * (1.05 if n > 700 else 1), "n^2", scatter=0.01)
    assert found["refuted"] == 0
    assert found["holds"] >= 36


@pytest.mark.parametrize("factor", [0.5, 0.65, 1.6, 2.5])
@pytest.mark.parametrize("after", [256, 512])
def test_a_kernel_switch_changes_the_constant_and_not_the_verdict(
    factor: float, after: float
) -> None:
    def switched(n: float) -> float:
        return n**2 * (factor if n > after else 1)

    found = judged(switched, "n^2", scatter=0.01)
    assert found["refuted"] == 0
    assert found["holds"] >= 36
    assert judged(switched, "n", scatter=0.01)["refuted"] >= 30
    fit = fit_series(replayed(switched))
    assert fit.changepoint is not None
    assert fit.changepoint[0] == after
    assert fit.changepoint[1] == pytest.approx(factor, rel=0.1)
    assert fit.octaves == pytest.approx(3)


def test_after_a_switch_in_the_last_octave_nobody_knows() -> None:
    fit = fit_series(replayed(lambda n: n**2 * (0.5 if n > 1024 else 1), "O(n)"))
    assert verdict(fit) == "inconclusive"
    assert "between n = 1024 and 2048" in reason(fit)
    faster = replayed(lambda n: n**2 * (2 if n > 1024 else 1), "O(n)")
    assert verdict(fit_series(faster)) == "refuted", "no way of going on makes that O(n)"


def test_a_refutation_stands_whichever_changepoint_is_taken_out() -> None:
    """Three sizes cannot tell n^2.5 from n² with a kernel switch."""
    times = [300.0, 300 * 4, 300 * 4 * 8]
    series = replayed(power(2), sizes=(128, 256, 512))
    exact = replace(
        series,
        times_us=tuple((t + OVERHEAD_US,) * 7 for t in times),
        overhead_us=(OVERHEAD_US,) * 7,
    )
    assert verdict(fit_series(exact)) == "inconclusive"


def test_terms_of_lower_order_are_still_rising_towards_the_law() -> None:
    fit = fit_series(replayed(lambda n: n**2 + 350 * n, scatter=0.003))
    assert verdict(fit) == "inconclusive"
    assert "still rising towards n^2" in reason(fit)


@pytest.mark.parametrize("lower", [lambda n: 120 * n, lambda n: 500 * n, lambda n: 3e4 * n**0.5])
def test_a_curvature_is_not_taken_for_a_changepoint(lower: Time) -> None:
    assert fit_series(replayed(lambda n: n**2 + lower(n), scatter=0.003)).changepoint is None


def test_a_overhead_that_was_not_measured_is_not_taken_for_a_changepoint() -> None:
    series = replayed(lambda n: n**2 + 8000, scatter=0.003, overhead_us=None, least_overhead_us=1.0)
    assert fit_series(series).changepoint is None
    switched = replace(series, kernels=("a", "b", "b", "b", "b"))
    assert fit_series(switched).changepoint is not None, "unless the kernel changes just there"


@pytest.mark.parametrize("law", ["n log n", "n^2 log n"])
def test_log_factors_are_unresolved_never_held_nor_refuted(law: str) -> None:
    p = parse(law).degree("n")
    found = judged(lambda n: n ** float(p) * math.log(n), law)
    assert found == {"inconclusive": 40}
    assert judged(power(float(p)), law) == {"inconclusive": 40}
    assert judged(power(float(p) + 1), law)["refuted"] >= 36
    fit = fit_series(replayed(power(float(p)), law))
    assert "log factors" in reason(fit)


def test_a_bound_with_logarithms_holds_where_it_would_without() -> None:
    assert judged(power(1), "O(n log n)")["holds"] >= 36


def test_several_terms_bound_the_exponent_by_the_largest() -> None:
    fit = fit_series(replayed(lambda n: n**2 + 4000 * n, "n d^2 + n^2 d", scatter=0.003))
    assert (fit.declared, fit.bound, verdict(fit)) == (2, True, "holds")
    assert judged(power(3), "n d^2 + n^2 d")["refuted"] >= 36


def test_two_octaves_refute_and_do_not_hold() -> None:
    short = FOUR_OCTAVES[:3]
    assert verdict(fit_series(replayed(power(2), sizes=short, scatter=0.003))) == "inconclusive"
    wrong = replayed(power(1), sizes=short, scatter=0.003)
    assert verdict(fit_series(wrong)) == "refuted"
    assert verdict(fit_series(replayed(power(1), sizes=FOUR_OCTAVES[:2]))) == "inconclusive"


def test_sizes_need_not_double() -> None:
    sizes = (100, 150, 300, 450, 900, 1000, 1600)
    fit = fit_series(replayed(power(2), sizes=sizes))
    assert verdict(fit) == "holds"
    assert fit.top is not None
    assert fit.top.value == pytest.approx(2, abs=0.1)


@pytest.mark.parametrize(
    ("axis", "workload", "declared"),
    [
        ("d", "attention", 1), ("heads", "attention", 1), ("heads at fixed width", "attention", 1),
        ("batch", "attention", 1), ("heads", "layer", 2), ("d", "layer", 2), ("batch", "layer", 1),
    ],
)  # fmt: skip
def test_along_other_axes_laws_are_upper_bounds(axis: Any, workload: str, declared: float) -> None:
    law = "n d^2 + n^2 d" if workload == "layer" else "n^2 d"
    half = replayed(power(0.5), law, (1, 2, 4, 8, 16), axis=axis, workload=workload)
    fit = fit_series(half)
    assert (fit.declared, fit.bound, verdict(fit)) == (declared, True, "holds")
    steep = replayed(power(declared + 1), law, (1, 2, 4, 8, 16), axis=axis, workload=workload)
    assert verdict(fit_series(steep)) == "refuted"


# Intervals.


def test_replicates_that_agree_do_not_make_a_narrow_interval() -> None:
    """Within one process they say nothing of the next."""
    series = replayed(power(2), scatter=0.0)
    still = replace(series, times_us=tuple((times[0],) * 9 for times in series.times_us))
    fit = fit_series(still)
    assert fit.exponent is not None
    assert fit.exponent.high is not None
    assert fit.exponent.high - fit.exponent.value > 0.01


def test_noisy_replicates_widen_the_interval() -> None:
    """Though their medians lie exactly on the line."""

    def spread(width: float) -> Estimate:
        series = replayed(power(2), scatter=0.0)
        factors = np.exp(np.linspace(-width, width, 7))
        times = tuple(tuple(300.0 * (n / 128) ** 2 * factors) for n in series.sizes)
        fit = fit_series(replace(series, times_us=times, overhead_us=None, least_overhead_us=1e-3))
        assert fit.exponent is not None
        return fit.exponent

    calm, wild = spread(0.001), spread(0.9)
    assert calm.low is not None
    assert calm.high is not None
    assert wild.low is not None
    assert wild.high is not None
    assert wild.value - wild.low > calm.value - calm.low + 0.1
    assert wild.high - wild.value > calm.high - calm.value + 0.1


@settings(max_examples=25, deadline=None)
@given(st.lists(st.floats(0.5, 1e6), min_size=1, max_size=11))
def test_intervals_of_medians_are_those_of_the_table(values: list[float]) -> None:
    middle, low, high = Replicates([tuple(values)]).intervals()
    assert middle[0] == pytest.approx(np.median(values))
    expected = processes_interval(values)
    if expected is None:
        assert math.isnan(low[0])
    else:
        assert (low[0], high[0]) == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf])
def test_a_set_with_one_replicate_that_is_no_time_has_no_median(bad: float) -> None:
    sets = Replicates([(1.0, 2.0, bad), (1.0, 2.0, 3.0), (bad,)])
    middle, _, _ = sets.intervals()
    assert middle.tolist() == pytest.approx([math.nan, 2.0, math.nan], nan_ok=True)
    drawn = np.isnan(sets.drawn_medians(10, 3)).all(axis=1)
    assert drawn.tolist() == [True, False, True]


@pytest.mark.parametrize("count", [1, 2, 5, 8])
def test_drawn_medians_are_those_of_resampled_sets(count: int) -> None:
    values = tuple(np.random.default_rng(count).lognormal(0, 1, count))
    drawn = Replicates([values, values]).drawn_medians(20_000, 2)
    resampled = np.median(
        np.random.default_rng(0).choice(values, (20_000, count), replace=True), axis=1
    )
    for share in (0.05, 0.25, 0.5, 0.75, 0.95):
        assert np.quantile(drawn[0], share) == pytest.approx(
            np.quantile(resampled, share), rel=0.05, abs=0.02
        )
    if count > 1:
        assert abs(np.corrcoef(drawn[0], drawn[1]).item(1)) < 0.05, (
            "the sets of a series are independent"
        )


def test_the_same_series_gives_the_same_figures_alone_or_among_others() -> None:
    series = replayed(power(2))
    others = [replayed(power(1), seed=seed) for seed in range(3)]
    assert fit_series(series, draws=200) == fit_many([*others, series], draws=200)[-1]


@settings(max_examples=30, deadline=None)
@given(p=st.floats(0.3, 3.2), factor=st.floats(0.01, 100), unit=st.floats(0.1, 50))
def test_exponents_do_not_hang_on_units(p: float, factor: float, unit: float) -> None:
    series = replayed(power(p), scatter=0.01, overhead_us=None)
    scaled = replace(
        series,
        sizes=tuple(unit * n for n in series.sizes),
        times_us=tuple(tuple(factor * t for t in times) for times in series.times_us),
    )
    one, other = fit_series(series, draws=100), fit_series(scaled, draws=100)
    assert (one.exponent is None) == (other.exponent is None)
    if one.exponent is not None and other.exponent is not None:
        assert other.exponent.value == pytest.approx(one.exponent.value, abs=1e-6)


# What lies between sizes.


def test_cache_and_kernel_boundaries_stand_beside_what_does_not_hold_and_cut_nothing() -> None:
    passed: dict[str, Any] = {
        "working_set_bytes": (1e6, 4e6, 16e6, 64e6, 256e6), "cache_bytes": 32e6,
        "kernels": ("a", "a", "a", "b", "b"),
    }  # fmt: skip
    wrong, right = (fit_series(replayed(power(2), law, **passed)) for law in ("n^3", "n^2"))
    assert set(wrong.left_out) == {None}
    assert "passes the last cache (30.5 MiB) between n = 512 and 1024" in reason(wrong)
    assert "the kernels change between n = 512 and 1024" in reason(wrong)
    assert "kernels" not in reason(right)


def test_launch_bound_sizes_do_not_count() -> None:
    series = replayed(power(2))
    enqueue = (400.0, 5.0, 5.0, 5.0, 5.0)
    fit = fit_series(replace(series, enqueue_us=enqueue))
    assert "launch-bound" in str(fit.left_out[0])
    assert fit.left_out[1:] == (None,) * 4


# Bad input.


NO_TIMES: dict[str, tuple[tuple[float, ...], ...]] = {
    "none": ((), (), (), (), ()),
    "zero": ((0.0,) * 7,) * 5,
    "nan": ((math.nan,) * 7,) * 5,
    "some zero": ((500.0,) * 7, (0.0, 1.0), (math.nan,), (math.inf,), (-3.0,) * 7),
}


@pytest.mark.parametrize("times", NO_TIMES.values(), ids=NO_TIMES)
@pytest.mark.parametrize("overhead", [None, (), (0.0,), (math.nan,), (16.0,)])
def test_times_that_are_none_are_inconclusive(times: Any, overhead: Any) -> None:
    for law in ("n^2", "O(n^3)", "1"):
        fit = fit_series(replace(replayed(power(2), law), times_us=times, overhead_us=overhead))
        assert verdict(fit) == "inconclusive"
        assert [why for why in fit.left_out if why], "each has a reason"


def test_odd_sizes_are_inconclusive_or_left_out() -> None:
    for sizes in [(512.0,) * 5, (0.0,) * 5, (128.0, 128.0, 128.0, 128.0, 256.0)]:
        series = replace(replayed(power(2)), sizes=sizes)
        assert verdict(fit_series(series)) == "inconclusive"
    assert fit_series(replace(replayed(power(2)), sizes=(), times_us=())).exponent is None
    one = replace(replayed(power(2)), sizes=(128.0,), times_us=((300.0,) * 7,))
    assert verdict(fit_series(one)) == "inconclusive"


@given(
    value=st.floats(-1, 5), half=st.floats(0, 2), top=st.floats(-1, 5), top_half=st.floats(0, 2),
    octaves=st.floats(0, 8), sizes=st.integers(0, 9), p=st.sampled_from([0.0, 1.0, 1.5, 2.0]),
    bound=st.booleans(), logs=st.none() | st.floats(0.1, 1), change_in_top=st.booleans(),
)  # fmt: skip
def test_the_rule_is_the_one_written_down(
    value: float, half: float, top: float, top_half: float, octaves: float, sizes: int, p: float,
    bound: bool, logs: float | None, change_in_top: bool,
) -> None:  # fmt: skip
    evidence = ExponentEvidence(
        exponent=Estimate(value=value, low=value - half, high=value + half),
        top=Estimate(value=top, low=top - top_half, high=top + top_half),
        octaves=octaves, sizes=sizes, power=p, bound=bound, logs=logs, change_in_top=change_in_top,
        changepoint="the time changes" if change_in_top else None,
    )  # fmt: skip
    found, why = decide(evidence)
    assert why
    if found == "holds":
        assert octaves >= 3 - 1e-6
        assert value + half <= p + 0.15
        assert top + top_half <= p + 0.2
        assert bound or value - half >= p - 0.15
        assert logs is None or bound
    if found == "refuted":
        assert octaves >= 2 - 1e-6
        above = value - half > p + 0.15
        assert above or (not bound and value + half < p - 0.15)
