"""One panel: lines against n, or points where there is a single n."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator

from attnbench.report import scales
from attnbench.report.charts import Chart, Scale
from attnbench.report.labels import STRIP_ROWS, End, Failed, label_ends, mark_failed, short
from attnbench.report.style import QUIET, Look

WIDE_RATIO = 4.0  # ratios that spread further than this need a logarithmic axis
DODGE_OCTAVES = 0.4  # how far lines that are moved apart spread over x, all together


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
        return self.chart.unit(self.limits[1]) if self.chart.unit else (1.0, "")

    @property
    def axis(self) -> str:
        """What is written beside the value axis."""
        return self.chart.axis.format(unit=self.unit[1])

    def text(self, value: float) -> str:
        """A value as the axis writes it."""
        return self.chart.text(value / self.unit[0])


def value_axis(
    chart: Chart, rows: pd.DataFrame, peak: float | None
) -> tuple[Scale, tuple[float, float]]:
    """Scale and limits of the value axis over all panels, with intervals, predictions and peak."""
    names = [name for name in (chart.value, chart.low, chart.high, chart.predicted) if name]
    values = [float(v) for name in names for v in rows[name].dropna() if v > 0]
    if chart.reference:
        values.append(chart.reference[0])
    if not values:
        return chart.scale, (1.0, 2.0)
    if chart.scale == "linear" and not chart.reference:
        return "linear", (0.0, 1.08 * max([*values, peak or 0.0]))
    if chart.scale == "linear" and max(values) < WIDE_RATIO * min(values):
        room = 0.08 * max(max(values) - min(values), 0.05)
        return "linear", (min(values) - room, max(values) + room)
    low, high = scales.bounds(values)
    scale: Scale = "log10" if chart.scale == "linear" else chart.scale
    return scale, ((low / 1.7 if chart.guides else low), high)


def set_value_axis(ax: Axes, shared: Frame, which: str = "y") -> None:
    """Give one axis the chart's scale, limits and tick texts."""
    limits = shared.limits
    if shared.scale != "linear":
        scales.log_axis(ax, which, limits, 2 if shared.scale == "log2" else 10, shared.text)
        return
    axis = ax.yaxis if which == "y" else ax.xaxis
    (ax.set_ylim if which == "y" else ax.set_xlim)(*limits)
    axis.set_major_locator(MaxNLocator(6 if which == "y" else 4))
    axis.set_major_formatter(FuncFormatter(lambda value, _: shared.text(value)))


def failed_lines(chart: Chart, rows: pd.DataFrame) -> list[Failed]:
    """The lines with cells that have no result, those that worked somewhere else first."""
    bad = rows[rows["status"] != "ok"]
    found = []
    for (name, status), part in bad.groupby([chart.lines, "status"], sort=False):
        worked = bool((rows[rows[chart.lines] == name]["status"] == "ok").any())
        xs = tuple(float(n) for n in sorted(part["seq_len"].unique()))
        found.append((not worked, Failed(str(name), str(status), xs)))
    return [item for _, item in sorted(found, key=lambda pair: pair[0])]


def draw_lines(ax: Axes, rows: pd.DataFrame, shared: Frame) -> None:
    """Draw a line for each implementation (or cache) against n, labelled at its end."""
    chart = shared.chart
    scales.length_axis(ax, shared.lengths, room=DODGE_OCTAVES / 2 if chart.dodge else 0.0)
    set_value_axis(ax, shared)
    _draw_background(ax, rows, shared)
    ends = []
    known = rows[rows[chart.value].notna()]
    groups = list(known.groupby(chart.lines, sort=False))
    for index, (name, part) in enumerate(groups):
        ordered = part.sort_values("seq_len")
        aside = 2 ** ((index - (len(groups) - 1) / 2) * min(0.07, DODGE_OCTAVES / len(groups)))
        _draw_line(ax, ordered, shared, shared.looks[str(name)], aside if chart.dodge else 1.0)
        last = ordered.iloc[-1]
        ends.append(End(str(name), float(last["seq_len"]), _inside(last[chart.value], shared)))
    failed = failed_lines(chart, rows)
    # A line that ends early because its next cell failed is named where that is marked.
    named = {item.name for item in failed[:STRIP_ROWS] if max(item.xs) == max(shared.lengths)}
    label_ends(ax, [end for end in ends if end.name not in named], shared.looks)
    mark_failed(ax, failed, shared.looks)


def _inside(value: float, shared: Frame) -> float:
    """A logarithmic axis has no zero: it stands on the lower edge."""
    return max(float(value), shared.limits[0])


def _draw_line(ax: Axes, rows: pd.DataFrame, shared: Frame, look: Look, aside: float) -> None:
    chart = shared.chart
    x = rows["seq_len"].astype(float).to_numpy() * aside
    y = [_inside(value, shared) for value in rows[chart.value]]
    if chart.predicted:
        predicted = rows.dropna(subset=[chart.predicted])
        ys = [_inside(value, shared) for value in predicted[chart.predicted]]
        ax.plot(predicted["seq_len"].astype(float), ys, color=look.colour, linewidth=1.0)
    style = _HOLLOW if chart.predicted else _FILLED
    ax.errorbar(
        x, y, yerr=_bars(rows, chart), color=look.colour, marker=look.marker,
        elinewidth=1.0, capsize=1.8, clip_on=False, zorder=3, **style,
    )  # fmt: skip


