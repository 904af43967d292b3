"""What disturbs a measurement: taken again or kept, and said; decided by counters, not by times."""

from dataclasses import dataclass, field
from functools import partial

import pytest

from attnbench.measure import engine
from attnbench.measure.clock import Block
from attnbench.measure.engine import STEPPED_BACK, race
from attnbench.measure.sampling import (
    MOST_CALLS,
    Contender,
    StoppingRule,
    UnmeasurableError,
    compile_activity,
    warm_up,
)
from attnbench.measure.watch import Ledger, Watch


@dataclass
class Machine:
    """A clock and the machine's counters: each block costs what its call says, then `happens`."""

    l2: str = "warm"
    timer: str = "host"
    resolution_us: float = 0.001
    now_s: float = 0.0
    switches: int = 0
    ticks: int = 0
    withheld_us: float = 0.0
    blocks: int = 0
    calls: list[str] = field(default_factory=list)
    happens: dict[int, dict[str, float]] = field(default_factory=dict)
    released: list[object] = field(default_factory=list)

    def block(self, call, calls):
        cost_us = call()
        time_us = cost_us(self.blocks) if callable(cost_us) else cost_us
        self.now_s += time_us * calls / 1e6
        for name, amount in self.happens.get(self.blocks, {}).items():
            setattr(self, name, getattr(self, name) + amount)
        self.blocks += 1
        return Block(time_us=time_us, e2e_us=time_us)

    def release(self, call):
        self.released.append(call)

    def watch(self, **fields) -> Watch:
        return Watch(
            interruptions=lambda: self.switches,
            stolen_ticks=lambda: self.ticks,
            throttled_us=lambda: self.withheld_us,
            **fields,
        )


@pytest.fixture
def machine(monkeypatch):
    made = Machine()
    monkeypatch.setattr("attnbench.measure.engine.time.perf_counter", lambda: made.now_s)
    monkeypatch.setattr("attnbench.measure.engine.TURN_US", 1.0)  # turns of one block
    return made


@pytest.fixture
def long_turns(machine, monkeypatch):
    """Turns of ten blocks of 2 ms."""
    monkeypatch.setattr("attnbench.measure.engine.TURN_US", 20_000.0)


WARM_BLOCKS = 3
RULE = StoppingRule(precision=1e-9, min_time_s=0.02, max_time_s=0.02, min_samples=6)
LONG = StoppingRule(precision=1e-9, min_time_s=0.12, max_time_s=0.12, min_samples=6)


def _same(cost):
    return cost


def run(machine, costs, rule=RULE, **watch):
    racers = {name: Contender(call=partial(_same, cost)) for name, cost in costs.items()}
    race(racers, machine, rule, seed=0, watch=machine.watch(**watch))
    return racers


def test_a_turn_that_other_work_interrupted_is_taken_again_in_its_round(machine):
    machine.happens = {WARM_BLOCKS + 1: {"switches": 1}}
    racer = run(machine, {"a": 2000.0})["a"]
    reasons = [sample.discarded for sample in racer.samples]
    assert reasons == [None, "interrupted by other work (1 time)", *[None] * (len(reasons) - 2)]
    again = racer.samples[2]
    assert (again.round, again.position) == (1, 1)
    assert racer.conditions.interrupted == 1


@pytest.mark.usefixtures("long_turns")
def test_a_turn_is_as_fast_as_its_fastest_block_and_keeps_the_others(machine):
    """Delays by other work never reach the sample, if one block was left alone."""
    costs = {"a": lambda block: 2000.0 if block < 3 or block % 5 == 2 else 2600.0}
    racer = run(machine, costs, LONG)["a"]
    assert set(racer.times_us) == {2000.0}
    for sample in racer.samples:
        assert len(sample.blocks_us) == 10
        assert sorted(sample.blocks_us) == [2000.0] * 2 + [2600.0] * 8
        assert sample.time_us == 2000.0


@pytest.mark.usefixtures("long_turns")
def test_a_turn_counts_as_long_as_one_of_its_blocks_was_left_alone(machine):
    first = range(WARM_BLOCKS, WARM_BLOCKS + 9)  # all blocks of the first turn but the last
    machine.happens = {block: {"switches": 1} for block in first}
    assert run(machine, {"a": 2000.0}, LONG)["a"].samples[0].discarded is None
    first = range(machine.blocks + WARM_BLOCKS, machine.blocks + WARM_BLOCKS + 10)  # all of them
    machine.happens = {block: {"switches": 1} for block in first}
    assert "interrupted" in (run(machine, {"a": 2000.0}, LONG)["a"].samples[0].discarded or "")


