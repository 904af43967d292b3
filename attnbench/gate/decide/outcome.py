"""What was decided from a gate run: a verdict on each cell, the controls, and how the run ends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from msgspec import Struct

from attnbench.errors import ExitCode
from attnbench.gate.decide.data import GateCell, Stage, VersionName

Verdict = Literal[
    "incorrect", "regressed", "larger", "inconclusive", "not timed", "not comparable", "improved",
    "ok",
]  # fmt: skip
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)  # the worst first


class Change(Struct, frozen=True):
    """What a verdict is of: a metric, and candidate / base; None where that is not known."""

    metric: str
    ratio: float | None = None


@dataclass(frozen=True, kw_only=True)
class Row:
    """The verdict on one cell.

    `changes` are what it is of, that which decides first: time, or what repeats exactly. `ratio` is
    that of the times, candidate / base (above 1: slower), the median over rounds, with its
    95 % interval [low, high] over rounds; from the rounds of `stage` alone. `wins` of `rounds` lay
    beyond the margin (regressed and suspects), or below the threshold (cleared). `only_in` names
    the version that alone has the implementation. `trade` says what the time does where a cell is
    larger: `12 % faster`. `notes` annotate: what changed without being held against the candidate.
    """

    cell: GateCell
    verdict: Verdict
    reason: str
    changes: tuple[Change, ...] = ()
    stage: Stage | None = None
    ratio: float | None = None
    low: float | None = None
    high: float | None = None
    wins: int | None = None
    rounds: int = 0
    only_in: VersionName | None = None
    trade: str = ""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Controls:
    """What the controls of the run showed.

    `found` is whether the positive control was (None: no time was compared), in `wins` of
    `rounds` up to the latest look; at that look, at `look` rounds, it takes `needed`.
    `planted_ratio` is the median it was seen with. `null_ratio` is the median of the A/A
    control over all rounds and cells; `untrusted` why the run cannot be trusted.
    """

    found: bool | None = None
    wins: int = 0
    rounds: int = 0
    look: int = 0
    needed: int | None = None
    planted_ratio: float | None = None
    null_ratio: float | None = None
    untrusted: str | None = None


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """All verdicts of a run, in the order of its cells, and how the process must end.

    `words` is one sentence that says why.
    """

    rows: tuple[Row, ...]
    controls: Controls
    exit_code: ExitCode
    words: str
