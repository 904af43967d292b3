"""The fitted exponents: each fit as drawn; the table of verdicts has them beside the laws."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from textwrap import shorten
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from attnbench.analysis.scaling.results import NOUNS, ExponentFit
from attnbench.base import units
from attnbench.report import axes, figures, growth
from attnbench.report.figures import FILLED, INK, FigureKind, Margins, Size, Sketch
from attnbench.report.looks import Look

FIT = FigureKind(
    name="fit",
    title="Fitted exponents",
    reading="Times with 95 % intervals, and overhead + c · size^p fitted to the sizes that"
    " count; the band has the slopes of the exponent's interval. Sizes on grey, with hollow"
    " markers, do not count, for the reason above the panel; the line is dashed beyond those that"
    " do.",
)
PANEL_INCHES = 3.7  # of a fit
HOLLOW: dict[str, Any] = {"markerfacecolor": "white", "markeredgewidth": 0.9, "zorder": 2.7}


def sketches(fits: Sequence[ExponentFit], looks: Mapping[str, Look]) -> Iterator[Sketch]:
    """Each fit, the widest range of sizes first, for each workload and axis."""
    usable = sorted(
        (fit for fit in fits if any(e.value > 0 for e in fit.time_us)),
        key=lambda f: (
            -max(f.series.sizes) / min(f.series.sizes), f.series.same, growth.by_name(f.series.impl)
        ),
    )  # fmt: skip
    found = figures.pages(usable, lambda f: (f.series.workload, f.series.axis), *growth.PAGES)
    for page in found:
        shared, rest = units.split_common([fit.series.same.replace(",", " ") for fit in page.items])
        yield Sketch(
            kind=FIT, draw=partial(_draw_fits, page.items, rest, looks), slug=page.slug,
            caption=f"{page.subject}: {shared}", left_out=page.left_out, first=page is found[0],
            alt=[f"{fit.series.subject}: {'; '.join(_texts(fit))}" for fit in page.items],
        )  # fmt: skip


def _draw_fits(
    fits: Sequence[ExponentFit], rest: Sequence[str], looks: Mapping[str, Look], size: Size
) -> Figure:
    """Small multiples of fits, with a common scale of times; `rest` is what differs in each."""
    heights = [PANEL_INCHES] * len(fits)
    narrow = size.width is not None and size.width < figures.NARROW
    figure, found = figures.panels(heights, Margins(top=0.75 + 0.15 * narrow), size)
    estimates = [e for fit in fits for e in fit.time_us]
    values = [v for e in estimates for v in (e.value, *e.ends)]
    values += [fit.overhead_us for fit in fits]
    low, high = axes.bounds([v for v in values if v > 0 and math.isfinite(v)])
    for ax, fit, differs in zip(found, fits, rest, strict=True):
        axes.length_axis(ax, [round(size) for size in fit.series.sizes])
        axes.log_axis(ax, "y", (low / 2.0, high * 1.3), 10, axes.round_time)
        if fit.overhead_us > 0:
            axes.across(ax, fit.overhead_us, f"overhead {units.time(fit.overhead_us)}", -10)
        _draw_curve(ax, fit, looks[fit.series.impl].colour)
        _draw_sizes(ax, fit, looks[fit.series.impl])
        lines = [f"{fit.series.impl} {differs}".strip(), *_texts(fit)]
        if reasons := [why for why in fit.left_out if why]:  # alike, but for their figures
            lines.append(shorten(f"grey: {reasons[0]}", 45 if narrow else 80, placeholder=" …"))
        text = "\n".join(lines)
        text = text.replace(", last two", ",\nlast two") if narrow else text
        ax.set_title(text, loc="left", pad=5, color=INK, fontsize=8)
        ax.set_xlabel(growth.axis_name(fit.series.axis, fit.series.workload))
        ax.set_ylabel("time per token" if fit.series.workload == "decode" else "time per call")
    return figure


def _texts(fit: ExponentFit) -> list[str]:
    """Exponent and last two doublings, and below them the law with its verdict."""
    noun = NOUNS[fit.series.axis]
    found = f"{noun}^{growth.interval(fit.exponent)}" if fit.exponent else "no exponent"
    if fit.top:
        found += f", last two doublings {growth.interval(fit.top)}"
    verdict = growth.mark(fit.finding.verdict if fit.finding else None)
    law = growth.raised(fit.finding.law if fit.finding else str(fit.series.law or "no law"))
    return [found, f"{law}: {verdict}" if verdict else law]


def _draw_sizes(ax: Axes, fit: ExponentFit, look: Look) -> None:
    """The measured times; those that do not count are hollow, on grey."""
    sizes = [float(size) for size in fit.series.sizes]
    x_low, x_high = ax.get_xlim()
    edges = [x_low, *(math.sqrt(a * b) for a, b in pairwise(sizes)), x_high]
    for style, counts in ((FILLED, True), (HOLLOW, False)):
        points = [i for i, why in enumerate(fit.left_out) if (why is None) == counts]
        growth.points(ax, [(sizes[i], fit.time_us[i]) for i in points], look, style)
        for i in () if counts else points:
            ax.axvspan(edges[i], edges[i + 1], color="#ededed", linewidth=0, zorder=0.5)


def _draw_curve(ax: Axes, fit: ExponentFit, colour: str) -> None:
    """The fitted line, solid over what counts, with the band of its slope's interval.

    A changepoint between two sizes breaks it: the intercept is that of the sizes beyond.
    """
    if fit.exponent is None or fit.intercept is None:
        return
    slope = fit.exponent.value
    used = [s for s, reason in zip(fit.series.sizes, fit.left_out, strict=True) if reason is None]
    centre = sum(map(math.log, used)) / len(used)

    def curve(xs: Any, other: float, intercept: float) -> Any:
        """Overhead + c · x^other, through the line's point in the middle of what counts."""
        logs = intercept + (slope - other) * centre + other * np.log(xs)
        return fit.overhead_us + np.exp(np.minimum(700.0, logs))

    x_low, x_high = ax.get_xlim()
    pieces = [(x_low, x_high, fit.intercept)]
    if fit.changepoint is not None:
        size, factor = fit.changepoint
        at = math.sqrt(size * min((s for s in fit.series.sizes if s > size), default=x_high))
        pieces = [(x_low, at, fit.intercept - math.log(factor)), (at, x_high, fit.intercept)]
        ax.annotate(
            f"changepoint {factor:.2g} ×", (at, 0.02), xycoords=("data", "axes fraction"),
            va="bottom", ha="center", rotation=90, color=figures.QUIET, fontsize=6.5,
        )  # fmt: skip
    ax.set_autoscale_on(False)
    for left, right, intercept in pieces:
        xs = np.geomspace(left, right, 60)
        ys = curve(xs, slope, intercept)
        ax.plot(xs, ys, color=colour, linestyle=(0, (3, 2)), linewidth=0.8, alpha=0.7)
        if within := [x for x in used if left <= x <= right]:
            xs = np.geomspace(min(within), max(within), 60)
            ax.plot(xs, curve(xs, slope, intercept), color=colour, linewidth=1.4)
            band = [curve(xs, other, intercept) for other in fit.exponent.ends]
            ax.fill_between(xs, *band, color=colour, alpha=0.22, linewidth=0)
