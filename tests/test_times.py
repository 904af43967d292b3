"""The reported time, its interval over samples or processes, and the notes on it."""

import math
import random
from dataclasses import replace

import pytest
from msgspec import structs

from attnbench.analysis import notes, times
from attnbench.base.stats import (
    fastest_of_windows,
    interval_rank,
    median_interval,
    processes_interval,
    quotient_interval,
)
from attnbench.schema.case import Case
from attnbench.schema.record import Cell, Record, Sample, merged

CELL = Cell(case=Case(seq_len=128), impl="naive")


def record(values, *, process=0, discarded=None, **metrics) -> Record:
    samples = []
    for i, us in enumerate(values):
        code = (discarded or {}).get(i)
        samples.append(
            Sample(round=i, position=0, calls=2, time_us=us, e2e_us=us, discarded=code,
                   discard_code=code)
        )  # fmt: skip
    return Record(cell=CELL, status="ok", samples=tuple(samples), metrics=metrics, process=process)


def slowed(code) -> Record:
    """A cell of which three of nine samples count for want of better ones."""
    quiet = record([100.0] * 9)
    kept = [structs.replace(s, kept_despite=code if s.round < 3 else None) for s in quiet.samples]
    return replace(quiet, samples=tuple(kept))


def processes(*values, **metrics) -> Record:
    """A cell of nine equal samples in each of several processes."""
    return merged([record([value] * 9, process=i, **metrics) for i, value in enumerate(values)])


def on_cpu(pairs, *, probe_us=26.0, **metrics) -> Record:
    """A cell of one thread: wall and processor time of each sample, and how fast the core was."""
    samples = tuple(
        Sample(round=i, position=0, calls=2, time_us=wall, e2e_us=wall, cpu_us=cpu,
               probe_us=probe_us)
        for i, (wall, cpu) in enumerate(pairs)
    )  # fmt: skip
    return Record(cell=CELL, status="ok", samples=samples, metrics={"probe_us": 26.0} | metrics)


# Medians and their intervals: by hand for small n, by simulation for skewed data.


@pytest.mark.parametrize(
    ("n", "rank"),
    # Conover's table of the sign test: 2·P(Bin(n, 1/2) < k) <= 0.05.
    [(0, None), (5, None), (6, 1), (8, 1), (9, 2), (11, 2), (12, 3), (15, 4), (25, 8), (100, 40)],
)
def test_ranks_are_those_of_the_sign_test(n, rank):
    assert interval_rank(n) == rank
    assert median_interval(range(n)) == (None if rank is None else (rank - 1, n - rank))


def test_a_confidence_that_is_met_exactly_is_met():
    # Two values: both sides miss in 1 of 4 ways each, so exactly 50 % are covered.
    assert median_interval([1.0, 2.0], confidence=0.5) == (1.0, 2.0)
    assert median_interval([1.0, 2.0], confidence=0.51) is None


def test_the_interval_of_a_ratio_divides_the_ends_crosswise():
    assert quotient_interval((10.0, 16.0), (1.0, 7.0)) == (10 / 7, 16.0)
    assert quotient_interval((1.0, 7.0), None) is None


# Windows and processes.


def test_the_fastest_of_each_window_counts_and_none_is_left_out():
    assert fastest_of_windows([3.0, 1.0, 2.0], 1) == [3.0, 1.0, 2.0]
    assert fastest_of_windows([3.0, 1.0, 2.0, 5.0, 0.5], 2) == [1.0, 0.5]
    assert fastest_of_windows([3.0, 1.0], 8) == [1.0]
    assert fastest_of_windows([], 3) == []
    rng = random.Random(1)  # delays by others vanish, and the work itself stays
    delays = [rng.expovariate(1 / 30.0) if rng.random() < 0.6 else 0.0 for _ in range(400)]
    values = [100.0 + delay for delay in delays]
    assert times.time_us(record(values)) == pytest.approx(105, abs=5)
    assert times.time_us(record(values, window=7)) == pytest.approx(100.0)


