"""The roofline: useful FLOP rate against arithmetic intensity, under what the machine can do."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import matplotlib as mpl
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from attnbench.base import units
from attnbench.report import plots, scales, style
from attnbench.report.charts import Chart
from attnbench.report.labels import End, label_ends
from attnbench.report.plots import Plot
from attnbench.report.sheets import Sheet, first_of_each, sheets
from attnbench.report.style import QUIET, Look

ROOFLINE = Chart(
    title="Roofline",
    reading="Useful FLOP rate against useful FLOPs for each byte of the least traffic, one point a"
    " cell, a larger marker for a longer n; the solid line is the most that this machine reached in"
    " the same run: a large read on the slope, a large matmul on the plateau. Far below the slope"
    " or the plateau time goes elsewhere: starting kernels, traffic beyond the least, work that is"
    " not useful. A working set within the cache may stand above the slope.",
    value="tflops", axis="useful {unit}", text=scales.plain, scale="log10", unit=units.rate_unit,
    workloads=("attention", "layer", "recurrent", "decode"),
)  # fmt: skip
LEGEND_INCHES = 0.36  # above the roof, which few points reach
NAME_INCHES = 0.26  # below the points, for their n
SIDE_INCHES = 0.3  # beside the points, for half the text of their n
SMALLEST, LARGEST = 3.2, 6.4  # markers, in points
N_APART_INCHES = 0.3


@dataclass(frozen=True, kw_only=True)
class Roof:
    """The most that a device can do: a memory that streams, and arithmetic."""

    tflops: float
    gbps: float

    @property
    def ridge(self) -> float:
        """Where the slope meets the plateau, in FLOP/B."""
        return 1e3 * self.tflops / self.gbps

    def at(self, intensity: float) -> float:
        """The most TFLOP/s at this many FLOPs a byte."""
        return min(self.tflops, intensity * self.gbps / 1e3)

    @property
    def text(self) -> str:
        """Both limits, for people."""
        return f"{units.flop_rate(self.tflops)}, {units.bandwidth(self.gbps)}"


def draw_all(cells: pd.DataFrame, folder: Path) -> list[Plot]:
    """Draw a roofline for each slice of `cells` whose machine's ceilings were measured.

    `cells` is `compare.compared`, the failed rows included.
    """
    known = cells[cells["tflops"].notna() & cells["arithmetic_intensity"].notna()]
    known = known[known["peak_tflops_measured"].notna() & known["read_gbps_measured"].notna()]
    looks = style.looks(sorted(cells["impl"].unique()))
    found, drawn = sheets(known, "impl"), []
    shown = first_of_each(found, plots.MOST_SHEETS)
    with mpl.rc_context(style.RC):
        for sheet in shown:
            roofs = roofs_of(sheet.rows)
            figure = draw(sheet, roofs, looks)
            plot = plots.save(figure, "roofline", ROOFLINE, sheet, folder)
            limits = "; ".join(f"{name} limits {roof.text}" for name, roof in roofs.items())
            drawn.append(replace(plot, reading=ROOFLINE.reading, alt=f"{plot.alt} {limits}."))
    if len(found) > len(shown):
        drawn[0] = plots.with_note(drawn[0], len(found) - len(shown))
    return drawn


def roofs_of(rows: pd.DataFrame) -> dict[str, Roof]:
    """The measured roof and, where the device is known, that of its datasheet."""
    row = rows.iloc[0]
    roofs = {"measured": Roof(tflops=row["peak_tflops_measured"], gbps=row["read_gbps_measured"])}
    tflops, gbps = row["peak_tflops_datasheet"], row["memory_gbps_datasheet"]
    if not units.is_unknown(tflops) and not units.is_unknown(gbps):
        roofs["datasheet"] = Roof(tflops=tflops, gbps=gbps)
    return roofs


def draw(sheet: Sheet, roofs: Mapping[str, Roof], looks: Mapping[str, Look]) -> Figure:
    """Draw one figure: a panel for each combination of axes, with common scales."""
    layout = replace(plots.plan_layout(ROOFLINE, sheet, single=False), strip=0.0)
    x_limits, y_limits = _limits(sheet.rows, roofs, layout.width, layout.height)
    unit, unit_name = units.rate_unit(roofs["measured"].tflops)
    lengths = sorted(int(n) for n in sheet.rows["seq_len"].unique())
    figure = Figure(figsize=layout.size, dpi=160)
    FigureCanvasAgg(figure)
    for index, panel in enumerate(sheet.panels):
        ax = figure.add_axes(layout.place(index))
        scales.log_axis(ax, "x", x_limits, 2, _intensity)
        scales.log_axis(ax, "y", y_limits, 10, lambda value: scales.plain(value / unit))
        _draw_roofs(ax, roofs)
        _draw_points(ax, panel.rows, lengths, looks)
        _name_lengths(ax, panel.rows, layout.width)
        ax.set_title(panel.title, loc="left", pad=5, color="#222222")
        ax.set_xlabel("arithmetic intensity, useful FLOP/B")
        ax.set_ylabel(ROOFLINE.axis.format(unit=unit_name))
    plots.head(figure, ROOFLINE.title, sheet.title)
    return figure


def _intensity(value: float) -> str:
    """FLOP/B on an axis, whose ticks are powers of two: `0.5`, `8`, `1,024`."""
    return scales.plain(value) if value < 1 else units.count(round(value))


def _limits(
    rows: pd.DataFrame, roofs: Mapping[str, Roof], width: float, height: float
) -> tuple[tuple[float, float], tuple[float, float]]:
    """Limits of x and y: all points, both parts of each roof, room for the legend and for n."""
    ridges = [roof.ridge for roof in roofs.values()]
    xs = [*rows["arithmetic_intensity"], min(ridges) / 2, max(ridges) * 1.5]
    ys = [*rows["tflops"], *(roof.tflops for roof in roofs.values())]
    return (
        _with_room(min(xs), max(xs), width, SIDE_INCHES, SIDE_INCHES),
        _with_room(min(ys), max(ys), height, NAME_INCHES, LEGEND_INCHES),
    )


def _with_room(
    low: float, high: float, inches: float, before: float, after: float
) -> tuple[float, float]:
    """Limits of a logarithmic axis of `inches`: a decade or more, and room before and after."""
    low = min(low, high / 10)
    each = (high / low) ** (1 / (inches - before - after))  # the factor of an inch
    return low / each**before, high * each**after


_STROKES: dict[str, dict[str, Any]] = {
    "measured": {"linestyle": "-", "linewidth": 1.3},
    "datasheet": {"linestyle": (0, (4, 3)), "linewidth": 0.9},
}


def _draw_roofs(ax: Axes, roofs: Mapping[str, Roof]) -> None:
    x_low, x_high = ax.get_xlim()
    for name, roof in roofs.items():
        xs = [x_low, roof.ridge, x_high]
        label = f"{name}: {roof.text}"
        ax.plot(
            xs, [roof.at(x) for x in xs], color=QUIET, zorder=1.5, label=label, **_STROKES[name]
        )
    ax.legend(
        loc="upper left", fontsize=7.5, labelcolor="#444444", facecolor="white", edgecolor="none",
        framealpha=1.0, borderaxespad=0.2, borderpad=0.1, labelspacing=0.2, handlelength=2.0,
    )  # fmt: skip


def _draw_points(
    ax: Axes, rows: pd.DataFrame, lengths: Sequence[int], looks: Mapping[str, Look]
) -> None:
    ends = []
    for name, part in rows.groupby("impl", sort=False):
        ordered, look = part.sort_values("seq_len"), looks[str(name)]
        xs, ys = ordered["arithmetic_intensity"].tolist(), ordered["tflops"].tolist()
        ax.plot(xs, ys, color=look.colour, linewidth=0.8, alpha=0.6, zorder=2)
        for x, y, n in zip(xs, ys, ordered["seq_len"], strict=True):
            ax.plot(
                [x], [y], color=look.colour, marker=look.marker, markersize=_size(n, lengths),
                markeredgecolor="white", markeredgewidth=0.5, clip_on=False, zorder=3,
            )  # fmt: skip
        ends.append(End(str(name), xs[-1], ys[-1]))
    label_ends(ax, ends, looks)


def _size(n: int, lengths: Sequence[int]) -> float:
    """Marker size by the place of n among the lengths: equal steps for equal doublings."""
    place = lengths.index(n) / max(1, len(lengths) - 1)
    return SMALLEST + (LARGEST - SMALLEST) * place


def _name_lengths(ax: Axes, rows: pd.DataFrame, width: float) -> None:
    """Write n above the axis, below its points; lengths that are close together share a text."""
    (low, high), columns = ax.get_xlim(), ["arithmetic_intensity", "seq_len"]
    inch = math.log(high / low) / width
    groups: list[list[tuple[float, int]]] = []
    for x, n in sorted((float(x), int(n)) for x, n in rows[columns].drop_duplicates().to_numpy()):
        near = groups and math.log(x / groups[-1][-1][0]) < N_APART_INCHES * inch
        groups = [*groups[:-1], [*groups[-1], (x, n)]] if near else [*groups, [(x, n)]]
    for index, group in enumerate(groups):
        lengths = [n for _, n in group]
        ends = dict.fromkeys((units.length(min(lengths)), units.length(max(lengths))))
        ax.annotate(
            "n=" * (index == 0) + "…".join(ends), (math.sqrt(group[0][0] * group[-1][0]), 0.0),
            xycoords=ax.get_xaxis_transform(), xytext=(0, 3), textcoords="offset points",
            ha="center", fontsize=7, color=QUIET,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.6},
        )  # fmt: skip
