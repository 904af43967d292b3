"""The reported time, its interval over samples or processes, and the notes on it."""

import math
import random
from dataclasses import replace

import pytest

from attnbench.analysis import notes, times
from attnbench.base.stats import (
    fastest_of_windows,
    log_t_interval,
    median_interval,
    processes_interval,
    t_quantile,
)
from attnbench.schema.case import Case
from attnbench.schema.record import Cell, Record, Sample, merged

CELL = Cell(case=Case(seq_len=128), impl="naive")


def record(values, *, process=0, discarded=None, **metrics) -> Record:
    codes = discarded or {}
    samples = tuple(
        Sample(
            round=i,
            position=0,
            calls=2,
            time_us=v,
            e2e_us=v,
            discarded=codes.get(i),
            discard_code=codes.get(i),
        )
        for i, v in enumerate(values)
    )
    return Record(cell=CELL, status="ok", samples=samples, metrics=metrics, process=process)


class TestWindows:
    def test_the_fastest_of_each_window_counts_and_none_is_left_out(self):
        assert fastest_of_windows([3.0, 1.0, 2.0], 1) == [3.0, 1.0, 2.0]
        assert fastest_of_windows([3.0, 1.0, 2.0, 5.0, 0.5], 2) == [1.0, 0.5]
        assert fastest_of_windows([3.0, 1.0], 8) == [1.0]
        assert fastest_of_windows([], 3) == []

    def test_delays_by_others_vanish_and_the_work_itself_stays(self):
        rng = random.Random(1)
        delays = [rng.expovariate(1 / 30.0) if rng.random() < 0.6 else 0.0 for _ in range(400)]
        values = [100.0 + delay for delay in delays]
        assert times.time_us(record(values)) == pytest.approx(105, abs=5)
        assert times.time_us(record(values, window=7)) == pytest.approx(100.0)


class TestProcesses:
    def test_t_quantiles_are_those_of_the_table(self):
        # Table of Student's t, 0.975.
        known = {1: 12.706, 2: 4.303, 4: 2.776, 10: 2.228}
        assert {n: round(t_quantile(n), 3) for n in known} == known
        for n in (0, 11):
            with pytest.raises(ValueError, match="degrees of freedom"):
                t_quantile(n)

    def test_the_interval_of_two_processes_is_wide_and_of_one_there_is_none(self):
        assert log_t_interval([100.0]) is None
        low, high = log_t_interval([100.0, 102.0]) or (0, 0)
        half = 12.7062 * math.log(1.02) / 2
        assert math.log(high / low) == pytest.approx(2 * half)

    def test_the_processes_median_is_reported_and_repeats_over_them(self):
        parts = [record([value] * 9, process=i) for i, value in enumerate((100.0, 110.0, 104.0))]
        cell = merged(parts)
        assert times.time_us(cell) == 104.0
        assert times.replicated(cell) == "between_processes"
        low, high = times.interval_us(cell) or (0, 0)
        assert low < 100.0
        assert high > 110.0
        assert times.replicated(parts[0]) == "within_process"
        assert times.interval_us(parts[0]) == (100.0, 100.0)

    def test_from_six_processes_on_no_distribution_is_assumed(self):
        medians = [101.0, 102.0, 103.0, 104.0, 105.0, 106.0]
        assert processes_interval(medians) == median_interval(medians) == (101.0, 106.0)

    def test_what_slows_a_whole_process_leaves_the_ratio_within_it(self):
        speeds = (1.0, 1.3, 0.9)
        slow = merged([record([200.0 * s] * 9, process=i) for i, s in enumerate(speeds)])
        fast = merged([record([100.0 * s] * 9, process=i) for i, s in enumerate(speeds)])
        value, interval = times.ratio(slow, fast)
        assert value == pytest.approx(2.0)
        assert interval == pytest.approx((2.0, 2.0))

    def test_a_cell_that_fails_in_one_process_fails(self):
        bad = Record(cell=CELL, status="crashed", reason="signal 11", process=1)
        cell = merged([record([100.0] * 9), bad])
        assert cell.status == "crashed"
        assert cell.reason == "in process 2 of 2: signal 11"
        assert not cell.samples

    def test_what_was_measured_beside_time_is_merged_by_its_kind(self):
        one = {"memory_workspace_bytes": 10, "load_1m": 1.0, "kept_disturbed": 2, "cpu_quota": 2.0}
        two = {"memory_workspace_bytes": 12, "load_1m": 2.0, "kept_disturbed": 3, "cpu_quota": 1.5}
        alike: dict[str, object] = {"sdpa_backend": "flash", "l2": "cold"}
        texts = [
            alike | {"kernel": "a", "meddles": None},
            alike | {"kernel": "b", "meddles": None, "throttle": "thermal 90%"},
            alike | {"kernel": "a", "meddles": None},
        ]
        parts = [
            record([1.0], process=i, **beside, **text)
            for i, (beside, text) in enumerate(zip((one, two, two), texts, strict=True))
        ]
        assert merged(parts[::-1]).metrics == alike | {
            "memory_workspace_bytes": 12,
            "load_1m": pytest.approx(5 / 3),
            "kept_disturbed": 8,
            "cpu_quota": 1.5,
            "kernel": "a (2 of 3); b (1 of 3)",
            "throttle": "thermal 90% (1 of 3)",
            "meddles": None,
        }

    def test_records_of_different_cells_do_not_merge(self):
        other = replace(record([1.0]), cell=Cell(case=CELL.case, impl="sdpa"))
        with pytest.raises(ValueError, match="cannot merge"):
            merged([record([1.0]), other])