def test_the_interval_of_a_few_processes_is_student_s_and_from_six_on_one_of_ranks():
    assert processes_interval([100.0]) is None
    low, high = processes_interval([100.0, 102.0]) or (0, 0)
    assert math.log(high / low) == pytest.approx(12.7062 * math.log(1.02))
    medians = [101.0, 102.0, 103.0, 104.0, 105.0, 106.0]
    assert processes_interval(medians) == median_interval(medians) == (101.0, 106.0)


def test_the_processes_median_is_reported_and_repeats_over_them():
    cell, one = processes(100.0, 110.0, 104.0), record([100.0] * 9)
    assert times.time_us(cell) == 104.0
    low, high = times.interval_us(cell) or (0, 0)
    assert low < 100.0
    assert high > 110.0
    assert times.interval_us(one) == (100.0, 100.0)


def test_a_cell_that_fails_in_one_process_fails():
    bad = Record(cell=CELL, status="crashed", reason="signal 11", process=1)
    cell = merged([record([100.0] * 9), bad])
    assert cell.status == "crashed"
    assert cell.reason == "in process 2 of 2: signal 11"
    assert not cell.samples


# The low end of one thread on a CPU.


def test_the_fastest_sample_that_was_left_alone_is_reported():
    """A preempted spin on the clock needs little processor time: that is no time it could take."""
    pairs = [(130.0, 129.0), (110.0, 109.5), (120.0, 119.9), (500.0, 60.0), (900.0, 70.0)]
    cell = on_cpu(pairs)
    assert times.time_us(cell) == 110.0
    assert times.interval_us(cell) == pytest.approx((110.0 * 0.94, 130.0 * 1.04))
    assert [s.own_us for s in cell.samples] == [130.0, 110.0, 120.0, 60.0, 70.0]
    assert times.observations_us(on_cpu(pairs, window=3)) == [110.0]


@pytest.mark.parametrize(("probe_us", "slowdown"), [(26.0, 1.0), (28.0, 1.0), (52.0, 2.0)])
def test_a_core_below_its_full_speed_widens_the_interval_downwards(probe_us, slowdown):
    """By as much as the loop lost to it, unless the batches show that calls lose less."""
    less = on_cpu([(100.0, 100.0)] * 9, probe_us=probe_us, speed_slope=0.5)
    assert (times.interval_us(less) or (0, 0))[0] == pytest.approx(94.0 / slowdown**0.5)
    cell = on_cpu([(100.0, 100.0)] * 9, probe_us=probe_us)
    low, high = times.interval_us(cell) or (0, 0)
    assert times.time_us(cell) == 100.0
    assert (low, high) == pytest.approx((94.0 / slowdown, 104.0))


def test_several_processes_report_the_median_of_their_low_ends():
    parts = [
        replace(on_cpu([(us, us), (us + 9, us + 9), (us + 5, us + 5)]), process=i)
        for i, us in enumerate((100.0, 104.0, 101.0))
    ]
    cell = merged(parts)
    assert times.time_us(cell) == 101.0
    low, high = times.interval_us(cell) or (0, 0)
    assert low < 97.0
    assert high > 108.0


def test_fewer_than_three_samples_have_no_interval():
    assert times.interval_us(on_cpu([(100.0, 100.0)] * 2)) is None
    assert times.time_us(on_cpu([(100.0, 100.0)] * 2)) == 100.0


def test_of_cold_calls_the_fastest_may_not_have_been_cold():
    warm = on_cpu([(60.0, 60.0), *[(100.0 + i, 100.0 + i) for i in range(10)]])
    cold = replace(warm, metrics=warm.metrics | {"l2": "cold"})
    assert times.time_us(warm) == 60.0
    assert times.time_us(cold) == pytest.approx(104, abs=1)
    assert (times.interval_us(cold) or (0, 0))[0] > 99


