"""The reported time of a record, its interval and what they rest on."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

from attnbench.base import stats
from attnbench.base.sample import FULL_SPEED
from attnbench.base.stats import (
    fastest_of_windows,
    median,
    median_interval,
    processes_interval,
    quotient_interval,
    t_quantile,
)
from attnbench.machine import limits
from attnbench.machine.host import SLICE_US
from attnbench.schema.record import Record, Sample

Interval = tuple[float, float]
_POWER = 0.8
HOST_BOUND = 0.95  # of the time, spent by the host on issuing the call: the device waits for it
_ORDER_STATISTICS = 6  # from so many values on the interval is one of order statistics
FEWEST = 3  # samples that give a low end
# Two processes of the same code differ by that, persistently (address layout, page placement): the
# median of ten runs of eight cells each, alone on a machine of two cores, was 1.4 to 2.6 %.
BETWEEN_PROCESSES = 0.03


def by_process(record: Record) -> list[list[Sample]]:
    """The samples that count, for each fresh process of the cell, in the order of their rounds."""
    kept = record.kept
    if len({sample.process for sample in kept}) == 1:
        return [list(kept)]  # the usual case, of runs of many cells
    found: dict[int, list[Sample]] = {}
    for sample in kept:
        found.setdefault(sample.process, []).append(sample)
    return list(found.values())


def are_times(values: Sequence[float]) -> bool:
    """Whether all are numbers above 0, and none is infinite; true of none at all."""
    return not values or (min(values) > 0 and math.isfinite(sum(values)))


def observations_us(record: Record) -> list[float]:
    """The replicates of a cell within its run, in µs per call (decode: per token).

    From one process the fastest sample of each window, without what other work took; from several
    the processes' medians of that: the fresh process is the replicate, not the sample within it.
    All cells of a group meet the same machine, so that these are what to compare cells by.
    """
    processes = [_times(record, samples) for samples in by_process(record)]
    return processes[0] if len(processes) == 1 else [median(times) for times in processes]


def _times(record: Record, samples: list[Sample]) -> list[float]:
    return _windows(record, [(sample.disturbed, sample.own_us) for sample in samples])


def _windows(record: Record, times: list[tuple[bool, float]]) -> list[float]:
    """The fastest time of each window, of those that were not disturbed where there are any."""
    window = record.metrics.get("window") or 1
    return [time_us for _, time_us in fastest_of_windows(times, window)]


def time_us(record: Record) -> float | None:
    """The reported time in µs; None where nothing was measured.

    On a CPU the low end: the fastest sample of those that other work left alone; where it left
    fewer than three alone, the least processor time. Over several processes their median. On a
    GPU, and in runs from before a core's speed was recorded, the median of the observations.
    """
    if not record.samples:
        return None
    if "probe_us" not in record.metrics:
        return median(observations_us(record))
    return median(low_end(record, samples)[0] for samples in by_process(record))


def interval_us(record: Record) -> Interval | None:
    """Where the reported time lies with 95 %, in µs; None where there are too few samples.

    On a CPU it contains what may have been taken from the fastest sample: by a core below its full
    speed (as the fixed loop around the sample tells), and where no sample was left alone by other
    work (the truth lies between processor and wall time); how high the low end might have come
    out; and what two processes of the same code differ by. Over several processes it is over
    those, too. Elsewhere it is that of the median, over samples or over processes.
    """
    if not record.samples:
        return None
    found = observations_us(record)
    if "probe_us" not in record.metrics:
        return processes_interval(found) if over_processes(record) else median_interval(found)
    processes = by_process(record)
    if min(map(len, processes)) < FEWEST:
        return None
    ends = [low_end(record, samples) for samples in processes]
    between = processes_interval([least for least, _, _ in ends])
    low = median(low for _, low, _ in ends) * (1 - BETWEEN_PROCESSES)
    high = median(high for _, _, high in ends) * (1 + BETWEEN_PROCESSES)
    return (low, high) if between is None else (min(low, between[0]), max(high, between[1]))


def low_end(record: Record, samples: list[Sample]) -> tuple[float, float, float]:
    """The least time of one process in µs, and the ends of where it may lie within that process."""
    alone = [sample for sample in samples if not sample.disturbed]
    pool = alone if len(alone) >= FEWEST else samples
    fastest = min(pool, key=lambda sample: sample.own_us)
    slowdown = (fastest.probe_us or 0.0) / record.metrics["probe_us"]
    low = fastest.own_us / (slowdown if slowdown > FULL_SPEED else 1.0)
    width = min(record.metrics.get("window") or 1, max(1, len(pool) // FEWEST))
    # Wall time: where none was left alone, the truth may be as high as that.
    high = stats.upper_quartile(fastest_of_windows([sample.time_us for sample in pool], width))
    return fastest.own_us, low, high


def within_run_us(record: Record) -> Interval | None:
    """Where the median of the observations lies, for comparisons with cells of the same run.

    Without what slows all cells of a run alike: a slow core, a process's own luck. Where other work
    left no sample of a window alone, it reaches from processor to wall time. None for too few.
    """
    found = observations_us(record)
    if over_processes(record):
        return processes_interval(found)
    low = median_interval(found)
    high = median_interval(_windows(record, [(s.disturbed, s.time_us) for s in record.kept]))
    return None if low is None or high is None else (low[0], high[1])


def over_processes(record: Record) -> bool:
    """True where the cell was measured in several fresh processes."""
    return len({sample.process for sample in record.kept}) > 1


def replicated(record: Record) -> str | None:
    """What the interval replicates: `within_process` or `between_processes`; None without one."""
    if interval_us(record) is None:
        return None
    return "between_processes" if over_processes(record) else "within_process"


def precision(record: Record) -> float | None:
    """Half the interval's width, relative to the reported time; None without an interval."""
    interval, middle = interval_us(record), time_us(record)
    return None if interval is None or not middle else (interval[1] - interval[0]) / 2 / middle


