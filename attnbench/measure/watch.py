"""What other work did to a measurement: seen by counters of the system, never by the timings."""

from __future__ import annotations

import contextlib
import gc
import resource
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from attnbench.base.sample import Discard
from attnbench.machine import host
from attnbench.machine.host import SLICE_US

TICK_US = 10_000.0  # what a tick of steal is worth
# A batch or round that lost this share of its planned length to others says little.
LOST_SHARE = 0.25


class Sensor(Protocol):
    """Reads the state of a GPU: `GpuSensor` of `attnbench.measure.gpu`, or a fake."""

    def read(self) -> Any:
        """Clock in MHz, power in W, temperature in °C, reasons for a slow clock; or None."""


def interruptions() -> int:
    """Involuntary context switches of this process so far, all threads."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw


@dataclass
class SampleConditions:
    """What was seen beside one target's samples, summed up for its record."""

    interrupted: int = 0
    kept_disturbed: int = 0
    readings: list[Any] = field(default_factory=list)


@dataclass(kw_only=True)
class Watch:
    """Watches batches (interruptions), samples (the GPU's state), rounds (steal, throttling).

    `must_discard(reading)` gives a reason where a GPU's state forbids to count what ran in it.
    """

    sensor: Sensor | None = None
    must_discard: Callable[[Any], str | None] = lambda reading: None
    interruptions: Callable[[], int] = interruptions
    stolen_ticks: Callable[[], float | None] = host.stolen_ticks
    throttled_us: Callable[[], float | None] = host.throttled_us

    def lost_to_others(self, switches: int, planned_us: float) -> Discard | None:
        """Why a batch of this planned length was disturbed, or None.

        The planned length was known before the batch was timed: what it took decides nothing, so
        that a slow result is as welcome as a fast one.
        """
        if switches * SLICE_US <= LOST_SHARE * planned_us:
            return None
        times = f"{switches} time{'s' * (switches > 1)}"
        return Discard("interrupted", f"interrupted by other work ({times})")

    def read(self) -> Any:
        """The GPU's state now, or None."""
        return self.sensor.read() if self.sensor is not None else None

    def mark(self) -> tuple[float, float]:
        """Microseconds stolen by the hypervisor and withheld by a quota so far."""
        return (self.stolen_ticks() or 0) * TICK_US, self.throttled_us() or 0.0

    def lost_by_round(
        self, before: tuple[float, float], planned_us: float, readings: Iterable[Any]
    ) -> Discard | None:
        """Why a whole round does not count, or None: time stolen or withheld may hit any sample."""
        for reading in readings:
            reason = self.must_discard(reading) if reading is not None else None
            if reason:
                return Discard("gpu", reason)
        stolen, throttled = (now - then for now, then in zip(self.mark(), before, strict=True))
        if stolen > LOST_SHARE * planned_us:
            reason = f"the hypervisor took {stolen / 1000:.0f} ms of processor time"
            return Discard("stolen", reason)
        if throttled > LOST_SHARE * planned_us:
            return Discard("throttled", f"the CPU quota withheld {throttled / 1000:.0f} ms")
        return None


@dataclass(frozen=True)
class CounterMarks:
    """Counters of the system when a cell began, to say at its end what happened meanwhile."""

    begin: float
    stolen_ticks: float | None
    throttled_us: float | None

    @classmethod
    def now(cls) -> CounterMarks:
        """Read the counters now."""
        return cls(time.perf_counter(), host.stolen_ticks(), host.throttled_us())

    def metrics(self) -> dict[str, Any]:
        """Shares of the wall time since then: stolen (per CPU), withheld; load and the like now."""
        elapsed_us = max((time.perf_counter() - self.begin) * 1e6, 1.0)
        return {
            "stolen_share": _share(self.stolen_ticks, host.stolen_ticks(), TICK_US / elapsed_us),
            "throttled_share": _share(self.throttled_us, host.throttled_us(), 1 / elapsed_us),
        } | host.cell_facts()


def _share(before: float | None, now: float | None, scale: float) -> float | None:
    return None if before is None or now is None else round(max(0.0, now - before) * scale, 6)


@contextlib.contextmanager
def collector_off() -> Iterator[None]:
    """No collection inside: it would take time, and free memory that others had allocated."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
