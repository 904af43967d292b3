"""Energy of a call, from a loop of its own: the counter of a GPU is far too slow for one call."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from attnbench.measure.gpu import GpuReading

_BATCH_S = 0.01  # between two readings of the counter, so that its ticks are seen one by one


class EnergySensor(Protocol):
    """What is asked of a sensor: GpuSensor, or a fake."""

    def energy_mj(self) -> int | None:
        """A counter of millijoules that only grows."""

    def read(self) -> GpuReading | None:
        """A reading with the power of now."""


@dataclass(frozen=True, kw_only=True)
class Energy:
    """Energy of one call, and what it rests on.

    `energy_j` is gross: what the whole board used in the loop, over its calls; `idle_power_w`, the
    power just before with nothing to do, stands beside it and is not taken off. `seconds`,
    `ticks` (of the counter) and `calls` describe that loop. Where `energy_j` is None, `reason`
    says why.
    """

    energy_j: float | None
    idle_power_w: float | None
    seconds: float
    ticks: int
    calls: int
    reason: str | None = None


@dataclass(frozen=True, kw_only=True)
class EnergyRule:
    """How long to loop: until both `min_s` and `min_ticks` are reached, but at most `max_s`.

    `idle_s` is how long the device rests before its idle power is read; NVML averages power over
    about a second.
    """

    min_s: float = 2.0
    min_ticks: int = 20
    max_s: float = 10.0
    idle_s: float = 1.5


def measure_energy(
    call: Callable[[], Any],
    sensor: EnergySensor,
    *,
    rule: EnergyRule | None = None,
    now: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
    synchronize: Callable[[], None] = torch.cuda.synchronize,
) -> Energy:
    """Loop over `call` with warm caches and read the sensor's energy counter between batches.

    The loop begins and ends on a tick of the counter: energy, time and calls then cover the same
    stretch. Whatever `call` raises passes. `now` and `sleep` are in seconds.
    """
    rule = rule or EnergyRule()
    synchronize()
    sleep(rule.idle_s)
    reading = sensor.read()
    seconds, ticks, calls = 0.0, 0, 0  # between the first tick and the last one seen

    def ended(energy_j: float | None = None, *, reason: str | None = None) -> Energy:
        return Energy(
            energy_j=energy_j,
            idle_power_w=None if reading is None else reading.power_w,
            seconds=seconds,
            ticks=ticks,
            calls=calls,
            reason=reason,
        )

    def make(count: int) -> None:
        for _ in range(count):
            call()
        synchronize()

    make(1)  # warm-up
    begin_s = now()
    make(1)
    call_s = max(now() - begin_s, 1e-6)
    if call_s * rule.min_ticks > rule.max_s:  # the counter is read once a call at best
        return ended(reason=f"a call of {call_s:.3g} s is too long for a loop of {rule.max_s:g} s")
    begin_s, batch = now(), max(1, int(_BATCH_S / call_s))
    last = sensor.energy_mj()
    first: tuple[float, int] | None = None  # time and counter at the first tick
    made = 0
    while last is not None:
        make(batch)
        made += batch
        value, at_s = sensor.energy_mj(), now()
        if value is None:
            break
        if value < last:
            return ended(reason=f"the energy counter fell from {last} to {value} mJ")
        if value > last:
            last = value
            if first is None:
                first, made = (at_s, value), 0
            else:
                seconds, ticks, calls = at_s - first[0], ticks + 1, made
                if ticks >= rule.min_ticks and seconds >= rule.min_s:
                    return ended((value - first[1]) / 1000 / made)
        if at_s - begin_s >= rule.max_s:
            return ended(
                reason=f"the energy counter ticked {ticks} times in {seconds:.3g} s of a "
                f"loop of {rule.max_s:g} s; needed are {rule.min_ticks} and {rule.min_s:g} s"
            )
    return ended(reason="the energy counter cannot be read")
