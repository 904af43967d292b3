"""Where the lead changes, as marked in the chart of speeds relative to the baseline."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import pandas as pd
from matplotlib.axes import Axes

from attnbench.analysis.crossovers import Crossing, Crossover
from attnbench.analysis.table import BASELINE
from attnbench.base import units

ByCase = Mapping[str, Sequence[Crossover]]
NAMED_APART = 0.13  # of the width of a panel: texts of crossings that are nearer are staggered
INK = "#222222"


def by_case(found: Sequence[Crossover]) -> ByCase:
    """The crossovers of implementations that change the lead, by the id of their largest case."""
    gathered: dict[str, list[Crossover]] = {}
    for crossover in found:
        if crossover.by == "impl" and crossover.crossings:
            gathered.setdefault(crossover.case.case_id, []).append(crossover)
    return gathered


def mark(ax: Axes, rows: pd.DataFrame, found: ByCase) -> None:
    """Ring every crossing on the lines of one panel, with its interval; name those on the line 1.

    `rows` are the panel's; limits and scales must be final.
    """
    here = [c for case_id in rows["case_id"].unique() for c in found.get(case_id, ())]
    named = []
    for crossover in here:
        for crossing in crossover.crossings:
            y = 1.0
            if BASELINE not in (crossover.first, crossover.second):
                speed = _speed(rows, crossover.first, crossing.n)
                if speed is None:
                    continue
                y = speed
            else:
                named.append(crossing)
            _ring(ax, crossing, y)
    _name(ax, sorted(named, key=lambda crossing: crossing.n))


def _speed(rows: pd.DataFrame, impl: str, n: float) -> float | None:
    """The line of `impl` at n, interpolated as it is drawn; None where it is not drawn there."""
    line = rows[(rows["impl"] == impl) & rows["speed"].notna()].sort_values("seq_len")
    points = list(zip(line["seq_len"].astype(float), line["speed"], strict=True))
    for (x0, y0), (x1, y1) in pairwise(points):
        if x0 <= n <= x1:
            return float(y0 * (y1 / y0) ** (math.log(n / x0) / math.log(x1 / x0)))
    return None


def _ring(ax: Axes, crossing: Crossing, y: float) -> None:
    style: dict[str, Any] = {"color": INK, "clip_on": True}
    if crossing.low is not None and crossing.high is not None:
        ax.plot([crossing.low, crossing.high], [y, y], linewidth=1.0, zorder=3.4, **style)
        for end, is_open in (
            (crossing.low, crossing.open_below),
            (crossing.high, crossing.open_above),
        ):
            shape = ("<" if end < crossing.n else ">") if is_open else "|"
            ax.plot([end], [y], marker=shape, markersize=4.5, zorder=3.4, **style)
    ax.plot(
        [crossing.n], [y], marker="o", markersize=7.5, markerfacecolor="none", markeredgewidth=1.2,
        linestyle="none", zorder=3.5, **style,
    )  # fmt: skip


def _name(ax: Axes, crossings: Sequence[Crossing]) -> None:
    """Write the n of crossings on the line 1, those close together at different heights."""
    x_low, x_high = ax.get_xlim()
    level, last = 0, -math.inf
    for crossing in crossings:
        place = math.log(crossing.n / x_low) / math.log(x_high / x_low)
        level = (level + 1) % 3 if place - last < NAMED_APART else 0
        last = place
        below = level == 1
        offset = -8 if below else 7 + 9 * (level == 2)
        ax.annotate(
            f"{units.length(float(units.digits(crossing.n)))}", (crossing.n, 1.0),
            xytext=(0, offset), textcoords="offset points", ha="center", fontsize=7, color=INK,
            va="top" if below else "bottom", zorder=4,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.6, "alpha": 0.8},
        )  # fmt: skip
