"""What to know before believing a time, in plain words: one row a note."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from attnbench.analysis import diagnostics, times
from attnbench.analysis.roofline import launch_bound
from attnbench.base import units
from attnbench.base.registry import Registry
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


@dataclass(frozen=True, kw_only=True)
class Note:
    """One thing to know. `text(record)` is None where there is nothing to say.

    `serious` notes make a row unsteady: its time may be wrong by more than its interval says.
    """

    text: Callable[[Record], str | None]
    serious: bool


NOTES: Registry[Note] = Registry("note")


def _note(name: str, *, serious: bool) -> Callable[[Callable[[Record], str | None]], None]:
    def add(text: Callable[[Record], str | None]) -> None:
        NOTES.add(name, Note(text=text, serious=serious))

    return add


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
    """Interrupted turns are taken again; here so many were that some had to be kept."""
    if "kept_disturbed" not in record.metrics:
        return _interrupted(record)
    kept = record.metrics["kept_disturbed"] or 0
    if kept <= DISTURBED_SHARE * len(record.kept):
        return None
    return f"other work interrupted {kept} of the {len(record.kept)} samples that count"


def _interrupted(record: Record) -> str | None:
    """Of runs from before turns were taken again."""
    rate = record.metrics.get("interruptions_per_s") or 0.0
    if rate < INTERRUPTIONS_PER_S:
        return None
    return f"interrupted {rate:.0f} times a second by other work on the machine"


@_note("stolen-time", serious=True)
def _stolen(record: Record) -> str | None:
    share = record.metrics.get("stolen_share") or 0.0
    if share <= STEAL_SHARE:
        return None
    return f"the hypervisor gave {share:.1%} of its processors' time to others"


@_note("withheld-time", serious=True)
def _withheld(record: Record) -> str | None:
    share = record.metrics.get("throttled_share") or 0.0
    if share <= STEAL_SHARE:
        return None
    return f"a CPU quota held the process back for {share:.1%} of the time"


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
    found = _discarded(record)
    return f"MORE THAN A FIFTH: {found[1]}" if found and found[0] > LOUD_SHARE else None


@_note("discarded", serious=False)
def _few_discarded(record: Record) -> str | None:
    found = _discarded(record)
    return found[1] if found and found[0] <= LOUD_SHARE else None


def _discarded(record: Record) -> tuple[float, str] | None:
    """Share and text of what does not count, but for other work: that is expected, and retaken."""
    reasons = Counter(_kind(s.discarded) for s in record.samples if s.discarded)
    dropped = {why: count for why, count in reasons.items() if why != _INTERRUPTED}
    if not dropped:
        return None
    share = sum(dropped.values()) / len(record.samples)
    return share, f"{share:.0%} of the samples do not count ({', '.join(dropped)})"


_INTERRUPTED = "interrupted by other work"


def _kind(reason: str) -> str:
    return reason.partition(" (")[0]


@_note("repeated", serious=False)
def _repeated(record: Record) -> str | None:
    count = [_kind(s.discarded or "") for s in record.samples].count(_INTERRUPTED)
    if not count:
        return None
    turns = "1 turn does" if count == 1 else f"{count} turns do"
    return f"{turns} not count: other work interrupted every block"


@_note("drift", serious=True)
def _drift(record: Record) -> str | None:
    found = [
        change
        for samples in times.by_process(record)
        if (change := diagnostics.drift([s.time_us for s in samples])) is not None
    ]
    if not found:
        return None
    worst = max(found, key=abs)
    return f"drifts: the last third took {abs(worst):.1%} {'more' if worst > 0 else 'less'} time"


@_note("two-speeds", serious=True)
def _two_speeds(record: Record) -> str | None:
    for samples in times.by_process(record):
        found = diagnostics.two_speeds([s.time_us for s in samples])
        if found:
            fast, slow, share = found
            return (
                f"two speeds: {units.time(fast)}, and {units.time(slow)} in {share:.0%} of samples"
            )
    return None


@_note("dependent-samples", serious=False)
def _dependent(record: Record) -> str | None:
    if times.over_processes(record):
        return None
    r = diagnostics.dependence(times.observations_us(record))
    if r is None:
        return None
    return (
        f"neighbouring observations depend on each other (rank correlation {r:.2g}):"
        f" the interval should be about {diagnostics.widening(r):.1f} times as wide"
    )


@_note("meddles", serious=True)
def _meddles(record: Record) -> str | None:
    meddled = record.metrics.get("meddles")
    return f"it changes {meddled} for the process; put back" if meddled else None


@_note("launch-bound", serious=False)
def _launch_bound(record: Record) -> str | None:
    enqueue_us = record.metrics.get("enqueue_us")
    if enqueue_us is None or not launch_bound(enqueue_us, times.time_us(record)):
        return None
    return f"launch-bound: the host takes {units.time(enqueue_us)} to issue a call"


@_note("sensor", serious=False)
def _sensor(record: Record) -> str | None:
    return record.metrics.get("sensor_note")


@_note("energy", serious=False)
def _energy(record: Record) -> str | None:
    return record.metrics.get("energy_note")
