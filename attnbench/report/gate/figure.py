"""A dot for every round of a gate run, cell under cell, beside the margin and the threshold."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from attnbench.base import units
from attnbench.gate.decide.data import GateRun, Outcome, Round, Variant, Verdict
from attnbench.report import figures, style
from attnbench.report.figures import FigureKind, Plot
from attnbench.report.gate import texts
from attnbench.report.style import QUIET, Look

MOST_ROWS, MOST_PAGES = 44, 4  # rows of a figure, and figures
LONGEST = 46  # letters of a label
PLOT_INCHES = 4.6  # about the width of the axes
TICK_INCHES = 0.47  # that the text of a tick needs
TOP, LOW, UNDER = (
    -0.38,
    0.16,
    0.34,
)  # where dots lie, and what was made of them, from a row's middle
COLUMNS = (("change (95 % interval)", 20), ("wins", 142), ("verdict", 178))  # points from the axes
MARGIN, AGAINST, HEADING = "#e3e8ee", "#fbeae4", "#f5f5f5"
INK = "#222222"
CONTROL = Look("#8a8a8a", "o")
ROUNDS = FigureKind(
    name="gate-rounds",
    title="A dot for every round",
    reading="Each dot is one round's change in time, candidate / base − 1, from top to bottom in"
    " the order they were measured: hollow ones (○) are of the screening, full ones (●) of the"
    " confirmation; a × is a round that was vetoed and counts for nothing. Under them the median"
    " of the rounds that decide, with its 95 % interval. In the shaded margin nothing is a"
    " regression; the dashed line is the slowdown that is found. A triangle at the edge stands for"
    " dots beyond it, with their number. The A/A control must lie around 0, the positive"
    " control on the line.",
)


@dataclass(frozen=True)
class Dot:
    """One round's change in percent."""

    percent: float
    full: bool
    vetoed: bool


@dataclass(frozen=True)
class Strip:
    """One row of the figure: its dots, what was made of them (percent), and the words beside."""

    label: str
    look: Look
    dots: tuple[Dot, ...] = ()
    middle: float | None = None
    ends: tuple[float, float] | None = None
    beside: tuple[str, str, str] = ("", "", "")  # change, wins, verdict
    verdict: Verdict | None = None
    words: str = ""  # in the place of dots

    @property
    def against(self) -> bool:
        """Whether the verdict is held against the candidate."""
        return self.verdict in ("incorrect", "regressed")

    @property
    def alt(self) -> str:
        """The row in words."""
        return f"{self.label} {' '.join(part for part in self.beside if part)}".strip()


@dataclass(frozen=True)
class Scale:
    """The common axis in percent: linear, or beyond `linear` logarithmic where that is given."""

    low: float
    high: float
    threshold: float
    margin: float
    linear: float | None = None
    ticks: tuple[float, ...] = field(default=())


def cells(run: GateRun, outcome: Outcome) -> list[Strip]:
    """A row for each cell, the worst first."""
    looks = style.looks(texts.flat(cell.impl) for cell in run.cells)
    _, names = texts.labels(run.cells)
    found = []
    for number, row in texts.worst_first(outcome.rows):
        measured = texts.change(row.ratio)
        ends = None
        if row.low is not None and row.high is not None:
            measured += f" ({texts.interval(row.low, row.high)})"
            ends = (_percent(row.low), _percent(row.high))
        dots = tuple(_dots(run.rounds, number, "candidate"))
        found.append(
            Strip(
                label=names[number].replace("$", r"\$"),  # which would begin a formula
                look=looks[texts.flat(row.cell.impl)],
                dots=dots,
                middle=None if row.ratio is None else _percent(row.ratio),
                ends=ends,
                beside=(measured, texts.wins(row), texts.mark(row.verdict)),
                verdict=row.verdict,
                words="" if dots else "no time was compared",
            )
        )
    return found


def _dots(rounds: Iterable[Round], cell: int, variant: Variant) -> Iterable[Dot]:
    for found in rounds:
        log = found.log_ratio(cell, variant)
        if log is not None:
            yield Dot(_percent(math.exp(log)), found.stage == "confirm", found.veto is not None)


def controls(run: GateRun, outcome: Outcome) -> list[Strip]:
    """The A/A control, all cells of a round on one height, and the positive control."""
    every = range(len(run.cells))
    null = [dot for r in run.rounds for cell in every for dot in _dots([r], cell, "null")]
    planted = [dot for r in run.rounds for cell in every for dot in _dots([r], cell, "planted")]
    found = outcome.controls
    seen = {True: "found", False: "NOT found", None: "none"}[found.found]
    return [
        Strip(
            label="A/A control (base again)", look=CONTROL, dots=tuple(null),
            middle=None if found.null_ratio is None else _percent(found.null_ratio),
            beside=(texts.change(found.null_ratio), "",
                    "! not to be trusted" if found.untrusted else ""),
        ),
        Strip(
            label=f"positive control (+{units.brief_percent(run.rules.threshold)})", look=CONTROL,
            dots=tuple(planted),
            middle=None if found.planted_ratio is None else _percent(found.planted_ratio),
            beside=(texts.change(found.planted_ratio),
                    f"{found.wins}/{found.rounds}" if found.rounds else "", seen),
        ),
    ]  # fmt: skip


