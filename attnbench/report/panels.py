"""Panels of a history: a cell's times over the runs of a machine, and the steps found in them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from attnbench.analysis.history.series import Line, Series, Verdict
from attnbench.base import units
from attnbench.report import figures
from attnbench.report.document import Finding, Picture, Sentence, Sign
from attnbench.report.figures import INK, QUIET
from attnbench.report.looks import Look, looks_of

SIZE = (4.2, 1.9)  # inches
COLOURS: dict[Verdict, str] = {
    "regression": "#b3261e", "improvement": "#0060a8", "suspicious": "#b8860b",
}  # fmt: skip
COMMON = Look(QUIET, "o")
Drawn = tuple[Line, Sign, str, Sentence]  # a line, its sign, its name, its steps


def draw_all(series: Series, drawn: Sequence[Drawn], reading: str, folder: Path) -> list[Picture]:
    """A panel for each line; they are in the page alone, not in `folder`."""
    del folder
    looks = looks_of(line.name.split()[0] for line, *_ in drawn if line.kind == "cell")
    pictures = []
    with figures.styled():
        for line, sign, name, steps in drawn:
            panel = _panel(series, line, looks.get(line.name.split()[0], COMMON))
            head = Finding(sign=sign, verdict=line.verdict, subject=name, reason=steps)
            alt = f"{name} over the runs: {line.verdict}"
            pictures.append(Picture(svg=figures.svg_of(panel), alt=alt, head=head, reading=reading))
    return pictures


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
        line.at, np.clip(y, low, high), s=13, color=look.colour, marker=look.marker, linewidth=0,
        alpha=0.7, clip_on=False, zorder=2,
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
    days = {run.when.date() for run in series.runs}
    form = "%H:%M" if len(days) == 1 else "%Y-%m-%d" if len(days) > 300 else "%b %d"
    texts = [f"{run.when:{form}}" for run in series.runs]
    places: list[int] = []
    for at, text in enumerate(texts):  # each day once, and none beside another
        if text not in texts[:at] and (not places or at - places[-1] >= last / 4):
            places.append(at)
    ax.set_xticks(places, [texts[at] for at in places])
    ax.get_xticklabels()[0].set_horizontalalignment("left")
    ax.set_xlim(-0.5, last + 0.5)
    ax.set_ylim(*ends)
    ax.locator_params(axis="y", nbins=4)
    ax.tick_params(labelsize=8)
    ax.set_title(unit, loc="left", fontsize=8, color=QUIET, pad=3)
