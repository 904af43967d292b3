"""The picture: the ratio that each live run reported for each cell, and where the truth lay."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter

from attnbench.report import figures
from tests.validation.page import write_picture

_COLOURS = ("#d55e00", "#0072b2", "#009e73", "#cc79a7", "#e69f00")
_WIDTH = 0.7  # of a cell's column
Figures = dict[str, Any]


def draw(summary: Figures, folder: Path) -> str:
    """Write ratios.png and ratios.svg, and return its Markdown; nothing where no run has a ratio.

    Raises:
        StoreError: the folder cannot be written.
    """
    if not any(r is not None for run in summary["ratios"] for r in run["ratios"]):
        return ""
    with mpl.rc_context(figures.RC):
        return write_picture(_figure(summary), "ratios", folder, "ratios of all live runs")


def _figure(summary: Figures) -> Figure:
    cells, runs = summary["cells"], summary["ratios"]
    size = 2.4 + 0.95 * len(cells), 4.3
    figure = Figure(figsize=size, dpi=figures.DPI, layout="constrained")
    ax = figure.add_subplot()
    planted = [row for row in summary["live"] if row["planted"]]
    colours = {row["label"]: _COLOURS[i % len(_COLOURS)] for i, row in enumerate(planted)}
    for number, run in enumerate(runs):
        shift = _WIDTH * ((number + 0.5) / len(runs) - 0.5)
        for column, ratio in enumerate(run["ratios"]):
            if ratio is not None:
                _dot(ax, column + shift, ratio, run, column, colours)
    for row in [{"label": "A/A", "planted": 0.0}, *planted]:
        colour = colours.get(row["label"], figures.QUIET)
        ax.axhline(1 + row["planted"], color=colour, linewidth=0.8, zorder=0)
    ax.set_xticks(range(len(cells)), [cell.replace(" ", "\n") for cell in cells])
    ax.yaxis.set_major_formatter(FuncFormatter(lambda ratio, _: f"{100 * (ratio - 1):+.0f} %"))
    ax.set_ylabel("candidate against base, as the gate reported it")
    ax.grid(False, axis="x")
    title = f"What the gate reported in {len(runs)} live runs on sides that are known"
    ax.set_title(title, loc="left")
    _legend(ax, colours)
    return figure


def _dot(
    ax: Axes, x: float, ratio: float, run: Figures, column: int, colours: dict[str, str]
) -> None:
    """A cell of a run: coloured where it was slowed; hollow where it was not called slower."""
    slowed = run["cell"] == column
    colour = colours[run["kind"]] if slowed else figures.QUIET
    called = run["verdicts"][column] in ("regressed", "incorrect")
    ax.plot(
        x, ratio, marker="D" if slowed else "o", markersize=5 if slowed else 3,
        markerfacecolor=colour if called else "none", color=colour, linestyle="none",
        alpha=0.9 if slowed or called else 0.6,
    )  # fmt: skip


def _legend(ax: Axes, colours: dict[str, str]) -> None:
    marks = [
        Line2D([], [], marker="D", color=colour, linestyle="none", label=f"{label} planted")
        for label, colour in colours.items()
    ]
    alike = Line2D(
        [], [], marker="o", color=figures.QUIET, markerfacecolor="none", linestyle="none",
        markersize=3, label="alike on both sides",
    )  # fmt: skip
    ax.legend(
        handles=[*marks, alike], loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False,
        title="filled: called slower,\nlines: the truth", title_fontsize=8, alignment="left",
    )  # fmt: skip
