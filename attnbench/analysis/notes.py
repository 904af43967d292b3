"""What to know before believing a time: notes, and the diagnostics behind them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np
import pandas as pd

from attnbench.analysis import times
from attnbench.base import units
from attnbench.base.sample import DiscardCode
from attnbench.base.stats import median
from attnbench.machine.symptoms import STEAL_SHARE
from attnbench.schema.record import Record

DISTURBED = 0.25
FULL_SPEED_SHARE = 0.9  # of the time; less shows in the intervals
LEFT_OUT = 0.01  # of the calls; some interruption meets every process

# Diagnostics: fewer values than these show nothing; standard errors from which on a rank
# correlation is taken for real; and the effects that matter.
ENOUGH = 20
SURE = 3.5
DRIFT = 0.03


def notes(record: Record) -> str | None:
    """All notes on a record, the serious ones first, or None."""
    found = [text for _, text in _serious(record)] + list(_asides(record))
    return "; ".join(found) or None


def unsteady(record: Record) -> str | None:
    """The names of the serious ones, or None: the time may be wrong by more than its interval."""
    return ", ".join(name for name, _ in _serious(record)) or None


def _serious(record: Record) -> Iterator[tuple[str, str]]:
    """Name and text of each note for which the error of a row's time has no bound."""
    metrics, kept = record.metrics, record.kept
    if not record.samples:
        return
    disturbed = metrics.get("kept_disturbed") or 0
    # Of one thread its processor time bounds what others took; of several nothing does. A low end
    # needs few samples that were left alone, a median (in runs of before) most of them.
    low_end = "probe_us" in metrics
    few = len(kept) - disturbed < times.FEWEST if low_end else disturbed > DISTURBED * len(kept)
    if disturbed and few and all(s.cpu_us is None for s in kept):
        yield (
            "busy-machine",
            f"other work interrupted {disturbed} of the {len(kept)} samples that count",
        )
    for code, count in Counter(s.kept_despite for s in kept if s.kept_despite).items():
        name, text = _KEPT[code]
        yield name, f"{text} in {count} of the {len(kept)} samples that count"
    if changed := metrics.get("meddles"):
        yield "meddles", f"it changes {changed} for the process; put back"


def _asides(record: Record) -> Iterator[str]:
    """What is good to know, and what the interval contains already."""
    metrics, kept = record.metrics, record.kept
    if not record.samples:
        return
    if disturbed := sum(sample.disturbed for sample in kept):
        taken = 1 - median(s.own_us / s.time_us for s in kept if s.disturbed)
        yield (
            f"other work took {taken:.0%} of {disturbed} of the {len(kept)} samples:"
            " their processor time counts"
        )
    if (full := metrics.get("full_speed_share", 1.0)) < FULL_SPEED_SHARE:
        speeds = f": a loop took {found}" if (found := metrics.get("core_speeds")) else ""
        yield f"the core ran at its full speed {full:.0%} of the time{speeds}"
    if (stolen := metrics.get("stolen_share") or 0.0) > STEAL_SHARE:
        yield f"the hypervisor gave {stolen:.1%} of its processors' time to others"
    if (withheld := metrics.get("throttled_share") or 0.0) > STEAL_SHARE:
        yield f"a CPU quota held the process back for {withheld:.1%} of the time"
    codes = Counter(s.discard_code for s in record.samples if s.discard_code is not None)
    count = codes.pop("interrupted", 0)  # expected, and taken again
    if share := codes.total() / len(record.samples):
        why = ", ".join(_DISCARDS[code] for code in codes)
        yield f"{share:.0%} of the samples do not count ({why})"
    if count:
        samples = "1 sample does" if count == 1 else f"{count} samples do"
        yield f"{samples} not count: other work interrupted every batch"
    left_out, calls = sum(s.left_out for s in kept), sum(s.calls for s in kept)
    if left_out > LEFT_OUT * calls:
        yield f"{left_out} of {calls} calls do not count: the host took far longer to issue them"
    of_processes = [[s.own_us for s in samples] for samples in times.by_process(record)]
    changes = [change for change in map(drift, of_processes) if change is not None]
    if worst := max(changes, key=abs, default=None):
        text = f"drifts: the last third took {abs(worst):.1%}"
        yield f"{text} {'more' if worst > 0 else 'less'} time"
    if times.launch_bound(record):
        hidden_us = metrics.get("hidden_us")
        of_which = f", of which {units.time(hidden_us)} are hidden" if hidden_us else ""
        text = f"the host takes {units.time(metrics['enqueue_us'])} to issue a call{of_which}"
        yield f"launch-bound: {text}"
    if waits := metrics.get("device_waits"):
        text = f"the host waits for the device {'once' if waits == 1 else f'{waits} times'} a call"
        yield f"{text}, and then the device for the host; --timer graph cannot take such a call"
    if before := metrics.get("retried_note"):
        yield f"measured in a process of its own: beside others it was {before}"
    yield from filter(None, (metrics.get("sensor_note"), metrics.get("energy_note")))


# What a sample may count in spite of: the name and the text of the note.
_KEPT: dict[DiscardCode, tuple[str, str]] = {
    "gpu": ("slowed-gpu", "the GPU slowed itself, for heat or want of power,"),
    "allocator": ("allocator", "memory was asked of the GPU's driver"),
}
_DISCARDS: dict[DiscardCode, str] = {
    "stolen": "time taken by the hypervisor",
    "throttled": "time withheld by the CPU quota",
    "gpu": "a GPU that slowed itself",
    "allocator": "memory asked of the GPU's driver",
    "compiled": "compilation",
    "clock": "a clock that stepped back",
}


def drift(times_us: Sequence[float]) -> float | None:
    """Relative change from the first third to the last, or None where there is no trend.

    A trend is a rank correlation of time with order (Spearman) beyond 3.5 standard errors, with a
    change of the thirds' medians of 3 % at least.
    """
    count, third = len(times_us), len(times_us) // 3
    if count < ENOUGH:
        return None
    ranks = pd.Series(times_us).rank()
    trend = ranks.corr(pd.Series(np.arange(float(count))))  # NaN where all are equal
    if not abs(trend) * math.sqrt(count - 1) >= SURE:
        return None
    change = median(times_us[-third:]) / median(times_us[:third]) - 1
    return change if abs(change) >= DRIFT else None