@pytest.mark.usefixtures("long_turns")
def test_the_least_time_asked_for_makes_windows_of_turns_and_no_timing_does(machine):
    """Seven windows fill it: 0.42 s are windows of three turns of 20 ms."""
    rule = StoppingRule(precision=1.0, min_time_s=0.42, max_time_s=0.42)
    racer = run(machine, {"a": lambda block: 2000.0 if block < 3 else 2300.0}, rule)["a"]
    assert racer.window == 3
    assert len(racer.samples) == 21
    assert racer.fastest_us == [2300.0] * 7
    machine.timer = "events"
    assert run(machine, {"a": 2000.0}, rule)["a"].window == 1


@pytest.mark.usefixtures("long_turns")
def test_where_little_time_is_asked_for_turns_are_shorter(machine):
    rule = StoppingRule(precision=1.0, min_time_s=0.042, max_time_s=0.1)
    racer = run(machine, {"a": 2000.0}, rule)["a"]
    assert {len(sample.blocks_us) for sample in racer.samples} == {3}  # 42 ms / 7 / 2 ms
    assert racer.window == 1


def test_a_call_that_has_spent_its_budget_takes_no_turn_again(machine):
    """A second turn of a call of seconds would be dear: it is kept, and counted."""
    machine.happens = {block: {"switches": 100} for block in range(1000)}
    racer = run(machine, {"a": 50_000.0}, StoppingRule(max_time_s=0.05))["a"]
    assert [sample.discarded is None for sample in racer.samples] == [True] * 7
    assert racer.conditions.kept_disturbed == 7


@pytest.mark.usefixtures("long_turns")
def test_on_a_gpu_a_turn_is_one_block_and_the_hosts_interruptions_are_no_matter(machine):
    machine.timer = "events"
    machine.happens = {block: {"switches": 1} for block in range(1000)}
    racer = run(machine, {"a": 2000.0})["a"]
    assert all(sample.blocks_us == () for sample in racer.samples)
    assert all(sample.discarded is None for sample in racer.samples)


@pytest.mark.usefixtures("long_turns")
def test_a_turn_never_stands_for_a_block_in_which_the_clock_stepped_back(machine):
    bad = WARM_BLOCKS + 4
    racer = run(machine, {"a": lambda block: -5.0 if block == bad else 2000.0}, LONG)["a"]
    assert racer.samples[0].discard_code == STEPPED_BACK.code
    assert set(racer.times_us) == {2000.0}


def test_a_turn_in_which_something_was_compiled_does_not_count(machine, monkeypatch):
    compiled = WARM_BLOCKS + 2
    monkeypatch.setattr(
        "attnbench.measure.engine.compile_activity", lambda: int(machine.blocks > compiled)
    )
    racer = run(machine, {"a": 2000.0})["a"]
    reasons = [sample.discarded for sample in racer.samples]
    assert reasons.count("something was compiled in it") == 1


def test_whether_a_turn_counts_does_not_depend_on_what_it_took(machine):
    """Interrupted blocks are discarded whether slow or fast, others kept whether slow or fast."""
    slow_and_quiet = WARM_BLOCKS + 1
    machine.happens = {WARM_BLOCKS + 2: {"switches": 1}}  # at the usual speed
    racer = run(machine, {"a": lambda block: 9000.0 if block == slow_and_quiet else 2000.0})["a"]
    by_reason = {s.discarded: s.time_us for s in racer.samples}
    assert 9000.0 in racer.times_us
    assert by_reason["interrupted by other work (1 time)"] == 2000.0


def test_a_long_block_may_lose_a_little(machine):
    """One slice of 4 ms is not a quarter of a block of 30 ms."""
    machine.happens = {WARM_BLOCKS: {"switches": 1}, WARM_BLOCKS + 1: {"switches": 2}}
    rule = StoppingRule(precision=1e-9, min_time_s=0.3, max_time_s=0.3, min_samples=6)
    racer = run(machine, {"a": 30_000.0}, rule)["a"]
    reasons = [sample.discarded for sample in racer.samples[:3]]
    assert reasons == [None, "interrupted by other work (2 times)", None]


def test_turns_are_taken_again_only_so_often_and_the_rest_is_kept_and_counted(machine):
    machine.happens = {block: {"switches": 1} for block in range(1000)}
    racer = run(machine, {"a": 2000.0})["a"]
    discarded = len(racer.samples) - len(racer.times_us)
    assert racer.conditions.kept_disturbed == len(racer.times_us) >= 6
    assert discarded <= 0.5 * len(racer.times_us) + 2


