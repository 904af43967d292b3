"""Ceilings of the machine, on a clock that knows what everything costs."""

import json
from datetime import datetime
from functools import partial

import pytest
import torch

from attnbench.base.sample import Batch
from attnbench.measure import ceilings
from attnbench.measure.clock import L2, Call, Timer

MIB = 2**20


class FakeClock:
    """Every op costs what `costs` says, in µs a call, the first time twice that.

    Ops are told apart by name and not run; one that is `lost` raises.
    """

    l2: L2 = "warm"
    timer: Timer = "host"
    resolution_us = 0.001
    broken = False

    def __init__(self, costs: dict[str, float], lost: tuple[str, ...] = ()) -> None:
        self.costs, self.lost = costs, lost
        self.order: list[str] = []
        self.calls: dict[str, int] = {}
        self.spent_us: dict[str, list[float]] = {}
        self.drift = 1.0

    def batch(self, call: Call, calls: int) -> Batch:
        assert isinstance(call, partial)
        name = call.func.__name__
        if name in self.lost:
            raise RuntimeError(f"{name} cannot be had")
        self.order.append(name)
        self.calls[name] = calls
        slower = 2.0 if self.order.count(name) == 1 else 1.0  # the first of each kind
        sized = f"{name} {len(call.args[0])}" if name == "mm" else name
        cost_us = self.costs.get(sized, self.costs.get(name, 1e6))
        time_us = slower * cost_us * self.drift ** self.order.count(name)
        self.spent_us.setdefault(name, []).append(time_us * calls)
        return Batch(time_us=time_us, e2e_us=time_us)

    def release(self, call: Call) -> None:
        pass


@pytest.fixture(autouse=True)
def small_machine(monkeypatch):
    """A last cache of 8 MiB, so that buffers have 64; products are narrow."""
    monkeypatch.setattr(ceilings, "last_cache_bytes", lambda device: 8 * MIB)
    monkeypatch.setattr(ceilings, "free_bytes", lambda device: 2**30)
    monkeypatch.setattr(ceilings, "_WIDTHS", {"cpu": (64, 128)})
    monkeypatch.setattr(ceilings, "_NARROW", {("cpu", "float16"): (64,)})


COSTS = {"mm": 4000.0, "copy_": 8000.0, "sum": 6000.0, "amax": 5000.0, "add_": 0.5}


def test_rates_are_work_over_the_least_time():
    found = ceilings.measure_ceilings("cpu", ["float32"], clock=FakeClock(COSTS))
    assert datetime.fromisoformat(found["measured"]).tzinfo is not None
    assert found == {
        "measured": found["measured"],
        "matmul_tflops": {"float32": pytest.approx(2 * 64**3 / 4e-3 / 1e12)},
        "copy_gbps": pytest.approx(2 * 64 * MIB / 8e-3 / 1e9),
        "read_gbps": pytest.approx(64 * MIB / 5e-3 / 1e9),  # amax, the fastest of the readers
        "launch_us": 0.5,
        "cache_bytes": 8 * MIB,
    }
    assert json.loads(json.dumps(found)) == found
    assert torch.is_grad_enabled()


def test_a_wider_product_is_tried_where_one_is_over_too_soon():
    slow, quick = FakeClock(COSTS), FakeClock(COSTS | {"mm": 100.0})
    ceilings.measure_ceilings("cpu", ["float32"], clock=slow)
    found = ceilings.measure_ceilings("cpu", ["float32"], clock=quick)
    assert quick.order.count("mm") == 6 * ceilings.MOST_ROUNDS  # two widths, each with its parts
    assert slow.order.count("mm") == 15  # 8 and 14 times 4 ms: the budget of 60 ms
    assert found["matmul_tflops"]["float32"] == pytest.approx(2 * 128**3 / 100e-6 / 1e12)


def test_the_best_of_all_widths_counts_and_float16_starts_narrow():
    for dtype, costs, width, cost_us in (
        ("float32", {"mm 16": 1.0}, 16, 1.0),
        ("float16", {"mm": 100.0}, 64, 100.0),
    ):
        found = ceilings.measure_ceilings("cpu", [dtype], clock=FakeClock(COSTS | costs))
        assert found["matmul_tflops"][dtype] == pytest.approx(2 * width**3 / cost_us / 1e6)


