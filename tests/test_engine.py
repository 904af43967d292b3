"""Interleaved timing on a fake clock: rounds, samples, warm-up, what disturbs and what is kept."""

import itertools
import random
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest
import torch

from attnbench.base.sample import Batch, Sample
from attnbench.measure.engine import COMPILED, STEPPED_BACK, Measurement
from attnbench.measure.race import Race
from attnbench.measure.sampling import (
    MOST_CALLS,
    Calls,
    StoppingRule,
    Target,
    UnmeasurableError,
    achieved,
    compile_activity,
    uneven,
    warm_up,
)
from attnbench.measure.sensor import GpuReading
from attnbench.measure.watch import CounterMarks, Reading, Watch, driver_allocations
from attnbench.worker.measuring import core_speed

Cost = float | Callable[[int], float]  # microseconds of a call, or a function of the batch's number


@dataclass
class Machine:
    """A clock and the machine's counters: each batch costs what its call says, then `happens`."""

    l2: str = "warm"
    timer: str = "host"
    resolution_us: float = 0.001
    broken: bool = False
    now_s: float = 0.0
    switches: int = 0
    ticks: int = 0
    withheld_us: float = 0.0
    allocations: int = 0
    batches: int = 0
    happens: dict[int, dict[str, float]] = field(default_factory=dict)
    cpu_share: dict[int, float] = field(default_factory=dict)  # by batch; unknown where empty
    probes_us: Iterator[float | None] = field(default_factory=lambda: itertools.repeat(26.0))

    def batch(self, call, calls):
        cost: Cost = call()
        time_us = cost(self.batches) if callable(cost) else cost
        self.now_s += time_us * calls / 1e6
        for name, amount in self.happens.get(self.batches, {}).items():
            setattr(self, name, getattr(self, name) + amount)
        share = self.cpu_share.get(self.batches) if self.cpu_share else None
        self.batches += 1
        cpu_us = None if share is None else share * time_us
        return Batch(time_us=time_us, e2e_us=time_us + 1.0, cpu_us=cpu_us)

    def release(self, call):
        pass

    def measure(self, targets: dict[str, Target], rule: StoppingRule, **options: Any) -> None:
        watch = Watch(
            sensor=options.pop("sensor", None), interruptions=lambda: self.switches,
            driver_allocations=lambda: self.allocations, probe_us=lambda: next(self.probes_us),
            stolen_ticks=lambda: self.ticks, throttled_us=lambda: self.withheld_us, calm_turns=0,
        )  # fmt: skip
        Measurement(targets, self, rule, watch, **options).run(seed=1)  # type: ignore[arg-type]

    def run(self, costs: dict[str, Cost], rule: StoppingRule, **options: Any) -> dict[str, Target]:
        targets = {
            name: Target(call=partial(lambda cost: cost, cost)) for name, cost in costs.items()
        }
        self.measure(targets, rule, **options)
        return targets

    def one(self, cost: Cost, rule: StoppingRule, **options: Any) -> Target:
        return self.run({"a": cost}, rule, **options)["a"]


@pytest.fixture
def machine(monkeypatch):
    made = Machine()
    for name in ("perf_counter", "process_time"):
        monkeypatch.setattr(f"attnbench.measure.engine.time.{name}", lambda: made.now_s)
    monkeypatch.setattr("attnbench.measure.engine.SAMPLE_US", 1.0)  # samples of one batch
    return made


@pytest.fixture
def long_samples(machine, monkeypatch):
    """Samples of ten batches of 2 ms."""
    monkeypatch.setattr("attnbench.measure.engine.SAMPLE_US", 20_000.0)


WARM = 3  # batches of warming up
RULE = StoppingRule(precision=1e-9, min_time_s=0.02, max_time_s=0.02, min_samples=6)
LONG = StoppingRule(precision=1e-9, min_time_s=0.12, max_time_s=0.12, min_samples=6)
ALWAYS_INTERRUPTED = {batch: {"switches": 1} for batch in range(1000)}


def codes(target: Target) -> list[str | None]:
    return [sample.discard_code for sample in target.samples]


# Rounds, and when they end.


