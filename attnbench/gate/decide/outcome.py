"""What a gate run is: its raw data; and what was decided from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from attnbench.errors import ExitCode
from attnbench.gate.decide.round import Round, Stage
from attnbench.gate.decide.rules import Rules, Verdict
from attnbench.schema.record import Cell

SCHEMA = 1


@dataclass(frozen=True, kw_only=True)
class Side:
    """One of the two versions of the code.

    `root` is the folder it lies in, `files` the implementation files there (absolute), `ref` what
    was asked for (None: the working tree as it is), `commit` its full id, `dirty` whether
    uncommitted changes came on top of it.
    """

    name: Literal["base", "candidate"]
    root: str
    files: tuple[str, ...]
    ref: str | None = None
    commit: str | None = None
    dirty: bool = False


@dataclass(frozen=True, kw_only=True)
class Checked:
    """What became of a cell before any pair was timed: its status on each side, and metrics.

    `status` is that of a record, or `absent`: the side has no such implementation. `metrics` are
    those that repeat exactly: counted FLOPs, bytes, the kernels. Where it is ok, `reason` says how
    it failed before it was tried again, if it did.
    """

    status: str
    reason: str | None = None
    metrics: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class GateRun:
    """Everything a verdict rests on: `gate.json`.

    `checks` holds by cell number and side what `Checked` says. `spent` maps parts of the run to
    wall seconds. `over_budget` says that time ran out before all was decided.
    """

    rules: Rules
    base: Side
    candidate: Side
    cells: tuple[Cell, ...]
    checks: Mapping[int, Mapping[str, Checked]]
    rounds: tuple[Round, ...]
    environment: Mapping[str, Any]
    options: Mapping[str, Any] = field(default_factory=dict)
    created: str = ""
    spent: Mapping[str, float] = field(default_factory=dict)
    over_budget: bool = False


@dataclass(frozen=True, kw_only=True)
class Row:
    """The verdict on one cell.

    `ratio` is candidate / base (above 1: slower), the median over rounds, with its 95 % interval
    [low, high] over rounds; from the rounds of `stage` alone. `wins` of `rounds` lay beyond the
    margin (regressed and suspects), or below the threshold (cleared). `notes` annotate: what
    changed without being held against the candidate.
    """

    cell: Cell
    verdict: Verdict
    reason: str
    stage: Stage | None = None
    ratio: float | None = None
    low: float | None = None
    high: float | None = None
    wins: int | None = None
    rounds: int = 0
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Controls:
    """What the controls of the run showed.

    `found` is whether the planted slowdown was (None: no time was compared), in `wins` of
    `rounds`; `planted_ratio` the median it was seen with. `null_ratio` is the median of base
    against itself over all rounds and cells; `untrusted` why the run cannot be trusted.
    """

    found: bool | None = None
    wins: int = 0
    rounds: int = 0
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
