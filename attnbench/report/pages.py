"""The figures of a run's page, and those for papers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import pandas as pd

from attnbench.analysis.crossovers import Crossover
from attnbench.analysis.scaling.results import Scaling
from attnbench.base.registry import require
from attnbench.errors import StoreError, UsageError
from attnbench.report import exponents, figures, lines, models, roofline, tradeoff
from attnbench.report.charts import CHARTS, with_rate_interval
from attnbench.report.document import Picture
from attnbench.report.figures import Size, Sketch
from attnbench.report.looks import looks_of

NAMES = (*CHARTS.names(), tradeoff.TRADEOFF.name)
PAPER: Any = {
    "font.size": 7.5, "axes.titlesize": 7.5, "axes.labelsize": 7.5, "lines.linewidth": 1.1,
    "lines.markersize": 3.6,
}  # fmt: skip


def sketches(
    cells: pd.DataFrame, costs: pd.DataFrame, environment: Mapping[str, Any],
    crossovers: Sequence[Crossover],
) -> Iterator[Sketch]:  # fmt: skip
    """Every chart that has data, trade-offs and rooflines."""
    cells = with_rate_interval(cells)
    yield from lines.sketches({"cells": cells, "costs": costs}, environment, crossovers)
    yield from tradeoff.sketches(cells)
    yield from roofline.sketches(cells)


def draw_charts(
    cells: pd.DataFrame, costs: pd.DataFrame, environment: Mapping[str, Any],
    crossovers: Sequence[Crossover], folder: Path,
) -> list[Picture]:  # fmt: skip
    """Draw every chart that has data, and the rooflines, into `folder`."""
    with mpl.rc_context(fname=figures.STYLE):
        found = sketches(cells, costs, environment, crossovers)
        return [sketch.save(folder) for sketch in found]


def draw_growth(scaling: Scaling, folder: Path) -> list[Picture]:
    """Draw every figure of growth that has data, into `folder`."""
    looks = looks_of(
        {fit.series.impl for fit in scaling.exponents} | {fit.impl for fit in scaling.models}
    )
    with mpl.rc_context(fname=figures.STYLE):
        found = [
            *exponents.sketch_forests(scaling.exponents, looks),
            *exponents.sketch_fits(scaling.exponents, looks),
            *models.sketches(scaling.models, looks),
        ]
        return [sketch.save(folder) for sketch in found]


def draw_for_paper(
    found: Sequence[Sketch], names: Sequence[str], kind: str, width: float, *, titled: bool,
    folder: Path,
) -> list[Path]:  # fmt: skip
    """Write the figures of these names as files of this kind, so many inches wide.

    Raises:
        UsageError: there is no such figure, or the run has none of that name.
        StoreError: the folder cannot be written.
    """
    require("figure", names, NAMES, "--figure")
    had = list(dict.fromkeys(sketch.kind.name for sketch in found))
    for name in names:
        if name not in had:
            raise UsageError(f"no data for figure '{name}'; there are: {', '.join(had) or 'none'}")
    paths = []
    try:
        folder.mkdir(exist_ok=True)
        with mpl.rc_context(fname=figures.STYLE), mpl.rc_context(PAPER):
            for sketch in (each for name in names for each in found if each.kind.name == name):
                figure = sketch.draw(Size(width, sketch.kind.title if titled else ""))
                paths.append(folder / f"{sketch.stem}.{kind}")
                dates = {"pdf": {"CreationDate": None}, "svg": {"Date": None}}
                figure.savefig(paths[-1], dpi=300, metadata=dates.get(kind))
    except OSError as err:
        raise StoreError(f"cannot write {folder} ({err.strerror})") from err
    return paths
