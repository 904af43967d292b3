"""A dot for every round of a gate run, cell under cell, beside the margin and the threshold."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, MaxNLocator, NullLocator

from attnbench.base import units
from attnbench.gate.decide.data import GateRun, Outcome, Round, Variant
from attnbench.report import axes, figures, style
from attnbench.report.figures import FigureKind, Plot
from attnbench.report.gate import texts
from attnbench.report.style import QUIET, Look

MOST_ROWS, MOST_PAGES = 44, 4  # rows of a figure, and figures
LONGEST = 46  # letters of a label
PLOT_INCHES = 4.6  # about the width of the axes
TOP, LOW, UNDER = -0.38, 0.16, 0.34  # of dots, and of their median, from a row's middle
COLUMNS = (("change (95 % interval)", 20), ("wins", 142), ("verdict", 178))  # points from the axes
MARGIN, AGAINST, HEADING = "#e3e8ee", "#fbeae4", "#f5f5f5"
INK, MEDIAN = "#222222", "#111111"
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
    against: bool = False  # whether the verdict is held against the candidate
    words: str = ""  # in the place of dots

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


def cells(run: GateRun, outcome: Outcome) -> list[Strip]:
    """A row for each cell, the worst first."""
    looks = style.looks(texts.flat(cell.impl) for cell in run.cells)
    _, names = texts.labels(run.cells)
    found = []
    for number, row in texts.worst_first(outcome.rows):
        measured, ends = texts.change(row.ratio), None
        if row.low is not None and row.high is not None:
            measured += f" ({texts.interval(row.low, row.high)})"
            ends = (_percent(row.low), _percent(row.high))
        dots = tuple(_dots(run.rounds, number, "candidate"))
        found.append(
            Strip(
                label=names[number].replace("$", r"\$"),  # which would begin a formula
                look=looks[texts.flat(row.cell.impl)], dots=dots,
                middle=None if row.ratio is None else _percent(row.ratio), ends=ends,
                beside=(measured, texts.wins(row), texts.mark(row.verdict)),
                against=row.verdict in ("incorrect", "regressed"),
                words="" if dots else "no time was compared",
            )
        )  # fmt: skip
    return found


def _dots(rounds: Iterable[Round], cell: int, variant: Variant) -> Iterable[Dot]:
    for found in rounds:
        log = found.log_ratio(cell, variant)
        if log is not None:
            yield Dot(_percent(math.exp(log)), found.stage == "confirm", found.veto is not None)


def controls(run: GateRun, outcome: Outcome) -> list[Strip]:
    """The A/A control, all cells of a round on one height, and the positive control."""
    dots: dict[Variant, tuple[Dot, ...]] = {
        variant: tuple(
            dot
            for found in run.rounds
            for cell in range(len(run.cells))
            for dot in _dots([found], cell, variant)
        )
        for variant in ("null", "planted")
    }
    found = outcome.controls
    seen = {True: "found", False: "NOT found", None: "none"}[found.found]
    return [
        Strip(
            label="A/A control (base again)", look=CONTROL, dots=dots["null"],
            middle=None if found.null_ratio is None else _percent(found.null_ratio),
            beside=(texts.change(found.null_ratio), "",
                    "! not to be trusted" if found.untrusted else ""),
        ),
        Strip(
            label=f"positive control (+{units.brief_percent(run.rules.threshold)})", look=CONTROL,
            dots=dots["planted"],
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
    if far:
        return Scale(1.08 * low, 1.15 * high, threshold, threshold / 3, linear=1.5 * threshold)
    room = 0.03 * (high - low)
    return Scale(low - room, high + room, threshold, threshold / 3)


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
    half = LONGEST // 2
    labels = [  # of one that is too long the two ends: the end tells the case
        "controls" if row is None else row.label if len(row.label) <= LONGEST
        else f"{row.label[: half - 1]}…{row.label[-half:]}"
        for row in rows
    ]  # fmt: skip
    ax.set_yticks(range(len(rows)), labels)
    ax.tick_params(axis="y", length=0, pad=13)
    for title, offset in COLUMNS:
        axes.beside(ax, -0.85, title, offset, color=QUIET)
    for y, (row, label) in enumerate(zip(rows, ax.get_yticklabels(), strict=True)):
        if row is None:
            label.set_fontweight("bold")
            ax.axhspan(y - 0.5, y + 0.5, color=HEADING, linewidth=0, zorder=2)
            continue
        label.set_color(QUIET if row.look is CONTROL else row.look.colour)
        for text, (title, offset) in zip(row.beside, COLUMNS, strict=True):
            axes.beside(
                ax, y, text, offset, color=QUIET if row.look is CONTROL else INK,
                fontweight="bold" if row.against and title == "verdict" else "normal",
            )  # fmt: skip
        _draw_strip(ax, y, row, scale)
    return figure


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
    beyond = ""
    if scale.linear is None:
        ax.xaxis.set_major_locator(MaxNLocator(8))
    else:
        beyond = f"; logarithmic beyond ±{scale.linear:g} %"
        steps = (1, 3) if scale.high < 2000 else (1,)
        far = [m * 10.0**e for e in range(7) for m in steps if m * 10.0**e > 1.9 * scale.threshold]
        near = [-scale.threshold, 0.0, scale.threshold]
        ticks = [x for x in (*(-x for x in far), *near, *far) if scale.low <= x <= scale.high]
        ax.xaxis.set_major_locator(FixedLocator(ticks))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter(lambda x, _: f"{x:+.3g} %".replace("-", "−") if x else "0")
    ax.grid(visible=False, axis="y")
    ax.set_xlabel(
        f"change in time, candidate / base − 1{beyond}\n"
        "○ screening   ● confirmation   × vetoed   ┿ median, 95 % interval"
    )


def _draw_strip(ax: Axes, y: int, row: Strip, scale: Scale) -> None:
    """One row: its rounds from top to bottom, and under them the median with its interval."""
    colour, across = row.look.colour, ax.get_yaxis_transform()
    if row.against:
        ax.axhspan(y - 0.5, y + 0.5, color=AGAINST, linewidth=0, zorder=0.5)
    if row.words:
        ground = {"facecolor": AGAINST if row.against else "white", "linewidth": 0, "pad": 1.5}
        ax.text(
            0.5, y, row.words, transform=across, color=QUIET, fontsize=7.5, ha="center",
            va="center", zorder=3, bbox=ground,
        )  # fmt: skip
    step = (LOW - TOP) / max(1, len(row.dots))
    placed = [(dot, y + TOP + step * (i + 0.5)) for i, dot in enumerate(row.dots)]
    rounds = [found for found in placed if not found[0].vetoed]
    vetoed = [found for found in placed if found[0].vetoed]
    ax.scatter(
        [dot.percent for dot, _ in rounds], [height for _, height in rounds], s=12, linewidth=0.8,
        edgecolors=colour, facecolors=[colour if dot.full else "white" for dot, _ in rounds],
        alpha=0.75 if len(placed) <= 60 else 0.4, zorder=2.5,
    )  # fmt: skip
    ax.scatter(
        [dot.percent for dot, _ in vetoed], [height for _, height in vetoed], s=12, linewidth=0.8,
        color="#a0a0a0", marker="x", zorder=2.5,
    )  # fmt: skip
    for beyond, edge, marker, place, align in (
        (sum(d.percent > scale.high for d, _ in rounds), scale.high, ">", 1.012, "left"),
        (sum(d.percent < scale.low for d, _ in rounds), scale.low, "<", -0.012, "right"),
    ):
        if beyond:
            ax.plot([edge], [y], marker=marker, color=colour, markersize=4.5, clip_on=False)
            ax.text(
                place, y, str(beyond), transform=across, color=colour, fontsize=6.5, va="center",
                ha=align,
            )  # fmt: skip
    if row.ends is not None:
        ax.hlines(y + UNDER, *row.ends, color=MEDIAN, linewidth=1.6, zorder=3.2)
    if row.middle is not None:
        ax.vlines(
            row.middle, y + UNDER - 0.12, y + UNDER + 0.12, color=MEDIAN, linewidth=2.0, zorder=3.2
        )
