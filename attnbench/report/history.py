"""What a history says: on the terminal, in Markdown, and on a page with small multiples."""

from __future__ import annotations

import math
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.text import Text

from attnbench.analysis.history.series import VERDICTS, Found, Line, Mark, Series, Verdict
from attnbench.base import units
from attnbench.base.files import write_whole
from attnbench.base.units import escape
from attnbench.errors import StoreError
from attnbench.report import tables
from attnbench.report.tables import value_text

PAGE, MARKDOWN = "history.html", "history.md"
HEADER = ("verdict", "change", "cell", "since", "runs", "why no more than suspicious")
SIGNS: dict[Verdict, str] = {
    "regression": "✗", "improvement": "↓", "suspicious": "?", "no change": "✓",
    "insufficient data": "–",
}  # fmt: skip
STYLES: dict[Verdict, str] = {
    "regression": "bold red", "improvement": "cyan", "suspicious": "yellow", "no change": "green",
    "insufficient data": "dim",
}  # fmt: skip
MOST_SHOWN, MOST_ROWS = 20, 40  # on the terminal, and in Markdown
READING = (
    "A cell's time here is without what moved all cells of its run, and the other cells that it"
    " took turns with: that is a line of its own. Runs taken apart cannot tell a change of the code"
    " from one of the machine: ask attnbench gate."
)


def rows(series: Series) -> list[tuple[Verdict, tuple[str, ...]]]:
    """The findings, what is sure first, by size, with the columns of `HEADER`."""
    names = short_names(series)
    pairs = [(line, found) for line in series.lines for found in line.found]
    pairs.sort(key=lambda pair: (pair[1].verdict == "suspicious", -abs(pair[1].step.log)))
    return [
        (
            found.verdict,
            (
                f"{SIGNS[found.verdict]} {found.verdict}", change(found), names[line.name],
                place(series, found.at), f"{found.step.before}|{found.step.after}",
                why(line, found),
            ),
        )
        for line, found in pairs
    ]  # fmt: skip


def change(found: Found) -> str:
    """`+10.4 %`: of the time after the step against that before."""
    return f"{100 * math.expm1(found.step.log):+.1f} %".replace("-", "−")


def place(series: Series, at: int) -> str:
    """The day of a run, and its commit, or its name where that is unknown."""
    run = series.runs[at]
    dirty = "+" if run.dirty else ""
    return f"{run.when:%Y-%m-%d} {run.commit[:7] + dirty if run.commit else run.run}"


def why(line: Line, found: Found) -> str:
    """Why a step is no more than suspicious; empty where it is more."""
    step, said = found.step, []
    if "few runs" in found.why:
        said.append("too few runs so far" if step.after <= step.before else "too few runs before")
    if found.mark is not None:
        said.append(mark_text(found.mark))
    if "together" in found.why:
        common = "the machine, or a change common to all of them"
        said.append("other cells moved along" if line.kind == "cell" else common)
    return "; ".join(said)


def mark_text(mark: Mark) -> str:
    """What changed in the environment: `torch 2.11.0 → 2.13.0, blas …`."""
    return ", ".join(
        f"{name} {value_text(name, old)} → {value_text(name, new)}" for name, old, new in mark.facts
    )


def short_names(series: Series) -> dict[str, str]:
    """The names of lines without the words that all cells share."""
    words = [line.name.split() for line in series.lines if line.kind == "cell"]
    shared = set.intersection(*map(set, words)) if len(words) > 1 else set()
    kept = {
        line.name: " ".join(w for w in line.name.split() if w not in shared)
        for line in series.lines
    }
    return {
        line.name: f"all cells of {kept[line.name] or 'one group'}"
        if line.kind == "group"
        else kept[line.name] or line.name
        for line in series.lines
    }


def counts(series: Series) -> dict[Verdict, int]:
    """How many cells have each verdict."""
    found = Counter(line.verdict for line in series.lines if line.kind == "cell")
    return {verdict: found[verdict] for verdict in VERDICTS}


