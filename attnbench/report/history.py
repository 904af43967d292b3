"""What a history says: the parts of its page with their pictures, its Markdown, the terminal."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from attnbench.analysis.history.series import VERDICTS, Found, Line, Series, Verdict
from attnbench.base import units
from attnbench.base.units import change, counted, tally
from attnbench.report import figures, parts
from attnbench.report.figures import INK, QUIET, Look
from attnbench.report.parts import Part, Section
from attnbench.report.render.html import data_uri
from attnbench.report.render.tables import value_text

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


def section(series: Series, *, pictures: bool = False) -> Section:
    """All that is to be shown of a machine."""
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
    if pictures:
        shown.append(_pictures(series, names))
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


def _pictures(series: Series, names: dict[Line, str]) -> Part:
    """The whole run, whose moods explain the others', then what changed most."""
    lines = sorted(series.lines, key=lambda line: line.kind != "run")[:PANELS]
    left_out = len(series.lines) - len(lines)
    return Part(
        title="What changed most",
        sentences=[PICTURES, *[f"{left_out} more lines are not drawn"] * (left_out > 0)],
        panels=[
            {"name": names[line], "verdict": line.verdict, "data": data,
             "changes": ", ".join(_figures(series, found)[1] for found in line.found)}
            for line, data in zip(lines, draw_all(series, lines), strict=True)
        ],
    )  # fmt: skip


def write_all(folder: Path, found: Sequence[Series]) -> Path:
    """Write history.html and history.md into `folder`; return the page.

    Raises:
        StoreError: the folder cannot be written.
    """
    return parts.write_all(folder, NAME, [section(series, pictures=True) for series in found])


SIZE = (4.2, 1.9)  # inches
COLOURS: dict[Verdict, str] = {
    "regression": "#b3261e", "improvement": "#0060a8", "suspicious": "#b8860b",
}  # fmt: skip
COMMON = Look(QUIET, "o")


def draw_all(series: Series, lines: Sequence[Line]) -> Iterator[str]:
    """A panel for each of `lines`, as a data: URI of an SVG."""
    looks = figures.looks(line.name.split()[0] for line in lines if line.kind == "cell")
    with mpl.rc_context(fname=figures.STYLE):
        for line in lines:
            look = looks[line.name.split()[0]] if line.kind == "cell" else COMMON
            yield data_uri(figures.svg_of(_panel(series, line, look)))


def _panel(series: Series, line: Line, look: Look) -> Figure:
    figure = Figure(figsize=SIZE, dpi=figures.DPI)
    ax = figure.add_axes((0.13, 0.17, 0.85, 0.72))
    scale, unit = (1.0, "×")
    if line.kind == "cell":
        scale, unit = units.unit(float(np.median(line.values)), units.TIMES)
    y = np.asarray(line.values) / scale
    ends = [0, *(line.at.index(found.at) for found in line.found), len(y)]
    parts = list(pairwise(ends))
    levels = [float(np.median(y[a:b])) for a, b in parts]
    low, high = np.quantile(y, (0.05, 0.95)).tolist()
    low, high = min(low, *levels), max(high, *levels)
    room = max(0.25 * (high - low), 0.03 * high)
    low, high = low - room, high + room
    ax.scatter(
        line.at, np.clip(y, low, high), s=7, color=look.colour, marker=look.marker, linewidth=0,
        alpha=0.55, clip_on=False, zorder=2,
    )  # fmt: skip
    for (a, b), level in zip(parts, levels, strict=True):
        ax.hlines(level, line.at[a], line.at[b - 1], color=INK, linewidth=1.6, zorder=3)
    for found in line.found:
        ax.axvline(found.at - 0.5, color=COLOURS[found.verdict], linewidth=1.8, zorder=1.5)
    for number, mark in enumerate(series.marks, start=1):
        ax.axvline(mark.at - 0.5, color=QUIET, linewidth=0.9, linestyle=(0, (3, 3)), zorder=1)
        ax.annotate(
            str(number), (mark.at - 0.5, 1.0), xycoords=("data", "axes fraction"), fontsize=7,
            color=QUIET, ha="center", va="bottom",
        )  # fmt: skip
    _axes(ax, series, (low, high), unit)
    return figure


def _axes(ax: Axes, series: Series, ends: tuple[float, float], unit: str) -> None:
    last = len(series.runs) - 1
    places = sorted({0, last // 3, 2 * last // 3, last} if last >= 6 else {0, last})
    days = {run.when.date() for run in series.runs}
    form = "%H:%M" if len(days) == 1 else "%Y-%m-%d" if len(days) > 300 else "%b %d"
    ax.set_xticks(places, [f"{series.runs[at].when:{form}}" for at in places])
    labels = ax.get_xticklabels()
    labels[0].set_horizontalalignment("left")
    labels[-1].set_horizontalalignment("right")
    ax.set_xlim(-0.5, last + 0.5)
    ax.set_ylim(*ends)
    ax.locator_params(axis="y", nbins=4)
    ax.tick_params(labelsize=8)
    ax.set_title(unit, loc="left", fontsize=8, color=QUIET, pad=3)
