"""The fitted exponents: all under each other beside the declared ones, and each fit as drawn."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import groupby, pairwise
from pathlib import Path
from textwrap import wrap
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FormatStrFormatter, MaxNLocator

from attnbench.analysis.scaling.decide import TOLERANCE
from attnbench.analysis.scaling.results import ExponentFit
from attnbench.base import units
from attnbench.report import axes, figures, growth
from attnbench.report.axes import short
from attnbench.report.figures import FigureKind, Page, Plot
from attnbench.report.style import QUIET, Look

EXPONENTS = FigureKind(
    name="exponents",
    title="Exponents beside the declared ones",
    reading="Markers are fitted exponents with 95 % intervals, small hollow ones the slope of the"
    " top octave. The tick is the declared power, and the bar around it what the verdict allows;"
    " for an upper bound, a bracket with an arrow, everything to the left is allowed.",
)
FIT = FigureKind(
    name="fit",
    title="Fitted exponents",
    reading="Median times with 95 % intervals, and overhead + c · size^p fitted to the sizes that"
    " count; the band has the slopes of the exponent's interval. Sizes on grey, with hollow"
    " markers, do not count, for the reason written there; the line is dashed beyond those that"
    " do.",
)
MOST_ROWS, MOST_FORESTS = 40, 2  # rows of a figure of exponents, and such figures
PANEL_INCHES = 3.7  # of a fit
INK, SOFT = "#222222", "#555555"
_SMALL: dict[str, Any] = {"color": SOFT, "fontsize": 6.5}

Row = ExponentFit | str  # a string is a heading


def draw_all(fits: Sequence[ExponentFit], looks: Mapping[str, Look], folder: Path) -> list[Plot]:
    """Draw the exponents that were found, then the fits in small multiples."""
    return [*draw_forests(fits, looks, folder), *draw_fits(fits, looks, folder)]


def draw_forests(
    fits: Sequence[ExponentFit], looks: Mapping[str, Look], folder: Path
) -> list[Plot]:
    """Draw the exponents under each other, grouped by workload and axis."""
    drawn = []
    for page in _forest_pages([fit for fit in fits if fit.exponent is not None]):
        figure = _draw_forest(page.items, looks, page.place.strip(" ()") or "all series")
        alt = [_alt(row) for row in page.items if isinstance(row, ExponentFit)]
        drawn.append(EXPONENTS.save(figure, page, alt, folder))
    return drawn


def draw_fits(fits: Sequence[ExponentFit], looks: Mapping[str, Look], folder: Path) -> list[Plot]:
    """Draw each fit, the widest range of sizes first, for each workload and axis."""
    usable = sorted(
        (fit for fit in fits if any(e.value > 0 for e in fit.time_us)),
        key=lambda f: (
            -max(f.series.sizes) / min(f.series.sizes), f.series.same, growth.by_name(f.series.impl)
        ),
    )  # fmt: skip
    drawn = []
    for page in growth.pages(usable, lambda f: (f.series.workload, f.series.axis)):
        alt = [f"{fit.series.subject}: {'; '.join(_texts(fit))}" for fit in page.items]
        drawn.append(FIT.save(_draw_fits(page, looks), page, alt, folder))
    return drawn


def _forest_pages(fits: Sequence[ExponentFit]) -> list[Page[Row]]:
    """Rows with a heading before each group; a group that is cut has its heading again."""
    groups: dict[str, list[ExponentFit]] = {}
    for fit in fits:
        groups.setdefault(f"{fit.series.workload}, along {fit.series.axis}", []).append(fit)
    parts: list[list[Row]] = [[]]
    for title, own in groups.items():
        ordered = sorted(own, key=lambda f: (f.series.same, *growth.by_name(f.series.impl)))
        for index, fit in enumerate(ordered):
            if len(parts[-1]) >= MOST_ROWS - 2:
                parts.append([])
            if index == 0 or not parts[-1]:
                parts[-1].append(title if index == 0 else f"{title}, continued")
            parts[-1].append(fit)
    parts = [part for part in parts if part]
    left_out = sum(not isinstance(row, str) for part in parts[MOST_FORESTS:] for row in part)
    return [
        Page((), number, len(parts), tuple(part), left_out if number == 1 else 0)
        for number, part in enumerate(parts[:MOST_FORESTS], start=1)
    ]


def _draw_forest(rows: Sequence[Row], looks: Mapping[str, Look], name: str) -> Figure:
    labels = _labels(rows)
    size = (6.8 + 0.06 * max(map(len, labels)), 0.21 * len(rows) + 1.1)
    figure = figures.figure_of(size, EXPONENTS.title, name)
    ax = figure.subplots()
    low, high = _limits([row for row in rows if isinstance(row, ExponentFit)])
    ax.set(xlim=(low, high), ylim=(len(rows) - 0.5, -0.5), xlabel="exponent of the time")
    ax.set_yticks(range(len(rows)), labels)
    for y, (row, text) in enumerate(zip(rows, ax.get_yticklabels(), strict=True)):
        if isinstance(row, ExponentFit):
            look = looks[row.series.impl]
            text.set_color(look.colour)
            _draw_row(ax, y, row, look)
        else:
            text.set_fontweight("bold")
            ax.axhspan(y - 0.5, y + 0.5, color="#f5f5f5", linewidth=0, zorder=0.4)
    ax.tick_params(axis="y", length=0)
    ax.xaxis.set_major_locator(MaxNLocator(7, steps=[1, 2, 2.5, 5, 10]))
    ax.xaxis.set_major_formatter(FormatStrFormatter("%g"))
    ax.grid(visible=False, axis="y")
    return figure


def _labels(rows: Sequence[Row]) -> list[str]:
    """What stands left of each row: under a heading, only what differs within its group."""
    found: list[str] = []
    for heading, group in groupby(rows, key=lambda row: isinstance(row, str)):
        if heading:
            found += map(str, group)
            continue
        fits = [row for row in group if isinstance(row, ExponentFit)]
        rest = growth.apart([fit.series.same for fit in fits])[1]
        names = [short(fit.series.impl) for fit in fits]
        found += [f"{name} {r}"[:60].strip() for name, r in zip(names, rest, strict=True)]
    return found


def _limits(fits: Sequence[ExponentFit]) -> tuple[float, float]:
    values = []
    for fit in fits:
        for estimate in (fit.exponent, fit.top):
            values += [estimate.value] if estimate else []
        if fit.exponent and fit.exponent.low is not None and fit.exponent.high is not None:
            values += [fit.exponent.low, fit.exponent.high]
        if fit.declared is not None:
            values += [fit.declared - (0.5 if fit.bound else TOLERANCE), fit.declared + TOLERANCE]
    # An interval that knows nothing must not squeeze all others.
    low, high = max(-1.0, min(values)), min(5.0, max(values))
    room = max(0.12, (1.0 - (high - low)) / 2)
    return low - room, high + room


def _draw_row(ax: Axes, y: int, fit: ExponentFit, look: Look) -> None:
    assert fit.exponent is not None
    low, high = ax.get_xlim()
    if fit.declared is not None:
        _draw_declared(ax, y, fit.declared, fit.bound)
    left, right = fit.exponent.low, fit.exponent.high
    if left is not None and right is not None:
        ends = [max(low, left), min(high, right)]
        ax.plot(ends, [y, y], color=look.colour, linewidth=1.6, solid_capstyle="butt", zorder=2.5)
        ax.plot([left, right], [y, y], "|", color=look.colour, markersize=5, zorder=2.5)
    hollow = {"markersize": 3.2, "markerfacecolor": "white", "markeredgewidth": 0.8, "zorder": 2.7}
    full = {"markersize": 5.5, "markeredgecolor": "white", "markeredgewidth": 0.5, "zorder": 3}
    for estimate, style in ((fit.top, hollow), (fit.exponent, full)):
        if estimate is not None:
            x = min(max(estimate.value, low), high)
            ax.plot([x], [y], color=look.colour, marker=look.marker, **style)  # type: ignore[arg-type]
    verdict = fit.finding.verdict if fit.finding else None
    axes.beside(ax, y, growth.interval(fit.exponent), 8, color=INK)
    axes.beside(
        ax, y, growth.mark(verdict), 110, color=QUIET if verdict == "inconclusive" else INK,
        fontweight="bold" if verdict == "refuted" else "normal",
    )  # fmt: skip


def _draw_declared(ax: Axes, y: int, declared: float, bound: bool) -> None:
    """The declared power, and around it what an interval may span."""
    low = ax.get_xlim()[0] if bound else declared - TOLERANCE
    ends = (y - 0.32, y + 0.32)
    ax.fill_betweenx(ends, low, declared + TOLERANCE, color="#dcdcdc", linewidth=0, zorder=1)
    serif = declared - 0.05 if bound else declared  # an upper bound is a bracket
    xs, ys = [serif, declared, declared, serif], [ends[0], ends[0], ends[1], ends[1]]
    ax.plot(xs, ys, color="#333333", linewidth=1.1, zorder=1.6)
    if bound:
        ax.annotate(
            "", (low + 0.02, y), (declared - 0.02, y), zorder=1.4,
            arrowprops={"arrowstyle": "->", "color": "#999999", "linewidth": 0.8},
        )  # fmt: skip


def _alt(fit: ExponentFit) -> str:
    verdict = f", {fit.finding.verdict}" if fit.finding else ""
    return f"{fit.series.subject} {growth.interval(fit.exponent)}{verdict}"


def _draw_fits(page: Page[ExponentFit], looks: Mapping[str, Look]) -> Figure:
    """Small multiples of fits, with a common scale of times."""
    shared, rest = growth.apart([fit.series.same for fit in page.items])
    subject = f"{', along '.join(page.group)}{page.place}: {shared}"
    figure, found = figures.panels(len(page.items), PANEL_INCHES, FIT.title, subject)
    estimates = [e for fit in page.items for e in fit.time_us]
    values = [v for e in estimates for v in (e.value, e.low or e.value, e.high or e.value)]
    values += [fit.overhead_us for fit in page.items]
    low, high = axes.bounds([v for v in values if v > 0 and math.isfinite(v)])
    for ax, fit, differs in zip(found, page.items, rest, strict=True):
        sizes = [float(size) for size in fit.series.sizes]
        axes.length_axis(ax, [round(size) for size in sizes])
        axes.log_axis(ax, "y", (low / 2.0, high * 1.3), 10, axes.round_time)
        _draw_left_out(ax, sizes, fit.left_out, wide=len(found) == 1)
        _draw_overhead(ax, fit)
        _draw_cache(ax, fit)
        _draw_curve(ax, fit, looks[fit.series.impl].colour)
        _draw_points(ax, fit, looks[fit.series.impl])
        lines = [f"{fit.series.impl} {differs}".strip(), *_texts(fit)]
        ax.set_title("\n".join(lines), loc="left", pad=5, color=INK, fontsize=8)
        ax.set_xlabel(growth.axis_name(fit.series.axis, fit.series.workload))
        ax.set_ylabel("time per token" if fit.series.workload == "decode" else "time per call")
    return figure


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

    A changepoint between two sizes breaks it: the intercept is that of the sizes beyond.
    """
    if fit.exponent is None or fit.intercept is None:
        return
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
        f"changepoint {factor:.2g} ×", (middle, 0.02), xycoords=("data", "axes fraction"),
        va="bottom", ha="center", rotation=90, **_SMALL,
    )  # fmt: skip


