"""The roofline: useful FLOP rate against arithmetic intensity, under what the machine can do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from attnbench.analysis.axes import slices
from attnbench.base import units
from attnbench.report import axes, figures, lines
from attnbench.report.charts import ROOFLINE, ChartPage, pages
from attnbench.report.document import Picture
from attnbench.report.figures import QUIET
from attnbench.report.looks import Look, looks_of

X = "arithmetic_intensity"
SMALLEST, LARGEST = 3.2, 6.4  # markers, in points
_STROKES: dict[str, Any] = {"measured": "-", "datasheet": (0, (4, 3))}


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


def draw_all(cells: pd.DataFrame, folder: Path) -> list[Picture]:
    """Draw a roofline for each slice of `cells` whose machine's ceilings were measured.

    Those of several threads have another roof, and figures of their own. `cells` is
    `table.load`, the failed rows included.
    """
    needed = ["tflops", X, "peak_tflops_measured", "read_gbps_measured"]
    known = cells[cells[needed].notna().all(axis=1)]
    draw_one = partial(draw, looks_of(cells["impl"].unique()))
    found: list[Picture] = []
    for values, rows in slices(known, ["threads"]):
        name = f"roofline-{values['threads']}-threads" if found else "roofline"
        plots = lines.draw_pages(name, ROOFLINE, pages(rows, ROOFLINE), draw_one, folder)
        limits = "; ".join(f"{roof} limits {at.text}" for roof, at in roofs_of(rows).items())
        found += [replace(plot, alt=f"{plot.alt} {limits}.") for plot in plots]
    return found


def roofs_of(rows: pd.DataFrame) -> dict[str, Roof]:
    """The measured roof and, where the device is known, that of its datasheet."""
    row = rows.iloc[0]
    roofs = {"measured": Roof(tflops=row["peak_tflops_measured"], gbps=row["read_gbps_measured"])}
    tflops, gbps = row["peak_tflops_datasheet"], row["memory_gbps_datasheet"]
    if not units.is_unknown(tflops) and not units.is_unknown(gbps):
        roofs["datasheet"] = Roof(tflops=tflops, gbps=gbps)
    return roofs


def draw(looks: Mapping[str, Look], page: ChartPage) -> Figure:
    """Draw one figure: a panel for each combination of axes, with common scales."""
    rows, roofs = page.rows, roofs_of(page.rows)
    ridges = [roof.ridge for roof in roofs.values()]
    x_limits = axes.bounds([*rows[X], min(ridges) / 2, max(ridges) * 1.5])
    y_limits = axes.bounds([*rows["tflops"], *(roof.tflops for roof in roofs.values())])
    unit, unit_name = units.rate_unit(roofs["measured"].tflops)
    lengths = sorted(rows["seq_len"].unique())
    sizes = dict(zip(lengths, np.linspace(SMALLEST, LARGEST, len(lengths)), strict=True))
    figure, found = figures.panels(len(page.panels), lines.PANEL_INCHES, ROOFLINE.title, page.title)
    for ax, panel in zip(found, page.panels, strict=True):
        axes.log_axis(ax, "x", x_limits, 2, lambda v: axes.plain(v) if v < 1 else f"{v:,.0f}")
        axes.log_axis(ax, "y", y_limits, 10, lambda value: axes.plain(value / unit))
        for name, roof in roofs.items():
            xs = [x_limits[0], roof.ridge, x_limits[1]]
            ax.plot(xs, [*map(roof.at, xs)], color=QUIET, linestyle=_STROKES[name], zorder=1.5)
        for impl, part in panel.rows.sort_values("seq_len").groupby("impl", sort=False):
            look, points = looks[str(impl)], (part[X].tolist(), part["tflops"].tolist())
            ax.plot(*points, color=look.colour, linewidth=0.8, alpha=0.6, zorder=2)
            hollow = lines.uncertain(part, ROOFLINE).tolist()
            ax.scatter(
                *points, s=part["seq_len"].map(sizes).astype(float) ** 2, marker=look.marker,
                facecolors=["white" if h else look.colour for h in hollow],
                edgecolors=[look.colour if h else "white" for h in hollow],
                linewidths=[1.1 if h else 0.5 for h in hollow], clip_on=False, zorder=3,
            )  # fmt: skip
        ax.set_title(panel.title, loc="left", pad=5, color=figures.INK)
        ax.set_xlabel("arithmetic intensity, useful FLOP/B")
        ax.set_ylabel(ROOFLINE.axis.format(unit=unit_name))
    notes = [
        Line2D([], [], color=QUIET, linestyle=_STROKES[name], label=f"{name}: {roof.text}")
        for name, roof in roofs.items()
    ]
    notes += [
        Line2D([], [], color=QUIET, marker="o", linestyle="none", markersize=sizes[n],
               label=f"n={units.length(n)}")
        for n in dict.fromkeys((lengths[0], lengths[-1]))
    ]  # fmt: skip
    notes += [lines.HOLLOW_NOTE] * bool(lines.uncertain(rows, ROOFLINE).any())
    figures.legend(figure, lines.lines_of(ROOFLINE, rows), looks, notes)
    return figure
