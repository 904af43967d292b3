"""The roofline: useful FLOP rate against arithmetic intensity, under what the machine can do."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from attnbench.base import units
from attnbench.report import axes, figures, lines, style
from attnbench.report.axes import End
from attnbench.report.charts import Chart, Sheet, sheets
from attnbench.report.figures import Plot
from attnbench.report.style import QUIET, Look

ROOFLINE = Chart(
    title="Roofline",
    reading="Useful FLOP rate against useful FLOPs for each byte of the least traffic, one point a"
    " cell, a larger marker for a longer n; the solid line is the most that this machine reached in"
    " the same run: a large read on the slope, a large matmul on the plateau. Far below the slope"
    " or the plateau time goes elsewhere: starting kernels, traffic beyond the least, work that is"
    " not useful. A working set within the cache may stand above the slope.",
    value="tflops", axis="useful {unit}", text=axes.plain, scale="log10", unit=units.rate_unit,
    workloads=("attention", "layer", "recurrent", "decode"),
)  # fmt: skip
X = "arithmetic_intensity"
SMALLEST, LARGEST = 3.2, 6.4  # markers, in points
_STROKES: dict[str, dict[str, Any]] = {
    "measured": {"linestyle": "-", "linewidth": 1.3},
    "datasheet": {"linestyle": (0, (4, 3)), "linewidth": 0.9},
}


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
    needed = ["tflops", X, "peak_tflops_measured", "read_gbps_measured"]
    known = cells[cells[needed].notna().all(axis=1)]
    looks = style.looks(cells["impl"].unique())
    found = sheets(known, "impl")
    plots = lines.draw_sheets(
        "roofline", ROOFLINE, found, lambda sheet: draw(sheet, roofs_of(sheet.rows), looks), folder
    )
    limits = (
        [f"{name} limits {roof.text}" for name, roof in roofs_of(known).items()] if plots else []
    )
    return [replace(plot, alt=f"{plot.alt} {'; '.join(limits)}.") for plot in plots]


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
    rows, ridges = sheet.rows, [roof.ridge for roof in roofs.values()]
    x_limits = _limits([*rows[X], min(ridges) / 2, max(ridges) * 1.5], 1.25, 1.25)
    # Room below the points for their n, and above the roof, which few points reach, for the legend.
    y_limits = _limits([*rows["tflops"], *(roof.tflops for roof in roofs.values())], 1.2, 1.4)
    unit, unit_name = units.rate_unit(roofs["measured"].tflops)
    lengths = sorted(int(n) for n in rows["seq_len"].unique())
    sizes = {
        n: SMALLEST + (LARGEST - SMALLEST) * i / max(1, len(lengths) - 1)
        for i, n in enumerate(lengths)
    }
    figure, found = figures.panels(
        len(sheet.panels), lines.PANEL_INCHES, ROOFLINE.title, sheet.title
    )
    ends = []
    for ax, panel in zip(found, sheet.panels, strict=True):
        axes.log_axis(ax, "x", x_limits, 2, _intensity)
        axes.log_axis(ax, "y", y_limits, 10, lambda value: axes.plain(value / unit))
        _draw_roofs(ax, roofs)
        ends.append(_draw_points(ax, panel.rows, sizes, looks))
        _name_lengths(ax, panel.rows)
        ax.set_title(panel.title, loc="left", pad=5, color="#222222")
        ax.set_xlabel("arithmetic intensity, useful FLOP/B")
        ax.set_ylabel(ROOFLINE.axis.format(unit=unit_name))
    figures.lay_out(figure)
    for ax, own in zip(found, ends, strict=True):
        axes.label_ends(ax, own, looks)
    return figure


def _intensity(value: float) -> str:
    """FLOP/B on an axis, whose ticks are powers of two: `0.5`, `8`, `1,024`."""
    return axes.plain(value) if value < 1 else units.count(round(value))


def _limits(values: list[float], before: float, after: float) -> tuple[float, float]:
    """Limits of a logarithmic axis: a decade or more, and room before and after by a factor.

    The factors are those of an axis of one decade; over more decades the room grows with them.
    """
    high = max(values)
    low = min(*values, high / 10)
    decades = math.log10(high / low)
    return low / before**decades, high * after**decades


def _draw_roofs(ax: Axes, roofs: Mapping[str, Roof]) -> None:
    x_low, x_high = ax.get_xlim()
    for name, roof in roofs.items():
        xs = [x_low, roof.ridge, x_high]
        ax.plot(
            xs, [roof.at(x) for x in xs], color=QUIET, zorder=1.5, label=f"{name}: {roof.text}",
            **_STROKES[name],
        )  # fmt: skip
    ax.legend(
        loc="upper left", fontsize=7.5, labelcolor="#444444", facecolor="white", edgecolor="none",
        framealpha=1.0, borderaxespad=0.2, borderpad=0.1, labelspacing=0.2, handlelength=2.0,
    )  # fmt: skip


def _draw_points(
    ax: Axes, rows: pd.DataFrame, sizes: Mapping[int, float], looks: Mapping[str, Look]
) -> list[End]:
    ends = []
    for name, part in rows.groupby("impl", sort=False):
        ordered, look = part.sort_values("seq_len"), looks[str(name)]
        xs, ys = ordered[X].tolist(), ordered["tflops"].tolist()
        ax.plot(xs, ys, color=look.colour, linewidth=0.8, alpha=0.6, zorder=2)
        for x, y, n in zip(xs, ys, ordered["seq_len"], strict=True):
            ax.plot(
                [x], [y], color=look.colour, marker=look.marker, markersize=sizes[n],
                markeredgecolor="white", markeredgewidth=0.5, clip_on=False, zorder=3,
            )  # fmt: skip
        ends.append(End(str(name), xs[-1], ys[-1]))
    return ends


def _name_lengths(ax: Axes, rows: pd.DataFrame) -> None:
    """Write n above the axis, below its points; lengths that are close together share a text."""
    low, high = ax.get_xlim()
    near = (high / low) ** 0.1
    groups: list[list[tuple[float, int]]] = []
    for x, n in sorted(
        (float(x), int(n)) for x, n in rows[[X, "seq_len"]].drop_duplicates().values
    ):
        if groups and x < near * groups[-1][-1][0]:
            groups[-1].append((x, n))
        else:
            groups.append([(x, n)])
    for index, group in enumerate(groups):
        ns = [n for _, n in group]
        ends = dict.fromkeys((units.length(min(ns)), units.length(max(ns))))
        ax.annotate(
            "n=" * (index == 0) + "…".join(ends), (math.sqrt(group[0][0] * group[-1][0]), 0.0),
            xycoords=ax.get_xaxis_transform(), xytext=(0, 3), textcoords="offset points",
            ha="center", fontsize=7, color=QUIET,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.6},
        )  # fmt: skip