def _percent(ratio: float) -> float:
    return 100 * (ratio - 1)


def scale_of(run: GateRun, strips: Sequence[Strip]) -> Scale:
    """An axis that shows every median and interval, and all dots but the furthest.

    Where something is far out, what is beyond 1.5 thresholds is logarithmic: a cell that takes
    twice as long must not squeeze all others.
    """
    threshold = 100 * run.rules.threshold
    drawn = [x for s in strips for x in (s.middle, *(s.ends or ())) if x is not None]
    dots = sorted(dot.percent for strip in strips for dot in strip.dots if not dot.vetoed)
    cut = len(dots) // 50  # the furthest 2 % at each end may stand at the edge
    spread = [dots[cut], dots[-1 - cut]] if dots else []
    near = [min(max(x, -3 * threshold), 3 * threshold) for x in spread]
    low = max(-100.0, min([-1.25 * threshold, *drawn, *near]))
    high = max([1.5 * threshold, *drawn, *near])
    far = max(-low, high) > 4 * threshold
    room = 0.03 * (high - low)
    return Scale(
        low=1.08 * low if far else low - room,
        high=1.15 * high if far else high + room,
        threshold=threshold,
        margin=threshold / 3,
        linear=1.5 * threshold if far else None,
        ticks=_ticks(low, high, threshold, far),
    )


def _ticks(low: float, high: float, threshold: float, far: bool) -> tuple[float, ...]:
    """Halves of the threshold; where the ends are logarithmic whole ones, and 1, 2, 5 beyond."""
    step = threshold / 2 if not far else threshold
    least, most = (low, high) if not far else (-threshold, threshold)
    linear = [n * step for n in range(math.ceil(least / step), math.floor(most / step) + 1)]
    if not far:
        return tuple(linear)
    powers = [m * 10.0**e for e in range(-1, 7) for m in (1, 2, 5)]
    beyond = [p for p in powers if p >= 1.9 * threshold]
    return tuple([-p for p in beyond if -p >= low] + linear + [p for p in beyond if p <= high])


def draw_all(run: GateRun, outcome: Outcome, folder: Path) -> list[Plot]:
    """Draw the rounds of all cells, the worst first, with the controls under them."""
    strips, under = cells(run, outcome), controls(run, outcome)
    if not any(strip.dots for strip in strips):
        return []
    scale = scale_of(run, [*strips, *under])
    common = texts.labels(run.cells)[0]
    drawn = []
    folder.mkdir(parents=True, exist_ok=True)
    with mpl.rc_context(style.RC):
        for page in figures.pages(strips, lambda _: (), MOST_ROWS - len(under) - 1, MOST_PAGES):
            rows = [*page.items, None, *under]
            alt = [strip.alt for strip in (*page.items, *under)]
            name = common + page.place
            svg, png = figures.write(_draw(rows, scale, name), f"gate-rounds-{page.number}", folder)
            drawn.append(ROUNDS.plot(name, page.left_out, alt, svg, png))
    return drawn


def _draw(rows: Sequence[Strip | None], scale: Scale, name: str) -> Figure:
    """Draw one figure; `None` is the heading above the controls."""
    longest = min(LONGEST, max(len(row.label) for row in rows if row is not None))
    each = 0.32 if len(rows) <= 14 else 0.27
    size = (PLOT_INCHES + 4.0 + 0.06 * longest, each * len(rows) + 1.3)
    figure = figures.figure_of(size, ROUNDS.title, name)
    ax = figure.subplots()
    _draw_axis(ax, scale, len(rows))
    labels = [_shortened(row.label) if row else "controls" for row in rows]
    ax.set_yticks(range(len(rows)), labels)
    ax.tick_params(axis="y", length=0, pad=13)
    for title, offset in COLUMNS:
        _write(ax, -0.85, title, offset, color=QUIET)
    for y, (row, label) in enumerate(zip(rows, ax.get_yticklabels(), strict=True)):
        if row is None:
            label.set_fontweight("bold")
            ax.axhspan(y - 0.5, y + 0.5, color=HEADING, linewidth=0, zorder=2)
            continue
        label.set_color(QUIET if row.look is CONTROL else row.look.colour)
        for text, (title, offset) in zip(row.beside, COLUMNS, strict=True):
            bold = row.against and title == "verdict"
            colour = QUIET if row.look is CONTROL else INK
            _write(ax, y, text, offset, color=colour, fontweight="bold" if bold else "normal")
        _draw_strip(ax, y, row, scale)
    return figure


def _write(ax: Axes, y: float, text: str, offset: float, **style: Any) -> None:
    """Write beside the axes, so many points from them, at the height of a row."""
    ax.annotate(
        text, (1, y), xycoords=("axes fraction", "data"), xytext=(offset, 0),
        textcoords="offset points", fontsize=7.8, va="center", **style,
    )  # fmt: skip


def _shortened(name: str) -> str:
    """Its two ends, where it is too long: the end tells the case."""
    half = LONGEST // 2
    return name if len(name) <= LONGEST else f"{name[: half - 1]}…{name[-half:]}"