def test_rounds_are_interleaved_and_end_with_the_budget():
    clock = FakeClock(COSTS | {"copy_": ceilings.STREAM_US})
    ceilings.measure_ceilings("cpu", [], clock=clock)
    streams = [name for name in clock.order if name != "add_"]
    first = streams[: len(streams) // ceilings.LEAST_ROUNDS]
    assert streams == first * ceilings.LEAST_ROUNDS
    assert first.count("copy_") == 1


def test_calls_of_a_gpu_are_timed_in_batches_that_hide_the_wait_for_the_first(monkeypatch):
    monkeypatch.setattr(ceilings, "_BATCH_US", {"cpu": 1000.0})  # as on a GPU
    clock = FakeClock(COSTS | {"mm": 200.0, "copy_": 1e-3})
    ceilings.measure_ceilings("cpu", ["float32"], clock=clock)
    assert clock.calls["add_"] == ceilings.LAUNCH_BATCH_US / COSTS["add_"]
    assert clock.calls["mm"] == 5
    assert clock.calls["copy_"] == ceilings.MOST_CALLS
    assert clock.calls["sum"] == 1


def test_while_the_least_times_disagree_the_rounds_go_on():
    quiet, busy = FakeClock(COSTS), FakeClock(COSTS | {"mm": 10_000.0})
    busy.drift = 0.9  # each time a tenth faster than the last: nothing has been reached yet
    for clock in (quiet, busy):
        ceilings.measure_ceilings("cpu", ["float32"], clock=clock)
    spent_us = [sum(clock.spent_us["mm"]) for clock in (quiet, busy)]
    assert spent_us[0] < 1.2 * ceilings.MATMUL_US
    assert spent_us[1] > 1.4 * ceilings.MATMUL_US


def test_a_start_on_a_gpu_is_measured_with_cold_caches_too(monkeypatch):
    zeros, cold = torch.zeros, FakeClock({"add_": 3.0})
    monkeypatch.setattr(torch, "zeros", lambda size, device: zeros(size))
    monkeypatch.setattr(ceilings, "free_bytes", lambda device: 0)
    monkeypatch.setattr(ceilings, "clock_for", lambda device, l2: {"cold": cold}[l2])
    found = ceilings.measure_ceilings("cuda", [], clock=FakeClock(COSTS))
    assert (found["launch_us"], found["launch_cold_us"]) == (0.5, 3.0)


@pytest.mark.parametrize(
    ("op", "unknown"),
    [("mm", {"matmul_tflops"}), ("add_", {"launch_us"}), ("copy_", {"copy_gbps", "read_gbps"})],
)
def test_what_cannot_be_measured_is_null_and_the_rest_stands(op, unknown):
    found = ceilings.measure_ceilings("cpu", ["float32"], clock=FakeClock(COSTS, lost=(op,)))
    flat = found | {"matmul_tflops": found["matmul_tflops"]["float32"]}
    assert {name for name, value in flat.items() if value is None} == unknown


def test_a_clock_that_sees_nothing_gives_null_and_no_infinity():
    nothing = dict.fromkeys([*COSTS, "linalg_vector_norm"], -1.0)
    found = ceilings.measure_ceilings("cpu", ["float32"], clock=FakeClock(nothing))
    assert found.pop("cache_bytes") == 8 * MIB
    assert found.pop("measured")
    assert {*found.pop("matmul_tflops").values(), *found.values()} == {None}


def test_where_memory_is_short_nothing_is_streamed(monkeypatch):
    monkeypatch.setattr(ceilings, "free_bytes", lambda device: 100 * MIB)
    clock = FakeClock(COSTS)
    found = ceilings.measure_ceilings("cpu", ["float32"], clock=clock)
    assert (found["read_gbps"], found["copy_gbps"], "copy_" in clock.order) == (None, None, False)
    assert found["matmul_tflops"]["float32"] > 0


@pytest.mark.parametrize(
    ("device", "cache", "free", "size"),
    [
        ("cpu", 8 * MIB, 64 * 1024 * MIB, 64 * MIB),
        ("cpu", 400 * MIB, 64 * 1024 * MIB, 1024 * MIB),
        ("cpu", 600 * MIB, 64 * 1024 * MIB, None),  # 1 GiB is not far past such a cache
        ("cpu", 32 * MIB, 800 * MIB, 100 * MIB),  # both together a quarter of what is free
        ("cpu", 32 * MIB, 500 * MIB, None),
        ("cpu", None, None, 256 * MIB),
        ("cuda", 40 * MIB, 64 * 1024 * MIB, 1024 * MIB),  # not LRU: a share of it is hit again
        ("cuda", 40 * MIB, 4096 * MIB, 512 * MIB),
    ],
)
def test_buffers_are_far_past_the_cache_and_well_within_memory(device, cache, free, size):
    found = ceilings.stream_bytes(device, cache, free)
    assert found is None if size is None else abs(found - size) < 32768
