"""Error against time: which methods buy speed, and at what distance from exact attention."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import partial

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from attnbench.analysis.axes import fixed, slices, varying
from attnbench.analysis.ratios import PREFERRED
from attnbench.base import units
from attnbench.base.parameters import base_name
from attnbench.report import axes, figures
from attnbench.report.axes import End
from attnbench.report.charts import MOST_PAGES
from attnbench.report.figures import QUIET, SMALL, FigureKind, Margins, Size, Sketch
from attnbench.report.looks import Look, looks_of

TRADEOFF = FigureKind(
    name="tradeoff",
    title="Error against time",
    reading="Distance of the output from that of exact attention against the time of a call: to the"
    " left is faster, below is nearer; bars are 95 % intervals, lines join one method at several"
    " parameters, dashed are the times of exact attention. Left, inputs whose attention is local,"
    " as much of that of trained models is; right, normal inputs, whose attention is spread over"
    " all keys: the hardest for methods that leave keys out.",
)
ERRORS = {"approx_error_local": "local attention", "approx_error": "attention spread over all keys"}
LEAST = 1e-6  # of an error that is drawn: below it is rounding
PANEL_INCHES = 4.4


def sketches(cells: pd.DataFrame) -> Iterator[Sketch]:
    """A figure for each slice of `cells` (`table.load`) that approximates attention.

    Each at one n: where most methods were measured whose error can be seen, of several such the
    largest.
    """
    timed = cells[cells["time_us"].notna()]
    looks = looks_of({base_name(name) for name in cells["impl"].unique()})
    drawn = 0
    names = [name for name in varying(timed) if name not in ("seq_len", "kv_len")]
    for _, rows in slices(timed, names):
        methods = rows[(rows[list(ERRORS)] > LEAST).any(axis=1)]
        if methods.empty or drawn == MOST_PAGES:
            continue
        drawn += 1
        counts = methods.groupby("seq_len")["impl"].nunique()
        n = max(counts.index, key=lambda length: (counts[length], length))
        rows = rows[rows["seq_len"] == n]
        kept = rows[rows["approx_error"].notna()]
        alt = [f"{row['impl']} {units.time(row['time_us'])}" for row in kept.to_dict("records")]
        yield Sketch(
            kind=TRADEOFF, draw=partial(draw, looks, rows), alt=alt, caption=fixed(rows),
            slug=str(drawn), first=drawn == 1,
        )  # fmt: skip


def draw(looks: Mapping[str, Look], rows: pd.DataFrame, size: Size) -> Figure:
    """Draw the methods of one case, a panel for each kind of inputs that was measured."""
    shown = [name for name in ERRORS if (rows[name] > LEAST).any()]
    methods = rows[rows["approx_error"].notna()]
    names = methods["impl"].map(base_name)
    around = Margins(left=0.72, right=max(map(figures.width_of, names)) + 0.25)
    figure, found = figures.panels([PANEL_INCHES] * len(shown), around, size)
    exact = rows[rows["impl"].isin(PREFERRED)]
    times = [*methods[["time_us", "time_us_low", "time_us_high"]].stack(), *exact["time_us"]]
    errors = [e for name in shown for e in methods[name] if e > LEAST]
    for ax, name in zip(found, shown, strict=True):
        axes.log_axis(ax, "x", axes.bounds(times, room=0.12), 10, axes.round_time)
        axes.log_axis(ax, "y", axes.bounds(errors, room=0.08), 10, units.brief_percent)
        for row in exact.to_dict("records"):
            ax.axvline(row["time_us"], **axes.DASHED)
            ax.annotate(
                row["impl"], (row["time_us"], 1.0), xycoords=("data", "axes fraction"),
                xytext=(3, -4), textcoords="offset points", rotation=90, va="top", color=QUIET,
                fontsize=SMALL,
            )  # fmt: skip
        ax.set_title(ERRORS[name], loc="left", pad=5, color=figures.INK)
        ax.set_xlabel("time per call")
        ax.set_ylabel("distance from exact attention")
        axes.label_ends(ax, _draw_methods(ax, methods, name, looks))
    return figure


def _draw_methods(ax: Axes, rows: pd.DataFrame, error: str, looks: Mapping[str, Look]) -> list[End]:
    """A line for each method through its parameters, whose first and last are written beside it."""
    rows, ends = rows.assign(error=rows[error].clip(lower=ax.get_ylim()[0])), []
    for name, several in rows.groupby(rows["impl"].map(base_name)):
        along, look = several.sort_values("time_us"), looks[str(name)]
        times = along["time_us"]
        spans = times - along["time_us_low"], along["time_us_high"] - times
        ax.errorbar(
            times, along["error"], xerr=[part.fillna(0.0).clip(lower=0.0) for part in spans],
            color=look.colour, marker=look.marker, elinewidth=1.0, **figures.FILLED,
        )  # fmt: skip
        last = along.iloc[-1]
        ends.append(End(last["time_us"], last["error"], str(name), look))
        for row in (along.iloc[[0, -1]] if len(along) > 1 else along.iloc[:0]).to_dict("records"):
            ax.annotate(
                re.split("[:=]", row["impl"])[-1] if ":" in row["impl"] else "",
                (row["time_us"], row["error"]), xytext=(2, 4), textcoords="offset points",
                fontsize=6.5, color=look.colour,
            )  # fmt: skip
    return ends