def _draw_piece(
    ax: Axes, fit: ExponentFit, colour: str, ends: tuple[float, float], shift: float
) -> None:
    """One piece of the line, between `ends`; `shift` is added to the intercept."""
    assert fit.exponent is not None
    assert fit.intercept is not None
    slope, intercept = fit.exponent.value, fit.intercept
    used = [s for s, reason in zip(fit.series.sizes, fit.left_out, strict=True) if reason is None]
    middle = sum(map(math.log, used)) / len(used) if used else 0.0

    def curve(xs: Sequence[float], other: float) -> list[float]:
        """Overhead + c · x^other, through the line's point in the middle of what counts."""
        level = intercept + shift + (slope - other) * middle
        return [fit.overhead_us + math.exp(min(700.0, level + other * math.log(x))) for x in xs]

    ax.set_autoscale_on(False)
    xs = _steps(*ends)
    ax.plot(xs, curve(xs, slope), color=colour, linestyle=(0, (3, 2)), linewidth=0.8, alpha=0.7)
    within = [x for x in used if ends[0] <= x <= ends[1]]
    if not within:
        return
    xs = _steps(min(within), max(within))
    ax.plot(xs, curve(xs, slope), color=colour, linewidth=1.4)
    if fit.exponent.low is not None and fit.exponent.high is not None:
        band = [curve(xs, other) for other in (fit.exponent.low, fit.exponent.high)]
        ax.fill_between(xs, band[0], band[1], color=colour, alpha=0.22, linewidth=0)


