"""The words of one profile and of two, the same on the terminal, in Markdown and on the page."""

from __future__ import annotations

import math

from attnbench.analysis.profiles import TOGETHER, Change, Difference, kernel_name, together
from attnbench.base import units
from attnbench.report.profile import one
from attnbench.report.render.tables import value_text
from attnbench.schema.profile import Memory, Profile
from attnbench.theory.traits import case_label

MOST_ROWS = 12  # of single ops in a table of differences
LEAST = 0.005  # of the longer time: what changed by less is put together
BRIEF = 26  # letters of an op in the terminal's table
COMMON = 0.05  # of the logarithm of a factor that is worth a sentence
MOST_LABEL = 14  # letters of a label that heads a column
NONE = "no op changed beyond noise"
READING = (
    "The rows add up to the last; bytes are those read and written. An op that is called as before,"
    " on as many bytes, counts as changed only beyond noise. Profiles are taken one after another,"
    " and one process can be faster than the next: whether a version is slower, attnbench gate"
    " decides."
)


def case(profile: Profile) -> str:
    """The case in short."""
    return case_label(profile.cell.case)


def labels(found: Difference) -> tuple[str, str]:
    """What to call A and B: by their labels, or where these are alike or long by those letters."""
    a, b = found.a.label, found.b.label
    fit = a != b and max(len(a), len(b)) <= MOST_LABEL
    return (a, b) if fit else ("A", "B")


def head(found: Difference) -> str:
    """What is compared, in which case, and what both have in common of machine and torch.

    `naive → chunked`; where labels head no columns, `A: naive in … → B: …`.
    """
    named = zip(labels(found), (found.a.label, found.b.label), strict=True)
    pair = " → ".join(label if name == label else f"{name}: {label}" for name, label in named)
    a, b = found.a.environment, found.b.environment
    same = [name for name in ("device_name", "torch") if a.get(name) and a[name] == b.get(name)]
    facts = [f"torch {a[name]}" if name == "torch" else str(a[name]) for name in same]
    return " · ".join([f"{pair}: {case(found.a)}", *facts])


def brief(name: str, longest: int) -> str:
    """The name of an op or a kernel in at most `longest` letters: parameters go first."""
    if len(name) > longest:
        name = kernel_name(name).replace("at::native::", "")
    return one.brief(name, longest)


def change(delta_us: float) -> str:
    """A change of time: `+1.20 ms`, `−35.0 µs`, `0`."""
    if not delta_us:
        return "0"
    return f"{'+' if delta_us > 0 else '−'}{units.time(abs(delta_us))}"


def calls(of: Change) -> str:
    """How often the op runs in a call of A and of B: `2 → 32`, or once where that is the same."""
    if of.what in TOGETHER:
        return ""
    a, b = (f"{count:.3g}" for count in (of.a_count, of.b_count))
    return a if a == b else f"{a} → {b}"


def moved(of: Change) -> str:
    """The change of bytes read and written: `+2.0 MiB`."""
    if of.bytes is None:
        return units.UNKNOWN
    return f"{'+' if of.bytes > 0 else '−'}{units.size(abs(of.bytes))}" if of.bytes else "0"


def shown(found: Difference, most: int, least: float = 0.0) -> tuple[Change, ...]:
    """At most `most` single ops, then those left over as one, then the two last entries.

    Three or more, up to the last that changes by the share `least` of the longer time.
    """
    single = found.ops
    least_us = least * max(found.a.time.median_us, found.b.time.median_us)
    seen = [n for n, of in enumerate(single, start=1) if abs(of.delta_us) >= least_us]
    count = min(most, max([3, *seen]))
    rest = together(f"{len(single) - count} more", "more", single[count:])
    return (*single[:count], *rest, *found.changes[len(single) :])


def header(found: Difference) -> tuple[str, ...]:
    """The columns of `rows`."""
    return ("op", *labels(found), "change", "calls", "what", "bytes")


def rows(found: Difference, most: int = MOST_ROWS, least: float = LEAST) -> list[tuple[str, ...]]:
    """A row for each entry of the difference, with the sum as the last."""
    table = []
    for of in shown(found, most, least):
        there = (of.a_us, of.what != "appeared"), (of.b_us, of.what != "vanished")
        times = (one.signed(time_us) if known else units.UNKNOWN for time_us, known in there)
        said = "" if of.what in TOGETHER else of.what
        size = "" if of.what == "outside" else moved(of)
        table.append((of.name, *times, change(of.delta_us), calls(of), said, size))
    both = (units.time(of.time.median_us) for of in (found.a, found.b))
    return [*table, ("a call", *both, change(found.delta_us), "", "", "")]


def verdict(found: Difference) -> str:
    """The result in one sentence: `chunked takes 0.28 of naive's time: 44.2 ms, not 159 ms …`."""
    a, b = found.a, found.b
    ours, theirs = labels(found)
    ends, ratio = found.ratio_interval, found.ratio
    times = f"{units.time(b.time.median_us)}, not {units.time(a.time.median_us)}"
    interval = f"{_digits(ends[0])}–{_digits(ends[1])}" if ends else "its interval is unknown"
    if ends and ends[0] <= 1 <= ends[1]:
        return (
            f"{theirs} and {ours} take the same time but for noise: {_digits(ratio)} of it"
            f" ({interval}): {times}"
        )
    much = f"{_digits(ratio)} {'of' if ratio < 1 else 'times'} {ours}'s time ({interval})"
    return f"{theirs} takes {much}: {times}"


def _digits(ratio: float) -> str:
    return units.digits(ratio, 2 if ratio < 0.995 else 3)


def summary(found: Difference) -> list[str]:
    """The verdict, what changed most, and both peaks of memory."""
    ops = [of for of in found.ops if abs(of.delta_us) >= 0.02 * abs(found.delta_us)][:3]
    most = ", ".join(f"{brief(of.name, 48)} {change(of.delta_us)} ({of.what})" for of in ops)
    single = found.ops
    count = f"{units.counted(len(single), 'op')} changed"
    parts = [verdict(found), f"{count}: {most}" if most else count if single else NONE]
    if found.common is not None and abs(math.log(found.common or 1.0)) > COMMON:
        parts.append(
            f"ops that are alike in both take {units.digits(found.common, 2)} times as long in"
            f" {labels(found)[1]}: the machine's speed, or a cause common to all"
        )
    return [
        *parts,
        *(
            memory(of, name)
            for of, name in zip((found.a, found.b), labels(found), strict=True)
            if of.memory.peak_bytes is not None
        ),
    ]


def predicted_peak(of: Memory) -> float | None:
    """The workspace predicted from sizes alone, and the outputs: the peak if it is right."""
    if of.predicted_bytes is None or of.outputs_bytes is None:
        return None
    return of.predicted_bytes + of.outputs_bytes


def memory(profile: Profile, name: str = "") -> str:
    """`naive: peak 128.0 MiB in aten::softmax, predicted 128.0 MiB`."""
    of = profile.memory
    where = f" in {brief(of.peak_op, 48)}" if of.peak_op else ""
    predicted = predicted_peak(of)
    said = f", predicted {units.size(predicted)}" if predicted is not None else ""
    return f"{name or profile.label}: memory peaks at {units.size(of.peak_bytes)}{where}{said}"


def environment(found: Difference) -> list[tuple[str, str, str]]:
    """The facts of the environments that differ: name, A's value, B's."""
    return [(of, value_text(of, a), value_text(of, b)) for of, a, b in found.environment]
