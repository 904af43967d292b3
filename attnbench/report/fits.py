"""The fitted exponents as drawn: what was measured, what counts, and the line through it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import groupby, pairwise
from pathlib import Path
from textwrap import wrap
from typing import Any

from matplotlib.axes import Axes

from attnbench.analysis.scaling.results import ExponentFit
from attnbench.base import units
from attnbench.report import growth, plots, scales
from attnbench.report.growth import Kind
from attnbench.report.plots import Layout, Plot
from attnbench.report.style import QUIET, Look

FIT = Kind(
    name="fit",
    title="Fitted exponents",
    reading="Median times with 95 % intervals, and overhead + c · size^p fitted to the sizes that"
    " count; the band has the slopes of the exponent's interval. Sizes on grey, with hollow"
    " markers, do not count, for the reason written there; the line is dashed beyond those that"
    " do.",
)
HEIGHT_INCHES = 2.6
GREY = "#ededed"
_CURVE_POINTS = 60


def draw_all(fits: Sequence[ExponentFit], looks: Mapping[str, Look], folder: Path) -> list[Plot]:
    """Draw the fits in small multiples, for each workload and axis."""
    usable = [fit for fit in fits if any(e.value > 0 for e in fit.time_us)]
    ordered = sorted(
        usable, key=lambda f: (-_span(f), f.series.same, growth.by_name(f.series.impl))
    )
    drawn = []
    for page, here in growth.paged(ordered, lambda f: (f.series.workload, f.series.axis)):
        figure = growth.figure_of((1, 1))
        places = growth.layout(len(here), height=HEIGHT_INCHES, right=0.25, titles=3)
        figure.set_size_inches(*places.size)
        limits = _limits(here)
        shared, rest = growth.apart([fit.series.same for fit in here])
        for index, fit in enumerate(here):
            ax = figure.add_axes(places.place(index))
            _draw(ax, fit, looks[fit.series.impl], limits, places)
            lines = [f"{fit.series.impl} {rest[index]}".strip(), *_texts(fit)]
            ax.set_title("\n".join(lines), loc="left", pad=5, color="#222222", fontsize=8)
        plots.head(figure, FIT.title, f"{page.title}: {shared}")
        alt = [f"{fit.series.subject}: {'; '.join(_texts(fit))}" for fit in here]
        drawn.append(growth.save(figure, FIT, page, alt, folder))
    return drawn


def _span(fit: ExponentFit) -> float:
    return max(fit.series.sizes) / min(fit.series.sizes)


def _limits(fits: Sequence[ExponentFit]) -> tuple[float, float]:
    ends = [(e.value, e.low or e.value, e.high or e.value) for fit in fits for e in fit.time_us]
    values = [*(v for row in ends for v in row), *(fit.overhead_us for fit in fits)]
    low, high = scales.bounds([v for v in values if v > 0 and math.isfinite(v)])
    return low / 2.0, high * 1.3


def _draw(
    ax: Axes, fit: ExponentFit, look: Look, limits: tuple[float, float], places: Layout
) -> None:
    sizes = [float(size) for size in fit.series.sizes]
    scales.length_axis(ax, [round(size) for size in sizes])
    scales.log_axis(ax, "y", limits, 10, scales.round_time)
    _draw_left_out(ax, sizes, fit.left_out, places.width)
    if fit.overhead_us > 0:
        _draw_overhead(ax, fit.overhead_us)
    _draw_cache(ax, fit)
    if fit.exponent is not None and fit.intercept is not None:
        _draw_curve(ax, fit, look.colour)
    _draw_points(ax, fit, look)
    ax.set_xlabel(growth.axis_name(fit.series.axis, fit.series.workload))
    ax.set_ylabel("time per token" if fit.series.workload == "decode" else "time per call")


def _texts(fit: ExponentFit) -> list[str]:
    """Exponent and top octave, and below them the law with its verdict."""
    symbol = {"n": "n", "d": "d", "batch": "B"}.get(fit.series.axis, "H")
    found = f"{symbol}^{growth.interval(fit.exponent)}" if fit.exponent else "no exponent"
    if fit.top:
        found += f", top octave {growth.interval(fit.top)}"
    verdict = growth.mark(fit.finding.verdict if fit.finding else None)
    law = growth.raised(fit.finding.law if fit.finding else str(fit.series.law or "no law"))
    return [found, f"{law}: {verdict}" if verdict else law]


def _draw_points(ax: Axes, fit: ExponentFit, look: Look) -> None:
    counts: dict[str, Any] = {"markeredgecolor": "white", "markeredgewidth": 0.5, "zorder": 3}
    hollow: dict[str, Any] = {"markerfacecolor": "white", "markeredgewidth": 1.0, "zorder": 3}
    rows = list(zip(fit.series.sizes, fit.time_us, fit.left_out, strict=True))
    for style, is_in in ((counts, True), (hollow, False)):
        points = [(float(size), time) for size, time, why in rows if (why is None) == is_in]
        growth.points(ax, points, look, style)


def _draw_curve(ax: Axes, fit: ExponentFit, colour: str) -> None:
    """The fitted line, solid over what counts, with the band of its slope's interval.

    A changepoint between two sizes breaks the line: the intercept is that of the sizes beyond.
    """
    x_low, x_high = ax.get_xlim()
    if fit.changepoint is None:
        _draw_piece(ax, fit, colour, (x_low, x_high), 0.0)
        return
    size, factor = fit.changepoint
    after = min((float(s) for s in fit.series.sizes if s > size), default=x_high)
    middle = math.sqrt(size * after)
    _draw_piece(ax, fit, colour, (x_low, middle), -math.log(factor))
    _draw_piece(ax, fit, colour, (middle, x_high), 0.0)
    ax.annotate(
        f"change {factor:.2g} ×", (middle, 0.02), xycoords=("data", "axes fraction"), va="bottom",
        ha="center", rotation=90, fontsize=6.5, color="#555555",
    )  # fmt: skip


def _draw_piece(
    ax: Axes, fit: ExponentFit, colour: str, ends: tuple[float, float], shift: float
) -> None:
    """One piece of the line, between `ends`; `shift` is added to the intercept."""
    assert fit.exponent is not None
    used = [s for s, reason in zip(fit.series.sizes, fit.left_out, strict=True) if reason is None]
    middle = sum(map(math.log, used)) / len(used) if used else 0.0

    def curve(xs: Sequence[float], slope: float) -> list[float]:
        return _curve(fit, xs, slope, middle, shift)

    ax.set_autoscale_on(False)
    everywhere = _steps(*ends)
    dashed: dict[str, Any] = {"linestyle": (0, (3, 2)), "linewidth": 0.8, "alpha": 0.7}
    ax.plot(everywhere, curve(everywhere, fit.exponent.value), color=colour, **dashed)
    within = [x for x in used if ends[0] <= x <= ends[1]]
    if not within:
        return
    within = _steps(min(within), max(within))
    ax.plot(within, curve(within, fit.exponent.value), color=colour, linewidth=1.4)
    if fit.exponent.low is not None and fit.exponent.high is not None:
        band = [curve(within, slope) for slope in (fit.exponent.low, fit.exponent.high)]
        ax.fill_between(within, band[0], band[1], color=colour, alpha=0.22, linewidth=0)


def _steps(low: float, high: float) -> list[float]:
    return [low * (high / low) ** (i / _CURVE_POINTS) for i in range(_CURVE_POINTS + 1)]


def _curve(
    fit: ExponentFit, xs: Sequence[float], slope: float, middle: float, shift: float
) -> list[float]:
    """Floor + c · x^slope, through the fitted line's point at `middle`, a logarithm."""
    assert fit.exponent is not None
    assert fit.intercept is not None
    level = fit.intercept + shift + (fit.exponent.value - slope) * middle
    return [fit.overhead_us + math.exp(min(700.0, level + slope * math.log(x))) for x in xs]


