"""The speeds of a core, and how a call's time follows them, where single readings are wrong."""

import math
import random

import pytest

from attnbench.base.stats import robust_least
from attnbench.measure import clock, watch
from attnbench.measure.watch import Reading, most_slope, speeds

MS = 1_000_000


def readings(rng: random.Random, *stays: tuple[float, int]) -> list[Reading]:
    """One a millisecond; each stay has the loop's time, which scatters by 1 %, and its length."""
    times = [us * math.exp(rng.gauss(0, 0.01)) for us, count in stays for _ in range(count)]
    return [Reading(i * MS, us) for i, us in enumerate(times)]


@pytest.mark.parametrize(("value", "least"), [([5.0], 5), ([2.0, 9.0], 9), ([9.0, 1.0, 2.0], 2)])
def test_the_robust_least_is_the_second(value, least):
    assert robust_least(value) == least
    assert robust_least(range(100)) == 10


def test_two_speeds_are_found_with_their_shares_and_stays():
    fast, slow = speeds(readings(random.Random(1), *[(18.7, 20), (28.0, 30)] * 20))
    assert (fast.loop_us, slow.loop_us) == pytest.approx((18.7, 28.0), rel=0.03)
    assert (fast.share, slow.share) == pytest.approx((0.4, 0.6), abs=0.01)
    assert (fast.stay_ms, slow.stay_ms) == pytest.approx((20, 30), rel=0.05)


def test_a_clock_that_stands_still_now_and_then_makes_no_speed():
    """Whole or partial standstills, one in forty: the least of all readings would be 0.1 µs."""
    rng = random.Random(2)
    found = readings(rng, *[(18.7, 20), (28.0, 30)] * 20)
    for i in range(0, len(found), 40):
        found[i] = Reading(found[i].at_ns, rng.uniform(0.1, 18.0))
    assert [speed.loop_us for speed in speeds(found)] == pytest.approx([18.7, 28.0], rel=0.04)


@pytest.mark.parametrize("seed", range(20))
def test_one_speed_is_one_however_wide_it_scatters(seed):
    rng = random.Random(seed)
    for width in (0.001, 0.02, 0.1):
        found = [
            Reading(i, 20 * math.exp(rng.gauss(0, width))) for i in range(rng.choice((9, 900)))
        ]
        assert len(speeds(found)) == 1
    assert speeds([]) == []
    [alone] = speeds([Reading(0, 20.0)])
    assert (alone.loop_us, alone.share) == (20.0, 0)


@pytest.mark.parametrize("slope", [0.0, 0.3, 0.6])
def test_a_calls_slope_lies_below_its_bound_and_the_bound_near_it(slope):
    rng, calls = random.Random(3), []
    for length_us in (100.0, 5000.0):
        loops = [rng.choice((18.7, 28.0)) * math.exp(rng.gauss(0, 0.01)) for _ in range(200)]
        times = [length_us * loop**slope * math.exp(rng.gauss(0, 0.05)) for loop in loops]
        calls.append(list(zip(loops, times, strict=True)))
    assert slope < most_slope(calls) < slope + 0.3


def test_where_the_core_had_one_speed_a_call_may_lose_as_much_as_the_loop():
    rng = random.Random(4)
    steady = [[(28.0 * math.exp(rng.gauss(0, 0.01)), rng.uniform(90, 110)) for _ in range(99)]]
    assert most_slope(steady) == most_slope([]) == most_slope([[(18.0, 1.0), (28.0, 1.5)]]) == 1.0


def clocks(monkeypatch, wall: list[int], cpu: list[int]) -> None:
    """Each clock advances by the next of its steps, in ns, when it is read the second time."""
    for module in (clock, watch):
        for name, steps in (("now_ns", wall), ("cpu_ns", cpu)):
            marks = iter([mark for step in steps for mark in (0, step)])
            monkeypatch.setattr(module, name, lambda marks=marks: next(marks))


@pytest.mark.parametrize(
    ("wall", "cpu", "known"),
    [(30_000, 26_000, 26.0), (30_000, 0, None), (30_000, -9, None), (26_000, 3_600_000_000, None)],
)
def test_a_probe_is_known_where_the_clocks_do_not_contradict_each_other(
    monkeypatch, wall, cpu, known
):
    clocks(monkeypatch, [10, wall], [10, cpu])
    assert watch.probe_us() == known


@pytest.mark.parametrize(("wall", "cpu", "time_us", "cpu_us"), [
    (2_000_000, 1_990_000, 2000.0, 1990.0),
    (2_000_000, 2_000_300, 2000.0, 2000.0),  # read around the other clock
    (2_000_000, 0, 2000.0, None),  # it stood still
    (1_000_000, 1_990_000, 0.0, None),  # the wall's stood still for half of the batch
    (-5_000_000, 1_990_000, -5000.0, None),
    (2_000_000, 3_600_000_000_000, 0.0, None),  # it jumped an hour
])  # fmt: skip
def test_a_batch_whose_clocks_contradict_each_other_has_no_time(
    monkeypatch, wall, cpu, time_us, cpu_us
):
    clocks(monkeypatch, [wall], [cpu])
    monkeypatch.setattr(clock, "_waits", lambda: 0)
    monkeypatch.setattr("torch.get_num_threads", lambda: 1)
    batch = clock.HostClock("warm").batch(lambda: None, 1)
    assert batch.time_us == time_us
    assert time_us <= 0 or batch.cpu_us == cpu_us
    assert (batch.own_us > 0) == (time_us > 0)