_FILLED: dict[str, Any] = {"linestyle": "-", "markeredgecolor": "white", "markeredgewidth": 0.5}
# Equal workspaces are common: hollow markers show that there are several in one place.
_HOLLOW: dict[str, Any] = {
    "linestyle": "none", "markerfacecolor": "none", "markersize": 6.5, "markeredgewidth": 1.1,
}  # fmt: skip


def _bars(rows: pd.DataFrame, chart: Chart) -> list[list[float]] | None:
    """Lengths below and above the value; none for a value without an interval."""
    if not (chart.low and chart.high) or rows[chart.low].isna().all():
        return None
    value = rows[chart.value]
    below = (value - rows[chart.low]).fillna(0.0).clip(lower=0.0)
    above = (rows[chart.high] - value).fillna(0.0).clip(lower=0.0)
    return [below.tolist(), above.tolist()]


def _draw_background(ax: Axes, rows: pd.DataFrame, shared: Frame) -> None:
    chart = shared.chart
    if chart.reference:
        _across(ax, *chart.reference)
    if shared.peak_tflops is not None:
        _across(ax, shared.peak_tflops, "datasheet peak")
    known = rows[rows[chart.value].notna() & (rows[chart.value] > 0)]
    if known.empty or len(shared.lengths) < 3:
        return
    if chart.guide_under == "slowest":
        slowest = known.sort_values(chart.value).iloc[-1]
        known = known[known[chart.lines] == slowest[chart.lines]]
    n_max = max(shared.lengths)
    share = known["seq_len"].astype(float) / n_max
    for power in chart.guides:
        # Just below all points, so that it touches no line and shows which ones run parallel.
        anchor = 0.72 * float((known[chart.value].astype(float) / share**power).min())
        scales.guide(ax, shared.lengths, (n_max, anchor), power)


def _across(ax: Axes, value: float, name: str) -> None:
    ax.axhline(value, color=QUIET, linewidth=0.9, linestyle=(0, (4, 3)), zorder=1.5)
    ax.annotate(
        name, (0.01, value), xycoords=("axes fraction", "data"), xytext=(0, 2),
        textcoords="offset points", color=QUIET, fontsize=7.5,
    )  # fmt: skip


def draw_points(ax: Axes, rows: pd.DataFrame, shared: Frame) -> None:
    """Draw one point for each implementation (or cache), best on top; there is only one n."""
    chart = shared.chart
    set_value_axis(ax, shared, "x")
    known = rows[rows[chart.value].notna()].sort_values("time_us_median", ascending=False)
    bad = rows[rows["status"] != "ok"]
    names = [*bad[chart.lines], *known[chart.lines]]
    for y, (_, row) in enumerate(known.iterrows(), start=len(bad)):
        _draw_point(ax, y, row.to_frame().T, shared)
    for y, (_, row) in enumerate(bad.iterrows()):
        colour = shared.looks[row[chart.lines]].colour
        at: dict[str, Any] = {"transform": ax.get_yaxis_transform(), "clip_on": False}
        ax.plot([0.02], [y], color=colour, marker="x", markeredgewidth=1.3, **at)
        ax.text(0.05, y, row["status"], color=colour, fontsize=7.5, va="center", **at)
    ax.set_yticks(range(len(names)), [short(str(name)) for name in names])
    ax.set_ylim(-0.6, len(names) - 0.4)
    ax.grid(visible=False, axis="y")
    if chart.reference:
        ax.axvline(chart.reference[0], color=QUIET, linewidth=0.9, linestyle=(0, (4, 3)))


def _draw_point(ax: Axes, y: int, row: pd.DataFrame, shared: Frame) -> None:
    chart = shared.chart
    look = shared.looks[str(row[chart.lines].iloc[0])]
    value = _inside(row[chart.value].iloc[0], shared)
    if chart.predicted and row[chart.predicted].notna().all():
        predicted = _inside(row[chart.predicted].iloc[0], shared)
        ax.plot([predicted], [y], color=look.colour, marker="|", markersize=12)
    ax.errorbar(
        [value], [y], xerr=_bars(row, chart), color=look.colour, marker=look.marker,
        markersize=6, capsize=2, elinewidth=1.0, clip_on=False,
    )  # fmt: skip
    ax.annotate(
        shared.text(value), (value, y), xytext=(0, 6), textcoords="offset points", fontsize=7.5,
        ha="center", color="#222222",
    )  # fmt: skip


def lines_of(chart: Chart, rows: pd.DataFrame) -> Sequence[str]:
    """Names of the lines, as they will be written beside a panel."""
    return [str(name) for name in rows[chart.lines].dropna().unique()]
