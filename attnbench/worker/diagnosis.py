"""Self-tests of measuring on one device, with facts of the machine beside them, as plain JSON."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from attnbench.machine import host
from attnbench.machine.facts import environment
from attnbench.measure import selfcheck
from attnbench.measure.clock import clock_for
from attnbench.measure.gpu import GpuSensor
from attnbench.measure.sampling import StoppingRule
from attnbench.measure.watch import interruptions

# 500 rounds, so that 5 % stand out on a busy machine, too; or 1.6 s for each of the three.
_SLOWDOWN = StoppingRule(
    precision=float("inf"), min_time_s=0.0, max_time_s=0.8, min_samples=500, patience=2.0
)


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """How much work the self-tests do on a device: a spin in µs, widths of squares, bytes read.

    `read_bytes` fits the cache that `cold` evicts, and lasts well above the cost of a launch.
    """

    spin_us: float
    batches: int
    matmul_width: int
    read_bytes: int
    noise_width: int


SIZES = {
    # On CPU the read stays below torch's threshold for several threads (32768 elements), whose
    # start would hide it.
    "cpu": Sizes(
        spin_us=2000.0,
        batches=1000,
        matmul_width=1024,
        read_bytes=1 << 17,
        noise_width=256,
    ),
    "cuda": Sizes(
        spin_us=40_000.0,
        batches=300,
        matmul_width=4096,
        read_bytes=1 << 24,
        noise_width=2048,
    ),
}


def diagnose(device: str, tell: Callable[[str], None] = lambda test: None) -> dict[str, Any]:
    """Run every self-test on `device` (`cpu` or `cuda`); takes about 16 s.

    `tell` hears the name of each before it runs. One that raises leaves `{"raised": …}`.
    `facts` are of the machine as the tests began; `meanwhile` is what happened beside them.
    """
    facts = environment(device) | host.facts()
    begin, ticks = time.perf_counter(), host.cpu_ticks()
    throttled_us, switches = host.throttled_us(), interruptions()
    tests = {}
    with torch.no_grad():
        for name, test in _tests(device).items():
            tell(name)
            tests[name] = _outcome(test)
    gpu = gpu_facts(GpuSensor.open()) if device == "cuda" else None  # while it is still warm
    wall_s = time.perf_counter() - begin
    after_us = host.throttled_us()
    withheld_us = None if throttled_us is None or after_us is None else after_us - throttled_us
    return {
        "facts": facts,
        "gpu": gpu,
        "meanwhile": {
            "wall_s": round(wall_s, 3),
            "steal_share": host.steal_share(host.cpu_ticks(), ticks),
            "throttled_us": withheld_us,
            "interruptions_per_s": round((interruptions() - switches) / wall_s, 2),
        },
        "tests": tests,
    }


def gpu_facts(sensor: GpuSensor) -> dict[str, Any]:
    """What NVML says of the GPU now, and how many other processes use it; unknown is null."""
    reading = sensor.read()
    facts = {
        "problem": sensor.problem,
        "sm_mhz": reading and reading.sm_mhz,
        "power_w": reading and reading.power_w,
        "temperature_c": reading and reading.temperature_c,
        "throttle": sorted(reading.throttle) if reading and reading.throttle is not None else None,
        "other_processes": _other_processes(),
    }
    sensor.close()
    return facts


def _other_processes() -> int | None:
    """Processes on the GPU beside this one, which is among those listed, if any is."""
    try:
        listed = torch.cuda.list_gpu_processes()
    except Exception:  # NVML again: absent, denied, or a driver that refuses
        return None
    if "no processes" in listed:
        return 0
    count = sum(line.startswith("process") for line in listed.splitlines())
    return count - 1 if count else None  # anything else says why it cannot tell


def _tests(device: str) -> dict[str, Callable[[], Any]]:
    sizes = SIZES[device]
    # Tests build their clocks themselves: one that cannot be built costs its own test alone.
    warm, cold = partial(clock_for, device, l2="warm"), partial(clock_for, device, l2="cold")
    square = partial(_square, device=device)
    return {
        "clock": lambda: selfcheck.resolution(warm(), batches=sizes.batches),
        "spin": lambda: _spin(device, sizes.spin_us),
        "matmul": lambda: selfcheck.matmul_rate(warm(), square(sizes.matmul_width)),
        "cold": lambda: selfcheck.cold_and_warm(cold(), warm(), _read(device, sizes.read_bytes)),
        "planted": lambda: selfcheck.slowdown(warm(), _unit(device), _SLOWDOWN),
        "noise": lambda: selfcheck.noise(clock_for(device), _product(square(sizes.noise_width))),
    }


def _outcome(test: Callable[[], Any]) -> dict[str, Any]:
    try:
        outcome: dict[str, Any] = test()
    except Exception as err:  # whatever a broken driver raises costs this test alone
        return {"raised": f"{type(err).__name__}: {' '.join(str(err).split())[:200]}"}
    return outcome


def _spin(device: str, duration_us: float) -> selfcheck.Numbers:
    clock = clock_for(device, l2="warm")
    if device == "cuda":
        return selfcheck.spin_reading(clock, selfcheck.DeviceSpin(duration_us))
    spin = selfcheck.Spin(duration_us)
    return selfcheck.spin_reading(clock, spin, lasted_us=lambda: spin.lasted_us)


def _square(width: int, device: str) -> torch.Tensor:
    return torch.randn(width, width, device=device)


def _product(a: torch.Tensor) -> Callable[[], Any]:
    return partial(torch.mm, a, a, out=torch.empty_like(a))


def _unit(device: str) -> Callable[[], Any]:
    """The work that is repeated 20 or 21 times, some microseconds of it.

    On a GPU a product that lasts longer than the host needs to issue the next. On CPU what runs
    in one thread: two threads that wait for each other on a busy machine are a matter of noise,
    which is another test.
    """
    if device == "cuda":
        return _product(_square(1024, device))
    data = torch.randn(8192)
    return partial(torch.exp, data, out=torch.empty_like(data))


def _read(device: str, size: int) -> Callable[[], Any]:
    data = torch.randn(size // 4, device=device)
    return partial(torch.sum, data, 0, out=torch.empty((), device=device))
