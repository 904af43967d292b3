"""How values, verdicts and words are written: what all renderers share."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from attnbench.base import units
from attnbench.report import document as doc

_NAMED = 8  # subjects of which the same is said
INTERVAL = "95 % interval"


class Look(NamedTuple):
    """How a sign is shown: its letter, a style of the terminal, a class of the page."""

    letter: str
    style: str
    page: str


LOOKS: dict[doc.Sign, Look] = {
    "good": Look("✓", "green", "holds"),
    "better": Look("↓", "cyan", "holds"),
    "bad": Look("✗", "bold red", "refuted"),
    "open": Look("?", "yellow", "inconclusive"),
    "none": Look("–", "dim", "inconclusive"),
}
# Units that are not here are written as `str` has them.
_WRITE: dict[doc.Unit, Callable[[Any], str]] = {
    "number": "{:.3g}".format, "exponent": "{:.2f}".format,
    "count": units.count, "us": units.time, "s": units.seconds,
    "bytes": units.size, "ratio": units.ratio, "change": units.change, "share": units.brief_percent,
    "delta_us": units.delta(units.time), "delta_bytes": units.delta(units.size),
    "tflops": units.flop_rate, "gbps": units.bandwidth,
}  # fmt: skip
_INTERVALS: dict[doc.Unit, Callable[[Any, Any], str]] = {
    "exponent": "{:.2f}–{:.2f}".format,
    "number": lambda low, high: f"{units.digits(low)}–{units.digits(high)}",
    "share": lambda low, high: f"{units.brief_percent(low)[:-2]}–{units.brief_percent(high)}",
    "us": units.time_interval, "ratio": units.ratio_interval, "change": units.change_interval,
}  # fmt: skip
# What no page, XML file or terminal can show, or what turns the order of letters around: control
# characters, marks of direction, halves of a pair, non-characters.
_UNPRINTABLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff\ud800-\udfff\ufffe\uffff]"
)
_LONG = re.compile(r"\S{161,}")  # a word: names of that length say nothing more


def clean(text: str, *, whole: bool = False) -> str:
    """The text on one line, without what cannot be shown; words of any length if `whole`."""
    flat = _UNPRINTABLE.sub("", " ".join(text.split()))
    return flat if whole else _LONG.sub(lambda word: f"{word[0][:80]}…{word[0][-79:]}", flat)


def value(of: doc.Value | str) -> str:
    """A value in its unit, without its interval."""
    if isinstance(of, str):
        return clean(of)
    if units.is_unknown(of.number):
        return clean(of.of) or units.UNKNOWN
    written = clean(str(of.number))
    if not isinstance(of.number, str) and of.unit in _WRITE:
        written = _WRITE[of.unit](of.number)
    return clean(f"{of.of} {written}{of.mark}") if of.of or of.mark else written


def interval(of: doc.Cell) -> str:
    """The interval of a value; where there is none, unknown."""
    if not isinstance(of, doc.Value) or of.unit not in _INTERVALS or of.low is of.high is None:
        return units.UNKNOWN
    return _INTERVALS[of.unit](of.low, of.high)


def words(of: doc.Words) -> str:
    """A sentence with its figures."""
    if isinstance(of, str):
        return clean(of)

    def figure(found: re.Match[str]) -> str:
        if (known := of.figures.get(found[1])) is None:
            return found[0]
        return interval(known) if found[2] else value(known)

    return clean(re.sub(r"\{(\w+)(\.interval)?\}", figure, of.text))


def verdict(of: doc.Finding) -> str:
    """`✗ regressed`."""
    return f"{LOOKS[of.sign].letter} {clean(of.verdict)}"


def figures(of: doc.Finding) -> str:
    """Its figures that have intervals: `+10.6 % (+8.1 … +12.9 %)`."""
    ends = (x for x in of.figures.values() if x.low is not None)
    return ": ".join(f"{value(x)} ({interval(x)})" for x in ends)


def conclusion(of: doc.Finding) -> str:
    """`✗ failed: 1 regressed`; without a verdict the reason alone."""
    if not of.verdict:
        return words(of.reason)
    return f"{verdict(of)}: {words(of.reason)}" if of.reason else verdict(of)


Shown = tuple[str, doc.Sign | None]  # a cell: its text, and the sign of a verdict


class Column(NamedTuple):
    """A column of a table as people see it; `impl`: its cells name implementations."""

    head: str
    cells: list[Shown]
    number: bool = False
    impl: bool = False


def grid(table: doc.Table) -> list[Column]:
    """The columns with headers; where cells have intervals, these are a column of their own."""
    found: list[Column] = []
    for i, (name, head) in enumerate(table.columns.items()):
        if not head:
            continue
        cells = [row[i] for row in table.rows]
        kinds = {of.unit for of in cells if isinstance(of, doc.Value)}
        texts: list[Shown] = [
            (verdict(c), c.sign) if isinstance(c, doc.Finding) else (value(c), None) for c in cells
        ]
        if table.grouped and not found:
            firsts = [text for text, _ in texts]
            texts = [
                ("" if j and text == firsts[j - 1] else text, None) for j, text in enumerate(firsts)
            ]
        found.append(Column(clean(head), texts, bool(kinds - {"text", "impl"}), "impl" in kinds))
        if any(isinstance(of, doc.Value) and of.low is not None for of in cells):
            ends: list[Shown] = [(interval(of), None) for of in cells]
            found.append(Column(table.intervals.get(name, INTERVAL), ends, number=True))
    return found


def rows(columns: Sequence[Column]) -> list[tuple[Shown, ...]]:
    """The same cells by row."""
    return list(zip(*(column.cells for column in columns), strict=True))


def reasons(parts: Iterable[doc.Part]) -> list[tuple[doc.Sign, str, str]]:
    """What findings say beside their verdicts: sign, subjects that share it, and why."""
    sharing: dict[tuple[doc.Sign, str], list[str]] = {}
    for of in parts:
        if isinstance(of, doc.Finding):
            found = [(of.sign, words(of.reason))] if of.reason else []
            for key in (*found, *(("none", f"note: {clean(note)}") for note in of.notes)):
                sharing.setdefault(key, []).append(clean(of.subject))  # type: ignore[arg-type]
    return [(sign, listed(names), why) for (sign, why), names in sharing.items()]


def listed(names: Sequence[str]) -> str:
    """`a, b, c and 12 more`."""
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more


def runs_of(parts: Sequence[doc.Part]) -> list[list[doc.Part]]:
    """The parts with findings that follow each other in one list, all others in their own."""
    found: list[list[doc.Part]] = []
    for part in parts:
        if found and isinstance(part, doc.Finding) and isinstance(found[-1][0], doc.Finding):
            found[-1].append(part)
        else:
            found.append([part])
    return found


def visible(of: doc.Part) -> bool:
    """Whether people see anything of a part; a table without headers is for JSON alone."""
    match of:
        case doc.Section(parts=parts):
            return any(map(visible, parts))
        case doc.Table(rows=rows, columns=columns):
            return bool(rows) and any(columns.values())
        case doc.Text(lines=lines):
            return bool(lines)
    return True


def facts(known: Mapping[str, doc.Value]) -> dict[str, str]:
    """Facts as texts, by name."""
    return {clean(name): value(of) for name, of in known.items()}


def tests(sections: Iterable[doc.Part]) -> dict[tuple[str, str], doc.Finding]:
    """The findings that are tests, in tables and beside them, by class and name."""
    found: dict[tuple[str, str], doc.Finding] = {}
    for part in sections:
        match part:
            case doc.Section(parts=parts):
                found |= tests(parts) | found
            case doc.Table(rows=rows):
                found |= tests(c for row in rows for c in row if isinstance(c, doc.Finding)) | found
            case doc.Finding(test=(group, name)):
                found.setdefault((group, name), part)
    return found