@pytest.mark.parametrize("fails_at", [None, WARM - 1, WARM + 4])
def test_a_part_is_timed_in_the_rounds_of_its_whole_and_changes_none_of_its_times(
    machine, fails_at
):
    calls, left = itertools.count(), list[str]()

    def call() -> float:
        if next(calls) == fails_at:
            raise ValueError
        return 2000.0

    whole = Target(call=call)
    part = Target(call=lambda: 250.0, part_of=whole)
    race = Race(timing_s=0.0, limit_s=0.0, began=0.0) if fails_at is None else None
    both = {"a": whole, "a alone": part}
    machine.measure(both, RULE, finished=left.append, race=race)
    assert left == ["a alone", "a"]
    assert set(whole.times_us) <= {2000.0}
    assert abs(len(part.samples) - len(whole.samples)) <= (fails_at is not None)
    assert part.spent_s <= whole.spent_s + 0.002
    assert (whole.error is None, part.error) == (fails_at is None, None)


def test_every_round_takes_one_sample_of_each_target_in_random_order(machine):
    both = machine.run({"a": 2000.0, "b": 4000.0}, RULE)
    shared = min(len(target.samples) for target in both.values())
    places = {
        name: [(s.round, s.position) for s in target.samples[:shared]]
        for name, target in both.items()
    }
    for number in range(shared):
        assert {places[name][number] for name in both} == {(number, 0), (number, 1)}
    assert {position for _, position in places["a"]} == {0, 1}, "one target was always first"


def noisy(middle_us: float, spread: float, seed: int) -> Callable[[int], float]:
    draw = random.Random(seed)
    return lambda batch: middle_us * draw.lognormvariate(0.0, spread)


OPEN = StoppingRule(precision=1e-9, min_time_s=0.0, max_time_s=1e6, warm_s=0.0)


def test_in_a_race_those_leave_whose_ratio_to_the_fastest_is_decided(machine):
    costs: dict[str, Cost] = {
        name: noisy(us, 0.02, seed)
        for seed, (name, us) in enumerate(
            {"0 best": 2000.0, "0 twin": 2010.0, "0 kept": 3000.0, "0 slow": 4000.0, "1 lone": 9e3}
            .items()
        )
    }  # fmt: skip
    left: list[str] = []
    race = Race(timing_s=1e9, limit_s=1e9, kept=["kept"])
    found = machine.run(costs, OPEN, race=race, finished=left.append)
    rounds = {name: len(target.samples) for name, target in found.items()}
    assert left[0] == "0 slow"
    assert rounds["0 slow"] == 8, "as soon as a confidence sequence can tell"
    assert rounds["0 kept"] >= 8
    assert rounds["0 twin"] > rounds["0 slow"], "close ones are timed on"
    assert rounds["1 lone"] == max(rounds.values()), "it has the rounds of those it stands beside"
    faster, times = found["0 slow"].decided
    assert faster in ("0 best", "0 twin")
    assert times == pytest.approx(2.0, rel=0.05)
    assert found["0 best"].decided[1] == 1.0


def test_a_race_of_equals_is_rarely_won_however_often_one_looks(machine):
    won = 0
    for seed in range(100):
        costs: dict[str, Cost] = {"0 a": noisy(2e3, 0.3, seed), "0 b": noisy(2e3, 0.3, seed + 500)}
        race = Race(timing_s=0.5, limit_s=0.5, began=0.0)
        machine.now_s = 0.0
        found = machine.run(costs, OPEN, race=race)
        won += any(target.decided[1] > 1 for target in found.values())
    assert won <= 5  # an interval of a fixed number of rounds errs in a third of them


def test_a_race_ends_in_time(machine):
    costs: dict[str, Cost] = {"0 a": noisy(2e3, 0.3, 1), "0 b": noisy(2e3, 0.3, 2)}
    machine.run(costs, OPEN, race=Race(timing_s=1.0, limit_s=2.0, began=0.0))
    assert 0.9 <= machine.now_s <= 1.0


@pytest.mark.parametrize(("timing_s", "limit_s", "rounds"), [(3.0, 60.0, 7), (3.0, 20.0, 2)])
def test_calls_too_slow_for_an_interval_have_the_rounds_that_fit(
    machine, timing_s, limit_s, rounds
):
    """Warming up takes 5 s, and so does a round: with seven rounds there is an interval."""
    costs: dict[str, Cost] = {"0 a": noisy(2e6, 0.01, 1), "0 b": noisy(3e6, 0.01, 2)}
    race = Race(timing_s=timing_s, limit_s=limit_s, began=0.0)
    found = machine.run(costs, OPEN, race=race)
    assert [len(target.samples) for target in found.values()] == [rounds, rounds]
    assert machine.now_s <= limit_s


