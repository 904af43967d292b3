"""One gate run: both sides checked, then timed in rounds until the decision asks no more."""

from __future__ import annotations

import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from msgspec import structs

from attnbench.base.files import digest
from attnbench.errors import UsageError, WorkerError
from attnbench.execution.settings import Settings
from attnbench.gate.decide.data import GateRun, Round, RoundFacts, Rules, Version
from attnbench.gate.decide.sequential import RoundPlan, SequentialDecision
from attnbench.gate.decide.verdict import comparable
from attnbench.gate.run.checking import Sides, check_sides
from attnbench.gate.run.turns import Bench, ChangedError, RoundError, measure_round
from attnbench.gate.run.worktree import own_prefix
from attnbench.machine import host
from attnbench.planning.plan import Axes
from attnbench.schema.record import Cell

# Rounds that may be measured again for what went on beside them; after that they count.
MOST_VETOES = 8


@dataclass(frozen=True, kw_only=True)
class GateRequest:
    """What a gate run is asked for.

    `settings` say where and how (device, threads, seed, the timeout of a silent process); their
    files come from the sides. `options` is kept for people. `keep` is given each round as soon as
    it is measured, with the run as it began, before anything is decided from it. `injected` slows
    the candidate in some cells, by number, by a share: for self-tests alone.
    """

    base: Version
    candidate: Version
    sweeps: tuple[Axes, ...]
    rules: Rules = field(default_factory=Rules)
    settings: Settings = field(default_factory=Settings)
    injected: Mapping[int, float] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    keep: Callable[[GateRun, Round], None] = lambda run, found: None


class GateListener(Protocol):
    """Who watches a gate run."""

    def stage(self, words: str) -> None:
        """A part of the run begins."""

    def planned(self, cells: tuple[Cell, ...]) -> None:
        """These cells are watched."""

    def heard(self, found: Round, number: int, words: str) -> None:
        """A round was measured; `words` say how far the run has come."""

    def warned(self, message: str) -> None:
        """Something the user should know that stops nothing."""


def run_gate(request: GateRequest, listener: GateListener) -> GateRun:
    """Check and time both sides; return the raw data of the run.

    Raises:
        UsageError: the candidate does not load, nothing is there to compare, or its files
            changed while they were measured.
        WorkerError: no process can be started.
    """
    begin = time.perf_counter()
    before = _digests(request)
    listener.stage("checking both sides")
    sides = check_sides(request.base, request.candidate, request.sweeps, request.settings)
    for message in sides.warnings:
        listener.warned(message)
    listener.planned(sides.cells)
    checked_s = time.perf_counter() - begin
    run = _begun(request, sides)
    settings = replace(request.settings, device=sides.environment["device"])
    listener.stage("timing in turns")
    with _bench(request, settings, sides) as bench:
        bench.digests |= before
        decision = SequentialDecision(comparable(run), request.rules, settings.seed)
        deadline = begin + request.rules.budget_s
        rounds, over = _race(bench, decision, listener, deadline, partial(request.keep, run))
    spent_s = {
        "checks_s": checked_s,
        "rounds_s": sum(found.spent_s for found in rounds),
        "wall_s": time.perf_counter() - begin,
    }
    return replace(
        run,
        rounds=tuple(rounds),
        spent={part: round(seconds, 3) for part, seconds in spent_s.items()},
        over_budget=over,
        options=dict(run.options) | {"loaded_alike": bench.loaded_alike()},
    )


def _begun(request: GateRequest, sides: Sides) -> GateRun:
    return GateRun(
        rules=request.rules,
        base=request.base,
        candidate=request.candidate,
        cells=sides.cells,
        checks=sides.checks,
        rounds=(),
        environment=sides.environment,
        options=dict(request.options) | {"seed": request.settings.seed},
        created=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def _digests(request: GateRequest) -> dict[tuple[str, str], str]:
    """What the watched files hold before they are checked: what is timed must be the same."""
    return {
        (side.name, os.path.relpath(file, side.root)): digest(Path(file))
        for side in (request.base, request.candidate)
        for file in side.files
    }


@contextmanager
def _bench(request: GateRequest, settings: Settings, sides: Sides) -> Iterator[Bench]:
    with tempfile.TemporaryDirectory(prefix=own_prefix(), ignore_cleanup_errors=True) as kept:
        pinned = settings.device == "cpu" and settings.threads == 1
        cpus = host.affinity() if pinned else None
        yield Bench(
            base=request.base,
            candidate=request.candidate,
            cells=sides.cells,
            rules=request.rules,
            settings=settings,
            truths=Path(kept),
            cpus=tuple(cpus) if cpus else None,
            chance=random.Random(settings.seed),
            injected=request.injected,
        )


def _race(
    bench: Bench,
    decision: SequentialDecision,
    listener: GateListener,
    deadline: float,
    keep: Callable[[Round], None],
) -> tuple[list[Round], bool]:
    """Rounds until nothing is open, and whether the time ended before."""
    rounds: list[Round] = []
    vetoes, last_s = 0, 0.0
    while (order := decision.next_round()) is not None:
        if time.perf_counter() + last_s > deadline:
            return rounds, True
        found = _measured(bench, order, len(rounds))
        if found.veto is not None and vetoes >= MOST_VETOES:
            facts = RoundFacts(**found.facts, not_vetoed=found.veto)
            found = structs.replace(found, veto=None, facts=facts)
        vetoes += found.veto is not None
        last_s = found.spent_s
        rounds.append(found)
        keep(found)
        decision.add(found)
        listener.heard(found, len(rounds), _words(decision))
    return rounds, False


def _measured(bench: Bench, order: RoundPlan, number: int, tries: int = 2) -> Round:
    try:
        return measure_round(bench, order, number)
    except RoundError as err:
        if tries == 1:
            raise WorkerError(f"the processes of a round fail again and again: {err}") from err
        return _measured(bench, order, number, tries - 1)
    except ChangedError as err:
        root = (bench.candidate if str(err) == "candidate" else bench.base).root
        raise UsageError(
            f"files below {root} changed while they were measured; leave them alone and run again"
        ) from err


def _words(decision: SequentialDecision) -> str:
    if decision.suspects is None:
        return f"screening {len(decision.cells)} cells"
    still = len(decision.progress())
    if not still:
        return "every cell is decided"
    return f"confirming {still} suspect{'s' * (still > 1)}"