def _draw_axis(ax: Axes, scale: Scale, rows: int) -> None:
    """The change in percent, with the margin and the threshold and their names."""
    if scale.linear is not None:
        ax.set_xscale("symlog", linthresh=scale.linear, linscale=1.0)
    ax.set(xlim=(scale.low, scale.high), ylim=(rows - 0.5, -0.5))
    ax.axvspan(-scale.margin, scale.margin, color=MARGIN, linewidth=0, zorder=0.6)
    ax.axvline(0, color="#9aa3ad", linewidth=0.8, zorder=1)
    ax.axvline(scale.threshold, color="#333333", linewidth=1.0, linestyle=(0, (4, 3)), zorder=1.2)
    for x, word in ((0.0, "margin"), (scale.threshold, "threshold")):
        ax.text(x, -0.64, word, color=QUIET, fontsize=7, ha="center", va="bottom")
    ax.xaxis.set_major_locator(FixedLocator(_with_room(ax, scale.ticks)))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _tick(value)))
    ax.grid(visible=False, axis="y")
    beyond = "" if scale.linear is None else f"; logarithmic beyond ±{scale.linear:g} %"
    ax.set_xlabel(
        f"change in time, candidate / base − 1{beyond}\n"
        "○ screening   ● confirmation   × vetoed   ┿ median, 95 % interval"
    )


def _with_room(ax: Axes, ticks: Sequence[float]) -> list[float]:
    """The ticks whose texts have room beside each other, from 0 outwards."""
    to_axes = ax.transData + ax.transAxes.inverted()
    place = {tick: PLOT_INCHES * to_axes.transform((tick, 0))[0] for tick in ticks}
    kept: list[float] = []
    for tick in sorted(ticks, key=abs):
        if all(abs(place[tick] - place[other]) >= TICK_INCHES for other in kept):
            kept.append(tick)
    return kept


def _tick(percent: float) -> str:
    return f"{percent:+.3g} %".replace("-", "−") if percent else "0"


def _draw_strip(ax: Axes, y: int, row: Strip, scale: Scale) -> None:
    """One row: its dots, and under them the median with its interval."""
    ground = AGAINST if row.against else "white"
    if row.against:
        ax.axhspan(y - 0.5, y + 0.5, color=AGAINST, linewidth=0, zorder=0.5)
    if row.words:
        ax.text(
            0.5, y, row.words, transform=ax.get_yaxis_transform(), color=QUIET, fontsize=7.5,
            ha="center", va="center", zorder=3,
            bbox={"facecolor": ground, "linewidth": 0, "pad": 1.5},
        )  # fmt: skip
    _draw_dots(ax, y, row, scale)
    line: dict[str, Any] = {"color": "#111111", "solid_capstyle": "butt", "zorder": 3.2}
    if row.ends is not None:
        ends = [min(max(end, scale.low), scale.high) for end in row.ends]
        ax.plot(ends, [y + UNDER] * 2, linewidth=1.6, **line)
    if row.middle is not None:
        middle = min(max(row.middle, scale.low), scale.high)
        ax.plot([middle] * 2, [y + UNDER - 0.12, y + UNDER + 0.12], linewidth=2.0, **line)


def _draw_dots(ax: Axes, y: int, row: Strip, scale: Scale) -> None:
    """The rounds in their order from top to bottom; those beyond an edge as a number there."""
    count = len(row.dots)
    placed = [
        (dot, y + TOP + (LOW - TOP) * (i + 0.5) / count)
        for i, dot in enumerate(row.dots)
        if scale.low <= dot.percent <= scale.high
    ]
    colour, alpha = row.look.colour, 0.75 if count <= 60 else 0.4
    kinds: tuple[tuple[list[tuple[Dot, float]], dict[str, Any]], ...] = (
        ([p for p in placed if not p[0].vetoed and not p[0].full],
         {"marker": "o", "color": colour, "markerfacecolor": "white", "alpha": alpha}),
        ([p for p in placed if not p[0].vetoed and p[0].full],
         {"marker": "o", "color": colour, "alpha": alpha}),
        ([p for p in placed if p[0].vetoed], {"marker": "x", "color": "#a0a0a0"}),
    )  # fmt: skip
    for found, style_ in kinds:
        xs, heights = [dot.percent for dot, _ in found], [height for _, height in found]
        ax.plot(xs, heights, linestyle="none", markersize=3.5, markeredgewidth=0.8, zorder=2.5,
                **style_)  # fmt: skip
    counting = [dot.percent for dot in row.dots if not dot.vetoed]
    for beyond, edge, marker, place, align in (
        (sum(x > scale.high for x in counting), scale.high, ">", 1.012, "left"),
        (sum(x < scale.low for x in counting), scale.low, "<", -0.012, "right"),
    ):
        if beyond:
            ax.plot([edge], [y], marker=marker, color=colour, markersize=4.5, clip_on=False)
            ax.text(
                place, y, str(beyond), transform=ax.get_yaxis_transform(), color=colour,
                fontsize=6.5, va="center", ha=align,
            )  # fmt: skip