def excess(record: Record) -> float:
    """By which factor the reported time may be too long at most; infinite if unknown.

    Other work only ever adds to a time. What it added to the reported time beyond the fastest
    sample is known. What it added to the fastest is bounded by the larger of two: as much again;
    and what was taken from all samples on average, since the fastest met the least. That is wall
    time over processor time (`cpu_share`, per thread), and what a hypervisor or a quota kept.
    Records from before processor time was kept have involuntary switches, each of which costs a
    slice for every other process that wants to run.
    """
    reported, metrics = time_us(record), record.metrics
    if not reported or metrics.get("meddles"):  # no counter says what such a call did to itself
        return math.inf
    beyond = reported / min(sample.time_us for sample in record.kept)
    running = metrics.get("cpu_share")
    if running is None:
        others = max(1.0, (metrics.get("load_1m") or math.inf) - 1)
        switches = metrics.get("interruptions_per_s") or 0.0
        running = 1 - switches * SLICE_US * 1e-6 * others if switches else 1.0
    kept = (metrics.get("stolen_share") or 0.0) + (metrics.get("throttled_share") or 0.0)
    left = min(1.0, running) * (1 - kept)
    return beyond * max(beyond, 1 / left) if left > 0 else math.inf


def detectable(record: Record) -> float | None:
    """The smallest relative difference from another row of this precision that would show.

    That `ratio` finds with probability 0.8, the two rows having the same standard error: its
    interval must lie z(0.8) · √2 standard errors beyond where it just excludes 1. Within one
    process that is at twice z(1 − 0.025/2), as the interval is made of two; over processes at
    √2 times the quantile that the interval holds; of three processes, whose spread is hardly
    known, the difference shows every other time only. As the sample-size formula for two means,
    e.g. Lehr, Statistics in Medicine 11 (1992), 1099.
    """
    interval, z = within_run_us(record), NormalDist().inv_cdf
    if interval is None:
        return None
    half = (interval[1] - interval[0]) / 2 / median(observations_us(record))
    power = z(_POWER) * math.sqrt(2)
    if not over_processes(record):
        return half * (2 * z(1 - 0.025 / 2) + power) / z(0.975)
    processes = len(by_process(record))
    held = t_quantile(processes - 1) if processes < _ORDER_STATISTICS else z(0.975)
    return half * (held * math.sqrt(2) + power) / held


def described(environment: Mapping[str, Any], device: str) -> Mapping[str, Any]:
    """The environment of run.json; empty where it is that of another device."""
    return environment if environment.get("device", device) == device else {}


def flops(record: Record) -> int | None:
    """The executed FLOPs; the useful ones where an implementation does not declare them."""
    executed: int | None = record.metrics.get("flops_executed")
    return record.metrics.get("flops_useful") if executed is None else executed


def suspect(record: Record, environment: Mapping[str, Any], time_us: float | None) -> str | None:
    """Why a time of the record cannot be right on its machine, or None."""
    if not flops(record) and not record.metrics.get("bytes_min"):
        return None  # no work that a limit could be applied to
    here = described(environment, record.cell.case.device)
    return limits.suspect(
        device_name=here.get("device_name"),
        dtype=record.cell.case.dtype,
        matmul_precision=here.get("matmul_precision"),
        time_us=time_us,
        flops=flops(record),
        bytes_min=record.metrics.get("bytes_min"),
        measured=limits.ceilings_of(here, record.cell.case.threads),
    )


@dataclass(frozen=True)
class CellTimes:
    """What a ratio needs of one record, computed once where it is compared with many.

    `interval_us` holds with 97.5 %: two such intervals hold together with 95 %. `processes_us`
    has the median of each fresh process.
    """

    median_us: float
    interval_us: Interval | None
    processes_us: Mapping[int, float]


def cell_times(record: Record) -> CellTimes:
    """What a ratio needs of a record, which must have samples."""
    parts = {part[0].process: _times(record, part) for part in by_process(record)}
    medians = {process: median(found) for process, found in parts.items()}
    observed = list(medians.values()) if len(parts) > 1 else next(iter(parts.values()))
    return CellTimes(median(observed), median_interval(observed, 1 - 0.05 / 2), medians)


def ratio(above: Record, below: Record) -> tuple[float, Interval | None]:
    """Reported time of `above` / that of `below`, with an interval of at least 95 %, or None.

    Within one process from the intervals of both medians. Over several, process by process: in
    each the two were interleaved, unless the run was interrupted between them, so that what slowed
    one slowed the other.
    """
    return ratio_of(cell_times(above), cell_times(below))


def ratio_of(above: CellTimes, below: CellTimes) -> tuple[float, Interval | None]:
    """As `ratio`, of what was computed once for each."""
    value = above.median_us / below.median_us
    if min(len(above.processes_us), len(below.processes_us)) < 2:
        return value, quotient_interval(above.interval_us, below.interval_us)
    both = sorted(above.processes_us.keys() & below.processes_us.keys())
    paired = [above.processes_us[process] / below.processes_us[process] for process in both]
    return (median(paired), processes_interval(paired)) if len(paired) > 1 else (value, None)


def launch_bound(enqueue_us: float | None, time_us: float | None) -> bool:
    """Whether the host takes as long to issue a call as the device to run it; False if unknown.

    Both per unit; `time_us` is the reported time.
    """
    return bool(enqueue_us is not None and time_us and enqueue_us >= HOST_BOUND * time_us)
