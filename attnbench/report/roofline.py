"""The roofline: useful FLOP rate against arithmetic intensity, under what the machine can do."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from attnbench.base import units
from attnbench.report import axes, charts, figures, lines
from attnbench.report.axes import End
from attnbench.report.charts import CHARTS, ChartPage
from attnbench.report.figures import QUIET, Size, Sketch
from attnbench.report.looks import Look, looks_of

ROOFLINE = CHARTS.get("roofline")
X = "arithmetic_intensity"
_STROKES: dict[str, Any] = {"measured": "-", "datasheet": (0, (4, 3))}


class Roof(NamedTuple):
    """The most that a device can do: arithmetic, and a memory that streams."""

    tflops: float
    gbps: float

    @property
    def ridge(self) -> float:
        """Where the slope meets the plateau, in FLOP/B."""
        return 1e3 * self.tflops / self.gbps

    def at(self, intensity: float) -> float:
        """The most TFLOP/s at this many FLOPs a byte."""
        return min(self.tflops, intensity * self.gbps / 1e3)


def sketches(cells: pd.DataFrame) -> Iterator[Sketch]:
    """A roofline for each slice of `cells` (`table.load`) whose machine's ceilings are known."""
    needed = ["tflops", X, "peak_tflops_measured", "read_gbps_measured"]
    rows = ROOFLINE.rows({"cells": cells})
    rows = rows[rows[needed].notna().all(axis=1)]
    looks = looks_of(cells["impl"].unique())
    for page in charts.pages(rows, ROOFLINE):
        texts = dict.fromkeys(
            f"{name} limits {units.flop_rate(roof.tflops)}, {units.bandwidth(roof.gbps)}"
            for panel in page.panels for name, roof in roofs_of(rows, panel.rows).items()
        )  # fmt: skip
        drawn = partial(draw, looks, rows, page)
        yield lines.sketch(ROOFLINE, page, drawn, "; ".join(texts))


def roofs_of(cells: pd.DataFrame, rows: pd.DataFrame) -> dict[str, Roof]:
    """The roof over the rows of a panel, and that of the datasheet where the device is known.

    A cell that is faster than the large matmul raises it, unless its time cannot be right.
    """
    row = rows.iloc[0]
    same = ["device", "dtype", "threads"]
    alike = (cells[same] == row[same]).all(axis=1)
    best = cells[alike & cells["suspect"].isna()]["tflops"].max()
    tflops = np.nanmax([row["peak_tflops_measured"], best])
    roofs = {"measured": Roof(float(tflops), row["read_gbps_measured"])}
    tflops, gbps = row["peak_tflops_datasheet"], row["memory_gbps_datasheet"]
    if not units.is_unknown(tflops) and not units.is_unknown(gbps):
        roofs["datasheet"] = Roof(tflops, gbps)
    return roofs


def draw(looks: Mapping[str, Look], cells: pd.DataFrame, page: ChartPage, size: Size) -> Figure:
    """Draw one figure: a panel for each combination of axes, with common scales."""
    rows = page.rows
    roofs = [roofs_of(cells, panel.rows) for panel in page.panels]
    every = [roof for own in roofs for roof in own.values()]
    ridges = sorted(roof.ridge for roof in every)
    x_limits = axes.bounds([*rows[X], ridges[0] / 2, ridges[-1] * 1.5])
    y_limits = axes.bounds([*rows["tflops"], *(roof.tflops for roof in every)])
    unit, unit_name = units.rate_unit(every[0].tflops)
    figure, found = lines.line_panels(page, [*rows["line"].unique()], size)
    for ax, panel, own in zip(found, page.panels, roofs, strict=True):
        axes.log_axis(ax, "x", x_limits, 2, lambda v: axes.plain(v) if v < 1 else f"{v:,.0f}")
        axes.log_axis(ax, "y", y_limits, 10, lambda value: axes.plain(value / unit))
        for name, roof in own.items():
            xs = [x_limits[0], roof.ridge, x_limits[1]]
            ax.plot(xs, [*map(roof.at, xs)], color=QUIET, linestyle=_STROKES[name], zorder=1.5)
        ends = []
        for line, part in panel.rows.sort_values("seq_len").groupby("line", sort=False):
            look = looks[str(part["impl"].iloc[0])]
            ax.plot(
                part[X], part["tflops"], color=look.colour, marker=look.marker, linewidth=0.8,
                clip_on=False, **figures.FILLED,
            )  # fmt: skip
            ends.append(End(part[X].iloc[-1], part["tflops"].iloc[-1], str(line), look))
        ax.set_xlabel("arithmetic intensity, useful FLOP/B")
        ax.set_ylabel(ROOFLINE.axis.format(unit=unit_name))
        axes.label_ends(ax, ends)
    return figure
