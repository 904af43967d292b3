"""What repeats exactly needs no statistics: two checks of a cell, metric by metric."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from attnbench.base.units import brief_percent, count, digits, size
from attnbench.gate.decide.outcome import Checked
from attnbench.gate.decide.rules import Verdict
from attnbench.schema.record import Record

# Fewer bytes never fail: a page is less than any buffer that grows with n takes at the sizes worth
# watching, and more than the numbers and row statistics that come and go with a rewrite.
FLOOR_BYTES = 4096
# Errors are rounding: another order of summation moves them a little, and is no news.
ERROR_GROWTH = 0.1


@dataclass(frozen=True, kw_only=True)
class Exact:
    """How two checks of a cell differ: `failures` are held against the candidate, `notes` not."""

    failures: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Both:
    """One metric's values, both known."""

    base: Any
    candidate: Any


_NOTHING = Exact()


def _sentence(words: str, both: _Both, text: Callable[[Any], str], way: str) -> str:
    shown = text(both.base), text(both.candidate)
    if shown[0] == shown[1]:  # rounding hides the difference
        shown = count(both.base), count(both.candidate)
    change = f" ({_signed(both.candidate / both.base - 1)})" if both.base else ""
    return f"{words} {way} from {shown[0]} to {shown[1]}{change}"


def _signed(share: float) -> str:
    return ("+" if share > 0 else "") + brief_percent(share)


def _amount(
    words: str, text: Callable[[Any], str], floor: int, both: _Both, growth: float, alike: bool
) -> Exact:
    """More than `growth` and more than `floor`: a failure. Less, or within: a note."""
    change = both.candidate - both.base
    if abs(change) <= floor:
        return _NOTHING
    if change < 0:
        return Exact(notes=(_sentence(words, both, text, "shrank"),))
    grew = _sentence(words, both, text, "grew")
    allowed = f", allowed: +{brief_percent(growth)}"
    if not alike:
        return Exact(notes=(f"{grew}, counted in another way: not compared",))
    if change <= growth * both.base:
        return Exact(notes=(grew + allowed,))
    return Exact(failures=(grew + allowed,))


def _changed(words: str, both: _Both, growth: float, alike: bool) -> Exact:
    if both.base == both.candidate:
        return _NOTHING
    return Exact(notes=(f"{words}: {both.candidate}, was {both.base}",))


def _kernels(words: str, both: _Both, growth: float, alike: bool) -> Exact:
    """Which names are new and which have gone: the order says little, the list is long."""
    before, now = both.base.split("; "), both.candidate.split("; ")
    new = [f"+{name}" for name in now if name not in before]
    gone = [f"−{name}" for name in before if name not in now]
    return Exact(notes=(f"{words}: {', '.join(new + gone)}",)) if new or gone else _NOTHING


def _error(words: str, both: _Both, growth: float, alike: bool) -> Exact:
    if both.candidate <= both.base * (1 + ERROR_GROWTH):
        return _NOTHING
    shown = f"from {digits(both.base)} to {digits(both.candidate)} of what is allowed"
    return Exact(notes=(f"{words} grew {shown}",))


# (both, growth, alike) -> what is to be said of a metric known on both sides.
_Judge = Callable[[_Both, float, bool], Exact]


@dataclass(frozen=True, kw_only=True)
class Metric:
    """One row of the comparison.

    `words` name it in sentences. `judge` says what a difference means. Where `same_way` names a
    metric that differs between the sides, the two were not counted alike, and nothing fails.
    `missing` stands for unknown where that is an answer, too, such as no SDPA at all.
    """

    name: str
    words: str
    judge: _Judge
    same_way: str | None = None
    missing: str | None = None


def _bytes(name: str, words: str) -> Metric:
    return Metric(name=name, words=words, judge=partial(_amount, words, size, FLOOR_BYTES))


_ROWS = (
    Metric(
        name="flops_counted",
        words="counted FLOPs",
        judge=partial(_amount, "counted FLOPs", count, 0),
        # Formulas of opaque ops price work that a hand-written backward pass need not do.
        same_way="flops_counted_source",
    ),
    _bytes("memory_workspace_bytes", "workspace"),
    _bytes("memory_prepared_bytes", "memory prepared before the call"),
    _bytes("memory_saved_bytes", "memory saved for the backward pass"),
    _bytes("memory_retained_bytes", "memory held on to after the call"),
    Metric(name="kernel", words="kernels", judge=partial(_kernels, "kernels"), missing="none"),
    Metric(
        name="kernel_count",
        words="number of kernels",
        judge=partial(_changed, "number of kernels"),
    ),
    Metric(
        name="sdpa_backend",
        words="backend of SDPA",
        judge=partial(_changed, "backend of SDPA"),
        missing="none",
    ),
    Metric(
        name="meddles",
        words="settings it changes",
        judge=partial(_changed, "settings of the process it changes"),
        missing="none",
    ),
    Metric(name="error_ratio", words="error", judge=partial(_error, "error")),
)

