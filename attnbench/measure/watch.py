"""What other work did to a measurement: seen by counters of the system, never by the timings."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from attnbench.base.sample import Discard
from attnbench.machine import host
from attnbench.machine.host import SLICE_US

try:
    import resource
except ImportError:  # not on this system: nothing is counted
    resource = None  # type: ignore[assignment]

# What a tick of steal is worth.
TICK_US = 10_000.0
# From this share of its planned length on, a block that lost so much says little.
LOST_SHARE = 0.25


class Sensor(Protocol):
    """What a GPU says of itself; see `attnbench.measure.nvml`."""

    def read(self) -> Any:
        """Clock in MHz, power in W, temperature in °C, reasons for a slow clock; or None."""


def interruptions() -> int:
    """Involuntary context switches of this process so far, all threads; 0 where not counted."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw if resource else 0


@dataclass
class Conditions:
    """What was seen beside one contender's samples, summed up for its record."""

    interrupted: int = 0
    kept_disturbed: int = 0
    readings: list[Any] = field(default_factory=list)


@dataclass(kw_only=True)
class Watch:
    """Watches blocks (interruptions, the GPU's state) and rounds (steal, throttling).

    `must_discard(reading)` gives a reason where a GPU's state forbids to count what ran in it.
    """

    sensor: Sensor | None = None
    must_discard: Callable[[Any], str | None] = lambda reading: None
    interruptions: Callable[[], int] = interruptions
    stolen_ticks: Callable[[], float | None] = host.stolen_ticks
    throttled_us: Callable[[], float | None] = host.throttled_us

    def lost_to_others(self, switches: int, planned_us: float) -> Discard | None:
        """Why a block of this planned length is to be taken again, or None.

        The planned length was known before the block was timed: what the block took decides
        nothing, so that a slow result is as welcome as a fast one.
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
    ) -> tuple[Discard | None, bool]:
        """Why a whole round does not count, or None; and whether nothing may overrule that.

        Time stolen or withheld may hit any turn of the round. A GPU that slowed itself for heat
        slows all that follow, too: such a round never counts, for any of its contenders.
        """
        for reading in readings:
            reason = self.must_discard(reading) if reading is not None else None
            if reason:
                return Discard("gpu", reason), True
        stolen, throttled = (now - then for now, then in zip(self.mark(), before, strict=True))
        if stolen > LOST_SHARE * planned_us:
            reason = f"the hypervisor took {stolen / 1000:.0f} ms of processor time"
            return Discard("stolen", reason), False
        if throttled > LOST_SHARE * planned_us:
            reason = f"the CPU quota withheld {throttled / 1000:.0f} ms"
            return Discard("throttled", reason), False
        return None, False


@dataclass(frozen=True)
class Ledger:
    """Counters of the system when a cell began, to say at its end what happened meanwhile."""

    begin: float
    stolen_ticks: float | None
    throttled_us: float | None

    @classmethod
    def open(cls) -> Ledger:
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
