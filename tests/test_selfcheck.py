"""The self-tests of measuring, on clocks that are right and on clocks that are wrong."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch

from attnbench.base.sample import Batch
from attnbench.measure import selfcheck
from attnbench.measure.clock import CudaClock
from attnbench.measure.sampling import StoppingRule
from attnbench.measure.sensor import GpuSensor
from attnbench.worker import diagnosis
from tests import fakegpu
from tests.test_nvml import FakeNvml, NVMLError

FEW = StoppingRule(precision=float("inf"), min_time_s=0.0, max_time_s=60.0, min_samples=40)


class World:
    """Time that passes only when someone works or looks at a clock."""

    def __init__(self, look_ns: int = 100) -> None:
        self.ns = 0
        self._look_ns = look_ns

    def now(self) -> int:
        self.ns += self._look_ns
        return self.ns

    def work(self, us: float) -> Callable[[], None]:
        def call() -> None:
            self.ns += int(us * 1000)

        return call


class WorldClock:
    """Reads the world's time in ticks; `noise` is added to each block in turn."""

    timer: Literal["host", "events", "graph"] = "host"
    l2: Literal["cold", "warm"] = "warm"
    resolution_us = 0.001
    broken = False

    def __init__(
        self, world: World, *, tick_ns: int = 1, noise: tuple[float, ...] = (0.0,)
    ) -> None:
        self._world, self._tick_ns, self._noise = world, tick_ns, itertools.cycle(noise)

    def batch(self, call: Callable[[], Any], calls: int) -> Batch:
        begin = self._read()
        for _ in range(calls):
            call()
        us = (self._read() - begin) / 1000 / calls * (1 + next(self._noise))
        return Batch(time_us=us, e2e_us=us)

    def _read(self) -> int:
        return self._world.now() // self._tick_ns * self._tick_ns

    def release(self, call: Callable[[], Any]) -> None:
        pass


def test_delays_of_many_lengths_show_the_tick_of_a_clock_that_always_reads_two():
    world = World(look_ns=2048)
    clock = WorldClock(world, tick_ns=1024)
    delays = [world.work(0.07 * i) for i in range(64)]
    assert selfcheck.resolution(clock, batches=50)["seen_us"] == pytest.approx(2.048)
    seen = selfcheck.resolution(clock, batches=50, delays=delays)
    assert seen["seen_us"] == pytest.approx(1.024)
    assert seen["block_us"] == pytest.approx(2.048)


def test_the_walk_needs_each_row_before_the_next_and_fits_the_cache():
    walk = diagnosis.walk("cpu")
    rows, sums = walk.args[0], walk()  # type: ignore[attr-defined]
    assert torch.equal(sums, rows.cumsum(0))
    assert (rows.shape[0] >= 1000, rows.stride()) == (True, (rows.shape[1], 1))
    assert rows.nbytes + sums.nbytes <= 1 << 20


@pytest.fixture
def world(monkeypatch, idle_machine) -> World:
    """A world of its own for all that timing looks at: the clocks, and the counters beside them."""
    made = World()
    for name in ("perf_counter", "process_time"):
        monkeypatch.setattr(f"attnbench.measure.engine.time.{name}", lambda: made.ns / 1e9)
    return made


def test_noise_is_the_width_of_the_interval_and_discarded_turns_are_counted(world):
    quiet = selfcheck.noise(WorldClock(world), world.work(1000.0), budget_s=0.5)
    rng = random.Random(0)
    noise = tuple(rng.expovariate(5.0) for _ in range(997))  # delays, as other work causes them
    clock, work = WorldClock(world, noise=noise), world.work(1000.0)
    short, loud = (selfcheck.noise(clock, work, budget_s=s) for s in (0.05, 0.5))
    assert quiet["width"] == 0.0
    assert (short["width"] or 0) > (loud["width"] or 0) > 0.0
    assert loud["samples"] is not None
    assert loud["samples"] >= 21


def test_every_self_test_runs_on_this_machine_and_is_plain_numbers(monkeypatch):
    """For real, with next to no work: what the figures are is not looked at."""
    monkeypatch.setattr(selfcheck, "noise", lambda clock, call: {"width": call() is None})
    quickly = partial(selfcheck.cold_and_warm, budget_s=0.0)
    monkeypatch.setattr(selfcheck, "cold_and_warm", quickly)
    monkeypatch.setattr("attnbench.measure.clock.last_cache_bytes", lambda device: 1 << 20)
    monkeypatch.setattr(diagnosis, "_SLOWDOWN", replace(FEW, min_samples=9, max_time_s=0.5))
    begun: list[str] = []
    outcome = diagnosis.diagnose("cpu", begun.append)
    assert begun[0] == "the clock"
    assert list(outcome["tests"]) == ["clock", "cold", "planted", "noise"]
    assert [test for test in outcome["tests"].values() if "raised" in test] == []
    assert outcome["gpu"] is None