# Precision.


def test_discarded_samples_are_kept_in_the_record_and_count_for_nothing():
    cell = record([100.0] * 5 + [900.0] * 7, discarded=dict.fromkeys(range(5, 12), "stolen"))
    assert times.time_us(cell) == 100.0
    again = Record.from_line(cell.to_line())
    assert again == cell
    assert len(again.samples) == 12
    with pytest.raises(ValueError, match="none of 1 samples"):
        record([1.0], discarded={0: "clock"})


# Diagnostics.


def noise(rng, n, sd=0.01):
    return [100.0 * math.exp(rng.gauss(0, sd)) for _ in range(n)]


# Notes.

QUIET = [100.0] * 9
INTERRUPTED = [structs.replace(s, left_out=i % 2) for i, s in enumerate(record(QUIET).samples)]
HOT = "of the samples discarded (a throttled GPU)"
TROUBLES = [
    (record(QUIET, stolen_share=0.03), "gave 3.0% of its processors' time", None),
    (record(QUIET, throttled_share=0.4), "held the process back for 40.0%", None),
    (record(QUIET, full_speed_share=0.4), "at its full speed only 40 % of the time", None),
    (record([100.0] * 20, kept_disturbed=6), "6 of the 20 samples that count", "busy-machine"),
    (
        record([100.0] * 9, kept_disturbed=7, probe_us=26.0),
        "7 of the 9 samples that count", "busy-machine",
    ),
    (slowed("gpu"), "the GPU throttled itself, for heat or power, in 3 of the", "slowed-gpu"),
    (slowed("allocator"), "memory from the GPU's driver in 3 of the 9", "allocator"),
    (
        record([999.0] * 7 + QUIET[:5], uneven="9 times"),
        "took 999 µs in 7 samples, then 100 µs: it", "settling",
    ),
    (record([180.0] * 7 + QUIET[:5], stolen_share=0.03), "gave 3.0% of", None),  # a faster core
    (record([999.0] * 4 + QUIET, stolen_share=0.03), "gave 3.0% of", None),  # settled by now
    (record(QUIET, uneven="2.1 times the time"), "its calls is 2.1 times the time:", "uneven"),
    (record([1e7] * 5), "timed in only 10 calls:", None),
    (record(QUIET, crowded="2 threads on 1 CPU"), "and wait for each other", "crowded"),
    (record(QUIET, meddles="the number of threads"), "it changes the number of", "meddles"),
    (record([10.0] * 9, enqueue_us=14.0), "launch-bound: the host takes 14.0 µs", None),
    (
        record([10.0] * 9, enqueue_us=14.0, hidden_us=4.0),
        "14.0 µs to issue a call, of which 4.00 µs are hidden", None,
    ),
    (
        record(QUIET, device_waits=1), "the host waits for the device once a call, and then", None
    ),
    (
        replace(record(QUIET), samples=tuple(INTERRUPTED)),
        "4 of 18 calls left out: the host took far longer to issue them", None,
    ),
    (record([100.0] * 20, discarded=dict.fromkeys(range(6), "gpu")), f"30 % {HOT}", None),
    (
        record([100.0] * 20, discarded={3: "interrupted", 7: "interrupted"}, kept_disturbed=0),
        "2 samples discarded: other work interrupted every batch", None,
    ),
    (
        on_cpu([(100.0, 98.0)] * 5 + [(200.0, 100.0)] * 4, kept_disturbed=4),
        "4 of 9 samples interrupted for 50 % of their time: CPU time", None,
    ),
]  # fmt: skip


@pytest.mark.parametrize(("cell", "says", "serious"), TROUBLES)
def test_each_trouble_has_its_note_and_the_serious_ones_a_name(cell, says, serious):
    assert says in (notes.notes(cell) or "")
    assert notes.unsteady(cell) == serious
