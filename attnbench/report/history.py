"""What a history says: the parts of its page, its Markdown and the terminal."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Sequence
from pathlib import Path

from attnbench.analysis.history.series import VERDICTS, Found, Line, Series
from attnbench.base.units import counted, tally
from attnbench.errors import StoreError
from attnbench.report import parts
from attnbench.report.gate.texts import change
from attnbench.report.parts import Part, Section
from attnbench.report.tables import value_text

NAME = "history"
PANELS = 24  # lines of a machine that are drawn
MOST_SUSPICIOUS = 8  # on the terminal
READING = (
    "A cell's time here is without what moved all cells of its run, and the other cells that it"
    " took turns with: that is a line of its own. Runs taken apart cannot tell a change of the code"
    " from one of the machine: ask attnbench gate."
)
SUSPICIOUS = (
    "few runs: on one side, so far; environment: that change, below, came along; together: so did"
    " other cells, which may be the machine"
)
PICTURES = (
    "A dot is a run, in the order of time; a bar the level between two steps; what lies off the"
    " scale is drawn at its edge. Coloured lines are steps: regression red, improvement blue,"
    " suspicious yellow. Dashed lines are changes of the environment, by their number above."
)


def section(series: Series, scratch: Path | None = None) -> Section:
    """All that is to be shown of a machine; with pictures where there is a folder to draw in."""
    names = _names(series)
    found = [(line, one) for line in series.lines for one in line.found]
    found.sort(key=lambda pair: -abs(pair[1].step.log))
    sure, suspicious = [], []
    for line, one in found:
        if one.verdict == "suspicious":
            suspicious.append((names[line], _why(series, one), *_figures(series, one)))
        else:
            sure.append((names[line], one.verdict, *_figures(series, one)))
    changes = [
        f"{number}: {_place(series, mark.at)}: "
        + ", ".join(f"{n} {value_text(n, a)} → {value_text(n, b)}" for n, a, b in mark.facts)
        for number, mark in enumerate(series.marks, start=1)
    ]
    header = ("since", "change", "runs")
    shown = [
        Part(
            title="Changed" if sure else "No cell is seen to have changed by itself",
            sentences=(READING,), header=("cell", "verdict", *header), rows=sure, text_columns=3,
        ),
        Part(
            title="Suspicious", sentences=(SUSPICIOUS,), header=("cell", "why", *header),
            rows=suspicious, text_columns=3, most=MOST_SUSPICIOUS,
        ),
        Part(title="Changes of the environment", sentences=changes),
    ]  # fmt: skip
    if scratch:
        shown.append(_pictures(series, names, scratch))
    of_cells = (line.verdict for line in series.lines if line.kind == "cell")
    return Section(
        title=tally(of_cells, VERDICTS),
        facts=[_heading(series)],
        parts=[shown[0], *(part for part in shown[1:] if part.rows or part.sentences)],
    )


def _figures(series: Series, found: Found) -> tuple[str, str, str]:
    step, place = found.step, _place(series, found.at)
    return place, change(math.exp(step.log)), f"{step.before}|{step.after}"


def _place(series: Series, at: int) -> str:
    """The day of a run, and its commit, or its name where that is unknown."""
    run = series.runs[at]
    dirty = "+" if run.dirty else ""
    return f"{run.when:%Y-%m-%d} {run.commit[:7] + dirty if run.commit else run.run}"


def _why(series: Series, found: Found) -> str:
    """`few runs, environment 2, together`."""
    number = f" {series.marks.index(found.mark) + 1}" if found.mark else ""
    return ", ".join(word + number * (word == "environment") for word in found.why)


def _names(series: Series) -> dict[Line, str]:
    """The names of lines without the words that all cells share."""
    cells = [line for line in series.lines if line.kind == "cell"]
    common, own = parts.shortened([line.name for line in cells])
    names = dict(zip(cells, own, strict=True))
    for line in series.lines:
        if line.kind != "cell":
            words = " ".join(w for w in line.name.split() if w not in common.split())
            names[line] = f"all cells of {words or 'one group'}" if line.kind == "group" else words
    return names


def _heading(series: Series) -> str:
    first, last = series.runs[0], series.runs[-1]
    device, name, cores = (value_text("", part) for part in last.machine)
    count = counted(len(series.runs), "run")
    where = f"{name} ({device}, {cores} cores)"
    return f"{count} on {where}, {first.when:%Y-%m-%d %H:%M} to {last.when:%Y-%m-%d %H:%M}"


def _pictures(series: Series, names: dict[Line, str], scratch: Path) -> Part:
    """The whole run, whose moods explain the others', then what changed most."""
    from attnbench.report import history_panels

    lines = sorted(series.lines, key=lambda line: line.kind != "run")[:PANELS]
    left_out = len(series.lines) - len(lines)
    return Part(
        title="What changed most",
        sentences=[PICTURES, *[f"{left_out} more lines are not drawn"] * (left_out > 0)],
        panels=[
            {"name": names[line], "verdict": line.verdict, "data": data,
             "changes": ", ".join(_figures(series, found)[1] for found in line.found)}
            for line, data in zip(
                lines, history_panels.draw_all(series, lines, scratch), strict=True
            )
        ],
    )  # fmt: skip


def write_all(folder: Path, found: Sequence[Series]) -> Path:
    """Write history.html and history.md into `folder`; return the page.

    Raises:
        StoreError: the folder cannot be written.
    """
    try:
        with tempfile.TemporaryDirectory() as scratch:
            sections = [section(series, Path(scratch)) for series in found]
    except OSError as err:
        raise StoreError(f"cannot draw in {tempfile.gettempdir()} ({err.strerror})") from err
    return parts.write_all(folder, NAME, sections)
