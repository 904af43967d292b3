"""What other work did to a measurement, and how fast its core was: by counters and a fixed loop."""

from __future__ import annotations

import contextlib
import functools
import gc
import math
import mmap
import os
import resource
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, repeat
from typing import NamedTuple

import torch

from attnbench.base.sample import Discard
from attnbench.base.stats import median, robust_least
from attnbench.machine import host
from attnbench.measure.clock import READING_NS, cpu_ns, now_ns
from attnbench.measure.sensor import GpuReading, GpuSensor, must_discard

# What one involuntary switch of a process costs it: about a slice of Linux's scheduler.
SLICE_US = 4000.0
TICK_US = 10_000.0  # what a tick of steal is worth
AT_WORK_SHARE = 0.05  # of the processor time of all threads: less delays the others by no more
# A batch or round that lost this share of its planned length to others says little.
LOST_SHARE = 0.25


# Checksums of a page: one for what a call before them threw out of the caches, then some 15 µs. An
# empty loop of Python has speeds of its own: 14.8, 17.0, 17.8 or 20.2 µs by the addresses that the
# objects of the call before it left, for as long as nothing else is called.
_PAGE, _PROBE = bytes(range(256)) * 16, (1, 12)
# A core whose wide vector units have worked has its clock back after some 0.7 ms. Turns of an empty
# loop, a millisecond or more: waiting for a clock that steps back may take for ever.
CALM_TURNS = 100_000


def probe_us() -> float | None:
    """Processor time of some checksums: how fast the core is just now, which no counter tells.

    A processor that lowers its clock, or whose other hyperthread works for someone else, slows it
    as it slows what is measured. None where the clocks contradict each other: no time was used, or
    more than has passed.
    """
    for turns in _PROBE:
        first, begin = now_ns(), cpu_ns()
        for _ in repeat(None, turns):
            zlib.crc32(_PAGE)
        taken = cpu_ns() - begin
        passed = now_ns() - first
    return taken / 1000 if 0 < taken <= passed + READING_NS else None


def interruptions() -> int:
    """Involuntary context switches of this process so far, all threads."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw


def page_faults() -> int:
    """Pages of memory that this process has touched first, all threads."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def worked_ns() -> dict[str, int]:
    """Processor time of each thread of this process so far, by its id; of none where unknown."""
    found = {}
    with contextlib.suppress(OSError):
        for thread in os.listdir("/proc/self/task"):
            with contextlib.suppress(OSError), open(f"/proc/self/task/{thread}/schedstat") as file:
                found[thread] = int(file.read().split()[0])
    return found


def at_work(before: dict[str, int], after: dict[str, int]) -> int:
    """How many threads used more than 5 % of the processor time between two `worked_ns`."""
    used_ns = [ns - before.get(thread, 0) for thread, ns in after.items()]
    return sum(ns > AT_WORK_SHARE * sum(used_ns) for ns in used_ns)


