"""The figures of a run's page: charts against n, rooflines, trade-offs, and how cost grows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import pandas as pd

from attnbench.analysis.crossovers import Crossover
from attnbench.analysis.scaling.results import Scaling
from attnbench.report import exponents, figures, lines, models, roofline, tradeoff
from attnbench.report.charts import with_rate_interval
from attnbench.report.document import Picture
from attnbench.report.looks import looks_of


def draw_charts(
    cells: pd.DataFrame, costs: pd.DataFrame, environment: Mapping[str, Any],
    crossovers: Sequence[Crossover], folder: Path,
) -> list[Picture]:  # fmt: skip
    """Draw every chart that has data, and the rooflines, into `folder`."""
    cells = with_rate_interval(cells)
    tables = {"cells": cells, "costs": costs}
    with mpl.rc_context(fname=figures.STYLE):
        return [
            *lines.draw_all(tables, environment, folder, crossovers),
            *tradeoff.draw_all(cells, folder),
            *roofline.draw_all(cells, folder),
        ]


def draw_growth(scaling: Scaling, folder: Path) -> list[Picture]:
    """Draw every figure of growth that has data, into `folder`."""
    names = {fit.series.impl for fit in scaling.exponents}
    names |= {fit.impl for fit in scaling.exact} | {fit.impl for fit in scaling.models}
    looks = looks_of(names)
    with mpl.rc_context(fname=figures.STYLE):
        return [
            *exponents.draw_forests(scaling.exponents, looks, folder),
            *exponents.draw_fits(scaling.exponents, looks, folder),
            *models.draw_all(scaling.models, looks, folder),
            *models.draw_exact(scaling.exact, looks, folder),
        ]