def _draw_overhead(ax: Axes, overhead_us: float) -> None:
    ax.axhline(overhead_us, color=QUIET, linewidth=0.9, linestyle=":", zorder=1.5)
    ax.annotate(
        f"overhead {units.time(overhead_us)}", (0.01, overhead_us),
        xycoords=("axes fraction", "data"), xytext=(0, -2), textcoords="offset points",
        color="#555555", fontsize=7, zorder=4, va="top",
    )  # fmt: skip


def _draw_cache(ax: Axes, fit: ExponentFit) -> None:
    """Mark where the working set leaves the last cache: a remark, no verdict hangs on it."""
    cache, sets = fit.series.cache_bytes, fit.series.working_set_bytes
    known = [(x, b) for x, b in zip(fit.series.sizes, sets, strict=False) if b]
    if not cache:
        return
    for (x0, b0), (x1, b1) in pairwise(known):
        if b0 <= cache < b1:
            at = x0 * (x1 / x0) ** (math.log(cache / b0) / math.log(b1 / b0))
            ax.axvline(at, color=QUIET, linewidth=0.8, linestyle=(0, (1, 2)), zorder=1.5)
            ax.annotate(
                "past the cache", (at, 0.98), xycoords=("data", "axes fraction"), xytext=(-2, 0),
                textcoords="offset points", rotation=90, va="top", ha="right", fontsize=6.5,
                color="#555555",
            )  # fmt: skip


def _draw_left_out(
    ax: Axes, sizes: Sequence[float], reasons: Sequence[str | None], width_inches: float
) -> None:
    """Grey the stretches that do not count, and write why."""
    x_low, x_high = ax.get_xlim()
    middles = [math.sqrt(a * b) for a, b in pairwise(sizes)]
    edges = [x_low, *middles, x_high]
    for reason, group in groupby(range(len(sizes)), key=lambda i: reasons[i]):
        places = list(group)
        if reason is None:
            continue
        low, high = edges[places[0]], edges[places[-1] + 1]
        ax.axvspan(low, high, color=GREY, linewidth=0, zorder=0.5)
        inches = width_inches * math.log(high / low) / math.log(x_high / x_low)
        _write_reason(ax, math.sqrt(low * high), reason, inches)


def _write_reason(ax: Axes, x: float, reason: str, inches: float) -> None:
    """Write across where there is room, else upwards; what does not fit is cut with an ellipsis."""
    across = inches > 0.9
    room = inches if across else HEIGHT_INCHES * 0.62
    most = 4 if across else max(1, int(inches / 0.12))
    lines = wrap(reason, max(8, int(room / 0.056)))
    text = "\n".join(lines[:most]) + ("…" if len(lines) > most else "")
    ax.annotate(
        text, (x, 0.97), xycoords=("data", "axes fraction"), ha="center", va="top", fontsize=6.5,
        color="#555555", rotation=0 if across else 90, zorder=1.8,
    )  # fmt: skip
