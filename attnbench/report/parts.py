"""What `compare` and `history` show: the same parts on the terminal, in Markdown and on a page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.text import Text

from attnbench.base import units
from attnbench.base.files import write_whole
from attnbench.report.render import tables

SIGNS = {
    "slower": "✗", "regression": "✗", "faster": "↓", "improvement": "↓", "suspicious": "?",
    "not comparable": "–", "insufficient data": "–", "no change": "✓", "no change seen": "✓",
}  # fmt: skip
STYLES = {"✗": "bold red", "?": "yellow", "–": "dim", "↓": "cyan", "✓": "green"}
CLASSES = {"✗": "refuted", "?": "inconclusive", "–": "inconclusive", "↓": "holds"}  # of page.css
_SHOWN = 20  # sentences and rows of a part on the terminal
_COMMANDS = 8  # there


@dataclass(frozen=True, kw_only=True)
class Part:
    """Sentences, a table, commands, pictures; the first column of a table tells its rows.

    Columns after the first `text_columns` hold numbers; one called verdict has words of `SIGNS`.
    `most` rows are printed; `folded` has its place in files alone, as `panels` have on the page.
    """

    title: str
    sentences: Sequence[str] = ()
    header: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    text_columns: int = 1
    commands: Sequence[str] = ()
    panels: Sequence[dict[str, str]] = ()  # name, data, verdict, changes
    most: int = _SHOWN
    folded: bool = False


@dataclass(frozen=True, kw_only=True)
class Section:
    """What was found in a few words, what it is of, and its parts."""

    title: str
    facts: Sequence[str]
    parts: Sequence[Part]


def shortened(names: Sequence[str]) -> tuple[str, list[str]]:
    """The words that all names have, and each name without them; one name stays as it is."""
    return units.split_common(names) if len(names) > 1 else ("", list(names))


def terminal(sections: Sequence[Section]) -> str:
    """All sections in short, ready to print."""
    shown: list[Any] = []
    for section in sections:
        shown += [*[Text()] * bool(shown), *map(Text, section.facts)]
        for part in section.parts:
            shown += _on_terminal(part)
        shown += [Text(), Text(section.title, style="bold")]
    return tables.shown(*shown)


def _on_terminal(part: Part) -> Iterator[Any]:
    if part.folded or part.panels:
        return
    yield Text(f"\n{part.title}", style="bold")
    for sentence in part.sentences[:_SHOWN]:
        yield Text(units.filled(sentence, tables.console().width, 2, "- "), no_wrap=True)
    if part.rows:
        rows = [
            [Text(text, STYLES[text[0]]) if text[:1] in STYLES else text for text in row]
            for row in _signed(part)[: part.most]
        ]
        right = part.header[part.text_columns :]
        yield tables.grid(
            part.header, rows, right=right, whole=("verdict",), spare=("before", "after")
        )
    more = max(len(part.sentences) - _SHOWN, len(part.rows) - part.most)
    if more > 0:
        yield Text(f"… and {more} more on the page")
    for command in part.commands[:_COMMANDS]:
        yield Text(command, no_wrap=True)


def _signed(part: Part) -> list[list[str]]:
    """The rows of a part with a sign before each verdict."""
    return [
        [
            f"{SIGNS[text]} {text}" if column == "verdict" else text
            for text, column in zip(row, part.header, strict=True)
        ]
        for row in part.rows
    ]


def markdown(name: str, sections: Sequence[Section]) -> str:
    """All sections as Markdown; long tables folded."""
    blocks = []
    for section in sections:
        blocks += [f"## {name}: {units.escape(section.title)}", units.bullets(section.facts)]
        for part in section.parts:
            if part.panels:
                continue
            folded = f"<details><summary>{part.title} ({len(part.rows)})</summary>"
            blocks += [
                folded if part.folded else f"### {part.title}",
                units.bullets(part.sentences),
                units.table(part.header, _signed(part), part.text_columns) if part.rows else "",
                "\n".join(f"    {command}" for command in part.commands),
                "</details>" if part.folded else "",
            ]
    return "\n\n".join(filter(None, blocks)) + "\n"


def write_all(folder: Path, name: str, sections: Sequence[Section]) -> Path:
    """Write `name`.html and `name`.md into a folder; return the page.

    Raises:
        StoreError: the folder cannot be written.
    """
    from attnbench.report.render.html import template

    page = template("parts.html.jinja", Path(__file__).parent).render(
        name=f"attnbench {name}", sections=sections, signs=SIGNS, classes=CLASSES
    )
    write_whole(folder / f"{name}.md", markdown(f"attnbench {name}", sections))
    write_whole(folder / f"{name}.html", page)
    return folder / f"{name}.html"
