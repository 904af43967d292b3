"""A dot for every round of a gate run, cell under cell, beside the margin and the threshold."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from attnbench.base import units
from attnbench.gate.decide.data import GateRun, Round, Variant
from attnbench.gate.decide.outcome import Outcome
from attnbench.gate.decide.outcome import Row as CellRow
from attnbench.report import figures
from attnbench.report.document import Picture, Sign, Value
from attnbench.report.documents import gate
from attnbench.report.figures import FigureKind, Row, Size, Sketch
from attnbench.report.labels import labels
from attnbench.report.render import written

MOST_ROWS, MOST_PAGES = 42, 4  # cells of a figure, and figures
LONGEST = 46  # letters of a label
_MARKERS = {"screen": "○", "confirm": "●"}
MARGIN, AGAINST, MEDIAN = "#e3e8ee", "#fbeae4", "#111111"
# Dots have the colour of the verdict: that of an implementation would look like one.
COLOURS: dict[Sign, str] = {
    "good": "#2e6b3f", "better": "#0060a8", "bad": "#b3261e", "open": "#8a6100", "none": "#8a8a8a",
}  # fmt: skip
KIND = FigureKind(
    name="gate-rounds", title="A dot for every round",
    reading="Each dot is one round's change in time, candidate / base − 1, from top to bottom in"
    " the order they were measured: hollow ones (○) are of the screening, full ones (●) of the"
    " confirmation; a × is a round that was discarded and counts for nothing. Under them the"
    " median of the rounds that decide, with its 95 % interval. In the shaded margin nothing"
    " is a regression; the dashed line is the slowdown that is found. What lies beyond the"
    " axis is drawn at its edge. The A/A control must lie around 0, the positive control on"
    " the line.",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Strip:
    """One row of the figure: its dots (percent, marker), what was made of them, and the words."""

    label: str
    dots: tuple[tuple[float, str], ...]
    middle: float | None
    ends: tuple[float, float] | None = None
    words: str
    sign: Sign = "none"


def cells(run: GateRun, outcome: Outcome) -> list[Strip]:
    """A row for each cell, the worst first."""
    found = []
    for number, name, row in gate.ordered(run, outcome):
        change, wins = gate.changed(row), written.value(gate.wins(row))
        words = written.verdict(gate.finding(name, row))
        if _ends(change):
            words = f"{written.value(change)} ({written.interval(change)})  {wins}  {words}"
        elif row.trade:
            words = f"{written.value(change)}  {words}"
        label = written.clean(name)
        found.append(
            Strip(
                label=label if len(label) <= LONGEST else f"…{label[1 - LONGEST :]}",
                dots=_dots(run.rounds, [number], "candidate"),
                middle=_percent(row.ratio), ends=_ends(row),
                words=words, sign=gate.SIGNS[row.verdict],
            )
        )  # fmt: skip
    return found


def controls(run: GateRun, outcome: Outcome) -> list[Strip]:
    """The A/A control, all cells of a round in turn, and the positive control."""
    found, every = outcome.controls, range(len(run.cells))
    wins = f"{found.wins}/{found.rounds}"
    seen = f"{units.change(found.planted_ratio)}  {wins}  found"
    if not found.found:
        seen = "not timed" if found.found is None else f"{wins}  not found"
    aside = "  ! not to be trusted" if found.untrusted else ""
    return [
        Strip(
            label="A/A control (base again)", dots=_dots(run.rounds, every, "null"),
            middle=_percent(found.null_ratio), words=units.change(found.null_ratio) + aside,
            sign="open" if found.untrusted else "none" if found.null_ratio is None else "good",
        ),
        Strip(
            label=f"positive control (+{units.brief_percent(run.rules.threshold)})",
            dots=_dots(run.rounds, every, "planted"),
            middle=_percent(found.planted_ratio), words=seen,
            sign="none" if found.found is None else "good" if found.found else "open",
        ),
    ]  # fmt: skip


def _dots(
    rounds: Iterable[Round], cells: Iterable[int], variant: Variant
) -> tuple[tuple[float, str], ...]:
    return tuple(
        (100 * (math.exp(log) - 1), "×" if found.discarded is not None else _MARKERS[found.stage])
        for found in rounds
        for cell in cells
        if (log := found.log_ratio(cell, variant)) is not None
    )


def _percent(ratio: float | None) -> float | None:
    return None if ratio is None else 100 * (ratio - 1)


def _ends(of: Value | CellRow) -> tuple[float, float] | None:
    low, high = _percent(of.low), _percent(of.high)
    return None if low is None or high is None else (low, high)


def limits(run: GateRun, strips: Sequence[Strip]) -> tuple[float, float]:
    """The ends of the axis in percent: what is drawn, as far as three thresholds."""
    threshold = 100 * run.rules.threshold
    found = [x for strip in strips for x in (strip.middle, *(strip.ends or ())) if x is not None]
    found += [x for strip in strips for x, _ in strip.dots]
    low, high = max(-3 * threshold, min(found)), min(3 * threshold, max(found))
    return 1.05 * min(low, -1.25 * threshold), 1.05 * max(high, 1.5 * threshold)


def draw_all(run: GateRun, outcome: Outcome, folder: Path) -> list[Picture]:
    """Draw the rounds of all cells, the worst first, with the controls under them."""
    strips, under = cells(run, outcome), controls(run, outcome)
    if not any(strip.dots for strip in strips):
        return []
    ends, common, drawn = limits(run, [*strips, *under]), labels(run.cells)[0], []
    with figures.styled():
        for page in figures.pages(strips, lambda _: (), MOST_ROWS, MOST_PAGES):
            rows = [*page.items, *under]
            caption = "; ".join(filter(None, (common, page.subject.strip(" ()"))))
            if page.left_out:
                caption += f"; {page.left_out} more cells are not drawn"
            drawn.append(
                Sketch(
                    kind=KIND, draw=partial(_draw, run, rows, ends), caption=caption,
                    alt=[f"{row.label} {row.words}" for row in rows], slug=str(page.number),
                ).save(folder)
            )  # fmt: skip
    return drawn


def _draw(run: GateRun, rows: Sequence[Strip], ends: tuple[float, float], size: Size) -> Figure:
    """One figure; names on the left, what was made of the dots on the right."""
    texts = [Row(row.label, row.words, COLOURS[row.sign], row.sign == "bad") for row in rows]
    figure, (ax,) = figures.row_panels([texts], size, 10.5, figures.Margins(bottom=0.65), 0.3)
    _draw_axis(ax, 100 * run.rules.threshold, 100 * run.rules.margin, ends)
    for y, row in enumerate(rows):
        _draw_strip(ax, y, row, ends)
    return figure


def _draw_axis(ax: Axes, threshold: float, margin: float, ends: tuple[float, float]) -> None:
    """The change in percent, with the margin and the threshold."""
    ax.set_xlim(*ends)
    ax.axvspan(-margin, margin, color=MARGIN, linewidth=0, zorder=0.6)
    ax.axvline(threshold, color="#333333", linewidth=1.0, linestyle=(0, (4, 3)), zorder=1.2)
    ax.xaxis.set_major_formatter(lambda x, _: f"{x:+.3g} %".replace("-", "−") if x else "0")
    ax.set_xlabel(
        "change in time, candidate / base − 1\n"
        "○ screening   ● confirmation   × discarded   ┿ median, 95 % interval"
    )


def _draw_strip(ax: Axes, y: int, row: Strip, ends: tuple[float, float]) -> None:
    """One row: its rounds from top to bottom, and under them the median with its interval."""
    colour = COLOURS[row.sign]
    if row.sign == "bad":
        ax.axhspan(y - 0.5, y + 0.5, color=AGAINST, linewidth=0, zorder=0.5)
    heights = np.linspace(y - 0.36, y + 0.16, len(row.dots) + 2)[1:-1]
    for marker, shape, ground, edge in (
        ("○", "o", "white", colour), ("●", "o", colour, colour), ("×", "x", "#a0a0a0", None),
    ):  # fmt: skip
        ax.scatter(
            [np.clip(x, *ends) for x, own in row.dots if own == marker],
            [height for (_, own), height in zip(row.dots, heights, strict=True) if own == marker],
            s=12, marker=shape, c=ground, edgecolors=edge, linewidth=0.8, alpha=0.75, zorder=2.5,
        )  # fmt: skip
    if row.ends is not None:
        ax.hlines(y + 0.34, *np.clip(row.ends, *ends), color=MEDIAN, linewidth=1.6, zorder=3.2)
    if row.middle is not None:
        ax.vlines(
            np.clip(row.middle, *ends), y + 0.22, y + 0.46, color=MEDIAN, linewidth=2.0, zorder=3.2
        )
