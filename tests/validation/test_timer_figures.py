"""The figures of the comparison of timing tools, and the raw samples they are made of."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from attnbench.base.stats import median
from tests.validation.timer.candidates import CANDIDATES
from tests.validation.timer.programs import READINGS
from tests.validation.timer.raw import Raw, laid_out, read_pytest, turns
from tests.validation.timer.spread import (
    checkpoints,
    curve,
    mad_cv,
    p95_deviation,
    quantile,
    seconds_needed,
    settled_s,
)

READING = {reading.label: reading for reading in READINGS}


def raw(times: list[float], **fields: Any) -> Raw:
    ended = tuple(2.0 + 0.1 * (i + 1) for i in range(len(times)))
    return Raw(times_us=tuple(times), ended_s=ended, **fields)


# Figures.


def test_the_spread_is_the_scaled_median_deviation_over_the_median() -> None:
    assert mad_cv([9.0, 10.0, 10.0, 12.0, 30.0]) == pytest.approx(1.4826 * 1.0 / 10.0)
    assert mad_cv([5.0, 5.0, 5.0]) == 0.0


def test_the_spread_of_normal_values_is_their_standard_deviation() -> None:
    draws = random.Random(1)
    values = [draws.gauss(100.0, 3.0) for _ in range(20_000)]
    assert mad_cv(values) == pytest.approx(0.03, rel=0.03)
    assert p95_deviation(values) == pytest.approx(1.96 * 0.03, rel=0.03)


def test_the_95th_percentile_lies_between_its_neighbours() -> None:
    assert quantile([0.0, 10.0], 0.25) == 2.5
    assert quantile([3.0], 0.95) == 3.0
    # |x/100 − 1| = 0, 0, 0.1, 0.1, 0.5: the 95th percentile is 0.8 of the way from 0.1 to 0.5.
    assert p95_deviation([100, 100, 110, 90, 150]) == pytest.approx(0.1 + 0.8 * 0.4)


@pytest.mark.parametrize("figure", [mad_cv, p95_deviation, lambda v: quantile(v, 0.5)])
def test_no_values_have_no_spread(figure: Callable[[list[float]], float]) -> None:
    with pytest.raises(ValueError, match=r"no (median|quantile)"):
        figure([])


def test_a_run_has_settled_after_its_last_visit_outside() -> None:
    points = [(1.0, 100.0), (2.0, 105.0), (3.0, 101.0), (4.0, 99.0)]
    assert settled_s(points, 100.0) == 3.0
    assert settled_s(points[:2], 100.0) == math.inf
    assert settled_s(points[:1], 100.0) == 1.0
    assert settled_s([], 100.0) == math.inf


def test_the_seconds_needed_are_those_of_nine_runs_in_ten() -> None:
    def settling_at(seconds: float) -> list[tuple[float, float]]:
        return [(seconds / 2, 200.0), (seconds, 100.0)]

    ten = [settling_at(float(second)) for second in range(1, 11)]
    assert seconds_needed(ten, 100.0) == 9.0
    assert seconds_needed(ten[:2], 100.0) == 2.0
    never = [[(1.0, 200.0)]]
    assert seconds_needed([*ten[:9], *never], 100.0) == 9.0
    assert seconds_needed([*ten[:8], *never, *never], 100.0) == math.inf


def test_checkpoints_are_dense_at_first_and_reach_the_end() -> None:
    assert checkpoints(5) == [1, 2, 3, 4, 5]
    many = checkpoints(10_000)
    assert (many[0], many[-1]) == (1, 10_000)
    assert len(many) <= 60
    assert checkpoints(0) == []


def test_a_curve_says_what_would_have_been_reported_and_when() -> None:
    points = curve(READING["attnbench"], [raw([10.0, 20.0, 30.0])])
    assert [value for _, value in points] == [10.0, 15.0, 20.0]
    assert [seconds for seconds, _ in points] == pytest.approx([2.1, 2.2, 2.3])


def test_over_processes_start_ups_add_up_and_the_median_is_over_those_so_far() -> None:
    points = curve(READING["attnbench --processes 3"], [raw([10.0]), raw([30.0]), raw([11.0])])
    assert [value for _, value in points] == [10.0, 20.0, 11.0]
    assert [seconds for seconds, _ in points] == pytest.approx([2.1, 4.2, 6.3])


def test_our_reported_time_is_the_median_of_the_turns() -> None:
    times = [float(10 + i % 7) for i in range(61)]
    blocks = tuple((time_us, time_us + 5.0) for time_us in times)
    assert READING["attnbench"].reported_us([raw(times, turns_us=blocks)]) == median(times)
    assert READING["attnbench"].reported_us([raw(times, window=7)]) == 10.0


# Estimators.


def test_every_candidate_estimates_by_hand_computed_values() -> None:
    fastest = [4.0, 1.0, 9.0, 3.0, 8.0, 2.0, 7.0, 5.0]
    blocks = [(time_us + 2.0, time_us, time_us + 1.0) for time_us in fastest]
    found = {name: candidate(blocks) for name, (_, candidate) in CANDIDATES.items()}
    assert found["fastest"] == 4.5
    assert found["medians"] == 5.5
    assert found["every"] == median([us for turn in blocks for us in turn])
    assert found["minima-2"] == median([1, 3, 2, 5])
    assert found["minima-8"] == found["minimum"] == 1.0
    assert found["low-25"] == pytest.approx(2.75)
    assert found["low-10"] == pytest.approx(1.7)


def test_a_tool_without_turns_has_one_block_in_each() -> None:
    assert turns(raw([1.0, 2.0])) == [(1.0,), (2.0,)]
    assert turns(raw([1.0], turns_us=((1.0, 3.0),))) == ((1.0, 3.0),)


# Raw samples.


def test_durations_are_laid_back_to_back_up_to_the_end() -> None:
    assert laid_out([1.0, 2.0], 10.0) == pytest.approx([8.0, 10.0])
    assert laid_out([1.0, 2.0], 10.0, 4.0) == pytest.approx([6.0, 10.0])  # stretched after warm-up
    assert laid_out([], 1.0) == []


def test_samples_that_do_not_count_are_left_out_of_the_times_alone() -> None:
    row = {
        "times_us": [5.0, 50.0, 6.0],
        "ended_s": [0.1, 0.2, 0.3],
        "dropped": {"1": "interrupted"},
        "startup_s": 1.0,
        "calls": 1,
    }
    found = Raw.of(row)
    assert found.times_us == (5.0, 6.0)
    assert found.ended_s == pytest.approx((1.1, 1.3))


# As pytest-benchmark 5.3.1 wrote it, shortened to what is read and some of what is not.
RECORDED: dict[str, Any] = {
    "machine_info": {"machine": "x86_64"},
    "benchmarks": [
        {
            "name": "test_cell[spin 1 ms]",
            "params": {"name": "spin 1 ms"},
            "extra_info": {"cell": "spin 1 ms", "begin_s": 14248.25, "end_s": 14248.5},
            "options": {"min_rounds": 5, "max_time": 0.0001, "warmup": False},
            "stats": {
                "min": 3.646400000434369e-05,
                "median": 3.818700133706443e-05,
                "rounds": 5,
                "data": [
                    3.646400000434369e-05,
                    3.818700133706443e-05,
                    3.8287000279524364e-05,
                    3.840700082946569e-05,
                    3.815700074483175e-05,
                ],
                "iterations": 1,
            },
        }
    ],
    "version": "5.3.1",
}


def recorded(tmp_path: Path, **changes: Any) -> Path:
    file = tmp_path / "result.json"
    file.write_text(json.dumps(RECORDED | changes))
    return file


def test_what_pytest_benchmark_reports_is_the_statistic_of_its_rounds(tmp_path: Path) -> None:
    found = read_pytest(recorded(tmp_path))
    assert (found.ready_s, found.end_s) == (14248.25, 14248.5)
    assert found.facts == {"version": "5.3.1"}
    one = Raw.of(found.cells["spin 1 ms"] | {"startup_s": 1.0})
    assert one.ended_s[-1] == pytest.approx(1.25)
    for label, name in (("pytest-benchmark min", "min"), ("pytest-benchmark median", "median")):
        reading = READING[label]
        assert reading.of(one) == one.own_us[name]
        assert reading.statistic(one.times_us) == pytest.approx(one.own_us[name])


def test_a_result_without_benchmarks_or_raw_data_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no benchmark"):
        read_pytest(recorded(tmp_path, benchmarks=[]))
    bare = [RECORDED["benchmarks"][0] | {"stats": {"min": 1.0}}]
    with pytest.raises(KeyError):
        read_pytest(recorded(tmp_path, benchmarks=bare))
