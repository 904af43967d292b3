"""Energy of a call, from a loop of its own: the counter of a GPU is far too slow for one call."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from attnbench.base.stats import median
from attnbench.measure.sensor import GpuSensor

# The loop lasts until both MIN_S and MIN_TICKS of the counter are reached, but at most MAX_S.
MIN_S, MIN_TICKS, MAX_S = 2.0, 20, 10.0
_IDLE_S = 1.5  # of rest before the idle power is read: NVML averages over about a second
_BATCH_S = 0.01  # between two readings of the counter, so that its ticks are seen one by one


class Energy(NamedTuple):
    """Energy of one call, gross: what the whole board used in a loop, over its calls.

    `idle_power_w` is the power just before. Where `energy_j` is None, `reason` says why.
    """

    energy_j: float | None
    idle_power_w: float | None
    reason: str | None = None


def measure_energy(
    call: Callable[[], Any],
    sensor: GpuSensor,
    *,
    now: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
    synchronize: Callable[[], None] = torch.cuda.synchronize,
) -> Energy:
    """Loop over `call` with warm caches and read the sensor's energy counter between batches.

    The loop begins and ends on a tick of the counter: energy, time and calls then cover the same
    stretch. Whatever `call` raises passes. `now` and `sleep` are in seconds.
    """
    synchronize()
    sleep(_IDLE_S)
    reading = sensor.read()
    idle_w = None if reading is None else reading.power_w

    def make(count: int) -> None:
        for _ in range(count):
            call()
        synchronize()

    make(1)  # warm-up
    marks = [now()]
    for _ in range(3):
        make(1)
        marks.append(now())
    call_s = max(median(after - before for before, after in pairwise(marks)), 1e-6)
    if call_s * MIN_TICKS > MAX_S:  # the counter is read once a call at best
        return Energy(None, idle_w, f"a call of {call_s:.3g} s is too long for {MAX_S:g} s")
    begin_s, batch = now(), max(1, int(_BATCH_S / call_s))
    last = sensor.energy_mj()
    first: tuple[float, int] | None = None  # time and counter at the first tick
    made, ticks, seconds = 0, 0, 0.0  # of the loop between the first tick and the last one seen
    while last is not None:
        make(batch)
        made += batch
        value, at_s = sensor.energy_mj(), now()
        if value is None:
            break
        if value < last:
            return Energy(None, idle_w, f"the energy counter fell from {last} to {value} mJ")
        if value > last:
            last = value
            if first is None:
                first, made = (at_s, value), 0
            else:
                seconds, ticks = at_s - first[0], ticks + 1
                if ticks >= MIN_TICKS and seconds >= MIN_S:
                    return Energy((value - first[1]) / 1000 / made, idle_w)
        if at_s - begin_s >= MAX_S:
            reason = (
                f"the energy counter ticked {ticks} times in {seconds:.3g} s of a "
                f"loop of {MAX_S:g} s; needed are {MIN_TICKS} and {MIN_S:g} s"
            )
            return Energy(None, idle_w, reason)
    return Energy(None, idle_w, "the energy counter cannot be read")