def test_time_is_per_unit_of_work(machine):
    tokens = Target(call=lambda: 8000.0, units=8)
    machine.measure({"t": tokens}, StoppingRule(max_time_s=0.1))
    assert set(tokens.times_us) == {1000.0}
    assert tokens.samples[0].e2e_us == pytest.approx((8000.0 + 1.0) / 8)


def test_a_noisy_target_stops_when_its_budget_is_spent(machine):
    noise = random.Random(0)
    rule = StoppingRule(precision=1e-4, max_time_s=0.5)
    noisy = machine.one(lambda batch: noise.uniform(1000, 9000), rule)
    assert noisy.spent_s == pytest.approx(0.5, abs=0.01)


def test_precision_is_the_half_width_relative_to_the_median():
    assert achieved([90.0, 100.0, 100.0, 100.0, 100.0, 110.0]) == pytest.approx(0.1)
    assert achieved([100.0] * 5) == float("inf")
    assert achieved([0.0] * 6) == float("inf")


# Batches, samples and windows.


@pytest.mark.usefixtures("long_samples")
def test_a_sample_is_as_fast_as_its_fastest_batch_and_keeps_the_others(machine):
    """Delays by other work never reach the sample, if one batch was left alone."""
    cost = lambda batch: 2000.0 if batch < WARM or batch % 5 == 2 else 2600.0  # noqa: E731
    target = machine.one(cost, LONG)
    assert set(target.times_us) == {2000.0}
    for sample in target.samples:
        assert sorted(sample.blocks_us) == [2000.0] * 2 + [2600.0] * 8
        assert sample.time_us == 2000.0


# Warming up.


@pytest.mark.parametrize("each_us", [2.0, 100_000.0])
def test_a_long_first_call_on_a_gpu_says_nothing_of_the_next(machine, each_us):
    """It may have asked for memory. One that is as long again is called once to warm up."""
    machine.timer = "events"
    target = Target(call=lambda: each_us, last_call_s=0.5)
    machine.measure({"a": target}, RULE)
    assert target.each_us == each_us
    assert target.calls == max(1, 1000 / each_us)
    assert machine.batches == len(target.samples) + (1 if each_us > 2.0 else 4)


def test_warming_up_waits_until_three_windows_agree(machine):
    first = (9000.0, 6000.0, 4000.0)
    rule = StoppingRule(precision=0.5, max_time_s=1.0)
    target = machine.one(lambda batch: first[batch] if batch < 3 else 2000.0, rule)
    assert set(target.times_us) == {2000.0}


@pytest.mark.parametrize("first_us", [-5.0, 0.0])
def test_one_bad_reading_in_warming_up_does_not_blow_the_batch_up(machine, first_us):
    """A slow call made a million times would take the rest of the day."""
    target = machine.one(lambda batch: first_us if batch == 0 else 2000.0, RULE)
    assert {sample.calls for sample in target.samples} == {1}
    assert machine.now_s < 1.0


def test_a_call_faster_than_the_clock_can_see_is_an_error_and_not_an_endless_loop(machine):
    error = machine.one(0.0, RULE).error
    assert isinstance(error, UnmeasurableError)
    assert str(MOST_CALLS) in str(error)


@pytest.mark.parametrize("share", [1e-4, 1e-6])
def test_a_processor_clock_that_lags_once_asks_for_no_crowd_of_calls(machine, share):
    """Of a call of 30 ms, whose wall time says so: 500 of them would be 15 s in one batch."""
    calls, batch = [], machine.batch

    def counted(call, count):
        calls.append(count)
        return batch(call, count)

    machine.batch = counted
    machine.cpu_share = dict.fromkeys(range(1000), 1.0) | {0: share}
    machine.one(30_000.0, LONG)
    assert max(calls) <= 4


def test_warming_up_goes_on_while_something_compiles(machine, monkeypatch):
    """A compiler at work in a window: the windows start again, and its time is told apart."""
    activity = iter([0, 1, 2, 3] + [3] * 100)
    monkeypatch.setattr("attnbench.measure.sampling.compile_activity", lambda: next(activity))
    target = Target(call=lambda: 4000.0)
    warm_up(target, clock=machine, rule=StoppingRule(max_time_s=0.02))
    assert machine.batches == 3 + 2  # a quarter of 20 ms would have been two batches
    assert target.compile_s == pytest.approx(3 * 0.004)


