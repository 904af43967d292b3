"""A document on the terminal: its sections, then what was concluded, then what to do next."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from rich.console import Console, RenderableType
from rich.text import Text as Shown

from attnbench.base import units
from attnbench.report.document import Document, Figure, Finding, Part, Section, Table, Text
from attnbench.report.render import tables, written
from attnbench.report.render.written import LOOKS


def render(document: Document, to: Console | None = None) -> str:
    """The text, ready to print on `to`, standard output unless given.

    What is folded, and figures, are on the page alone.
    """
    to = to or tables.console()
    parts: list[RenderableType] = [_line(written.words(line), to) for line in document.about]
    parts += _sections(document.sections, to)
    end = document.conclusion
    text = written.conclusion(end)
    text += f" (exit code {int(document.exit_code)})" if end.verdict else ""
    parts += [
        Shown(),
        _line(text, to, f"bold {LOOKS[end.sign].style}".replace("bold bold", "bold")),
    ]
    parts += [
        Shown(f"{f'{label}: ':<8}{written.clean(command, whole=True)}", no_wrap=True)
        for label, command in document.commands
    ]
    return tables.shown(*parts, to=to).lstrip("\n")


def _sections(
    sections: Sequence[Section], to: Console, before: str = "\n"
) -> Iterator[RenderableType]:
    for section in sections:
        if section.folded:
            continue
        found = [part for parts in written.runs_of(section.parts) for part in _parts(parts, to)]
        if found:
            yield Shown(f"{before}{written.clean(section.title)}", style="bold")
            yield from found


def _parts(parts: Sequence[Part], to: Console) -> Iterator[RenderableType]:
    match parts[0]:
        case Finding():
            for sign, subjects, why in written.reasons(parts):
                line = _line(f"{LOOKS[sign].letter} {subjects}: {why}", to)
                line.stylize(LOOKS[sign].style, 0, len(subjects) + 2)
                yield line
        case Table() as table:
            yield from _table(table, to)
        case Text(lines=lines, quiet=quiet):
            bullet = "- " * (len(lines) > 1 and not quiet)
            for words in lines:
                yield _line(bullet + written.words(words), to, "dim" if quiet else "")
        case Section() as inner:
            yield from _sections([inner], to, "")
        case Mapping() as facts:
            for name, text in written.facts(facts).items():
                yield _line(f"{name}: {text}", to)
        case Figure():
            pass


def _table(table: Table, to: Console) -> Iterator[RenderableType]:
    if not written.visible(table):
        return
    found = written.grid(table)
    rows = [
        [Shown(text, LOOKS[sign].style) if sign else text for text, sign in row]
        for row in written.rows(found)
    ]
    right = [column.head for column in found if column.number]
    whole = [column.head for column in found if column.cells[0][1]]
    spare = [table.columns[name] for name in table.spare]
    cut = table.columns.get(table.cut, "")
    yield tables.grid(
        [column.head for column in found], rows[: table.most], right, whole, spare, to, cut
    )
    if (more := len(rows) - table.most) > 0:
        yield Shown(f"… and {units.counted(more, 'more row')} on the page")


def _line(text: str, to: Console, style: str = "") -> Shown:
    """A line, broken between words, or in one that is too long; two blanks hang before the rest."""
    if to.width >= 10_000 or any(len(word) > to.width - 4 for word in text.split()):
        return Shown(text, style)
    return Shown(units.filled(text, to.width, 2), style, no_wrap=True)
