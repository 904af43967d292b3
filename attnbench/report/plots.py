"""Figures: small multiples of a chart, written as PNG and SVG. Object-oriented matplotlib only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import matplotlib as mpl
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from attnbench.analysis.crossovers import Crossover
from attnbench.machine.limits import peak_tflops
from attnbench.report import crossed, labels, panels, style
from attnbench.report.charts import CHARTS, Chart
from attnbench.report.sheets import Panel, Sheet, first_of_each, sheets
from attnbench.report.style import Look
from attnbench.theory.traits import n_name

PEAK_FROM = 0.25  # a datasheet's peak is drawn if something reaches this share of it
MOST_SHEETS = 4  # of a chart and a workload; more make a page of tens of megabytes, which tires


@dataclass(frozen=True, kw_only=True)
class Plot:
    """A figure on disk, and the texts that go with it."""

    chart: str
    title: str
    subject: str
    reading: str
    alt: str
    svg: Path
    png: Path


@dataclass(frozen=True)
class Layout:
    """Where panels go, in inches."""

    columns: int
    rows: int
    width: float  # of the plotting area
    height: float
    left: float
    right: float  # for the labels at the lines' ends
    strip: float  # for the failures above a panel

    @property
    def cell(self) -> tuple[float, float]:
        """Width and height of a panel with its margins."""
        return self.left + self.width + self.right, self.height + self.strip + 0.92

    @property
    def size(self) -> tuple[float, float]:
        """Width and height of the figure; the extra is for its title."""
        return self.cell[0] * self.columns, self.cell[1] * self.rows + HEAD

    def place(self, index: int) -> tuple[float, float, float, float]:
        """Left, bottom, width, height of a panel as fractions of the figure."""
        row, column = divmod(index, self.columns)
        (total_width, total_height), (width, height) = self.size, self.cell
        bottom = total_height - HEAD - (row + 1) * height + 0.52
        left = column * width + self.left
        return (
            left / total_width, bottom / total_height,
            self.width / total_width, self.height / total_height,
        )  # fmt: skip


HEAD = 0.46


def draw_all(
    tables: dict[str, pd.DataFrame],
    environment: Mapping[str, Any],
    folder: Path,
    crossovers: Sequence[Crossover] = (),
) -> list[Plot]:
    """Draw every chart that has data, for every slice of the run, into `folder`.

    `tables` maps `cells` to `compare.compared` (with the rate's interval) and `costs` to
    `compare.rope_cost`; `crossovers` are marked in the charts that show them.
    """
    folder.mkdir(parents=True, exist_ok=True)
    looks = style.looks(sorted(tables["cells"]["impl"].unique()))
    drawn, found_by_case = [], crossed.by_case(crossovers)
    with mpl.rc_context(style.RC):
        for name, chart in CHARTS.items():
            rows = chart.rows(tables)
            found = sheets(rows, chart.lines, chart.source == "cells", chart.several)
            found = [sheet for sheet in found if sheet.rows[chart.value].notna().any()]
            shown = first_of_each(found, MOST_SHEETS)
            for sheet in shown:
                figure = draw(
                    chart, sheet, _looks(chart, rows, looks), dict(environment), found_by_case
                )
                drawn.append(save(figure, name, chart, sheet, folder))
            if len(found) > len(shown):
                drawn[-len(shown)] = with_note(drawn[-len(shown)], len(found) - len(shown))
    return drawn


def with_note(plot: Plot, left_out: int) -> Plot:
    """Say in the reading how many figures of the kind are not drawn."""
    note = f"{left_out} more such figures are left out; the export has their numbers."
    return replace(plot, reading=f"{plot.reading} {note}")


def _looks(chart: Chart, rows: pd.DataFrame, looks: dict[str, Look]) -> dict[str, Look]:
    if chart.lines == "impl":
        return looks
    return style.looks(panels.lines_of(chart, rows), style.LINES[chart.lines])


def draw(
    chart: Chart,
    sheet: Sheet,
    looks: Mapping[str, Look],
    environment: dict[str, Any],
    crossings: crossed.ByCase,
) -> Figure:
    """Draw one figure: the chart's panels, with common scales."""
    rows = sheet.rows
    peak = _near_peak(chart, rows, environment)
    scale, limits = panels.value_axis(chart, rows, peak)
    shared = panels.Frame(
        chart=chart,
        looks=looks,
        lengths=tuple(sorted(int(n) for n in rows["seq_len"].unique())),
        scale=scale,
        limits=limits,
        peak_tflops=peak,
    )
    single = len(shared.lengths) == 1
    layout = plan_layout(chart, sheet, single)
    figure = Figure(figsize=layout.size, dpi=160)
    FigureCanvasAgg(figure)
    for index, panel in enumerate(sheet.panels):
        ax = figure.add_axes(layout.place(index))
        (panels.draw_points if single else panels.draw_lines)(ax, panel.rows, shared)
        if chart.crossings and not single:
            crossed.mark(ax, panel.rows, crossings)
        _annotate(ax, panel, shared, single)
    head(figure, chart.title_of(single), sheet.title)
    return figure


def plan_layout(chart: Chart, sheet: Sheet, single: bool) -> Layout:
    """Give every panel the room that the busiest one needs."""
    count = len(sheet.panels)
    lines = max(len(panels.lines_of(chart, panel.rows)) for panel in sheet.panels)
    names = max(len(labels.short(name)) for name in panels.lines_of(chart, sheet.rows))
    failed = [] if single else [panels.failed_lines(chart, panel.rows) for panel in sheet.panels]
    statuses = [len(labels.short(f.name)) + len(f.status) + 2 for row in failed for f in row]
    columns = 1 if count == 1 else 2
    return Layout(
        columns=columns,
        rows=-(-count // columns),
        width=5.4 if columns == 1 else 3.2,
        height=max(0.9, 0.36 * lines) if single else max(2.5, labels.LINE_INCHES * lines + 0.3),
        left=max(0.85, 0.25 + 0.075 * names) if single else 0.85,
        right=0.45 if single else 0.2 + 0.066 * max([names * 1.1, *statuses]),
        strip=max((labels.strip_inches(row) for row in failed), default=0.0),
    )


def _annotate(ax: Axes, panel: Panel, shared: panels.Frame, single: bool) -> None:
    failed = [] if single else panels.failed_lines(shared.chart, panel.rows)
    pad = 5 + 72 * labels.strip_inches(failed)
    ax.set_title(panel.title, loc="left", pad=pad, color="#222222")
    ax.set_xlabel(shared.axis if single else n_name(str(panel.rows["workload"].iloc[0])))
    if not single:
        ax.set_ylabel(shared.axis)


def head(figure: Figure, title: str, subject: str) -> None:
    """Write a figure's title, and under it what all its panels share."""
    width, height = figure.get_size_inches()
    figure.text(0.12 / width, 1 - 0.2 / height, title, fontsize=11, fontweight="bold", va="center")
    figure.text(0.12 / width, 1 - 0.4 / height, subject, fontsize=8, color=style.QUIET, va="center")


def _near_peak(chart: Chart, rows: pd.DataFrame, environment: dict[str, Any]) -> float | None:
    if not chart.peak:
        return None
    peak = peak_tflops(environment, str(rows["dtype"].iloc[0]))
    return peak if peak and rows[chart.value].max() >= PEAK_FROM * peak else None


def save(figure: Figure, name: str, chart: Chart, sheet: Sheet, folder: Path) -> Plot:
    """Write a figure as SVG and PNG, the same bytes for the same data."""
    lines = ", ".join(panels.lines_of(chart, sheet.rows))
    single = sheet.rows["seq_len"].nunique() == 1
    panel_titles = "; ".join(panel.title for panel in sheet.panels if panel.title)
    alt = f"{chart.title}, {sheet.title}, for {lines}"
    svg, png = write(figure, f"{name}-{sheet.slug}", folder)
    return Plot(
        chart=name, title=chart.title, subject=sheet.title, reading=chart.reading_of(single),
        alt=alt + (f". Panels: {panel_titles}." if panel_titles else "."), svg=svg, png=png,
    )  # fmt: skip


def write(figure: Figure, stem: str, folder: Path) -> tuple[Path, Path]:
    """Write a figure as `stem`.svg and `stem`.png, without a date, and return both paths."""
    svg, png = folder / f"{stem}.svg", folder / f"{stem}.png"
    figure.savefig(svg, metadata={"Date": None, "Creator": "attnbench"})
    figure.savefig(png, metadata={"Software": "attnbench"})
    return svg, png