def test_a_round_with_stolen_time_counts_for_nobody(machine):
    machine.happens = {2 * WARM_BLOCKS + 1: {"ticks": 3}}
    racers = run(machine, {"a": 2000.0, "b": 2000.0})
    for racer in racers.values():
        assert racer.samples[0].discarded == "the hypervisor took 30 ms of processor time"
        assert all(sample.discarded is None for sample in racer.samples[1:])


def test_a_quota_that_withholds_time_is_seen(machine):
    machine.happens = {WARM_BLOCKS: {"withheld_us": 50_000.0}}
    racer = run(machine, {"a": 2000.0})["a"]
    assert racer.samples[0].discarded == "the CPU quota withheld 50 ms"


class Hot:
    """A GPU that slows itself for heat in the readings with these numbers."""

    def __init__(self, hot):
        self.hot, self.count = hot, -1

    def read(self):
        self.count += 1
        return "thermal" if self.hot(self.count) else "fine"


def slowed(reading):
    return "thermal slowdown" if reading == "thermal" else None


def test_a_round_under_thermal_slowdown_counts_for_nobody_however_many_there_are(machine):
    sensor = Hot(lambda count: count < 20)
    racers = run(machine, {"a": 2000.0, "b": 2000.0}, sensor=sensor, must_discard=slowed)
    for racer in racers.values():
        reasons = [sample.discarded for sample in racer.samples]
        assert reasons[:10] == ["thermal slowdown"] * 10
        assert set(reasons[10:]) == {None}


def test_a_device_that_never_cools_down_is_an_error_that_says_so(machine):
    sensor = Hot(lambda count: True)
    racer = run(machine, {"a": 2000.0}, sensor=sensor, must_discard=slowed)["a"]
    assert isinstance(racer.error, UnmeasurableError)
    assert "thermal slowdown" in str(racer.error)


def test_a_device_that_heats_up_for_good_after_two_samples_is_not_waited_for(machine):
    sensor = Hot(lambda count: count >= 2)
    racer = run(machine, {"a": 2000.0}, sensor=sensor, must_discard=slowed)["a"]
    assert isinstance(racer.error, UnmeasurableError)
    assert str(racer.error).startswith("2 of ")


def test_rounds_with_withheld_time_that_had_to_be_kept_are_counted(machine):
    machine.happens = {block: {"withheld_us": 50_000.0} for block in range(1000)}
    racer = run(machine, {"a": 2000.0})["a"]
    assert racer.conditions.kept_disturbed == len(racer.times_us) >= 6


def test_a_clock_that_steps_back_once_costs_one_sample(machine):
    racer = run(machine, {"a": lambda block: -5.0 if block == WARM_BLOCKS + 2 else 2000.0})["a"]
    assert [s.discard_code for s in racer.samples].count(STEPPED_BACK.code) == 1
    assert racer.error is None
    assert min(racer.times_us) > 0


def test_a_clock_that_keeps_stepping_back_is_an_error(machine):
    racer = run(machine, {"a": lambda block: 2000.0 if block < WARM_BLOCKS else -5.0})["a"]
    assert isinstance(racer.error, UnmeasurableError)
    assert "stepped back" in str(racer.error)


def test_zero_variance_ends_with_an_interval_of_no_width(machine):
    rule = StoppingRule(min_time_s=0.01, max_time_s=10.0)
    racer = run(machine, {"a": 2000.0}, rule)["a"]
    assert len(racer.samples) == 7
    assert set(racer.times_us) == {2000.0}


def test_a_call_faster_than_the_clock_can_see_is_an_error_and_not_an_endless_loop(machine):
    racer = run(machine, {"a": 0.0})["a"]
    assert isinstance(racer.error, UnmeasurableError)
    assert str(MOST_CALLS) in str(racer.error)


@pytest.mark.parametrize("first_us", [-5.0, 0.0])
def test_one_bad_reading_in_warming_up_does_not_blow_the_block_up(machine, first_us):
    """A slow call made a million times would take the rest of the day."""
    racer = run(machine, {"a": lambda block: first_us if block == 0 else 2000.0})["a"]
    assert {sample.calls for sample in racer.samples} == {1}
    assert machine.now_s < 1.0


def test_a_slow_last_window_does_not_make_blocks_too_short(machine):
    racer = run(machine, {"a": lambda block: 40.0 if block == 2 else 10.0})["a"]
    assert all(sample.calls * 10.0 >= 1000.0 for sample in racer.samples)


def test_a_coarse_clock_gets_longer_blocks(machine):
    machine.resolution_us = 15.0
    racer = run(machine, {"a": 3.0})["a"]
    assert all(sample.calls * sample.time_us >= 15_000 for sample in racer.samples)