def test_a_self_test_that_raises_costs_itself_alone(monkeypatch):
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise OSError("no clock\nhere")

    for name in ("resolution", "slowdown", "noise"):
        monkeypatch.setattr(selfcheck, name, refuse)
    monkeypatch.setattr(selfcheck, "cold_and_warm", lambda *args: {"ratio": 3.0})
    tests = diagnosis.diagnose("cpu")["tests"]
    assert tests.pop("cold") == {"ratio": 3.0}
    assert {test["raised"] for test in tests.values()} == {"OSError: no clock here"}


@pytest.mark.parametrize(("listed", "others"), [
    ("GPU:0\nno processes are running", 0),
    ("GPU:0\nprocess      12 uses      400.000 MB GPU memory", 0),
    ("GPU:0\nprocess      12 uses 4 MB GPU memory\nprocess 13 uses 5 MB GPU memory", 1),
    ("pynvml module not found, please install nvidia-ml-py", None),
    (None, None),
])  # fmt: skip
def test_a_gpu_is_described_with_who_else_is_on_it_and_what_nvml_does_not_answer(
    monkeypatch, listed, others
):
    def list_processes() -> str:
        if listed is None:
            raise RuntimeError("NVML_ERROR_NO_PERMISSION")
        return str(listed)

    card = SimpleNamespace(major=9, minor=0, multi_processor_count=132, L2_cache_size=50 << 20)
    nvml = FakeNvml(nvmlDeviceGetTotalEnergyConsumption=NVMLError("Not Supported"))
    sensor = GpuSensor(nvml, "gpu") if listed else GpuSensor(None, None, "NVML: no driver")
    monkeypatch.setattr(torch.cuda, "list_gpu_processes", list_processes)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: card)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (70 << 30, 80 << 30))
    monkeypatch.setattr(GpuSensor, "open", lambda: sensor)
    facts = diagnosis.describe()
    assert facts["other_processes"] == others
    assert (facts["capability"], facts["energy_counter"]) == ("9.0", False)
    assert facts["mig"] is (False if listed else None)
    assert (facts["memory_free_bytes"], facts["l2_bytes"]) == (70 << 30, 50 << 20)
    seen = [facts[name] for name in ("sm_mhz", "throttle", "compute_mode", "driver", "problem")]
    missing = "NVML: no energy_mj (Not Supported)"
    whole = [1755.0, ["power cap"], "default", "570.86.10", missing]
    assert seen == (whole if listed else [None, None, None, None, "NVML: no driver"])


def test_what_works_is_tried_each_thing_apart_and_what_may_damage_the_process_last(monkeypatch):
    names = [name for name, _ in diagnosis._trials("cuda")]
    assert names[-1] == "CUDA graphs"
    assert {"sdpa-flash", "sdpa-cudnn", "flex", "Triton and a C compiler"} <= set(names)

    def broken() -> None:
        raise RuntimeError("no plan\nfor this GPU")

    trials = {
        ("sdpa-math", "float32"): partial(diagnosis.runs, "sdpa-math", "float32", "cpu"),
        ("sdpa-cudnn", "float32"): partial(diagnosis.runs, "sdpa-cudnn", "float32", "cpu"),
        ("flex", "bfloat16"): broken,
    }
    monkeypatch.setattr(diagnosis, "_trials", lambda device: trials)
    begun: list[str] = []
    assert [(row["works"], row["reason"]) for row in diagnosis.tried(begun.append)] == [
        (True, None),
        (False, "runs on cuda, not cpu"),
        (False, "RuntimeError: no plan for this GPU"),
    ]
    assert begun == ["sdpa-math, float32", "sdpa-cudnn, float32", "flex, bfloat16"]


def test_what_hides_a_launch_is_the_flush_and_a_spin_where_that_is_too_short(monkeypatch):
    device = fakegpu.install(monkeypatch)
    cold, warm = CudaClock("cold"), CudaClock("warm")

    def call() -> None:
        device.launch("call", device_us=5.0, host_us=90.0)

    seen = selfcheck.launch(cold, warm, call, device.flush)
    assert (seen["flush_us"], seen["enqueue_us"]) == (40.0, 90.0)
    assert seen["hidden_us"] == 90.0
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: None)
    cold = CudaClock("cold")
    monkeypatch.setattr(cold, "_cycles_per_us", lambda: 1.0)  # as nothing spins
    assert selfcheck.launch(cold, warm, call, device.flush)["hidden_us"] == pytest.approx(38, abs=5)
