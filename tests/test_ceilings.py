"""Ceilings of the machine, on a clock that knows what everything costs."""

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

    def batch(self, call: Call, calls: int) -> Batch:
        assert isinstance(call, partial)
        name = call.func.__name__
        if name in self.lost:
            raise RuntimeError(f"{name} cannot be had")
        self.order.append(name)
        slower = 2.0 if self.order.count(name) == 1 else 1.0  # the first of each kind
        sized = f"{name} {len(call.args[0])}" if name == "mm" else name
        cost_us = self.costs.get(sized, self.costs.get(name, 1e6))
        return Batch(time_us=slower * cost_us, e2e_us=slower * cost_us)

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


@pytest.mark.parametrize(("device", "cache", "free", "size"), [
    ("cpu", 8 * MIB, 64 * 1024 * MIB, 64 * MIB),
    ("cpu", 400 * MIB, 64 * 1024 * MIB, 1024 * MIB),
    ("cpu", 600 * MIB, 64 * 1024 * MIB, None),  # 1 GiB is not far past such a cache
    ("cpu", 32 * MIB, 800 * MIB, 100 * MIB),  # both together a quarter of what is free
    ("cpu", 32 * MIB, 500 * MIB, None),
    ("cpu", None, None, 256 * MIB),
    ("cuda", 40 * MIB, 64 * 1024 * MIB, 1024 * MIB),  # not LRU: a share of it is hit again
    ("cuda", 40 * MIB, 4096 * MIB, 512 * MIB),
])  # fmt: skip
def test_buffers_are_far_past_the_cache_and_well_within_memory(device, cache, free, size):
    found = ceilings.stream_bytes(device, cache, free)
    assert found is None if size is None else abs(found - size) < 32768
