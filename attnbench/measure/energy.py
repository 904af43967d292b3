"""Energy of a call, from a loop of its own: the counter of a GPU is far too slow for one call."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from attnbench.measure.nvml import GpuReading

_BATCH_S = 0.01  # between two looks at the counter, so that its ticks are seen one by one


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
    `ticks` (of the counter) and `calls` describe the loop. Where `energy_j` is None, `reason`
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
    loop = _Loop(call=call, sensor=sensor, now=now, synchronize=synchronize)
    reason = loop.run(rule)
    energy_mj = loop.used_mj
    return Energy(
        energy_j=None if reason else energy_mj / 1000 / loop.calls,
        idle_power_w=None if reading is None else reading.power_w,
        seconds=loop.seconds,
        ticks=loop.ticks,
        calls=loop.calls,
        reason=reason,
    )


@dataclass(kw_only=True)
class _Loop:
    """The stretch between the first tick and the last one seen: its energy, time and calls."""

    call: Callable[[], Any]
    sensor: EnergySensor
    now: Callable[[], float]
    synchronize: Callable[[], None]
    ticks: int = 0
    calls: int = 0
    seconds: float = 0.0
    used_mj: int = 0

    def run(self, rule: EnergyRule) -> str | None:
        """Loop until the rule is met; return why it was not, or None."""
        call_s = self._call_s()
        if call_s * rule.min_ticks > rule.max_s:  # the counter is read once a call at best
            return f"a call of {call_s:.3g} s is too long for a loop of {rule.max_s:g} s"
        begin_s, batch = self.now(), max(1, int(_BATCH_S / call_s))
        last = self.sensor.energy_mj()
        first: tuple[float, int] | None = None  # time and counter at the first tick
        made = 0
        while last is not None:
            self._make(batch)
            made += batch
            value, at_s = self.sensor.energy_mj(), self.now()
            if value is None:
                break
            if value < last:
                return f"the energy counter fell from {last} to {value} mJ"
            if value > last:
                last = value
                if first is None:
                    first, made = (at_s, value), 0
                else:
                    self.ticks, self.calls = self.ticks + 1, made
                    self.seconds, self.used_mj = at_s - first[0], value - first[1]
                    if self.ticks >= rule.min_ticks and self.seconds >= rule.min_s:
                        return None
            if at_s - begin_s >= rule.max_s:
                return (
                    f"the energy counter ticked {self.ticks} times in {self.seconds:.3g} s of a "
                    f"loop of {rule.max_s:g} s; needed are {rule.min_ticks} and {rule.min_s:g} s"
                )
        return "the energy counter cannot be read"

    def _call_s(self) -> float:
        """Seconds of the second call; the first is warm-up."""
        self._make(1)
        begin_s = self.now()
        self._make(1)
        return max(self.now() - begin_s, 1e-6)

    def _make(self, calls: int) -> None:
        for _ in range(calls):
            self.call()
        self.synchronize()
