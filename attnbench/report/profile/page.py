"""What a profile, or two of one case, leave: profile.html, profile.md, plots; lines to print."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.text import Text

from attnbench.analysis.profiles import Difference
from attnbench.base.files import write_whole
from attnbench.base.units import bullets, escape, table
from attnbench.report.profile import one, texts
from attnbench.report.render import tables
from attnbench.report.render.html import template
from attnbench.report.render.tables import value_texts
from attnbench.schema.profile import Profile

PAGE, MARKDOWN, PLOTS = "profile.html", "profile.md", "plots"
MOST_OPS, MOST_OPS_BRIEF = 40, 10  # of one profile on the page, and in Markdown


def terminal(found: Difference) -> str:
    """The difference of two profiles, ready to print: the verdict, then the table."""
    header, both = texts.header(found), (found.a, found.b)
    differs = [f"{name}: {a} → {b}" for name, a, b in texts.environment(found)]
    notes = [
        f"note, {name}: {text}"
        for of, name in zip(both, texts.labels(found), strict=True)
        for text in one.notes(of)
    ]
    rows = [(texts.brief(row[0], texts.BRIEF), *row[1:]) for row in texts.rows(found)]
    right, spare = (*header[1:5], "bytes"), ("bytes", "what")
    verdict, *facts = texts.summary(found)
    return tables.shown(
        Text(texts.head(found)),
        *(Text(text, style="yellow") for text in differs),
        Text(verdict, style="bold"),
        tables.grid(header, rows, right, whole=("op", "what"), spare=spare),
        *map(Text, (*facts, *notes)),
        Text(texts.READING, style="dim"),
    )


def write_all(folder: Path, profiles: Sequence[Profile], found: Difference | None = None) -> Path:
    """Write profile.html, profile.md and plots/ into an existing folder; return the page.

    `profiles` are the one that lies there, or the two of `found`, which lie in folders a and b.

    Raises:
        StoreError: the folder cannot be written.
    """
    from attnbench.report import pages  # matplotlib
    from attnbench.report.profile import figure

    with pages.writing(folder):
        values = {
            "title": _title(profiles),
            "head": _head(profiles, found),
            "profiles": profiles,
            "found": found,
            "one": one,
            "texts": texts,
            "value_texts": value_texts,
            "most_ops": MOST_OPS,
            "plots": figure.draw_all(profiles, found, folder / PLOTS),
        }
        write_whole(
            folder / PAGE, template("profile.html.jinja", Path(__file__).parents[1]).render(values)
        )
        write_whole(folder / MARKDOWN, markdown(profiles, found))
    return folder / PAGE


def _title(profiles: Sequence[Profile]) -> str:
    return " → ".join(profile.label for profile in profiles)


def _head(profiles: Sequence[Profile], found: Difference | None) -> str:
    return texts.head(found) if found else one.head(profiles[0])


def markdown(profiles: Sequence[Profile], found: Difference | None) -> str:
    """The same in short, to paste elsewhere."""
    blocks = [
        f"## attnbench profile: {escape(_title(profiles))}",
        escape(_head(profiles, found)),
    ]
    if found:
        if differs := texts.environment(found):
            blocks += [
                "### The environments differ",
                table(("fact", *texts.labels(found)), differs, 3),
            ]
        blocks += [
            bullets(texts.summary(found)),
            table(texts.header(found), texts.rows(found)),
            escape(texts.READING),
        ]
    for profile in profiles:
        rows = one.rows(profile, MOST_OPS_BRIEF)
        blocks += [f"### {escape(profile.label)}", bullets(one.sentences(profile)),
                   table(one.HEADER, rows)]  # fmt: skip
    return "\n\n".join(blocks) + "\n"