class TestPrecision:
    def test_precision_is_half_the_width(self):
        cell = record([98.0, 99.0, 100.0, 100.0, 101.0, 102.0])
        assert times.precision(cell) == pytest.approx(0.02)

    def test_the_detectable_difference_is_so_many_half_widths(self):
        """z(0.8) · √2 standard errors beyond an interval made of two of 97.5 %."""
        cell = record([98.0, 99.0, 100.0, 100.0, 101.0, 102.0])
        assert times.detectable(cell) == pytest.approx(
            0.02 * (2 * 2.2414 + 1.1902) / 1.96, rel=1e-4
        )
        three = merged([record([100.0 + i] * 9, process=i) for i in range(3)])
        half = times.precision(three) or 0.0
        found = half * (4.3027 * 2**0.5 + 1.1902) / 4.3027
        assert times.detectable(three) == pytest.approx(found, rel=1e-4)

    def test_one_sample_has_a_time_and_no_interval(self):
        cell = record([100.0])
        assert times.time_us(cell) == 100.0
        assert times.interval_us(cell) is None
        assert times.precision(cell) is None
        assert times.detectable(cell) is None
        assert times.replicated(cell) is None

    def test_zero_variance_is_an_interval_without_width(self):
        cell = record([100.0] * 30)
        assert times.interval_us(cell) == (100.0, 100.0)
        assert times.precision(cell) == 0.0
        assert notes.notes(cell) is None

    def test_discarded_samples_are_kept_in_the_record_and_count_for_nothing(self):
        cell = record([100.0] * 5 + [900.0] * 7, discarded=dict.fromkeys(range(5, 12), "stolen"))
        assert times.time_us(cell) == 100.0
        again = Record.from_line(cell.to_line())
        assert again == cell
        assert len(again.samples) == 12

    def test_a_record_of_which_every_sample_is_discarded_is_not_ok(self):
        with pytest.raises(ValueError, match="none of 1 samples"):
            record([1.0], discarded={0: "clock"})


def noise(rng, n, sd=0.01):
    return [100.0 * math.exp(rng.gauss(0, sd)) for _ in range(n)]


class TestDiagnostics:
    def test_a_drift_is_seen_with_its_size(self):
        rng = random.Random(5)
        values = [v * (1 + 0.1 * i / 60) for i, v in enumerate(noise(rng, 60))]
        assert notes.drift(values) == pytest.approx(0.067, abs=0.02)
        assert notes.drift(values[::-1]) == pytest.approx(-0.062, abs=0.02)

    def test_a_trend_too_small_to_matter_is_not_reported(self):
        rng = random.Random(6)
        values = [v * (1 + 0.01 * i / 300) for i, v in enumerate(noise(rng, 300, 0.001))]
        assert notes.drift(values) is None

    def test_two_speeds_are_seen_with_their_share(self):
        rng = random.Random(7)
        values = noise(rng, 45) + [1.2 * v for v in noise(rng, 15)]
        rng.shuffle(values)
        fast, slow, share = notes.two_speeds(values) or (0, 0, 0)
        assert (fast, slow) == pytest.approx((100.0, 120.0), rel=0.01)
        assert share == pytest.approx(0.25)

    def test_independent_times_of_one_speed_show_nothing(self):
        values = noise(random.Random(4), 60, 0.03)
        found = (notes.drift(values), notes.two_speeds(values), notes.dependence(values))
        assert found == (None, None, None)

    def test_a_few_outliers_are_no_second_speed(self):
        rng = random.Random(8)
        assert notes.two_speeds(noise(rng, 57) + [200.0] * 3) is None

    def test_dependence_is_seen_and_the_interval_is_said_to_be_too_narrow(self):
        rng, values, state = random.Random(9), [], 0.0
        for _ in range(80):
            state = 0.8 * state + rng.gauss(0, 1)
            values.append(100 + state)
        r = notes.dependence(values)
        assert r == pytest.approx(0.8, abs=0.15)
        assert notes.widening(0.8) == pytest.approx(3.0)
        assert notes.widening(1.0) == math.inf

    @pytest.mark.parametrize("n", [0, 1, 2, 9])
    def test_too_few_samples_show_nothing(self, n):
        values = [float(i) for i in range(1, n + 1)]
        assert notes.drift(values) is None
        assert notes.two_speeds(values) is None
        assert notes.dependence(values) is None