def test_tritons_compilations_are_counted_and_a_listener_of_someone_else_is_left(monkeypatch):
    knobs = types.SimpleNamespace(compilation=types.SimpleNamespace(listener=None))
    monkeypatch.setitem(sys.modules, "triton.knobs", knobs)
    before = compile_activity()
    knobs.compilation.listener("kernel", metadata=None)
    assert compile_activity() == before + 1
    knobs.compilation.listener = theirs = object()
    assert compile_activity() == before + 1
    assert knobs.compilation.listener is theirs


# What disturbs a sample or a round.


def test_an_interrupted_sample_is_taken_again_in_its_round_whatever_it_took(machine):
    """By counters alone: slow samples that nothing interrupted stay."""
    machine.happens = {WARM + 1: {"switches": 1}}
    target = machine.one(lambda batch: 9000.0 if batch == WARM + 2 else 2000.0, RULE)
    assert codes(target) == [None, "interrupted", *[None] * (len(target.samples) - 2)]
    assert target.samples[1].discarded == "interrupted by other work (1 time)"
    assert [sample.time_us for sample in target.samples[1:3]] == [2000.0, 9000.0]
    assert (target.samples[2].round, target.samples[2].position) == (1, 1)
    assert target.interrupted == 1


@pytest.mark.parametrize(
    "happens", [ALWAYS_INTERRUPTED, {batch: {"withheld_us": 50_000.0} for batch in range(1000)}]
)
def test_samples_are_taken_again_only_so_often_and_the_rest_is_kept_and_counted(machine, happens):
    machine.happens = happens
    target = machine.one(2000.0, RULE)
    kept = len(target.times_us)
    assert target.kept_disturbed == kept >= 6
    assert len(target.samples) - kept <= 0.5 * kept + 2


@pytest.mark.usefixtures("long_samples")
def test_a_batch_left_alone_stands_for_the_sample_else_the_second_least_processor_time(machine):
    """Nothing is taken again, nor lost to a hypervisor: processor time has none of it."""
    machine.happens = {batch: {"switches": 1, "ticks": 9} for batch in range(1000)}
    machine.cpu_share = dict.fromkeys(range(1000), 0.5) | {WARM + 3: 1.0, WARM + 7: 0.99}
    machine.cpu_share[WARM + 15] = 0.4
    machine.probes_us = itertools.chain(map(float, range(26, 50)), itertools.repeat(60.0))
    cost = lambda batch: {WARM + 3: 2100.0, WARM + 4: 1000.0}.get(batch, 2000.0)  # noqa: E731
    target = machine.one(cost, LONG)
    first, second = target.samples[:2]
    assert (first.time_us, first.cpu_us, first.disturbed) == (2000.0, 1980.0, False)
    assert first.probe_us == 33.5, "between the probes around the eighth batch"
    assert (second.own_us, second.disturbed) == (1000.0, True), "800 may be a clock that stood"
    assert set(codes(target)) == {None}
    assert target.kept_disturbed == 0, "counted where the record is made"


def test_a_call_that_lowers_the_clock_by_itself_is_at_full_speed(machine):
    """The loop takes 26 µs right after it, 20 µs a millisecond later, and 46 µs on a slow core."""
    around = [26.0] * 5 + [46.0] * 2
    machine.probes_us = itertools.chain.from_iterable((us, us, us / 1.3) for us in around)
    target = machine.one(2000.0, StoppingRule(max_time_s=0.01))
    assert target.slowed_by == pytest.approx([1.3] * 7)

    def speed(loop_us: float) -> dict[str, Any]:
        return core_speed(target, [Reading(i, loop_us) for i in range(9)], [target])

    assert speed(20.0)["probe_us"] == pytest.approx(26.0)
    assert speed(20.0)["full_speed_share"] == 0.7143
    assert speed(15.0)["full_speed_share"] == 0, "it has been faster elsewhere"


def test_a_probe_that_a_clock_spoilt_is_left_out_and_ends_nothing(machine):
    """None is what `probe_us` says where the clocks contradict each other."""
    machine.probes_us = itertools.cycle([26.0, None, *[26.0] * 5])
    target = machine.one(2000.0, StoppingRule(max_time_s=0.01))
    assert target.error is None
    assert set(target.probes_us) == {26.0}
    assert set(target.slowed_by) == {1.0}
    assert {sample.probe_us for sample in target.samples} <= {26.0, None}