def test_cold_calls_are_timed_one_by_one_and_need_no_long_blocks(machine):
    """Each waits behind a flush that may take milliseconds."""
    machine.l2 = "cold"
    racer = run(machine, {"a": 5.0})["a"]
    assert {sample.calls for sample in racer.samples} == {1}


def test_one_untimed_call_brings_the_caches_back_after_the_others(machine):
    calls = []

    def counted():
        calls.append(1)
        return 2000.0

    racer = Contender(call=counted)
    race({"a": racer}, machine, RULE, seed=0, watch=machine.watch())
    assert len(calls) == WARM_BLOCKS + 2 * len(racer.samples)
    calls.clear()
    machine.l2 = "cold"
    racer = Contender(call=counted)
    race({"a": racer}, machine, RULE, seed=0, watch=machine.watch())
    assert len(calls) == WARM_BLOCKS + len(racer.samples)


def test_a_long_call_is_not_made_twice(machine):
    calls = []

    def counted():
        calls.append(1)
        return engine.REWARM_BELOW_US

    racer = Contender(call=counted, last_call_s=engine.REWARM_BELOW_US / 1e6)
    rule = StoppingRule(precision=1e-9, min_time_s=0.05, max_time_s=0.05)
    race({"a": racer}, machine, rule, seed=0, watch=machine.watch())
    assert len(calls) == len(racer.samples)


def test_whoever_leaves_is_released_by_the_clock(machine):
    run(machine, {"a": 2000.0, "b": 2000.0})
    assert len(machine.released) == 2


def test_warming_up_goes_on_while_something_compiles(machine, monkeypatch):
    """A compiler at work in a window: the windows start again, and its time is told apart."""
    activity = iter([0, 1, 2, 3] + [3] * 100)
    monkeypatch.setattr("attnbench.measure.sampling.compile_activity", lambda: next(activity))
    racer = Contender(call=lambda: 4000.0)
    rule = StoppingRule(max_time_s=0.02)
    warm_up(racer, clock=machine, rule=rule)
    assert machine.blocks == 3 + 2  # a quarter of 20 ms would have been two blocks
    assert racer.compile_s == pytest.approx(3 * 0.004)


def test_torchs_compile_counters_are_seen(monkeypatch):
    import sys
    import types

    fake = types.SimpleNamespace(counters={"stats": {"unique_graphs": 2}, "inductor": {"x": 3}})
    monkeypatch.setitem(sys.modules, "torch._dynamo.utils", fake)
    before = compile_activity()
    fake.counters["inductor"]["x"] += 4
    assert compile_activity() == before + 4
    monkeypatch.setitem(sys.modules, "torch._dynamo.utils", types.SimpleNamespace())
    assert compile_activity() <= before  # a torch without such counters says nothing


def test_tritons_compilations_are_counted_and_a_listener_of_someone_else_is_left(monkeypatch):
    import sys
    import types

    from attnbench.measure.sampling import listen_to_triton

    knobs = types.SimpleNamespace(compilation=types.SimpleNamespace(listener=None))
    monkeypatch.setitem(sys.modules, "triton.knobs", knobs)
    before = compile_activity()
    listen_to_triton()
    knobs.compilation.listener("kernel", metadata=None)
    assert compile_activity() == before + 1
    theirs = object()
    knobs.compilation.listener = theirs
    listen_to_triton()
    assert knobs.compilation.listener is theirs


def test_the_ledger_gives_shares_of_wall_time(monkeypatch):
    now = iter([10.0, 12.0])
    ticks, withheld = iter([100, 150]), iter([0.0, 500_000.0])
    monkeypatch.setattr("attnbench.measure.watch.time.perf_counter", lambda: next(now))
    monkeypatch.setattr("attnbench.measure.watch.host.stolen_ticks", lambda: next(ticks))
    monkeypatch.setattr("attnbench.measure.watch.host.throttled_us", lambda: next(withheld))
    metrics = Ledger.open().metrics()
    assert metrics["stolen_share"] == pytest.approx(0.25)  # 50 ticks of 10 ms in 2 s
    assert metrics["throttled_share"] == pytest.approx(0.25)


def test_counters_that_cannot_be_read_are_unknown_and_disturb_nothing(machine, monkeypatch):
    monkeypatch.setattr("attnbench.measure.watch.host.stolen_ticks", lambda: None)
    monkeypatch.setattr("attnbench.measure.watch.host.throttled_us", lambda: None)
    assert Ledger.open().metrics()["stolen_share"] is None
    watch = Watch(interruptions=lambda: 0, stolen_ticks=lambda: None, throttled_us=lambda: None)
    assert watch.lost_by_round(watch.mark(), 1.0, []) == (None, False)
