"""The timing logic on a fake clock, and memory and FLOPs on calls that can be priced by hand."""

import random
from types import SimpleNamespace

import pytest
import torch

from attnbench.measure.clock import Block, HostClock
from attnbench.measure.counted import count_flops
from attnbench.measure.engine import race
from attnbench.measure.profiled import _cpu_bytes, profile_call
from attnbench.measure.sampling import Contender, StoppingRule, achieved
from attnbench.measure.watch import Watch


class FakeClock:
    """Every call costs what its function says, in microseconds; nothing really waits."""

    resolution_us = 0.001
    l2 = "warm"
    timer = "host"

    def __init__(self) -> None:
        self.blocks: list[tuple[str, int]] = []
        self.released: list[object] = []

    def block(self, call, calls):
        name, cost_us = call()
        self.blocks.append((name, calls))
        return Block(time_us=cost_us, e2e_us=cost_us + 1.0)

    def release(self, call):
        self.released.append(call)


@pytest.fixture
def wall(monkeypatch):
    """The engine's own wall clock: advances by what the fake clock charged."""
    clock = FakeClock()
    now = [0.0]
    original = clock.block

    def block(call, calls):
        result = original(call, calls)
        now[0] += result.time_us * calls / 1e6
        return result

    clock.block = block  # type: ignore[method-assign]
    monkeypatch.setattr("attnbench.measure.engine.time.perf_counter", lambda: now[0])
    monkeypatch.setattr("attnbench.measure.engine.Watch", Undisturbed)
    monkeypatch.setattr("attnbench.measure.engine.TURN_US", 1.0)  # turns of one block
    return clock


def Undisturbed() -> Watch:  # noqa: N802
    """A watch on a machine where nothing else runs."""
    return Watch(interruptions=lambda: 0, stolen_ticks=lambda: 0, throttled_us=lambda: 0.0)


def contender(name: str, cost) -> Contender:
    return Contender(call=lambda: (name, cost() if callable(cost) else cost))


def test_contenders_take_turns_in_every_round_in_random_order(wall):
    both = {"a": contender("a", 2000.0), "b": contender("b", 4000.0)}
    rule = StoppingRule(precision=1e-9, min_time_s=0.05, max_time_s=0.05, min_samples=6)
    race(both, wall, rule, seed=1)
    rounds: dict[int, set[int]] = {}
    for racer in both.values():
        for turn in racer.samples:
            rounds.setdefault(turn.round, set()).add(turn.position)
    shared = min(len(racer.samples) for racer in both.values())
    assert all(rounds[number] == {0, 1} for number in range(shared))
    firsts = {turn.position for turn in both["a"].samples[:shared]}
    assert firsts == {0, 1}, "one implementation was always first"


def test_blocks_are_long_enough_for_the_clock(wall):
    fast = {"fast": contender("fast", 3.0)}
    race(fast, wall, StoppingRule(max_time_s=0.1), seed=0)
    assert all(turn.calls * 3.0 >= 1000.0 for turn in fast["fast"].samples)
    assert fast["fast"].times_us == pytest.approx([3.0] * len(fast["fast"].samples))


def test_time_is_per_unit_of_work(wall):
    tokens = Contender(call=lambda: ("t", 8000.0), units=8)
    race({"t": tokens}, wall, StoppingRule(max_time_s=0.1), seed=0)
    assert set(tokens.times_us) == {1000.0}
    assert tokens.samples[0].e2e_us == pytest.approx((8000.0 + 1.0) / 8)


def test_warming_up_waits_until_three_windows_agree(wall):
    costs = iter([9000.0, 6000.0, 4000.0] + [2000.0] * 1000)
    slow_start = contender("s", lambda: next(costs))
    race({"s": slow_start}, wall, StoppingRule(precision=0.5, max_time_s=1.0), seed=0)
    assert set(slow_start.times_us) == {2000.0}


def test_a_slow_call_that_has_just_run_is_not_warmed_up_again(wall):
    slow = contender("s", 0.8e6)
    slow.last_call_s = 0.8
    race({"s": slow}, wall, StoppingRule(max_time_s=1.0), seed=0)
    assert slow.warm_s == 0
    assert len(wall.blocks) == len(slow.samples)


def test_a_steady_cell_stops_as_soon_as_its_interval_is_narrow(wall):
    steady = contender("s", 1000.0)
    race({"s": steady}, wall, StoppingRule(min_time_s=0.02, max_time_s=10.0), seed=0)
    assert len(steady.samples) == 21  # 20 ms in seven windows


def test_a_noisy_cell_stops_when_its_budget_is_spent(wall):
    noise = random.Random(0)
    noisy = contender("n", lambda: noise.uniform(1000, 9000))
    race({"n": noisy}, wall, StoppingRule(precision=1e-4, max_time_s=0.5), seed=0)
    assert noisy.spent_s == pytest.approx(0.5, abs=0.01)


