"""A dot for every round of a gate run, cell under cell, beside the margin and the threshold."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from attnbench.gate.decide.data import GateRun, Outcome
from attnbench.report import growth, plots, style
from attnbench.report.gate import strips as dots
from attnbench.report.gate import texts
from attnbench.report.gate.strips import CONTROL, Scale, Strip
from attnbench.report.growth import Kind, Page
from attnbench.report.plots import Plot
from attnbench.report.style import QUIET

MOST_ROWS, MOST_PAGES = 44, 4  # rows of a figure, and figures
PLOT_INCHES, RIGHT_INCHES = 4.6, 3.55
COLUMNS_INCHES = (0.26, 1.96, 2.46)  # of the words beside, from the plot's edge
TOP, LOW = -0.38, 0.16  # where a row's dots lie, in rows from its middle
UNDER = 0.34  # and under them what was made of them
TICK_INCHES = 0.47  # that a tick's text needs
LEGEND = ("○ screening   ● confirmation   × vetoed", "under them: median, 95 % interval")
LONGEST = 46  # letters of a label
MARGIN, AGAINST, HEADING = "#e3e8ee", "#fbeae4", "#f5f5f5"
DOTS = Kind(
    name="gate-rounds",
    title="A dot for every round",
    reading="Each dot is one round's change in time, candidate / base − 1, from top to bottom in"
    " the order they were measured: hollow ones are of the screening, full ones of the"
    " confirmation; a × is a round that was vetoed and counts for nothing. Under them the median"
    " of the rounds that decide, with its 95 % interval. In the shaded margin nothing is a"
    " regression; the dashed line is the slowdown that is found. A triangle at the edge stands for"
    " dots beyond it, with their number. Base against itself must lie around 0, the planted"
    " slowdown on the line.",
)


def draw_all(run: GateRun, outcome: Outcome, folder: Path) -> list[Plot]:
    """Draw the rounds of all cells, the worst first, with the controls under them."""
    strips, controls = dots.cells(run, outcome), dots.controls(run, outcome)
    if not any(strip.dots for strip in strips):
        return []
    scale = dots.scale_of(run, [*strips, *controls])
    room = MOST_ROWS - len(controls) - 1
    pages = [strips[i : i + room] for i in range(0, len(strips), room)]
    left_out = sum(map(len, pages[MOST_PAGES:]))
    drawn = []
    folder.mkdir(parents=True, exist_ok=True)
    with mpl.rc_context(style.RC):
        for number, page in enumerate(pages[:MOST_PAGES], start=1):
            subject = texts.labels(run.cells)[0]
            name = subject if len(pages) == 1 else f"{subject}, {number} of {len(pages)}"
            here = Page(str(number), name, left_out if number == 1 else 0)
            rows = [*page, None, *controls]
            alt = [strip.alt for strip in rows if strip is not None]
            drawn.append(growth.save(_draw(rows, scale, name), DOTS, here, alt, folder))
    return drawn


def _apart(ax: Axes, ticks: Sequence[float]) -> list[float]:
    """The ticks whose texts have room beside each other, from 0 outwards."""
    place = {tick: ax.transAxes.inverted().transform(ax.transData.transform((tick, 0)))[0]
             for tick in ticks}  # fmt: skip
    kept: list[float] = []
    for tick in sorted(ticks, key=abs):
        if all(abs(place[tick] - place[k]) * PLOT_INCHES >= TICK_INCHES for k in kept):
            kept.append(tick)
    return kept


def _draw(rows: Sequence[Strip | None], scale: Scale, name: str) -> Figure:
    """`None` is the heading above the controls."""
    longest = max(len(row.label) for row in rows if row is not None)
    left = min(3.6, 0.45 + 0.066 * longest)
    each = 0.32 if len(rows) <= 14 else 0.27
    height = each * len(rows)
    total = (left + PLOT_INCHES + RIGHT_INCHES, height + plots.HEAD + 0.85)
    figure = growth.figure_of(total)
    ax = figure.add_axes((
        left / total[0], 0.55 / total[1], PLOT_INCHES / total[0], height / total[1],
    ))  # fmt: skip
    _axis(ax, scale, len(rows))
    for y, row in enumerate(rows):
        if row is None:
            ax.axhspan(y - 0.5, y + 0.5, color=HEADING, linewidth=0, zorder=2)
        else:
            _draw_strip(ax, y, row, scale)
    _label(ax, rows)
    _guides(ax, scale)
    plots.head(figure, DOTS.title, name)
    for inches, words in ((0.36, LEGEND[0]), (0.2, LEGEND[1])):
        figure.text(
            (left + PLOT_INCHES + COLUMNS_INCHES[0]) / total[0], inches / total[1], words,
            color=QUIET, fontsize=7.2, va="center",
        )  # fmt: skip
    return figure


def _axis(ax: Axes, scale: Scale, rows: int) -> None:
    if scale.linear is not None:
        ax.set_xscale("symlog", linthresh=scale.linear, linscale=1.0)
    ax.set_xlim(scale.low, scale.high)
    ax.set_ylim(rows - 0.5, -0.5)
    ax.axvspan(-scale.margin, scale.margin, color=MARGIN, linewidth=0, zorder=0.6)
    ax.axvline(0, color="#9aa3ad", linewidth=0.8, zorder=1)
    ax.axvline(scale.threshold, color="#333333", linewidth=1.0, linestyle=(0, (4, 3)), zorder=1.2)
    ax.xaxis.set_major_locator(FixedLocator(_apart(ax, scale.ticks)))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _tick(value)))
    ax.grid(visible=False, axis="y")
    beyond = "" if scale.linear is None else f"; logarithmic beyond ±{scale.linear:g} %"
    ax.set_xlabel(f"change in time, candidate / base − 1{beyond}")


def _tick(percent: float) -> str:
    return f"{percent:+.3g} %".replace("-", "−") if percent else "0"


def _draw_strip(ax: Axes, y: int, row: Strip, scale: Scale) -> None:
    if row.verdict in ("incorrect", "regressed"):
        ax.axhspan(y - 0.5, y + 0.5, color=AGAINST, linewidth=0, zorder=0.5)
    if row.words:
        against = row.verdict in ("incorrect", "regressed")
        ax.text(
            0.5, y, row.words, transform=ax.get_yaxis_transform(), color=QUIET, fontsize=7.5,
            ha="center", va="center", zorder=3,
            bbox={"facecolor": AGAINST if against else "white", "linewidth": 0, "pad": 1.5},
        )  # fmt: skip
    _draw_dots(ax, y, row, scale)
    if row.ends is not None:
        ends = [min(max(end, scale.low), scale.high) for end in row.ends]
        ax.plot(
            ends, [y + UNDER, y + UNDER], color="#111111", linewidth=1.6,
            solid_capstyle="butt", zorder=3.2,
        )  # fmt: skip
    if row.middle is not None:
        middle = min(max(row.middle, scale.low), scale.high)
        ax.plot(
            [middle, middle], [y + UNDER - 0.12, y + UNDER + 0.12], color="#111111", linewidth=2.0,
            solid_capstyle="butt", zorder=3.4,
        )  # fmt: skip


def _draw_dots(ax: Axes, y: int, row: Strip, scale: Scale) -> None:
    count = len(row.dots)
    alpha = 0.75 if count <= 60 else 0.4
    heights = [y + TOP + (LOW - TOP) * (i + 0.5) / count for i in range(count)]
    for full, vetoed in ((False, False), (True, False), (True, True)):
        wanted = [
            (dot.percent, height)
            for dot, height in zip(row.dots, heights, strict=True)
            if dot.vetoed == vetoed and (vetoed or dot.full == full)
            and scale.low <= dot.percent <= scale.high
        ]  # fmt: skip
        colour = "#a0a0a0" if vetoed else row.look.colour
        ax.plot(
            [x for x, _ in wanted], [h for _, h in wanted], linestyle="none", color=colour,
            marker="x" if vetoed else "o", markersize=3.4 if vetoed else 3.6,
            markerfacecolor=colour if full else "white", markeredgecolor=colour,
            markeredgewidth=0.8, alpha=1.0 if vetoed else alpha, zorder=2.4 if vetoed else 2.6,
        )  # fmt: skip
    _draw_outside(ax, y, row, scale)


def _draw_outside(ax: Axes, y: int, row: Strip, scale: Scale) -> None:
    """A triangle at each edge beyond which there are dots, and how many."""
    counting = [dot.percent for dot in row.dots if not dot.vetoed]
    sides = (
        (sum(x > scale.high for x in counting), scale.high, ">", 1.012, "left"),
        (sum(x < scale.low for x in counting), scale.low, "<", -0.012, "right"),
    )
    for count, edge, marker, place, align in sides:
        if not count:
            continue
        ax.plot(
            [edge], [y], marker=marker, color=row.look.colour, markersize=4.5, linestyle="none",
            clip_on=False, zorder=3.6,
        )  # fmt: skip
        ax.text(
            place, y, str(count), transform=ax.get_yaxis_transform(), color=row.look.colour,
            fontsize=6.5, va="center", ha=align,
        )  # fmt: skip


def _label(ax: Axes, rows: Sequence[Strip | None]) -> None:
    names = ["controls" if row is None else row.label for row in rows]
    ax.set_yticks(range(len(rows)), [_shortened(name) for name in names])
    ax.tick_params(axis="y", length=0, pad=13)
    for row, text in zip(rows, ax.get_yticklabels(), strict=True):
        if row is None:
            text.set_fontweight("bold")
        else:
            text.set_color(QUIET if row.look is CONTROL else row.look.colour)
    _beside(ax, -0.85, ("change (95 % interval)", "wins", "verdict"), QUIET)
    for y, row in enumerate(rows):
        if row is not None:
            against = row.verdict in ("incorrect", "regressed")
            colour = QUIET if row.look is CONTROL else "#222222"
            _beside(ax, y, row.beside, colour, "bold" if against else "normal")


def _shortened(name: str) -> str:
    """Its two ends, where it is too long: the end tells the case."""
    half = LONGEST // 2
    return name if len(name) <= LONGEST else f"{name[: half - 1]}…{name[-half:]}"


def _guides(ax: Axes, scale: Scale) -> None:
    """What the band and the line stand for."""
    for x, word in ((0.0, "margin"), (scale.threshold, "threshold")):
        ax.text(x, -0.64, word, color=QUIET, fontsize=7, ha="center", va="bottom")


def _beside(
    ax: Axes, y: float, parts: tuple[str, str, str], colour: str, weight: str = "normal"
) -> None:
    for inches, part, bold in zip(COLUMNS_INCHES, parts, (False, False, True), strict=True):
        ax.text(
            1 + inches / PLOT_INCHES, y, part, transform=ax.get_yaxis_transform(), color=colour,
            fontsize=7.8, va="center", fontweight=weight if bold else "normal",
        )  # fmt: skip
