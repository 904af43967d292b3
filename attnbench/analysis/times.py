"""The reported time of a record, its interval and what they rest on."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from attnbench.base.sample import FULL_SPEED
from attnbench.base.stats import (
    fastest_of_windows,
    median,
    median_interval,
    processes_interval,
    robust_least,
)
from attnbench.machine import limits
from attnbench.schema.record import Record, Sample

Interval = tuple[float, float]
HOST_BOUND = 0.8  # of the time, in which the host was still issuing: the device waits for it
# A host that CUDA lets run ahead by about a thousand launches issues until nearly all of a call of
# more is done. What is left to the device then is that queue. One that waits for a result at the
# end of a call that is too long to be hidden has it as soon as the device is done.
QUEUE, QUEUED, LONG_US, WAITED_US = 1024, 0.5, 3000.0, 50.0
FEWEST = 3  # samples that give a low end
# Beyond what a run shows of itself its low end lies above that of other runs of the same code (a
# core that was slow between two probes, the placement of pages), or below it. Taken from 540 cells,
# alone and beside others, of which 3 to 4 % lie outside (docs/method.md).
ABOVE_OTHERS, BELOW_OTHERS = 0.06, 0.04


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
    processes = _observed_us(record)
    return processes[0] if len(processes) == 1 else [median(times) for times in processes]


def _observed_us(record: Record) -> list[list[float]]:
    """By process the fastest of each window, of those left alone where there are any."""
    window = record.metrics.get("window") or 1
    return [
        [us for _, us in fastest_of_windows([(s.disturbed, s.own_us) for s in samples], window)]
        for samples in by_process(record)
    ]


def time_us(record: Record) -> float | None:
    """The reported time in µs; None where nothing was measured.

    On a CPU the low end: the fastest sample that other work left alone, by two clocks; without
    three of these, or a second clock (several threads), the least that does not stand alone
    (`robust_least`). Over several processes their median. On a GPU, with a cold cache, and in runs
    from before a core's speed was recorded, the median of the observations.
    """
    if not record.samples:
        return None
    if _by_median(record):
        return median(observations_us(record))
    return median(low_end(record, samples)[0] for samples in by_process(record))


def _by_median(record: Record) -> bool:
    """Whether the fastest sample says little: of cold ones it may be one that was not cold."""
    return "probe_us" not in record.metrics or record.metrics.get("l2") == "cold"


def clock(record: Record) -> str | None:
    """What the times of a record are: `stream`, `wall`, or `processor` where that of a sample is.

    A sample that other work interrupted counts with its processor time (`Sample.own_us`).
    """
    if not record.samples:
        return None
    if record.cell.case.device == "cuda":
        return "stream"
    return "processor" if any(sample.disturbed for sample in record.kept) else "wall"


def interval_us(record: Record) -> Interval | None:
    """Where the reported time lies with 95 %, in µs; None where there are too few samples.

    On a CPU it contains what may have been taken from the fastest sample: by a core below its full
    speed (as the fixed loop around the sample tells), and where no sample was left alone by other
    work (the truth lies between processor and wall time); how high the low end might have come
    out; and what two processes of the same code differ by. Over several processes it is over
    those, too. Elsewhere it is that of the median, over samples or over processes. Of two, which
    say little of a third, it is from the lower end of the one to the upper end of the other.
    """
    if not record.samples:
        return None
    processes = by_process(record)
    if _by_median(record):
        each = [median_interval(us) for us in _observed_us(record)]
        if len(each) == 1:
            return each[0]
        known = [of for of in each if of]
        if len(known) == len(each) == 2:
            return min(low for low, _ in known), max(high for _, high in known)
        return processes_interval(observations_us(record))
    if min(map(len, processes)) < FEWEST:
        return None
    ends = [low_end(record, samples) for samples in processes]
    least = [least for least, _, _ in ends]
    between = (min(least), max(least)) if len(least) == 2 else processes_interval(least)
    low = median(low for _, low, _ in ends) * (1 - ABOVE_OTHERS)
    high = median(high for _, _, high in ends) * (1 + BELOW_OTHERS)
    return (low, high) if between is None else (min(low, between[0]), max(high, between[1]))


def low_end(record: Record, samples: list[Sample]) -> tuple[float, float, float]:
    """The least time of one process in µs, and the ends of where it may lie within that process."""
    alone = [sample for sample in samples if not sample.disturbed]
    pool = alone if len(alone) >= FEWEST else samples
    ordered = sorted(pool, key=lambda sample: sample.own_us)
    # Of one that was left alone two clocks agree; of others a clock that stood still may be behind.
    agree = pool is alone and all(sample.cpu_us is not None for sample in pool)
    least_us = (min if agree else robust_least)(sample.own_us for sample in pool)
    full_us, most = record.metrics["probe_us"], record.metrics.get("speed_slope", 1.0)
    nearest = [us for sample in ordered[:FEWEST] if (us := sample.probe_us)]
    speed = median(nearest) / full_us if nearest else 1.0
    low = least_us / speed**most if speed > FULL_SPEED else least_us
    # How high it may come out at the speed that the core had then.
    alike = [
        s.own_us for s in pool if (s.probe_us or 0.0) <= FULL_SPEED * max(speed, 1.0) * full_us
    ]
    width = min(record.metrics.get("window") or 1, max(1, len(alike) // FEWEST))
    # The least of another run's w windows lies above three quarters of these with a probability of
    # 0.25^w if windows are independent, and more often where slow spells last over several.
    fastest = sorted(fastest_of_windows(alike, width))
    high = fastest[math.ceil(0.75 * len(fastest)) - 1]
    if pool is not alone:  # the truth lies between processor and wall time
        high = max(high, least_wall_us(samples))
    return least_us, low, max(high, least_us)


def least_wall_us(samples: Sequence[Sample]) -> float:
    """What a call takes at most by the wall clock: its least time where a second clock agrees."""
    alone = [s.time_us for s in samples if s.cpu_us is not None and not s.disturbed]
    return min(alone) if alone else robust_least(s.time_us for s in samples)


def suspect(record: Record, environment: Mapping[str, Any], time_us: float | None) -> str | None:
    """Why a time of the record cannot be right on its machine, or None."""
    case = record.cell.case
    return limits.suspect(environment, case.dtype, case.threads, time_us, record.metrics)


def launch_bound(record: Record) -> bool:
    """Whether the host issues a call for as long as the device runs it; False if unknown.

    Of issuing, what was hidden does not count. Stream time then is the host's: where the device is
    the slower one, it is still busy when the last of a call is issued. Of 300 simulated cells of 1
    to 6000 launches, issued in 5 to 80 µs each, all that are 10 % too long are found, and 2 % of
    the others (tests/test_clock.py).
    """
    issued_us, ran_us = record.metrics.get("enqueue_us"), time_us(record)
    if issued_us is None or ran_us is None:
        return False
    exposed_us = issued_us - (record.metrics.get("hidden_us") or 0.0)
    queued = QUEUE / max(QUEUE, record.metrics.get("kernel_count") or 0)
    full = queued < 1 and ran_us - exposed_us >= QUEUED * queued * ran_us
    units = record.cell.case.units
    waited = ran_us * units > LONG_US and abs(issued_us - ran_us) * units <= WAITED_US
    return bool(exposed_us >= HOST_BOUND * ran_us and not full and not waited)