def _steps(low: float, high: float, count: int = 60) -> list[float]:
    return [low * (high / low) ** (i / count) for i in range(count + 1)]


def _draw_overhead(ax: Axes, fit: ExponentFit) -> None:
    if fit.overhead_us > 0:
        ax.axhline(fit.overhead_us, color=QUIET, linewidth=0.9, linestyle=":", zorder=1.5)
        ax.annotate(
            f"overhead {units.time(fit.overhead_us)}", (0.01, fit.overhead_us), va="top",
            xycoords=("axes fraction", "data"), xytext=(0, -2), textcoords="offset points",
            color=SOFT, fontsize=7, zorder=4,
        )  # fmt: skip


def _draw_cache(ax: Axes, fit: ExponentFit) -> None:
    """Mark where the working set leaves the last cache: a remark, no verdict hangs on it."""
    cache, sets = fit.series.cache_bytes, fit.series.working_set_bytes
    known = [(x, b) for x, b in zip(fit.series.sizes, sets, strict=False) if b]
    for (x0, b0), (x1, b1) in pairwise(known if cache else []):
        if cache and b0 <= cache < b1:
            at = x0 * (x1 / x0) ** (math.log(cache / b0) / math.log(b1 / b0))
            ax.axvline(at, color=QUIET, linewidth=0.8, linestyle=(0, (1, 2)), zorder=1.5)
            ax.annotate(
                "past the cache", (at, 0.98), xycoords=("data", "axes fraction"), xytext=(-2, 0),
                textcoords="offset points", rotation=90, va="top", ha="right", **_SMALL,
            )  # fmt: skip


def _draw_left_out(
    ax: Axes, sizes: Sequence[float], reasons: Sequence[str | None], wide: bool
) -> None:
    """Grey the stretches that do not count, and write why: across where there is room, else up."""
    x_low, x_high = ax.get_xlim()
    edges = [x_low, *(math.sqrt(a * b) for a, b in pairwise(sizes)), x_high]
    for reason, group in groupby(range(len(sizes)), key=lambda i: reasons[i]):
        places = list(group)
        if reason is None:
            continue
        low, high = edges[places[0]], edges[places[-1] + 1]
        ax.axvspan(low, high, color="#ededed", linewidth=0, zorder=0.5)
        letters = (95 if wide else 65) * math.log(high / low) / math.log(x_high / x_low)
        flat = letters > 16
        # What does not fit is cut with an ellipsis.
        lines, most = (
            wrap(reason, int(letters) if flat else 28),
            4 if flat else max(1, int(letters / 2)),
        )
        text = "\n".join(lines[:most]) + ("…" if len(lines) > most else "")
        ax.annotate(
            text, (math.sqrt(low * high), 0.97), xycoords=("data", "axes fraction"), ha="center",
            va="top", rotation=0 if flat else 90, zorder=1.8, **_SMALL,
        )  # fmt: skip