class TestNotes:
    def test_a_quiet_row_has_none(self):
        cell = record(noise(random.Random(10), 60, 0.003), kept_disturbed=0)
        assert notes.notes(cell) is None
        assert notes.unsteady(cell) is None

    def test_repeated_samples_are_noted_and_are_not_serious(self):
        why = "interrupted"
        cell = record([100.0] * 20, discarded={3: why, 7: why}, kept_disturbed=0)
        assert notes.notes(cell) == "2 samples do not count: other work interrupted every batch"
        assert notes.unsteady(cell) is None

    def test_interrupted_samples_that_had_to_be_kept_are_serious(self):
        cell = record([100.0] * 20, kept_disturbed=6)
        assert "interrupted 6 of the 20 samples that count" in (notes.notes(cell) or "")
        assert notes.unsteady(cell) == "busy-machine"

    @pytest.mark.parametrize(("hot", "loud"), [(3, False), (6, True)])
    def test_thermal_discards_are_counted_and_loud_past_a_fifth(self, hot, loud):
        cell = record([100.0] * 20, discarded=dict.fromkeys(range(hot), "gpu"))
        found = notes.notes(cell) or ""
        assert f"{hot / 20:.0%} of the samples do not count (a GPU that slowed itself)" in found
        assert ("MORE THAN A FIFTH" in found) == loud
        assert notes.unsteady(cell) == ("many-discarded" if loud else None)

    def test_each_trouble_has_its_note(self):
        rng = random.Random(11)
        drifting = [v * (1 + 0.2 * i / 60) for i, v in enumerate(noise(rng, 60))]
        assert "drifts: the last third took" in (notes.notes(record(drifting)) or "")
        two = noise(rng, 30) + [1.5 * v for v in noise(rng, 30)]
        rng.shuffle(two)
        assert "two speeds: 10" in (notes.notes(record(two)) or "")
        assert "known to ±" in (notes.notes(record([80.0, 90.0, 100.0, 110.0, 130.0, 150.0])) or "")
        stolen = record([100.0] * 9, stolen_share=0.03)
        assert "gave 3.0% of its processors' time" in (notes.notes(stolen) or "")
        withheld = record([100.0] * 9, throttled_share=0.4)
        assert "a CPU quota held the process back for 40.0%" in (notes.notes(withheld) or "")
        assert notes.unsteady(withheld) == "withheld-time"
        often = record([100.0] * 9, interruptions_per_s=250.0)
        assert "interrupted 250 times a second" in (notes.notes(often) or "")
        assert notes.notes(record([100.0] * 9, interruptions_per_s=90.0)) is None
        far = record([100.0, 240.0, 240.0, 250.0])
        assert "the reported time is 2.4 times the fastest sample" in (notes.notes(far) or "")
        meddling = record([100.0] * 9, meddles="the number of threads")
        assert "it changes the number of threads" in (notes.notes(meddling) or "")
        launch = record([10.0] * 9, enqueue_us=14.0)
        assert "launch-bound: the host takes 14.0 µs" in (notes.notes(launch) or "")
        assert notes.unsteady(launch) is None

    def test_a_failed_row_has_no_notes(self):
        bad = Record(cell=CELL, status="oom", reason="no memory", metrics={"stolen_share": 0.5})
        assert notes.notes(bad) is None
        assert notes.unsteady(bad) is None


# How much too long a time may be.


@pytest.mark.parametrize(
    ("values", "metrics", "factor"),
    [
        ([100.0] * 8, {}, 1.0),
        ([100.0] * 4 + [200.0] * 5, {}, 4.0),  # the fastest may be off by as much again
        ([100.0] * 8, {"cpu_share": 0.5}, 2.0),
        ([100.0] * 8, {"cpu_share": 1.01}, 1.0),  # as measured with one more thread
        ([100.0] * 8, {"cpu_share": 0.5, "interruptions_per_s": 500.0}, 2.0),
        ([100.0] * 8, {"cpu_share": 0.5, "meddles": "the environment"}, math.inf),
        # A slice each for two others: half of the time.
        ([100.0] * 8, {"interruptions_per_s": 62.5, "load_1m": 3.0}, 2.0),
        ([100.0] * 8, {"interruptions_per_s": 62.5, "load_1m": 0.4}, 4 / 3),
        ([100.0] * 8, {"interruptions_per_s": 62.5}, math.inf),
        ([100.0] * 8, {"interruptions_per_s": 500.0, "load_1m": 3.0}, math.inf),
        ([100.0] * 8, {"stolen_share": 0.25, "throttled_share": 0.25}, 2.0),
        ([100.0] * 8, {"stolen_share": 1.0}, math.inf),
    ],
)
def test_what_was_taken_bounds_the_excess_of_a_time(values, metrics, factor):
    assert times.excess(record(values, **metrics)) == pytest.approx(factor)