@functools.cache
def page_fault_us() -> float | None:
    """What the first touch of a page takes in this process, beyond a second one; None if unknown.

    Of five blocks of 8 MiB the least that does not stand alone: other work only adds to it.
    """
    found = []
    for _ in range(5):
        with mmap.mmap(-1, 2**23, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as block:
            pages, marks = -page_faults(), [cpu_ns()]
            for _ in range(2):
                torch.frombuffer(block, dtype=torch.uint8).fill_(1)
                marks.append(cpu_ns())
            pages += page_faults()
        found.append((2 * marks[1] - marks[0] - marks[2]) / 1000 / max(1, pages))
    return cost if (cost := robust_least(found)) > 0 else None


def driver_allocations() -> int:
    """How often torch's allocator has asked CUDA's driver for memory so far; 0 without CUDA.

    That takes up to milliseconds, and waits for the device where cached memory is given back first.
    """
    stats = torch.cuda.memory_stats()
    return sum(stats.get(name, 0) for name in ("num_device_alloc", "num_alloc_retries"))


@dataclass(kw_only=True)
class Watch:
    """Watches batches (interruptions), samples (the GPU's state), rounds (steal, throttling)."""

    sensor: GpuSensor | None = None
    interruptions: Callable[[], int] = interruptions
    worked_ns: Callable[[], dict[str, int]] = worked_ns
    driver_allocations: Callable[[], int] = driver_allocations
    probe_us: Callable[[], float | None] = probe_us
    calm_turns: int = CALM_TURNS
    readings: list[Reading] = field(default_factory=list)
    stolen_ticks: Callable[[], float | None] = host.stolen_ticks
    throttled_us: Callable[[], float | None] = host.throttled_us

    def probe(self) -> float | None:
        """How long the fixed loop takes just now, in µs, which is kept; None where unknown."""
        if (taken_us := self.probe_us()) is not None:
            self.readings.append(Reading(now_ns(), taken_us))
        return taken_us

    def calm_probe(self) -> float | None:
        """The loop once more, when the clock has recovered from the call before, in µs."""
        for _ in repeat(None, self.calm_turns):
            pass
        return self.probe()

    def lost_to_others(self, switches: int, planned_us: float) -> Discard | None:
        """Why a batch of this planned length was disturbed, or None, whatever it took."""
        if switches * SLICE_US <= LOST_SHARE * planned_us:
            return None
        times = f"{switches} time{'s' * (switches > 1)}"
        return Discard("interrupted", f"interrupted by other work ({times})")

    def read(self) -> GpuReading | None:
        """The GPU's state now, or None."""
        return self.sensor.read() if self.sensor is not None else None

    def mark(self) -> tuple[float, float]:
        """Microseconds stolen by the hypervisor and withheld by a quota so far."""
        return (self.stolen_ticks() or 0) * TICK_US, self.throttled_us() or 0.0

    def lost_by_round(
        self, before: tuple[float, float], planned_us: float, readings: Iterable[GpuReading]
    ) -> Discard | None:
        """Why a whole round does not count, or None: time stolen or withheld may hit any sample."""
        for reading in readings:
            if reason := must_discard(reading):
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
    """Counters of the system at a moment, to say later what happened since."""

    begin: float
    stolen_ticks: float | None
    throttled_us: float | None

    @classmethod
    def now(cls) -> CounterMarks:
        """Read the counters now."""
        return cls(time.perf_counter(), host.stolen_ticks(), host.throttled_us())

    def shares(self) -> dict[str, float | None]:
        """Shares of the wall time since then: stolen (per CPU), and withheld by a quota."""
        elapsed_us = max((time.perf_counter() - self.begin) * 1e6, 1.0)
        return {
            "stolen_share": _share(self.stolen_ticks, host.stolen_ticks(), TICK_US / elapsed_us),
            "throttled_share": _share(self.throttled_us, host.throttled_us(), 1 / elapsed_us),
        }


def _share(before: float | None, now: float | None, scale: float) -> float | None:
    if before is None or now is None:
        return None
    return round(min(1.0, max(0.0, now - before) * scale), 6)


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


BIN = math.log(1.05)  # the width of the histogram's bins
# Slopes of calls differ: between 0.3 (bound by memory) and 0.9 (by dispatch) on three hosts.
SPREAD = 0.2
FEWEST = 20  # batches for a slope
LEAST_SCATTER = 0.03  # of the loop's times, relative: below it they tell nothing of a slope


class Reading(NamedTuple):
    """When the loop was timed, in ns, and what it took, in µs."""

    at_ns: int
    us: float


class Speed(NamedTuple):
    """A speed of the core: the loop's time at it in µs, its share of the time, its mean stay."""

    loop_us: float
    share: float
    stay_ms: float


def speeds(readings: Sequence[Reading]) -> list[Speed]:
    """The speeds that the loop's times show, the fastest first; none without readings.

    Each is a peak of their histogram, with a valley before the next. `loop_us` is the low end of
    its readings: those in which the speed changed are longer. A stay is no shorter than the gap
    between two readings.
    """
    bins = [math.floor(math.log(us) / BIN) for _, us in readings]
    ends = _valleys(bins)
    of = [sum(place >= end for end in ends) for place in bins]
    spent_ns, stays = Counter[int](), Counter(of[:1])
    for (at, then), (now, after) in pairwise(zip(of, readings, strict=True)):
        spent_ns[at] += max(0, after.at_ns - then.at_ns)
        stays[now] += now != at
    return [
        Speed(
            loop_us=robust_least(r.us for n, r in zip(of, readings, strict=True) if n == at),
            share=spent_ns[at] / max(1, spent_ns.total()),
            stay_ms=spent_ns[at] / stays[at] / 1e6,
        )
        for at in sorted(stays)
    ]


def _valleys(bins: Sequence[int]) -> list[int]:
    """The bins at which one peak ends and the next begins, in ascending order.

    Either peak rises above the valley by half of its height, by three times what counts scatter by
    (√n), and by one in 200 readings.
    """
    counts, ends, peak, valley, end = Counter(bins), list[int](), 0, 0, 0

    def rises(height: int) -> bool:
        return height - valley >= max(height / 2, 3 * math.sqrt(height), len(bins) / 200)

    for place in range(min(bins, default=0), max(bins, default=0) + 1):
        count = counts[place]
        if rises(peak) and rises(count):
            ends.append(end)
            peak = valley = count
        elif count > peak:
            peak = valley = count
        elif count < valley:
            valley, end = count, place
    return ends


def most_slope(calls: Iterable[Sequence[tuple[float, float]]]) -> float:
    """How steeply a call's time follows the loop's at most, as a slope of logarithms, 0 to 1.

    From the batches of some calls of one process, each as (the loop's time around it, its own), by
    least squares around each call's medians: that slope, two standard errors, and what slopes of
    calls differ by. 1 where the loop's times scatter too little to tell: a call then loses to a
    slow core what the loop does.
    """
    xs, ys = list[float](), list[float]()
    for batches in filter(None, calls):
        for into, of in ((xs, 0), (ys, 1)):
            logs = [math.log(batch[of]) for batch in batches]
            middle = median(logs)
            into += [value - middle for value in logs]
    square = sum(x * x for x in xs)
    if len(xs) < FEWEST or square < len(xs) * LEAST_SCATTER**2:
        return 1.0
    slope = sum(x * y for x, y in zip(xs, ys, strict=True)) / square
    rest = sum((y - slope * x) ** 2 for x, y in zip(xs, ys, strict=True)) / (len(xs) - 2)
    return min(1.0, max(0.0, slope) + 2 * math.sqrt(rest / square) + SPREAD)