def heading(series: Series) -> str:
    """The machine, and from when to when."""
    first, last = series.runs[0], series.runs[-1]
    device, name, cores = (value_text("", part) for part in last.machine)
    count = f"{len(series.runs)} run{'s' * (len(series.runs) > 1)}"
    where = f"{name} ({device}, {cores} cores)"
    return f"{count} on {where}, {first.when:%Y-%m-%d %H:%M} to {last.when:%Y-%m-%d %H:%M}"


def _counted(series: Series) -> str:
    return ", ".join(f"{SIGNS[v]} {n} {v}" for v, n in counts(series).items())


def terminal(found: Sequence[Series]) -> str:
    """For each machine what changed most, a line a finding, then the counts; ready to print."""
    parts: list[Any] = []
    for series in found:
        lines = rows(series)[:MOST_SHOWN]
        parts.append(Text(heading(series), style="bold"))
        sure: list[tuple[str | Text, ...]] = [
            (Text(texts[0], style=STYLES[verdict]), *texts[1:4])
            for verdict, texts in lines
            if verdict != "suspicious"
        ]
        if sure:
            parts.append(tables.grid(HEADER[:4], sure, right=HEADER[1:2], whole=HEADER[::3]))
        for sign, size, cell, since, _, reason in (texts for _, texts in lines[len(sure) :]):
            words = Text.assemble((sign, STYLES["suspicious"]), f" {size} {cell}, {since}: ")
            parts.append(words.append(reason))
        if more := sum(len(line.found) for line in series.lines) - len(lines):
            parts.append(Text(f"… and {more} more on the page"))
        parts += [Text(f"{place(series, m.at)}: {mark_text(m)}", "dim") for m in series.marks]
        parts += [Text(f"cells: {_counted(series)}"), Text()]
    return tables.shown(*parts, Text(READING, style="dim"))


def markdown(found: Sequence[Series]) -> str:
    """The same as Markdown."""
    blocks = ["# attnbench history"]
    for series in found:
        lines = rows(series)
        blocks += [f"## {escape(heading(series))}", f"Cells: {escape(_counted(series))}."]
        if lines:
            blocks.append(units.table(HEADER, [texts for _, texts in lines[:MOST_ROWS]]))
        if len(lines) > MOST_ROWS:
            blocks.append(f"… and {len(lines) - MOST_ROWS} more on the page")
        changes = [f"- {place(series, m.at)}: {escape(mark_text(m))}" for m in series.marks]
        blocks += ["### Changes of the environment", "\n".join(changes)] if changes else []
    return "\n\n".join([*blocks, READING]) + "\n"


def write_page(folder: Path, found: Sequence[Series], panels: int) -> Path:
    """Write history.html and history.md into `folder`; at most so many panels a machine.

    Raises:
        StoreError: the folder cannot be written.
    """
    from attnbench.report import pages  # matplotlib

    try:
        with tempfile.TemporaryDirectory() as scratch:
            machines = [_machine(series, panels, Path(scratch)) for series in found]
    except OSError as err:
        raise StoreError(f"cannot draw in {tempfile.gettempdir()} ({err.strerror})") from err
    values = {"machines": machines, "header": HEADER, "reading": READING}
    write_whole(folder / PAGE, pages.template("history.html.jinja").render(values))
    write_whole(folder / MARKDOWN, markdown(found))
    return folder / PAGE


def _machine(series: Series, most: int, scratch: Path) -> dict[str, Any]:
    from attnbench.report import history_panels

    chosen = list(_chosen(series, most))
    names = short_names(series)
    return {
        "heading": heading(series),
        "counts": counts(series),
        "signs": SIGNS,
        "rows": rows(series),
        "marks": [(number, place(series, m.at), mark_text(m))
                  for number, m in enumerate(series.marks, start=1)],
        "panels": [
            {"name": names[line.name], "verdict": line.verdict, "data": data,
             "changes": ", ".join(map(change, line.found))}
            for line, data in zip(
                chosen, history_panels.draw_all(series, chosen, scratch), strict=True
            )
        ],
        "left_out": len(series.lines) - len(chosen),
    }  # fmt: skip


def _chosen(series: Series, most: int) -> Iterator[Line]:
    """The whole run, whose moods explain the others', then what changed most."""
    yield from [line for line in series.lines if line.kind == "run"][:most]
    yield from [line for line in series.lines if line.kind != "run"][: max(0, most - 1)]