# What `Checked.metrics` keeps of a record's metrics.
METRICS: tuple[str, ...] = tuple(
    name for row in _ROWS for name in (row.name, row.same_way) if name is not None
)


def compare(base: Checked, candidate: Checked, growth: float) -> Exact:
    """What differs between two checks of a cell that are both ok.

    FLOPs fail when they grow by more than the share `growth`, bytes when by more than that and
    more than a page. What is unknown on one side is a note; unknown on both it is not mentioned.
    """
    found = [_row(row, base, candidate, growth) for row in _ROWS]
    notes = [text for exact in found for text in exact.notes]
    # Of a check that is ok, that it was so only when it was tried again.
    notes += [side.reason for side in (base, candidate) if side.reason]
    return Exact(
        failures=tuple(text for exact in found for text in exact.failures), notes=tuple(notes)
    )


def _row(row: Metric, base: Checked, candidate: Checked, growth: float) -> Exact:
    sides = {"base": base.metrics.get(row.name), "candidate": candidate.metrics.get(row.name)}
    known = {side: value for side, value in sides.items() if value is not None}
    if not known:
        return _NOTHING
    if len(known) == 1 and row.missing is None:
        (side,) = known
        return Exact(notes=(f"{row.words}: known of the {side} alone, not compared",))
    both = _Both(known.get("base", row.missing), known.get("candidate", row.missing))
    alike = row.same_way is None or (
        base.metrics.get(row.same_way) == candidate.metrics.get(row.same_way)
    )
    return row.judge(both, growth, alike)


ABSENT = Checked(status="absent", reason="there is no such implementation")


def checked(record: Record | None) -> Checked:
    """What the gate keeps of a record; absent where there is none."""
    if record is None:
        return ABSENT
    metrics = {name: record.metrics[name] for name in METRICS if name in record.metrics}
    return Checked(status=record.status, reason=record.reason, metrics=metrics)


_NOT_RUN = ("absent", "unsupported", "skipped")
# What a candidate's status is held against it for: the statuses of the base.
_AGAINST: dict[str, tuple[str, ...]] = {
    "incorrect": ("ok", "incorrect", "oom", "timeout", "crashed", "error", *_NOT_RUN),
    "crashed": ("ok", "incorrect", *_NOT_RUN),
    "error": ("ok", "incorrect", *_NOT_RUN),
    "oom": ("ok",),
    "timeout": ("ok",),
    "unsupported": ("ok",),
    "skipped": ("ok",),
}
_CANDIDATE_WORDS = {
    "incorrect": "wrong result",
    "oom": "out of memory",
    "timeout": "timed out",
    "error": "fails",
    "unsupported": "no longer supports this case",
    "skipped": "no longer supports this case",
}


def verdict_of(base: Checked | None, candidate: Checked | None) -> tuple[Verdict, str] | None:
    """The verdict, with its reason, where the checks alone decide; None where both are ok.

    `incorrect` where the candidate is wrong, or fails where the base did not; `not comparable`
    where one side has no right result to compare with.
    """
    base, candidate = base or ABSENT, candidate or ABSENT
    if base.status == candidate.status == "ok":
        return None
    if base.status in _AGAINST.get(candidate.status, ()):
        words = _CANDIDATE_WORDS.get(candidate.status, candidate.status)
        also = " (the base's is wrong, too)" if base.status == "incorrect" else ""
        return "incorrect", f"{_told(words, candidate)}{also}"
    return "not comparable", _why_not(base, candidate)


def _why_not(base: Checked, candidate: Checked) -> str:
    if candidate.status == "absent":
        return "removed: the candidate has no such implementation"
    if base.status == "absent":
        new = "new: the base has no such implementation"
        return new if candidate.status == "ok" else f"{new}; {_told(candidate.status, candidate)}"
    if candidate.status == "ok":
        return f"the base has no right result: {_told(base.status, base)}"
    return f"{_told(base.status, base)} (on the base; {candidate.status} on the candidate, too)"


def _told(words: str, side: Checked) -> str:
    return f"{words}: {side.reason}" if side.reason else words
