"""All fitted exponents under each other, each beside the one that is declared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FormatStrFormatter, MaxNLocator

from attnbench.analysis.scaling.decide import TOLERANCE
from attnbench.analysis.scaling.results import ExponentFit
from attnbench.report import growth, plots
from attnbench.report.growth import Kind, Page
from attnbench.report.labels import short
from attnbench.report.plots import Plot
from attnbench.report.style import QUIET, Look

FOREST = Kind(
    name="exponents",
    title="Exponents beside the declared ones",
    reading="Markers are fitted exponents with 95 % intervals, small hollow ones the slope of the"
    " top octave. The tick is the declared power, and the bar around it what the verdict allows;"
    " for an upper bound, a bracket with an arrow, everything to the left is allowed.",
)
ROW_INCHES = 0.21
MOST_ROWS, MOST_PAGES = 40, 2  # rows of a figure, and figures
PLOT_INCHES = 3.6
RIGHT_INCHES = 2.75
ALLOWED = "#dcdcdc"

Row = ExponentFit | str  # a string is a heading


def draw_all(fits: Sequence[ExponentFit], looks: Mapping[str, Look], folder: Path) -> list[Plot]:
    """Draw the exponents that were found, grouped by workload and axis, under each other."""
    known = [fit for fit in fits if fit.exponent is not None]
    groups = [
        (f"{workload}, along {axis}", sorted(group, key=_order))
        for (workload, axis), group in _grouped(known)
    ]
    pages = _pages(groups)
    drawn = []
    for number, rows in enumerate(pages[:MOST_PAGES], start=1):
        several = len(pages) > 1
        name = f"{number} of {len(pages)}" if several else "all series"
        left_out = sum(isinstance(row, ExponentFit) for page in pages[MOST_PAGES:] for row in page)
        page = Page(str(number), name, left_out if number == 1 else 0)
        alt = [_alt(row) for row in rows if isinstance(row, ExponentFit)]
        drawn.append(growth.save(_draw(rows, looks, name), FOREST, page, alt, folder))
    return drawn


def _grouped(
    fits: Sequence[ExponentFit],
) -> list[tuple[tuple[str, str], list[ExponentFit]]]:
    found: dict[tuple[str, str], list[ExponentFit]] = {}
    for fit in fits:
        found.setdefault((fit.series.workload, fit.series.axis), []).append(fit)
    return list(found.items())


def _order(fit: ExponentFit) -> tuple[str, bool, str]:
    return fit.series.same, *growth.by_name(fit.series.impl)


def _pages(groups: Sequence[tuple[str, Sequence[ExponentFit]]]) -> list[list[Row]]:
    """Rows with a heading before each group; a group that is cut has its heading again."""
    pages: list[list[Row]] = [[]]
    for title, fits in groups:
        for index, fit in enumerate(fits):
            if len(pages[-1]) >= MOST_ROWS - 2:
                pages.append([])
            if index == 0 or not pages[-1]:
                pages[-1].append(title if index == 0 else f"{title}, continued")
            pages[-1].append(fit)
    return [page for page in pages if page]


def _draw(rows: Sequence[Row], looks: Mapping[str, Look], name: str) -> Figure:
    labels = _labels(rows)
    left = min(4.2, 0.35 + 0.066 * max(len(text) for text in labels))
    height = ROW_INCHES * len(rows)
    total = (left + PLOT_INCHES + RIGHT_INCHES, height + plots.HEAD + 0.75)
    figure = growth.figure_of(total)
    ax = figure.add_axes((
        left / total[0], 0.55 / total[1], PLOT_INCHES / total[0], height / total[1],
    ))  # fmt: skip
    low, high = _limits([row for row in rows if isinstance(row, ExponentFit)])
    ax.set_xlim(low, high)
    ax.set_ylim(len(rows) - 0.5, -0.5)
    for y, row in enumerate(rows):
        if isinstance(row, ExponentFit):
            _draw_row(ax, y, row, looks[row.series.impl])
        else:
            ax.axhspan(y - 0.5, y + 0.5, color="#f5f5f5", linewidth=0, zorder=0.4)
    ax.set_yticks(range(len(rows)), labels)
    _style_labels(ax, rows, looks)
    ax.tick_params(axis="y", length=0)
    ax.xaxis.set_major_locator(MaxNLocator(7, steps=[1, 2, 2.5, 5, 10]))
    ax.xaxis.set_major_formatter(FormatStrFormatter("%g"))
    ax.grid(visible=False, axis="y")
    ax.set_xlabel("exponent of the time")
    plots.head(figure, FOREST.title, name)
    return figure


def _labels(rows: Sequence[Row]) -> list[str]:
    """What stands left of each row: under a heading, only what differs within its group."""
    found: list[str] = []
    for heading, group in groupby(rows, key=lambda row: isinstance(row, str)):
        here = list(group)
        if heading:
            found += [str(row) for row in here]
            continue
        fits = [row for row in here if isinstance(row, ExponentFit)]
        rest = growth.apart([fit.series.same for fit in fits])[1]
        found += [
            f"{short(f.series.impl)} {r}"[:60].strip() for f, r in zip(fits, rest, strict=True)
        ]
    return found


def _style_labels(ax: Axes, rows: Sequence[Row], looks: Mapping[str, Look]) -> None:
    for row, text in zip(rows, ax.get_yticklabels(), strict=True):
        if isinstance(row, ExponentFit):
            text.set_color(looks[row.series.impl].colour)
        else:
            text.set_fontweight("bold")


def _limits(fits: Sequence[ExponentFit]) -> tuple[float, float]:
    values = []
    for fit in fits:
        assert fit.exponent is not None
        estimates = [fit.exponent, *([fit.top] if fit.top else [])]
        values += [e.value for e in estimates]
        values += [v for v in (fit.exponent.low, fit.exponent.high) if v is not None]
        if fit.declared is not None:
            least = fit.declared - (0.5 if fit.bound else TOLERANCE)
            values += [least, fit.declared + TOLERANCE]
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
        ax.plot(
            [max(low, left), min(high, right)], [y, y], color=look.colour, linewidth=1.6,
            solid_capstyle="butt", zorder=2.5,
        )  # fmt: skip
        ax.plot(
            [left, right], [y, y], color=look.colour, marker="|", markersize=5, linestyle="none",
            zorder=2.5,
        )  # fmt: skip
    if fit.top is not None:
        ax.plot(
            [min(max(fit.top.value, low), high)], [y], color=look.colour, marker=look.marker,
            markersize=3.2, markerfacecolor="white", markeredgewidth=0.8, zorder=2.7,
        )  # fmt: skip
    ax.plot(
        [min(max(fit.exponent.value, low), high)], [y], color=look.colour, marker=look.marker,
        markersize=5.5, markeredgecolor="white", markeredgewidth=0.5, zorder=3, clip_on=False,
    )  # fmt: skip
    _write(ax, y, 1.03, growth.interval(fit.exponent), "#222222")
    verdict = fit.finding.verdict if fit.finding else None
    weight = "bold" if verdict == "refuted" else "normal"
    _write(
        ax, y, 1.42, growth.mark(verdict), "#222222" if verdict != "inconclusive" else QUIET, weight
    )


def _draw_declared(ax: Axes, y: int, declared: float, bound: bool) -> None:
    """The declared power, and around it what an interval may span."""
    low = ax.get_xlim()[0] if bound else declared - TOLERANCE
    ax.fill_betweenx(
        [y - 0.32, y + 0.32], low, declared + TOLERANCE, color=ALLOWED, linewidth=0, zorder=1
    )
    ax.plot([declared, declared], [y - 0.36, y + 0.36], color="#333333", linewidth=1.1, zorder=1.6)
    if bound:
        for end in (y - 0.36, y + 0.36):
            ax.plot([declared - 0.05, declared], [end, end], color="#333333", linewidth=1.1)
        ax.annotate(
            "", (low + 0.02, y), (declared - 0.02, y), zorder=1.4,
            arrowprops={"arrowstyle": "->", "color": "#999999", "linewidth": 0.8},
        )  # fmt: skip


def _write(ax: Axes, y: int, x: float, text: str, colour: str, weight: str = "normal") -> None:
    ax.text(
        x, y, text, transform=ax.get_yaxis_transform(), color=colour, fontsize=8, va="center",
        fontweight=weight,
    )  # fmt: skip


def _alt(fit: ExponentFit) -> str:
    verdict = f", {fit.finding.verdict}" if fit.finding else ""
    return f"{fit.series.subject} {growth.interval(fit.exponent)}{verdict}"
