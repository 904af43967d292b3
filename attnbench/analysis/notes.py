"""What to know before believing a time: one row a note, and the diagnostics behind them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from attnbench.analysis import times
from attnbench.base import units
from attnbench.base.registry import Registry
from attnbench.base.sample import DiscardCode
from attnbench.base.stats import median
from attnbench.machine.symptoms import STEAL_SHARE
from attnbench.schema.record import Record

# Each interruption costs about a slice of the scheduler, 4 ms: from here on a core was away half of
# the time. Seen with two threads on two cores: 32 to 90 a second quiet, 170 to 250 beside a process
# that keeps one core busy.
INTERRUPTIONS_PER_S = 125.0
DISTURBED_SHARE = 0.25
FAR_FROM_FASTEST = 2.0
LOUD_SHARE = 0.2
WIDE = 0.1

# Diagnostics: fewer values than these show nothing; standard errors from which on a rank
# correlation is taken for real; and the effects that matter.
ENOUGH = 20
SURE = 3.5
DRIFT = 0.03
GAP = 0.05
SPLIT = 0.85
SMALLER_GROUP = 0.1
DEPENDS = 0.4


@dataclass(frozen=True, kw_only=True)
class Note:
    """One thing to know. `text(record)` is None where there is nothing to say.

    `serious` notes make a row unsteady: its time may be wrong by more than its interval says.
    """

    text: Callable[[Record], str | None]
    serious: bool


NOTES: Registry[Note] = Registry("note")


def _note(name: str, *, serious: bool) -> Callable[[Callable[[Record], str | None]], object]:
    return lambda text: NOTES.add(name, Note(text=text, serious=serious))


def notes(record: Record) -> str | None:
    """All notes on a record, or None."""
    found = [note.text(record) for _, note in NOTES.items()] if record.samples else []
    return "; ".join(text for text in found if text) or None


def unsteady(record: Record) -> str | None:
    """The names of the serious ones, or None."""
    if not record.samples:
        return None
    return ", ".join(n for n, note in NOTES.items() if note.serious and note.text(record)) or None


@_note("busy-machine", serious=True)
def _disturbed(record: Record) -> str | None:
    """Interrupted samples are taken again; here so many were that some had to be kept."""
    if "kept_disturbed" in record.metrics:
        kept = record.metrics["kept_disturbed"] or 0
        if kept <= DISTURBED_SHARE * len(record.kept):
            return None
        return f"other work interrupted {kept} of the {len(record.kept)} samples that count"
    rate = record.metrics.get("interruptions_per_s") or 0.0  # runs from before samples were retaken
    if rate < INTERRUPTIONS_PER_S:
        return None
    return f"interrupted {rate:.0f} times a second by other work on the machine"


@_note("stolen-time", serious=True)
def _stolen(record: Record) -> str | None:
    share = record.metrics.get("stolen_share") or 0.0
    text = f"the hypervisor gave {share:.1%} of its processors' time to others"
    return text if share > STEAL_SHARE else None


@_note("withheld-time", serious=True)
def _withheld(record: Record) -> str | None:
    share = record.metrics.get("throttled_share") or 0.0
    text = f"a CPU quota held the process back for {share:.1%} of the time"
    return text if share > STEAL_SHARE else None


@_note("far-from-its-fastest", serious=True)
def _far_from_fastest(record: Record) -> str | None:
    middle, fastest = times.time_us(record), min(s.time_us for s in record.kept)
    if middle is None or middle < FAR_FROM_FASTEST * fastest:
        return None
    return (
        f"the reported time is {middle / fastest:.2g} times the fastest sample:"
        " a busy machine, or two speeds"
    )


@_note("wide-interval", serious=True)
def _wide(record: Record) -> str | None:
    half = times.precision(record)
    return f"known to ± {half:.0%} only" if half is not None and half > WIDE else None


@_note("many-discarded", serious=True)
def _many_discarded(record: Record) -> str | None:
    share, text = _discarded(record)
    return f"MORE THAN A FIFTH: {text}" if share > LOUD_SHARE else None


@_note("discarded", serious=False)
def _few_discarded(record: Record) -> str | None:
    share, text = _discarded(record)
    return text if 0 < share <= LOUD_SHARE else None


_DISCARDS: dict[DiscardCode, str] = {
    "stolen": "time taken by the hypervisor",
    "throttled": "time withheld by the CPU quota",
    "gpu": "a GPU that slowed itself",
    "compiled": "compilation",
    "clock": "a clock that stepped back",
    "other": "other reasons",
}


def _discarded(record: Record) -> tuple[float, str]:
    """Share and text of what does not count, but for other work: that is expected, and retaken."""
    codes = Counter(s.discard_code or "other" for s in record.samples if s.discarded is not None)
    del codes["interrupted"]
    share = codes.total() / len(record.samples)
    why = ", ".join(_DISCARDS[code] for code in codes)
    return share, f"{share:.0%} of the samples do not count ({why})"


@_note("repeated", serious=False)
def _repeated(record: Record) -> str | None:
    count = [sample.discard_code for sample in record.samples].count("interrupted")
    if not count:
        return None
    samples = "1 sample does" if count == 1 else f"{count} samples do"
    return f"{samples} not count: other work interrupted every batch"


@_note("drift", serious=True)
def _drift(record: Record) -> str | None:
    changes = [drift([s.time_us for s in samples]) for samples in times.by_process(record)]
    worst = max((change for change in changes if change is not None), key=abs, default=None)
    if worst is None:
        return None
    return f"drifts: the last third took {abs(worst):.1%} {'more' if worst > 0 else 'less'} time"


def drift(times_us: Sequence[float]) -> float | None:
    """Relative change from the first third to the last, or None where there is no trend.

    A trend is a rank correlation of time with order (Spearman) beyond 3.5 standard errors, with a
    change of the thirds' medians of 3 % at least.
    """
    count, third = len(times_us), len(times_us) // 3
    if count < ENOUGH:
        return None
    if abs(_correlation(np.arange(float(count)), _ranks(times_us))) * math.sqrt(count - 1) < SURE:
        return None
    change = median(times_us[-third:]) / median(times_us[:third]) - 1
    return change if abs(change) >= DRIFT else None


@_note("two-speeds", serious=True)
def _two_speeds(record: Record) -> str | None:
    for samples in times.by_process(record):
        found = two_speeds([s.time_us for s in samples])
        if found:
            fast, slow = units.time(found[0]), units.time(found[1])
            return f"two speeds: {fast}, and {slow} in {found[2]:.0%} of samples"
    return None


def two_speeds(times_us: Sequence[float]) -> tuple[float, float, float] | None:
    """Return (fast, slow, share of slow ones) where the times fall into two groups, or None.

    The cut that explains most variance (Otsu, "A threshold selection method from gray-level
    histograms", 1979) explains 85 % of it: a uniform distribution reaches 75 %, a normal one
    64 %. Either group holds a tenth of the samples, and the medians differ by 5 %.
    """
    count = len(times_us)
    if count < ENOUGH:
        return None
    ordered = np.sort(np.array(times_us, dtype=np.float64))
    middle, edge = ordered.mean(), math.ceil(SMALLER_GROUP * count)
    cuts, sums = np.arange(edge, count - edge + 1), np.cumsum(ordered)
    below, above = sums[cuts - 1] / cuts, (sums[-1] - sums[cuts - 1]) / (count - cuts)
    between = cuts * (below - middle) ** 2 + (count - cuts) * (above - middle) ** 2
    total, cut = ((ordered - middle) ** 2).sum(), int(cuts[between.argmax()])
    fast, slow = float(np.median(ordered[:cut])), float(np.median(ordered[cut:]))
    if total == 0 or between.max() < SPLIT * total or slow < (1 + GAP) * fast:
        return None
    return fast, slow, (count - cut) / count


@_note("dependent-samples", serious=False)
def _dependent(record: Record) -> str | None:
    if times.over_processes(record):
        return None
    r = dependence(times.observations_us(record))
    if r is None:
        return None
    return (
        f"neighbouring observations depend on each other (rank correlation {r:.2g}):"
        f" the interval should be about {widening(r):.1f} times as wide"
    )


def dependence(observations: Sequence[float]) -> float | None:
    """Rank correlation of each observation with the next, or None where it does not matter.

    With correlation r the interval of a median that takes them for independent is too narrow by
    about √((1 + r)/(1 − r)), as for the mean of a first-order autoregressive series.
    """
    if len(observations) < ENOUGH // 2:
        return None
    ranks = _ranks(observations)
    r = _correlation(ranks[:-1], ranks[1:])
    return r if r >= DEPENDS and r * math.sqrt(len(ranks)) >= SURE else None


def widening(r: float) -> float:
    """By how much an interval widens for a correlation r of neighbours."""
    return math.sqrt((1 + r) / (1 - r)) if r < 1 else math.inf


def _ranks(values: Sequence[float]) -> NDArray[np.float64]:
    """Ranks from 0, equal values sharing their mean rank."""
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks: NDArray[np.float64] = (np.cumsum(counts) - (counts + 1) / 2)[place]
    return ranks


def _correlation(xs: NDArray[np.float64], ys: NDArray[np.float64]) -> float:
    """Pearson's; 0 where either does not vary."""
    x, y = xs - xs.mean(), ys - ys.mean()
    scale = math.sqrt((x @ x) * (y @ y))
    return float(x @ y / scale) if scale else 0.0


@_note("meddles", serious=True)
def _changes_process(record: Record) -> str | None:
    changed = record.metrics.get("meddles")
    return f"it changes {changed} for the process; put back" if changed else None


@_note("launch-bound", serious=False)
def _launch_bound(record: Record) -> str | None:
    enqueue_us = record.metrics.get("enqueue_us")
    if enqueue_us is None or not times.launch_bound(enqueue_us, times.time_us(record)):
        return None
    return f"launch-bound: the host takes {units.time(enqueue_us)} to issue a call"


_note("sensor", serious=False)(lambda record: record.metrics.get("sensor_note"))
_note("energy", serious=False)(lambda record: record.metrics.get("energy_note"))
