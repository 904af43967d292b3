"""What repeats exactly needs no statistics: statuses, FLOPs and memory of both versions."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

from attnbench.base.units import brief_percent, count, digits, size
from attnbench.gate.decide.data import Checked, ExactMetrics, Round, Rules
from attnbench.gate.decide.outcome import Change, Verdict
from attnbench.schema.record import STATUSES

# Fewer bytes never fail: a page is less than any buffer that grows with n takes at the sizes worth
# watching, and more than the numbers and row statistics that come and go with a rewrite.
LEAST_BYTES = 4096
# Errors are rounding: another order of summation moves them a little, and is no news.
ERROR_GROWTH = 0.1


@dataclass(frozen=True, kw_only=True)
class Differences:
    """How two checks of a cell differ: `failures` are held against the candidate, `notes` not.

    `changes` are the metrics of the failures.
    """

    failures: tuple[str, ...] = ()
    changes: tuple[Change, ...] = ()
    notes: tuple[str, ...] = ()


# Whether a difference is held against the candidate, and what follows the metric's name in the
# sentence on it; None: there is none.
_Difference = tuple[bool, str] | None


def _amount(
    text: Callable[[Any], str], least: int, base: int, candidate: int, growth: float | None
) -> _Difference:
    """More than `growth` and more than `least` is held against it; not less, or within.

    Without `growth` the two were not counted alike, and nothing is.
    """
    if abs(candidate - base) <= least:
        return None
    shown = text(base), text(candidate)
    if shown[0] == shown[1]:  # rounding hides the difference
        shown = count(base), count(candidate)
    share = candidate / base - 1 if base else None
    change = "" if share is None else f" ({'+' * (share > 0)}{brief_percent(share)})"
    way = "shrank" if candidate < base else "grew"
    sentence = f" {way} from {shown[0]} to {shown[1]}{change}"
    if candidate < base:
        return False, sentence
    if growth is None:
        return False, f"{sentence}, counted in another way: not compared"
    allowed = f", allowed: +{brief_percent(growth)}" if growth else ""
    return candidate - base > growth * base, f"{sentence}{allowed}"


def _changed(base: Any, candidate: Any, growth: float | None) -> _Difference:
    return None if base == candidate else (False, f": {candidate}, was {base}")


def _kernels(base: str, candidate: str, growth: float | None) -> _Difference:
    """Which names are new and which have gone: the order says little, the list is long."""
    before, now = base.split("; "), candidate.split("; ")
    changes = [f"+{name}" for name in now if name not in before]
    changes += [f"−{name}" for name in before if name not in now]
    return (False, f": {', '.join(changes)}") if changes else None


def _error(base: float, candidate: float, growth: float | None) -> _Difference:
    if candidate <= base * (1 + ERROR_GROWTH):
        return None
    return False, f" grew from {digits(base)} to {digits(candidate)} of what is allowed"


_bytes = partial(_amount, size, LEAST_BYTES)
# Each metric: its name in sentences and, where it may fail, in tables; what a difference means; and
# what stands for unknown where that is an answer, too, such as no SDPA at all.
ROWS: dict[str, tuple[str, str, Callable[[Any, Any, float | None], _Difference], str | None]] = {
    "flops_counted": ("counted FLOPs", "FLOPs", partial(_amount, count, 0), None),
    "memory_workspace_bytes": ("workspace", "workspace", _bytes, None),
    "memory_prepared_bytes": ("memory prepared before the call", "prepared", _bytes, None),
    "memory_saved_bytes": ("memory saved for the backward pass", "saved", _bytes, None),
    "memory_retained_bytes": ("memory held on to after the call", "retained", _bytes, None),
    "kernel": ("kernels", "", _kernels, "none"),
    "kernel_count": ("number of kernels", "", _changed, None),
    "sdpa_backend": ("backend of SDPA", "", _changed, "none"),
    "meddles": ("settings of the process it changes", "", _changed, "none"),
    "error_ratio": ("error", "", _error, None),
}
_SOURCE = "flops_counted_source"
METRICS = (*ROWS, _SOURCE)  # that a check is asked for
GROWING = Change("process memory")


def compare(base: Checked, candidate: Checked, rules: Rules) -> Differences:
    """What differs between two checks of a cell that are both ok.

    FLOPs fail when they grow by more than `rules` allow, bytes when by more than that and more than
    a page. What is unknown in one version is a note; unknown in both it is not mentioned.
    """
    rows = {name: _row(name, base.metrics, candidate.metrics, rules) for name in ROWS}
    found = {name: each for name, each in rows.items() if each is not None}
    notes = [words for against, words in found.values() if not against]
    # Of a check that is ok, that it was so only when it was tried again.
    notes += [checked.reason for checked in (base, candidate) if checked.reason]
    failures = {name: words for name, (against, words) in found.items() if against}
    before, now = dict[str, Any](base.metrics), dict[str, Any](candidate.metrics)
    changes = (
        Change(ROWS[name][1], now[name] / before[name] if before[name] else None)
        for name in failures
    )
    return Differences(
        failures=tuple(failures.values()), changes=tuple(changes), notes=tuple(notes)
    )


def _row(name: str, base: ExactMetrics, candidate: ExactMetrics, rules: Rules) -> _Difference:
    words, _, judge, unknown = ROWS[name]
    values: list[Any] = [base.get(name), candidate.get(name)]
    if values == [None, None]:
        return None
    if None in values and unknown is None:
        known = "base" if values[1] is None else "candidate"
        return False, f"{words}: known of the {known} alone, not compared"
    # Formulas of opaque ops price work that a hand-written backward pass need not do.
    alike = name != "flops_counted" or base.get(_SOURCE) == candidate.get(_SOURCE)
    old, new = (unknown if value is None else value for value in values)
    growth = rules.allowed("flops" if name == "flops_counted" else "memory")
    found = judge(old, new, growth if alike else None)
    return found and (found[0], words + found[1])


_NOT_RUN = ("absent", "unsupported", "skipped")
# What a candidate's status is held against it for, the statuses of the base; and how it is called.
_AGAINST: dict[str, tuple[tuple[str, ...], str]] = {
    "incorrect": ((*STATUSES, "absent"), "wrong result"),
    "crashed": (("ok", "incorrect", *_NOT_RUN), "crashed"),
    "error": (("ok", "incorrect", *_NOT_RUN), "fails"),
    "oom": (("ok",), "out of memory"),
    "timeout": (("ok",), "timed out"),
    "unsupported": (("ok",), "no longer supports this case"),
    "skipped": (("ok",), "no longer supports this case"),
}  # fmt: skip


def verdict_of(base: Checked, candidate: Checked) -> tuple[Verdict, str] | None:
    """The verdict, with its reason, where the checks alone decide; None where both are ok.

    `incorrect` where the candidate is wrong, or fails where the base did not; `not comparable`
    where one version has no right result to compare with.
    """
    if base.status == candidate.status == "ok":
        return None
    against, words = _AGAINST.get(candidate.status, ((), ""))
    if base.status in against:
        also = " (the base's is wrong, too)" if base.status == "incorrect" else ""
        return "incorrect", f"{_with_reason(words, candidate)}{also}"
    if candidate.status == "absent":
        why = "removed: the candidate does not have it"
    elif base.status == "absent":
        why = "new: the base does not have it"
        if candidate.status != "ok":
            why += f"; {_with_reason(candidate.status, candidate)}"
    else:
        of = "" if candidate.status == "ok" else f" ({candidate.status} on the candidate, too)"
        why = f"the base has no right result: {_with_reason(base.status, base)}{of}"
    return "not comparable", why


def _with_reason(words: str, found: Checked) -> str:
    return f"{words}: {found.reason}" if found.reason else words


# In fewer rounds chance could do it: of three alike processes one grows most with probability 1/3.
LEAST_ROUNDS = 8  # (1/3)^8 = 0.015 %
LEAST_GROWTH_BYTES = 4 << 20  # heaps breathe by a little


def growing(rounds: Iterable[Round], cell: int) -> tuple[str, ...]:
    """A sentence if the candidate's process grew, in every round, by more than both of the base's.

    By `LEAST_GROWTH_BYTES` at least, while this cell was timed, whoever allocates: as seen in the
    processes. Nothing where that is not known.
    """
    excess, calls = [], 0
    for found in rounds:
        grown = found.facts.get("grown", {}).get(str(cell), {})
        samples = found.samples.get(cell, {})  # none in a round that was broken off
        known = "candidate" in samples and grown.keys() >= {"base", "candidate", "null"}
        if known and found.discarded is None:
            excess.append(grown["candidate"] - max(grown["base"], grown["null"]))
            calls = sum(map(len, samples["candidate"]))
    if len(excess) < LEAST_ROUNDS or min(excess) < LEAST_GROWTH_BYTES:
        return ()
    return (
        f"its process grows by {size(min(excess))} and more in {calls} batches of calls, in each of"
        f" {len(excess)} rounds; the base's does not",
    )
