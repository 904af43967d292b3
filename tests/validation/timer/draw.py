"""The picture: for each tool a column of dots, one a cell, of its run-to-run spread."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from attnbench.report import figures
from tests.validation.page import write_picture
from tests.validation.timer.tables import percent

_WIDTH_EACH = 1.45  # inches of a tool's column
_DODGE = 0.56  # columns over which the dots of one tool are spread
_LEAST = 1e-5  # a spread below this, or none at all, is drawn on the lower edge


def draw(summary: dict[str, Any], impls: dict[str, str], folder: Path) -> str:
    """Write spread.png and spread.svg; return its Markdown. `impls` maps cells to implementations.

    Nothing is written where no tool has a spread.

    Raises:
        StoreError: the folder cannot be written.
    """
    rows = [row for row in summary["rows"] if row["spread"]["median"] is not None]
    if not rows:
        return ""
    with mpl.rc_context(figures.RC):
        alt = "Run-to-run spread of every tool, one dot a cell"
        return write_picture(_figure(summary, rows, impls), "spread", folder, alt)


def _figure(summary: dict[str, Any], rows: list[dict[str, Any]], impls: dict[str, str]) -> Figure:
    size = 2.0 + _WIDTH_EACH * len(rows), 4.3
    figure = Figure(figsize=size, dpi=figures.DPI, layout="constrained")
    ax = figure.add_subplot()
    looks = figures.looks(impls.values())
    for column, row in enumerate(rows):
        _dots(ax, column, row, summary["cells"], impls, looks)
    _goal(ax, rows)
    ax.set_yscale("log")
    ax.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:g} %"))
    ax.yaxis.set_minor_formatter(NullFormatter())
    ax.set_ylabel("run-to-run spread of the reported time (1.4826 × MAD / median)")
    ax.set_xticks(range(len(rows)), [_wrapped(row) for row in rows])
    ax.set_xlim(-0.6, len(rows) - 0.3)
    ax.grid(False, axis="x")
    ax.set_title(
        f"How repeatable is a time? {summary['runs']} runs of {summary['budget_s']:g} s for each"
        f" tool, {len(summary['cells'])} cells; lower is better",
        loc="left",
    )
    _legend(ax, looks)
    return figure


def _dots(
    ax: Axes,
    column: int,
    row: dict[str, Any],
    cells: list[str],
    impls: dict[str, str],
    looks: dict[str, figures.Look],
) -> None:
    """One tool: its cells from left to right in their order, and the median as a bar."""
    step = _DODGE / max(1, len(cells) - 1)
    for place, cell in enumerate(cells):
        spread = row["cells"][cell]["cv"]
        if spread is None:
            continue
        look = looks[impls[cell]]
        ax.plot(
            column - _DODGE / 2 + place * step, max(spread, _LEAST),
            marker=look.marker, color=look.colour, alpha=0.8, linestyle="none", clip_on=False,
        )  # fmt: skip
    middle = max(row["spread"]["median"], _LEAST)
    colour = "#000000" if row["ours"] else figures.QUIET
    ax.hlines(middle, column - 0.36, column + 0.36, colors=colour, linewidth=2.2)
    ax.annotate(
        percent(row["spread"]["median"]), (column + 0.37, middle), xytext=(2, 0),
        textcoords="offset points", va="center", fontweight="bold" if row["ours"] else "normal",
    )  # fmt: skip


def _goal(ax: Axes, rows: list[dict[str, Any]]) -> None:
    """A line at half of what the best peer reaches, if there is one."""
    peers = [row["spread"]["median"] for row in rows if not row["ours"]]
    if not peers or min(peers) <= 2 * _LEAST:
        return
    ax.axhline(min(peers) / 2, color=figures.QUIET, linewidth=0.9, linestyle=(0, (4, 3)), zorder=0)
    ax.annotate(
        "half of the best peer's median", (1.0, min(peers) / 2), xycoords=("axes fraction", "data"),
        xytext=(-2, 2), textcoords="offset points", ha="right", va="bottom", color=figures.QUIET,
        fontsize=7.5,
    )  # fmt: skip


def _legend(ax: Axes, looks: dict[str, figures.Look]) -> None:
    marks = [
        Line2D([], [], marker=look.marker, color=look.colour, linestyle="none", label=name)
        for name, look in looks.items()
    ]
    bar = Line2D([], [], color=figures.QUIET, linewidth=2.2, label="median over cells")
    ax.legend(
        handles=[*marks, bar], loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False,
        title="a dot is a cell,\nin the table's order", title_fontsize=8, alignment="left",
    )  # fmt: skip


def _wrapped(row: dict[str, Any]) -> str:
    """A tool's name on two lines."""
    head, _, rest = row["label"].partition(" ")
    return f"{head}\n{rest}"