@pytest.mark.parametrize(
    ("happens", "code", "reason"),
    [
        ({"ticks": 3}, "stolen", "the hypervisor took 30 ms of processor time"),
        ({"withheld_us": 50_000.0}, "throttled", "the CPU quota withheld 50 ms"),
    ],
)
def test_a_round_with_stolen_or_withheld_time_counts_for_no_target(machine, happens, code, reason):
    machine.happens = {2 * WARM + 1: happens}
    for target in machine.run({"a": 2000.0, "b": 2000.0}, RULE).values():
        assert codes(target) == [code] + [None] * (len(target.samples) - 1)
        assert target.samples[0].discarded == reason


class Hot:
    """A GPU that slows itself for heat in the readings with these numbers."""

    def __init__(self, hot):
        self.hot, self.count = hot, -1

    def read(self):
        self.count += 1
        return GpuReading(throttle=frozenset({"thermal"} if self.hot(self.count) else ()))


def heated(machine, hot, *names):
    machine.timer = "events"
    return machine.run(dict.fromkeys(names, 2000.0), RULE, sensor=Hot(hot))


def test_a_round_under_thermal_slowdown_counts_for_no_target_however_many_there_are(machine):
    for target in heated(machine, lambda count: count < 16, "a", "b").values():
        assert codes(target) == ["gpu"] * 8 + [None] * 6, "not done when the budget is spent"


def despite(target: Target) -> list[str | None]:
    return [sample.kept_despite for sample in target.samples if sample.discarded is None]


@pytest.mark.parametrize("good", [0, 2])
def test_a_device_that_never_cools_down_has_times_that_say_so_once_the_budget_is_spent(
    machine, good
):
    target = heated(machine, lambda count: count >= good, "a")["a"]
    assert (target.error, target.spent_s) == (None, pytest.approx(RULE.max_time_s, abs=0.0021))
    assert despite(target) == [None] * good + ["gpu"] * (len(target.samples) - good)
    slow = machine.one(0.05e6, RULE, sensor=Hot(lambda count: True))
    assert despite(slow) == ["gpu"] * RULE.min_samples


def test_one_hot_sample_of_a_call_that_has_spent_its_budget_does_not_count(machine):
    machine.timer = "events"
    slow = machine.one(0.05e6, RULE, sensor=Hot(lambda count: count == 0))
    assert codes(slow)[: RULE.min_samples + 1] == ["gpu"] + [None] * RULE.min_samples


def test_a_slow_call_that_needs_nine_calls_to_settle_is_seen_to(machine):
    target = machine.one(lambda count: 5000.0 if count < 9 else 500.0, replace(RULE, patience=100))
    assert target.times_us[-2:] == [500.0] * 2


@pytest.mark.parametrize(
    ("each_us", "slow", "beside", "found"),
    [
        # Behind each untimed call stands one that is timed: each 10th call is always untimed.
        (2000.0, range(0, 10**6, 10), (), "2 times the time (1.9–2.2), of those beside it 1"),
        (30_000.0, range(0, 10**6, 10), (), "1.8 times"),
        (30_000.0, range(0, 10**6, 7), (), "2.4 times"),
        (2000.0, range(0, 10**6, 10), range(0, 10**6, 10), None),  # the machine, perhaps
        (30_000.0, range(20, 21), (), None),
        (2000.0, range(6), (), None),  # it settles
    ],
)
def test_work_that_only_some_calls_do_is_told_from_what_all_meet(
    machine, each_us, slow, beside, found
):
    def call(calls, slow):
        us = (11 if next(calls) in slow else 1) * each_us
        machine.now_s += us / 1e6
        return us

    machine.cpu_share = dict.fromkeys(range(10_000), 1.0)
    targets = {
        name: Target(call=partial(call, itertools.count(), slow))
        for name, slow in (("a", slow), ("b", beside))
    }
    machine.measure(targets, StoppingRule(max_time_s=0.2))
    says = uneven(targets["a"], targets.values())
    assert says is None if found is None else str(says).startswith(found)


@pytest.mark.parametrize(("loop_us", "found"), [(26.0, True), (78.0, False)])
def test_a_core_that_slows_down_when_the_others_have_left_is_not_the_kernels_work(loop_us, found):
    def timed(rounds, us, loop_us):
        least = Sample(round=0, position=0, calls=1, time_us=100.0, e2e_us=100.0)
        calls = [Calls(0, 100.0, 1, 26.0)] * 5 + [Calls(n, us, 1, loop_us) for n in rounds]
        return Target(call=lambda: None, samples=[least], all_calls=calls)

    late, gone = timed(range(3, 40), 300.0, loop_us), timed(range(1, 3), 105.0, 26.0)
    assert bool(uneven(late, [late, gone])) is found


