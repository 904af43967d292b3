"""Charts as drawn: lines against n in small multiples."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from attnbench.analysis.crossovers import Crossover
from attnbench.analysis.notes import WIDE
from attnbench.base import units
from attnbench.machine.limits import peak_tflops
from attnbench.report import axes, charts, figures
from attnbench.report.charts import CHARTS, Chart, ChartPage, Scale, Tables
from attnbench.report.document import Picture
from attnbench.report.figures import INK, FigureKind
from attnbench.report.looks import KNOWN, LINES, Look, looks_of
from attnbench.theory.traits import TRAITS

PANEL_INCHES = 3.4
PEAK_FROM = 0.25  # a datasheet's peak is drawn if something reaches this share of it
WIDE_RATIO = 4.0  # ratios that spread further than this need a logarithmic axis
DODGE_OCTAVES = 0.4  # how far lines that are moved apart spread over x, all together


def draw_all(
    tables: Tables,
    environment: Mapping[str, Any],
    folder: Path,
    crossovers: Sequence[Crossover] = (),
) -> list[Picture]:
    """Draw every chart that has data, for every slice of the run, into `folder`.

    `tables` maps `cells` to `table.load` (with the rate's interval) and `costs` to
    `table.rope_cost`; `crossovers` are marked in the charts that show them.
    """
    drawn = []
    for name, chart in CHARTS.items():
        known = LINES.get(chart.lines, KNOWN)
        looks = looks_of(tables["cells"][chart.lines].dropna().unique(), known)
        draw = partial(draw_page, chart, looks, environment, crossovers)
        drawn += draw_pages(name, chart, chart.pages(tables), draw, folder)
    return drawn


def draw_pages(
    name: str,
    chart: Chart,
    found: list[ChartPage],
    draw: Callable[[ChartPage], Figure],
    folder: Path,
) -> list[Picture]:
    """Draw and write the first figures of each workload; the first says how much is left out."""
    shown, plots = charts.first_of_each(found), []
    kind = FigureKind(name=name, title=chart.title, reading=chart.reading)
    left_out = sum(len(page.panels) for page in found if page not in shown)
    for page in shown:
        alt = [", ".join(lines_of(chart, page.rows)), *(p.title for p in page.panels if p.title)]
        plots.append(kind.save_one(draw(page), page.title, alt, folder, page.slug, left_out))
        left_out = 0
    return plots


def lines_of(chart: Chart, rows: pd.DataFrame) -> list[str]:
    """Names of the lines, the highest first; those without any value last."""
    highest = rows.groupby(chart.lines, sort=False)[chart.value].max()
    return [str(name) for name in highest.sort_values(ascending=False).index]


@dataclass(frozen=True)
class Frame:
    """What all panels of a figure share, so that they can be compared by eye."""

    chart: Chart
    looks: Mapping[str, Look]
    lengths: tuple[int, ...]
    scale: Scale
    limits: tuple[float, float]
    peak_tflops: float | None = None

    @property
    def unit(self) -> tuple[float, str]:
        """The value axis' unit, where the chart leaves it to the values: its size and name."""
        return units.rate_unit(self.limits[1]) if self.chart.rate else (1.0, "")

    @property
    def axis(self) -> str:
        """What is written beside the value axis."""
        return self.chart.axis.format(unit=self.unit[1])

    def text(self, value: float) -> str:
        """A value as the axis writes it."""
        return self.chart.text(value / self.unit[0])

    def inside(self, value: float) -> float:
        """A logarithmic axis has no zero: it stands on the lower edge."""
        return max(float(value), self.limits[0])


def draw_page(
    chart: Chart,
    looks: Mapping[str, Look],
    environment: Mapping[str, Any],
    crossovers: Sequence[Crossover],
    page: ChartPage,
) -> Figure:
    """Draw one figure: the chart's panels, with common scales."""
    rows = page.rows
    peak = peak_tflops(environment, str(rows["dtype"].iloc[0])) if chart.peak else None
    if peak and rows[chart.value].max() < PEAK_FROM * peak:
        peak = None
    lengths = tuple(sorted(int(n) for n in rows["seq_len"].unique()))
    frame = Frame(chart, looks, lengths, *value_axis(chart, rows, peak), peak)
    names = lines_of(chart, rows)
    figure, found = figures.panels(len(page.panels), PANEL_INCHES, chart.title, page.title)
    for ax, panel in zip(found, page.panels, strict=True):
        _draw_lines(ax, panel.rows, frame)
        if chart.crossings:
            mark_crossings(ax, panel.rows, crossovers)
        above = axes.mark_failed(ax, failed_lines(chart, panel.rows), looks)
        ax.set_title(panel.title, loc="left", pad=5 + above, color=INK)
        ax.set_xlabel(TRAITS.get(str(panel.rows["workload"].iloc[0])).n_name)
        ax.set_ylabel(frame.axis)
    notes = [HOLLOW_NOTE] if uncertain(rows, chart).any() else []
    figures.legend(figure, names, looks, notes)
    return figure


def value_axis(
    chart: Chart, rows: pd.DataFrame, peak: float | None
) -> tuple[Scale, tuple[float, float]]:
    """Scale and limits of the value axis over all panels, with intervals, predictions and peak."""
    names = [name for name in (chart.value, chart.low, chart.high, chart.predicted) if name]
    values = [float(v) for name in names for v in rows[name].dropna() if v > 0]
    values += [chart.reference[0]] if chart.reference else []
    if not values:
        return chart.scale, (1.0, 2.0)
    if chart.scale == "linear" and not chart.reference:
        return "linear", (0.0, 1.08 * max([*values, peak or 0.0]))
    if chart.scale == "linear" and max(values) < WIDE_RATIO * min(values):
        room = 0.08 * max(max(values) - min(values), 0.05)
        return "linear", (min(values) - room, max(values) + room)
    low, high = axes.bounds(values)
    scale: Scale = "log10" if chart.scale == "linear" else chart.scale
    return scale, ((low / 1.7 if chart.guides else low), high)


def failed_lines(chart: Chart, rows: pd.DataFrame) -> list[tuple[str, str, list[float]]]:
    """Name, status and n of the lines that failed somewhere, those that worked elsewhere first."""
    worked = set(rows[rows["status"] == "ok"][chart.lines])
    groups = rows[rows["status"] != "ok"].groupby([chart.lines, "status"], sort=False)["seq_len"]
    found = [
        (str(name), str(status), sorted(map(float, lengths.unique())))
        for (name, status), lengths in groups
    ]
    return sorted(found, key=lambda item: item[0] not in worked)


def _draw_lines(ax: Axes, rows: pd.DataFrame, frame: Frame) -> None:
    chart = frame.chart
    axes.length_axis(ax, frame.lengths, room=DODGE_OCTAVES / 2 if chart.dodge else 0.0)
    if frame.scale == "linear":
        ax.set_ylim(frame.limits)
        ax.yaxis.set_major_locator(MaxNLocator(6))
        ax.yaxis.set_major_formatter(lambda value, _: frame.text(value))
    else:
        axes.log_axis(ax, "y", frame.limits, 2 if frame.scale == "log2" else 10, frame.text)
    _draw_background(ax, rows, frame)
    groups = list(rows[rows[chart.value].notna()].groupby(chart.lines, sort=False))
    for index, (name, part) in enumerate(groups):
        aside = 2 ** ((index - (len(groups) - 1) / 2) * min(0.07, DODGE_OCTAVES / len(groups)))
        ordered, look = part.sort_values("seq_len"), frame.looks[str(name)]
        _draw_line(ax, ordered, frame, look, aside if chart.dodge else 1.0)


def _draw_line(ax: Axes, rows: pd.DataFrame, frame: Frame, look: Look, aside: float) -> None:
    chart = frame.chart
    if chart.predicted:
        known = rows.dropna(subset=[chart.predicted])
        predicted = [frame.inside(value) for value in known[chart.predicted]]
        ax.plot(known["seq_len"].astype(float), predicted, color=look.colour, linewidth=1.0)
    xs = rows["seq_len"].astype(float).to_numpy() * aside
    ys = np.array([frame.inside(value) for value in rows[chart.value]])
    bars = None
    if chart.low and chart.high and rows[chart.low].notna().any():
        ends = rows[chart.value] - rows[chart.low], rows[chart.high] - rows[chart.value]
        bars = [part.fillna(0.0).clip(lower=0.0).tolist() for part in ends]
    ax.errorbar(
        xs, ys, yerr=bars, color=look.colour, marker=look.marker, elinewidth=1.0,
        capsize=1.8, clip_on=False, **(_HOLLOW if chart.predicted else figures.FILLED),
    )  # fmt: skip
    if (doubt := uncertain(rows, chart).to_numpy()).any():
        ax.plot(
            xs[doubt], ys[doubt], color=look.colour, marker=look.marker, linestyle="none",
            markerfacecolor="white", clip_on=False, zorder=3.2,
        )  # fmt: skip


# Equal workspaces are common: hollow markers show that there are several in one place.
_HOLLOW: dict[str, Any] = {
    "linestyle": "none", "markerfacecolor": "none", "markersize": 6.5, "markeredgewidth": 1.1,
    "zorder": 3,
}  # fmt: skip


HOLLOW_NOTE = Line2D(
    [], [], color=figures.QUIET, marker="o", markerfacecolor="white", linestyle="none",
    label=f"hollow: over ± {units.brief_percent(WIDE)}",
)  # fmt: skip


def uncertain(rows: pd.DataFrame, chart: Chart) -> pd.Series[bool]:
    """Which points have a wide interval or none, or stand for an unsteady time."""
    if not (chart.low and chart.high):
        return pd.Series(data=False, index=rows.index)
    sure = rows[chart.high] - rows[chart.low] <= 2 * WIDE * rows[chart.value]
    return rows[chart.value].notna() & (~sure | rows["unsteady"].notna())


def _draw_background(ax: Axes, rows: pd.DataFrame, frame: Frame) -> None:
    chart = frame.chart
    if chart.reference:
        value, column = chart.reference
        axes.across(ax, value, str(rows[column].iloc[0]) if column else "")
    if frame.peak_tflops is not None:
        axes.across(ax, frame.peak_tflops, "datasheet peak")
    known = rows[rows[chart.value].notna() & (rows[chart.value] > 0)]
    if known.empty or len(frame.lengths) < 3:
        return
    if chart.lines != "impl":  # caches grow in different ways: beside the one that costs most
        slowest = known.sort_values(chart.value).iloc[-1]
        known = known[known[chart.lines] == slowest[chart.lines]]
    share = known["seq_len"].astype(float) / frame.lengths[-1]
    for power in chart.guides:
        # Just below all points, so that it touches no line and shows which ones run parallel.
        least = float((known[chart.value].astype(float) / share**power).min())
        axes.guide(ax, (frame.lengths[-1], 0.72 * least), power)


def mark_crossings(ax: Axes, rows: pd.DataFrame, found: Sequence[Crossover]) -> None:
    """Mark every crossing on the lines of one panel, with its interval; `rows` are the panel's."""
    cases, impls = set(rows["case_id"]), set(rows["impl"])
    here = [c for c in found if c.case.case_id in cases and {c.first, c.second} <= impls]
    of_impls = [c for c in here if c.by == "impl" and c.crossings]
    for crossover in of_impls:
        line = rows[(rows["impl"] == crossover.first) & rows["speedup"].notna()]
        line = line.sort_values("seq_len").astype({"seq_len": float})
        for crossing in crossover.crossings:
            y = 1.0  # the baseline's line, where it is one of the two; else on the line as drawn
            if rows["baseline"].iloc[0] not in (crossover.first, crossover.second):
                logs = np.log(line["seq_len"]), np.log(line["speedup"])
                y = np.exp(np.interp(math.log(crossing.n), *logs)) if len(line) else math.nan
            n = crossing.n
            ax.errorbar(
                [n], [y], xerr=[[n - crossing.low], [crossing.high - n]], marker="|",
                markersize=13, markeredgewidth=1.4, elinewidth=1.0, capsize=2.5, color=INK,
                zorder=3.5,
            )  # fmt: skip
