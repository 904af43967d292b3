"""A gate run as rows of dots: what the figure of its rounds shows, and on which scale."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from attnbench.base import units
from attnbench.gate.decide.data import GateRun, Outcome, Round, Row, Variant, Verdict
from attnbench.report import style
from attnbench.report.gate import texts
from attnbench.report.style import Look

CONTROL = Look("#8a8a8a", "o")


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
    looks = style.looks({texts.flat(cell.impl) for cell in run.cells})
    _, names = texts.labels(run.cells)
    return [
        _cell(run, number, row, names[number], looks[texts.flat(row.cell.impl)])
        for number, row in texts.worst_first(outcome.rows)
    ]


def _cell(run: GateRun, number: int, row: Row, label: str, look: Look) -> Strip:
    measured = texts.change(row.ratio)
    if row.low is not None:
        measured += f" ({texts.interval(row.low, row.high)})"
    dots = tuple(_dots(run.rounds, number, "candidate"))
    return Strip(
        label=label.replace("$", r"\$"),  # which would begin a formula
        look=look,
        dots=dots,
        middle=None if row.ratio is None else _percent(row.ratio),
        ends=None if row.low is None or row.high is None else (
            _percent(row.low), _percent(row.high)
        ),
        beside=(measured, texts.wins(row), texts.mark(row.verdict)),
        verdict=row.verdict,
        words="" if dots else "no time was compared",
    )  # fmt: skip


def _dots(rounds: Iterable[Round], cell: int, arm: Variant) -> Iterable[Dot]:
    for found in rounds:
        log = found.log_ratio(cell, arm)
        if log is not None:
            yield Dot(
                percent=_percent(math.exp(log)),
                full=found.stage == "confirm",
                vetoed=found.veto is not None,
            )


def controls(run: GateRun, outcome: Outcome) -> list[Strip]:
    """Base against itself, all cells of a round on one height, and the planted slowdown."""
    every = range(len(run.cells))
    null = [dot for r in run.rounds for cell in every for dot in _dots([r], cell, "null")]
    planted = [dot for r in run.rounds for cell in every for dot in _dots([r], cell, "planted")]
    found = outcome.controls
    seen = {True: "found", False: "NOT found", None: "none"}[found.found]
    return [
        Strip(
            label="base against itself", look=CONTROL, dots=tuple(null),
            middle=None if found.null_ratio is None else _percent(found.null_ratio),
            beside=(texts.change(found.null_ratio), "",
                    "! not to be trusted" if found.untrusted else ""),
        ),
        Strip(
            label=f"planted slowdown of {units.brief_percent(run.rules.threshold)}", look=CONTROL,
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
    telling = [x for s in strips for x in (s.middle, *(s.ends or ())) if x is not None]
    dots = sorted(dot.percent for strip in strips for dot in strip.dots if not dot.vetoed)
    cut = len(dots) // 50  # the furthest 2 % at each end may stand at the edge
    spread = [dots[cut], dots[-1 - cut]] if dots else []
    near = [min(max(x, -3 * threshold), 3 * threshold) for x in spread]
    low = max(-100.0, min([-1.25 * threshold, *telling, *near]))
    high = max([1.5 * threshold, *telling, *near])
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
