"""What a command says, as values: made once from data, shown by one renderer for each format.

A producer (`report.documents`) writes no unit, sign, colour or width; a renderer
(`report.render`) knows nothing of what it shows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Sign = Literal["good", "better", "bad", "open", "none"]
# `change` is a ratio, shown by what it is above 1; `tflops` and `gbps` are rates.
Unit = Literal[
    "text", "impl", "number", "count", "us", "s", "bytes", "ratio", "exponent", "change",
    "delta_us", "delta_bytes", "share", "tflops", "gbps",
]  # fmt: skip


@dataclass(frozen=True)
class Value:
    """A number in its unit, with its interval [low, high] where that is known.

    None is unknown, never 0. `of` names the quantity, where a column holds several; `mark` follows.
    """

    number: float | int | str | bool | None
    unit: Unit = "text"
    low: float | None = None
    high: float | None = None
    of: str = ""
    mark: str = ""


@dataclass(frozen=True)
class Sentence:
    """Words with `figures` in them: `{name}` is a value, `{name.interval}` its interval."""

    text: str
    figures: Mapping[str, Value] = field(default_factory=dict)


def sentence(text: str, **figures: Value | str | None) -> Sentence:
    """A sentence; names from outside are figures, too, so that their braces mean nothing."""
    known = {k: v if isinstance(v, Value) else Value(v) for k, v in figures.items()}
    return Sentence(text, known)


Words = str | Sentence


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A verdict on a subject, and why. `verdict` is the domain's own word: shown, never parsed.

    `test` is its class and name in JUnit XML, which must not depend on what else was measured;
    without it is in none. `figures` is what the verdict rests on, `notes` is what changed beside
    it.
    """

    sign: Sign
    verdict: str
    subject: str
    reason: Words = ""
    test: tuple[str, str] | None = None
    figures: Mapping[str, Value] = field(default_factory=dict)
    notes: Sequence[str] = ()


Cell = Value | Finding | str


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows of cells under `columns`, from their names in JSON to their headers.

    A column whose header is empty stands in JSON alone. Those of `spare` go first where the place
    is too narrow, in this order; then texts of the column `cut` lose their middle. A terminal shows
    the first `most` rows. `intervals` has headers of the intervals of columns; with `sums` the last
    row is the sum; `bold` are numbers of rows, `bold_means` says on the page what that says; with
    `grouped` rows of one group follow each other, and their first cell is shown once.
    """

    columns: Mapping[str, str]
    rows: Sequence[Sequence[Cell]]
    spare: Sequence[str] = ()
    cut: str = ""
    intervals: Mapping[str, str] = field(default_factory=dict)
    most: int = 60
    sums: bool = False
    bold: Sequence[int] = ()
    bold_means: str = ""
    grouped: bool = False


@dataclass(frozen=True, kw_only=True)
class Picture:
    """An image as SVG, what it shows in words, and what stands above it.

    Those of one `title` belong together, with one `reading`; panels of each share its `caption`.
    """

    svg: bytes
    alt: str
    head: Finding | None = None
    title: str = ""
    caption: str = ""
    reading: str = ""


@dataclass(frozen=True, kw_only=True)
class Figure:
    """Pictures, drawn where a page needs them.

    `draw` names the function of this package that draws them, `rounds.draw_all`: it takes `of` and
    a folder, and returns `Picture`s. So a document is made without matplotlib.
    """

    title: str
    draw: str
    of: tuple[Any, ...]


@dataclass(frozen=True)
class Text:
    """Sentences, one below the other. `quiet` explains, and says no result."""

    lines: Sequence[Words]
    quiet: bool = False


Facts = Mapping[str, Value]  # by name


@dataclass(frozen=True)
class Section:
    """Parts under a title; one that is `folded` is not on the terminal."""

    title: str
    parts: Sequence[Part]
    folded: bool = False


Part = Finding | Table | Figure | Text | Facts | Section


@dataclass(frozen=True, kw_only=True)
class Document:
    """What a command found. `about` is what it is of, in a few words; `facts` are its rules.

    Where a page has a `title`, it stands in place of the conclusion, which follows below.

    `commands` say what to do next: pairs of a label and a command or a path. `table` is a
    DataFrame for programs, which no format shows.
    """

    kind: str
    conclusion: Finding
    exit_code: int  # an ExitCode, or that of a program which ran
    sections: Sequence[Section]
    about: Sequence[Words] = ()
    facts: Facts = field(default_factory=dict)
    created: str = ""
    spent_s: float | None = None
    commands: Sequence[tuple[str, str]] = ()
    title: str = ""
    table: Any = field(default=None, compare=False)


def facts(known: Mapping[str, Any]) -> Facts:
    """What run.json knows, or options, by name: bytes where the name says so."""
    found: dict[str, Value] = {}
    for name, value in known.items():
        if isinstance(value, dict):  # that of the caches, whose values are bytes
            parts = value.items() if name != "ceilings" else ()  # which have a table of their own
            for key, x in parts:
                found[f"{name}, {key}"] = Value(x, "bytes" if type(x) is int else "text")
        elif isinstance(value, list | tuple):
            found[name] = Value(", ".join(map(str, value)))
        elif type(value) is int and name.endswith("_bytes"):
            found[name] = Value(value, "bytes")
        else:
            plain = isinstance(value, int | float | str | None)
            found[name] = Value(value if plain else str(value))
    return found


def numbers(known: Mapping[str, Any]) -> Facts:
    """Figures by name, as the analysis has them: their unit is in the name."""
    return {k: Value(v, "number" if isinstance(v, float) else "text") for k, v in known.items()}


def changes(differing: Iterable[tuple[str, Any, Any]]) -> list[Sentence]:
    """Facts that differ, given by name, before and after: `torch: 2.11.0 → 2.13.0`."""
    return [
        sentence("{name}: {before} → {after}", name=name, before=was.get(name), after=now.get(name))
        for one, before, after in differing
        for was, now in ((facts({one: before}), facts({one: after})),)
        for name in {**was, **now}
        if was.get(name) != now.get(name)
    ]