# What asks CUDA's driver for memory.


def test_torchs_allocator_counts_what_it_asks_the_driver_for(monkeypatch):
    names = ("num_device_alloc", "num_alloc_retries")
    assert all(f'``"{name}"``' in str(torch.cuda.memory_stats.__doc__) for name in names)
    assert driver_allocations() == 0, "without a GPU"
    stats = dict(zip(names, (5, 2), strict=True)) | {"num_device_free": 9}
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device=None: stats)
    assert driver_allocations() == 7


def test_a_sample_that_asked_the_driver_for_memory_is_taken_again_behind_an_untimed_call(machine):
    """Others give its memory back in each round: the untimed call takes it anew, not the timed."""
    machine.timer, machine.l2 = "events", "cold"
    cached = [True]

    def call() -> float:
        machine.allocations += not cached[0]
        cached[0] = True
        return 2000.0

    def others() -> float:
        cached[0] = machine.batches < 2 * WARM
        return 2000.0

    targets = {"a": Target(call=call), "others": Target(call=others)}
    machine.measure(targets, RULE)
    assert codes(targets["a"]).count("allocator") == 1
    assert set(codes(targets["others"])) == {None}


@pytest.mark.parametrize(("timer", "kept"), [("events", "allocator"), ("graph", None)])
def test_a_call_that_asks_the_driver_each_time_has_times_that_say_so(machine, timer, kept):
    """What a graph works in was allocated before: an allocation is of someone else."""
    machine.timer, machine.happens = timer, {batch: {"allocations": 1} for batch in range(1000)}
    target = machine.one(2000.0, RULE)
    assert target.error is None
    assert set(despite(target)) == {kept}


@pytest.mark.usefixtures("long_samples")
def test_a_sample_never_stands_for_a_batch_in_which_the_clock_stepped_back(machine):
    """Neither one batch of ten, nor all of the second sample."""
    bad = {WARM + 4, *range(WARM + 10, WARM + 20)}
    target = machine.one(lambda batch: -5.0 if batch in bad else 2000.0, LONG)
    assert codes(target)[:3] == [None, STEPPED_BACK.code, None]
    assert (len(target.samples[0].blocks_us), len(target.samples[1].blocks_us)) == (9, 0)
    assert (set(target.times_us), target.error) == ({2000.0}, None)


def test_a_clock_that_keeps_stepping_back_is_an_error(machine):
    target = machine.one(lambda batch: 2000.0 if batch < WARM else -5.0, RULE)
    assert isinstance(target.error, UnmeasurableError)
    assert STEPPED_BACK.reason in str(target.error)


def test_a_sample_in_which_something_was_compiled_does_not_count(machine, monkeypatch):
    monkeypatch.setattr(
        "attnbench.measure.engine.compile_activity", lambda: int(machine.batches > WARM + 2)
    )
    assert codes(machine.one(2000.0, RULE)).count(COMPILED.code) == 1


def test_counters_beside_a_cell_are_shares_of_wall_time(monkeypatch):
    now = iter([10.0, 12.0])
    ticks, withheld = iter([100, 150]), iter([0.0, 500_000.0])
    monkeypatch.setattr("attnbench.measure.watch.time.perf_counter", lambda: next(now))
    monkeypatch.setattr("attnbench.measure.watch.host.stolen_ticks", lambda: next(ticks))
    monkeypatch.setattr("attnbench.measure.watch.host.throttled_us", lambda: next(withheld))
    shares = CounterMarks.now().shares()
    assert shares["stolen_share"] == pytest.approx(0.25)  # 50 ticks of 10 ms in 2 s
    assert shares["throttled_share"] == pytest.approx(0.25)


def test_counters_that_cannot_be_read_are_unknown_and_disturb_nothing(monkeypatch):
    monkeypatch.setattr("attnbench.measure.watch.host.stolen_ticks", lambda: None)
    monkeypatch.setattr("attnbench.measure.watch.host.throttled_us", lambda: None)
    assert CounterMarks.now().shares()["stolen_share"] is None
    watch = Watch(interruptions=lambda: 0, stolen_ticks=lambda: None, throttled_us=lambda: None)
    assert watch.lost_by_round(watch.mark(), 1.0, []) is None
