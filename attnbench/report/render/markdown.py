"""A document as Markdown, to paste elsewhere: details folded, without figures.

What is folded within a section is on the page alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from attnbench.base.units import bullets, counted, escape, table
from attnbench.report.document import Document, Finding, Part, Section, Table, Text
from attnbench.report.render import written
from attnbench.report.render.written import LOOKS


def render(document: Document) -> str:
    """The text."""
    head = f"attnbench {document.kind}: {written.conclusion(document.conclusion)}"
    blocks = [f"## {escape(head)}", bullets(map(written.words, document.about))]
    for section in document.sections:
        blocks += _section(section, 3)
    for label, command in document.commands:
        blocks += [f"{label[:1].upper()}{label[1:]}:", f"    {written.clean(command, whole=True)}"]
    return "\n\n".join(block for block in blocks if block) + "\n"


def _section(section: Section, level: int) -> Iterator[str]:
    parts = section.parts
    if section.folded:
        parts = [part for part in parts if not (isinstance(part, Section) and part.folded)]
    found = [block for of in written.runs_of(parts) for block in _parts(of, level)]
    if not any(found):
        return
    title = escape(written.clean(section.title))
    yield f"<details><summary>{title}</summary>" if section.folded else f"{'#' * level} {title}"
    yield from found
    if section.folded:
        yield "</details>"


def _parts(parts: Sequence[Part], level: int) -> Iterator[str]:
    match parts[0]:
        case Finding():
            yield bullets(
                f"{LOOKS[sign].letter} {subjects}: {why}"
                for sign, subjects, why in written.reasons(parts)
            )
        case Table() as of if written.visible(of):
            found = written.grid(of)
            rows = [[text for text, _ in row] for row in written.rows(found)[: of.most]]
            yield table([c.head for c in found], rows, numbers=[c.number for c in found])
            if (more := len(of.rows) - of.most) > 0:
                yield f"… and {counted(more, 'more row')} on the page"
        case Text(lines=lines, quiet=True):
            yield "\n\n".join(escape(written.words(line)) for line in lines)
        case Text(lines=lines):
            yield bullets(map(written.words, lines))
        case Section() as inner:
            yield from _section(inner, level + 1)
        case Mapping() as known:
            yield bullets(f"{name}: {text}" for name, text in written.facts(known).items())