def test_a_slow_cell_gets_enough_samples_for_an_interval_or_three_at_least(wall):
    slow, slower = contender("slow", 0.8e6), contender("slower", 30e6)
    race({"slow": slow, "slower": slower}, wall, StoppingRule(max_time_s=1.0), seed=0)
    assert len(slow.samples) == 7
    assert len(slower.samples) == 3


def test_one_that_raises_leaves_and_the_others_go_on(wall):
    calls = iter(range(1000))

    def fails():
        if next(calls) > 4:
            raise ValueError("broken")
        return "f", 1000.0

    both = {"f": Contender(call=fails), "ok": contender("ok", 1000.0)}
    left: list[str] = []
    race(both, wall, StoppingRule(max_time_s=0.1), seed=0, finished=left.append)
    assert isinstance(both["f"].error, ValueError)
    assert left == ["f", "ok"]
    assert both["ok"].error is None


def test_the_rule_needs_samples_time_and_precision():
    rule = StoppingRule(precision=0.02, min_time_s=0.1, max_time_s=1.0)
    steady = [100.0] * 7
    assert rule.done(steady, 0.2)
    assert not rule.done(steady, 0.05)
    assert not rule.done(steady[:6], 0.5)
    assert not rule.done([100.0, 200.0] * 4, 0.5)
    assert rule.done([100.0, 200.0] * 4, 1.0)


def test_precision_is_the_half_width_relative_to_the_median():
    assert achieved([90.0, 100.0, 100.0, 100.0, 100.0, 110.0]) == pytest.approx(0.1)
    assert achieved([100.0] * 5) == float("inf")
    assert achieved([0.0] * 6) == float("inf")


def test_the_host_clock_counts_every_call():
    calls: list[int] = []
    block = HostClock().block(lambda: calls.append(1), 7)
    assert len(calls) == 7
    assert block.time_us == block.e2e_us > 0


def test_memory_of_a_call_is_its_true_peak():
    x = torch.zeros(1000, 100)  # 400 000 bytes

    def call():
        a = x + 1  # one buffer alive
        b = a + a  # two
        del a
        c = b + 1  # two again
        return c + b  # three

    profiled = profile_call(call, "cpu")
    assert profiled.peak_bytes == 3 * 400_000
    assert profiled.kept_bytes == 400_000
    assert profiled.kernels == ("aten::add",)
    assert profiled.kernel_count == 4


def test_memory_inside_an_op_is_seen():
    # softmax over a dimension of half precision input with a wider dtype converts it first.
    x = torch.zeros(1000, 100, dtype=torch.bfloat16)
    profiled = profile_call(lambda: torch.softmax(x, 0, dtype=torch.float32), "cpu")
    assert profiled.peak_bytes >= 400_000


def test_memory_repeats_exactly():
    q = torch.randn(1, 2, 64, 16)

    def call():
        return torch.nn.functional.scaled_dot_product_attention(q, q, q)

    assert len({profile_call(call, "cpu").peak_bytes for _ in range(3)}) == 1


def test_what_a_call_frees_is_not_charged_to_it():
    held = [torch.zeros(10_000)]

    def call():
        held.clear()
        return torch.zeros(10)

    profiled = profile_call(call, "cpu")
    assert (profiled.peak_bytes, profiled.kept_bytes) == (40, 40)


def test_sizes_that_torch_remembers_from_a_past_session_are_passed_over():
    """A block that was there before is freed: torch reports what it last saw at its address."""

    def event(time_ns, address, size):
        data = SimpleNamespace(ptr=address, alloc_size=size)
        tag = SimpleNamespace(name="Allocation")
        return SimpleNamespace(tag=tag, start_time_ns=time_ns, typed=(None, data), children=[])

    freed, made, again = event(1, 7, -165_888), event(2, 9, 40), event(4, 7, 100)
    assert _cpu_bytes([made, freed]) == (40, 40)
    assert _cpu_bytes([freed, made, event(3, 9, -40), again]) == (100, 100)


def test_dispatched_matmuls_are_counted_in_every_form():
    a, b, c = torch.zeros(3, 4, 5), torch.zeros(3, 5, 6), torch.zeros(3, 4, 6)
    forms = [
        lambda: a @ b,
        lambda: torch.bmm(a, b, out=c),
        lambda: torch.baddbmm(c, a, b),
        lambda: c.baddbmm_(a, b),
    ]
    for form in forms:
        assert count_flops(form, {}) == (2 * 3 * 4 * 5 * 6, "dispatched")


def test_opaque_attention_is_priced_by_the_formula_it_is_given():
    from attnbench.theory.costs import OPAQUE_FORMULAS

    q, v = torch.randn(1, 2, 32, 16), torch.randn(1, 2, 32, 16)

    def call():
        return torch.nn.functional.scaled_dot_product_attention(q, q, v)

    assert count_flops(call, OPAQUE_FORMULAS) == (4 * 2 * 32 * 32 * 16, "formula")


def test_nothing_counted_is_unknown_and_not_zero():
    assert count_flops(lambda: torch.zeros(3) + 1, {}) == (None, None)
