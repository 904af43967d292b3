"""One round: fresh processes of both sides hand a token to and fro, cell by cell."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from attnbench.execution.settings import Settings
from attnbench.gate.decide.data import Failure, Round, Rules, Variant, Version
from attnbench.gate.decide.sequential import RoundPlan
from attnbench.gate.run.conditions import Conditions, Sky
from attnbench.gate.run.server import ArmError, Processes
from attnbench.schema.record import Cell

# A cell gets about this much of each arm's time in a round, in blocks of this length at least.
ARM_US = 60_000.0
BLOCK_US = 1000.0
MOST_BLOCKS = 6  # in a turn
# Each visit is the arms in a random order and back: at least one, so that each arm has two turns.
MOST_VISITS = 6
# A call after a change of its inputs has colder caches; a result that was kept is another matter.
REMEMBERED = 20.0
# How long a turn may take beyond all expectation before its process is given up.
PATIENCE_S, PATIENCE_FACTOR = 30.0, 50.0


@dataclass(kw_only=True)
class Bench:
    """All that rounds share. `injected` slows the candidate in some cells: for self-tests alone.

    `each_us` remembers how long a call takes, so that every round plans the same blocks;
    `digests` what the files of each side held when they were first loaded.
    """

    base: Version
    candidate: Version
    cells: tuple[Cell, ...]
    rules: Rules
    settings: Settings
    truths: Path
    cpus: tuple[int, ...] | None
    chance: random.Random
    injected: Mapping[int, float] = field(default_factory=dict)
    each_us: dict[int, float] = field(default_factory=dict)
    digests: dict[tuple[str, str], str] = field(default_factory=dict)

    def loaded_alike(self) -> bool | None:
        """Whether all files that were loaded are the same on both sides; None if none were."""
        found: dict[str, dict[str, str]] = {}
        for (side, file), digest in self.digests.items():
            found.setdefault(side, {})[file] = digest
        return found.get("base") == found.get("candidate") if found else None


class RoundError(Exception):
    """A process of a round failed before it was at any cell; the message says how."""


class ChangedError(Exception):
    """The files of a side are not what they were in the round before."""


def measure_round(bench: Bench, order: RoundPlan, number: int) -> Round:
    """Measure one round in fresh processes; what fails in it is part of the round.

    Raises:
        ChangedError: someone edits the code that is being measured.
        RoundError: a process failed, and no cell is to blame.
        UsageError: one side imports the other's code.
        WorkerError: no process can be started.
    """
    begin = time.perf_counter()
    cpu = bench.cpus[number % len(bench.cpus)] if bench.cpus else None
    visited = dict.fromkeys((*order.cells, *([] if order.slowed is None else [order.slowed])))
    sides: list[tuple[Variant, Version, Version]] = [
        ("base", bench.base, bench.candidate),
        ("candidate", bench.candidate, bench.base),
        ("null", bench.base, bench.candidate),
    ]
    bench.chance.shuffle(sides)  # who is forked first has other memory
    with Processes(sides, _config(bench, visited, cpu), bench.settings) as processes:
        turns: dict[int, dict[Variant, list[tuple[int, ...]]]] = {}
        grown: dict[str, dict[str, int]] = {}
        failures: dict[int, Failure] = {}
        conditions: Conditions | None = None
        try:
            failures = _hellos(bench, processes, [arm for arm, *_ in sides])
            if not failures:
                sky = Sky.look(processes)
                cells = list(visited)
                bench.chance.shuffle(cells)
                for cell in cells:
                    turns[cell], grown[str(cell)] = _visit(bench, processes, order, cell)
                conditions = sky.since(processes)
                for cell in order.cells:
                    _verify(processes, cell, turns[cell])
        except ArmError as err:
            if err.cell is None:
                raise RoundError(f"{err.arm}: {err.reason}") from err
            failures[err.cell] = _failure(err.arm, err.reason)
    if failures:  # broken off: what it timed counts for nothing
        turns, grown = {}, {}
    return Round(
        stage=order.stage,
        samples={c: _frozen(arms) for c, arms in turns.items()},
        failures=failures,
        veto=conditions.veto if conditions else None,
        facts={"cpu": cpu, "grown": grown, **conditions.facts} if conditions else {},  # type: ignore
        spent_s=time.perf_counter() - begin,
    )


def _failure(arm: Variant, text: str) -> Failure:
    code, _, reason = text.partition(": ")
    return Failure(variant=arm, code=code, reason=reason)  # type: ignore[arg-type]


def _config(bench: Bench, cells: Mapping[int, Any], cpu: int | None) -> dict[str, Any]:
    settings = bench.settings
    return {
        "device": settings.device,
        "threads": settings.threads,
        "seed": settings.seed,
        "l2": settings.l2,
        "timer": settings.timer,
        "cpu": cpu,
        "truths": str(bench.truths),
        "cells": {str(number): bench.cells[number].to_json() for number in cells},
    }


def _hellos(bench: Bench, processes: Processes, arms: list[Variant]) -> dict[int, Failure]:
    """Wait until all arms are ready; return the cells that some arm cannot time.

    What fails in base and candidate alike is not the candidate's fault: the base is named.
    """
    failures: dict[int, Failure] = {}
    for arm in arms:
        hello = processes.hello(arm)
        side = "candidate" if arm == "candidate" else "base"
        for file, digest in hello["digests"].items():  # not always the same: some import late
            if bench.digests.setdefault((side, file), digest) != digest:
                raise ChangedError(side)
        for cell, reason in hello["failures"].items():
            if int(cell) not in failures or arm != "candidate":
                failures[int(cell)] = _failure(arm, reason)
    return failures


def _visit(
    bench: Bench, processes: Processes, order: RoundPlan, cell: int
) -> tuple[dict[Variant, list[tuple[int, ...]]], dict[str, int]]:
    """Every arm's turns in one cell: in a random order and back, as often as time allows.

    And by how many bytes each process has grown between its first turn and its last.
    """
    arms: list[Variant] = ["base", "candidate", "null"] if cell in order.cells else ["base"]
    if cell == order.slowed:
        arms.append("planted")
    each_us = _each_us(bench, processes, cell)
    calls, blocks, visits = _amounts(each_us)
    patience_s = PATIENCE_S + PATIENCE_FACTOR * each_us * 1e-6 * (1 + calls * blocks)
    turns: dict[Variant, list[tuple[int, ...]]] = {arm: [] for arm in arms}
    resident: dict[str, list[int]] = {}
    for _ in range(visits):
        bench.chance.shuffle(arms)
        for arm in arms + arms[::-1]:
            request = {"do": "turn", "cell": cell, "calls": calls, "blocks": blocks}
            share = bench.rules.threshold if arm == "planted" else None
            if arm == "candidate":
                share = bench.injected.get(cell)
            process: Variant = "null" if arm == "planted" else arm
            answer = processes.ask(process, request | {"planted": share}, patience_s)
            if min(answer["ns"]) <= 0:
                raise ArmError(arm, "error: its clock stood still or stepped back", cell)
            turns[arm].append(tuple(answer["ns"]))
            if answer["resident"] is not None and arm != "planted":
                resident.setdefault(arm, []).append(answer["resident"])
    return turns, {arm: seen[-1] - seen[0] for arm, seen in resident.items()}


def _verify(
    processes: Processes, cell: int, turns: Mapping[Variant, list[tuple[int, ...]]]
) -> None:
    """See that what was timed is still right on both sides, and not remembered by the candidate.

    Raises:
        ArmError: it is not.
    """

    def ratio(arm: Variant) -> float:
        fastest_us = min(min(blocks) for blocks in turns[arm]) / 1000
        request = {"do": "verify", "cell": cell, "fastest_us": fastest_us, "remembered": REMEMBERED}
        return float(processes.ask(arm, request)["changed_ratio"])

    base, candidate = ratio("base"), ratio("candidate")
    # What either process of the base does as well is the machine's doing, or the case's.
    if candidate > REMEMBERED >= base and ratio("null") <= REMEMBERED:
        raise ArmError(
            "candidate",
            "incorrect: it returns a cached result: a call takes"
            f" {candidate:.0f} times as long once its inputs have changed",
            cell,
        )


def _each_us(bench: Bench, processes: Processes, cell: int) -> float:
    if cell not in bench.each_us:
        answer = processes.ask("base", {"do": "estimate", "cell": cell})
        bench.each_us[cell] = answer["each_us"]
    return bench.each_us[cell]


def _amounts(each_us: float) -> tuple[int, int, int]:
    """Calls a block, blocks a turn, and visits, for a call of this length: by length alone."""
    calls = max(1, math.ceil(BLOCK_US / each_us))
    block_us = calls * each_us
    blocks = max(2, min(MOST_BLOCKS, int(6 * BLOCK_US / block_us)))
    visits = max(1, min(MOST_VISITS, int(ARM_US / (2 * blocks * block_us))))
    return calls, blocks, visits


def _frozen(
    arms: Mapping[Variant, list[tuple[int, ...]]],
) -> dict[Variant, tuple[tuple[int, ...], ...]]:
    return {arm: tuple(turns) for arm, turns in arms.items()}
