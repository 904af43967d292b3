"""`make validate PART=gate` from options to a folder that grows from sitting to sitting."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnbench.base import units
from attnbench.base.files import check_name
from attnbench.base.stats import median
from attnbench.errors import ExitCode, UsageError
from attnbench.version import __version__
from tests.validation.gate.cases import load_cases, run_cases
from tests.validation.gate.goals import goals
from tests.validation.gate.live import SEQ_LENS, measured, settings
from tests.validation.gate.pool import Live, Pool, counted
from tests.validation.gate.schedule import Kind, Todo, kinds_of, missing
from tests.validation.gate.summary import name as cell_name
from tests.validation.gate.summary import summarise
from tests.validation.gate.tables import facts, tables
from tests.validation.neighbours import neighbours
from tests.validation.page import markdown, write_texts

if TYPE_CHECKING:
    from tests.validation.gate.live import Measure

NAME, SUMMARY, PAGE = "selftest-gate", "summary.json", "gate.md"
Tell = Callable[[str], None]
_ENDINGS = {
    ExitCode.OK: "passed",
    ExitCode.FINDING: "regressed",
    ExitCode.USAGE: "nothing comparable",
    ExitCode.INCONCLUSIVE: "inconclusive or blind",
    ExitCode.ENVIRONMENT: "untrusted",
}


@dataclass(frozen=True, kw_only=True)
class Request:
    """What `make validate PART=gate` was asked for.

    `aa` and `each` are how many live runs there shall be in the end, of identical sides and for
    each planted slowdown of `inject` (percent); `at_most` limits those of this sitting. Once all
    are there, or with `report_only`, `resamples` more of each kind are resampled from their
    rounds, and other tools' rules are applied. `cases` puts real changes through the gate.
    `neighbours` processes spin and sleep beside the runs.
    """

    aa: int = 40
    inject: tuple[float, ...] = (10.0, 5.0)
    each: int = 12
    at_most: int | None = None
    report_only: bool = False
    resamples: int = 2000
    cases: bool = False
    seq_lens: tuple[int, ...] = SEQ_LENS
    neighbours: int = 0
    output: Path = Path("results")
    name: str | None = None

    @property
    def wanted(self) -> dict[Kind, int]:
        """How many runs of each kind there shall be."""
        return {kind: self.each if kind.share else self.aa for kind in kinds_of(self.inject)}


@dataclass(frozen=True, kw_only=True)
class Finished:
    """A sitting's end: the folder and what it comes to so far."""

    path: Path
    summary: dict[str, Any] = field(repr=False)
    interrupted: bool = False

    @property
    def missed(self) -> bool:
        """Whether the report is a whole one, and a goal is missed."""
        return self.summary["whole"] and any(row["met"] is False for row in self.summary["goals"])


def examine(request: Request, tell: Tell) -> Finished:
    """Make the runs that are missing, one by one, then write what all of them come to.

    Raises:
        UsageError: something in the request makes no sense; nothing was written.
        StoreError: the folder is another's, or cannot be written.
        WorkerError: no process can be started.
    """
    path = request.output / check_name(request.name or NAME)
    pool = Pool.open(path)
    todo = [] if request.report_only else missing(request.wanted, counted(pool.runs))
    interrupted = sit(pool, todo, request, tell) if todo else False
    if request.cases and not request.report_only and not interrupted:
        interrupted = _try_cases(pool, tell)
    if pool.info is None or not pool.runs:
        raise UsageError(f"{path} holds no runs to report yet; leave out --report-only")
    whole = request.report_only or not missing(request.wanted, counted(pool.runs))
    resamples = request.resamples if whole and not interrupted else 0
    summary = _facts(pool) | summarise(pool.runs, request.wanted, resamples, tell)
    summary |= {"cases": load_cases(path), "whole": whole}
    summary["goals"] = goals(summary)
    _write(path, summary)
    return Finished(path=path, summary=summary, interrupted=interrupted)


def _try_cases(pool: Pool, tell: Tell) -> bool:
    """Put every real change through the gate; True if interrupted."""
    try:
        run_cases(pool.path, tell)
    except KeyboardInterrupt:
        tell("Interrupted: the changes tried so far are kept; the same command continues.")
        return True
    return False


def _facts(pool: Pool) -> dict[str, Any]:
    assert pool.info is not None
    created = sorted(live.created for live in pool.runs)
    return {
        "attnbench": __version__,
        "first": created[0],
        "last": created[-1],
        "environment": pool.info["environment"],
    }


def _write(path: Path, summary: dict[str, Any]) -> None:
    """summary.json, gate.md and the picture.

    Raises:
        StoreError: the folder cannot be written.
    """
    from tests.validation.gate.draw import draw  # here: matplotlib comes with it

    title = f"make validate PART=gate: {path.name}"
    page = markdown(title, tables(summary), facts(summary), picture=draw(summary, path))
    write_texts(path, {SUMMARY: json.dumps(summary, indent=1) + "\n", PAGE: page})


def sit(pool: Pool, todo: list[Todo], request: Request, tell: Tell) -> bool:
    """Make these runs, or the first of them; True if interrupted. Each is kept once it has ended.

    Raises:
        StoreError: the folder holds runs of another machine, or cannot be written.
    """
    from attnbench.gate.run.measuring import run_gate

    environment = dict(surroundings())
    if request.neighbours:
        environment["neighbours"] = request.neighbours
    if request.seq_lens != SEQ_LENS:
        environment["seq_lens"] = list(request.seq_lens)
    pool.same(environment)
    pool.begin(environment)
    try:
        with neighbours(request.neighbours, len(pool.runs)):
            make(pool, todo[: request.at_most], run_gate, tell, request.seq_lens)
    except KeyboardInterrupt:
        tell("Interrupted: the runs that had ended are kept; the same command continues.")
        return True
    return False


def surroundings() -> dict[str, Any]:
    """What a process that measures says of this machine."""
    from attnbench.execution.runner import LocalRunner

    with LocalRunner(settings(0)) as runner:
        return runner.catalogue().environment


def make(
    pool: Pool, todo: list[Todo], measure: Measure, tell: Tell, seq_lens: tuple[int, ...] = SEQ_LENS
) -> None:
    """Make these runs and tell of each how it ended and how long the rest will take."""
    for index, each in enumerate(todo):
        begin = time.monotonic()
        live = measured(each, measure, tell, seq_lens)
        pool.append(live)
        tell(_line(live, time.monotonic() - begin) + _left(pool, todo[index + 1 :]))


def _line(live: Live, spent_s: float) -> str:
    ending = _ENDINGS[ExitCode(live.exit_code)]
    rounds = len(live.run.rounds)
    cell = f", {cell_name(live.run.cells[live.cell])}" if live.cell is not None else ""
    return (
        f"{live.kind.label} run {live.number + 1}{cell}: {ending} (exit {live.exit_code}),"
        f" {rounds} rounds in {units.seconds(spent_s)}"
    )


def _left(pool: Pool, todo: list[Todo]) -> str:
    if not todo:
        return ""
    usual = median([live.spent_s for live in pool.runs])
    by_kind: Mapping[Kind, float] = {
        kind: median([live.spent_s for live in pool.runs if live.kind == kind])
        for kind in {live.kind for live in pool.runs}
    }
    left_s = sum(by_kind.get(each.kind, usual) for each in todo)
    return f"; {len(todo)} more, about {units.seconds(left_s)}"
