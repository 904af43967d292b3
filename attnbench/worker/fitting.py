"""Which cells of a group are tried: those whose predicted need is free before it is taken."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from attnbench.api import implementation
from attnbench.base.units import size
from attnbench.machine.facts import free_bytes
from attnbench.schema.case import Case
from attnbench.schema.record import Cell
from attnbench.theory.pruning import Pruning
from attnbench.worker.checking import Entry, Reporter
from attnbench.worker.reference import block_elements
from attnbench.worker.trial import Trial
from attnbench.worker.workloads import WORKLOADS


def fitting(entries: list[Entry], reporter: Reporter, pruning: Pruning) -> list[Entry]:
    """The group without the cells that cannot fit, or are larger than one that did not: reported.

    Each is looked at as if it were alone; what lacks memory beside others is tried again alone.
    """
    kept = []
    for entry in entries:
        names = []
        for name in entry.impls:
            trial = Trial(impl=implementation(name), case=entry.case, tensors={})
            reporter.at(entry.index, name, "check")
            with trial.stage("check"):
                implied = pruning.implied(Cell(case=entry.case, impl=name))
                trial.reason = implied or _lack(trial, at_most=pruning.enabled)
                trial.status = "skipped" if trial.reason else None
            if trial.status is None:
                names.append(name)
            else:
                reporter.record(entry.index, trial.record())
        kept += [replace(entry, impls=tuple(names))] if names else []
    return kept


def needs_of(cases: Sequence[Case], names: Sequence[str]) -> dict[str, tuple[int | None, ...]]:
    """For each implementation, case by case, what has to be free; None where its costs raise."""
    return {name: tuple(_needs(case, name) for case in cases) for name in names}


def _needs(case: Case, name: str) -> int | None:
    try:
        costs = Trial(impl=implementation(name), case=case, tensors={}).costs()
    except Exception:  # an author's formula; the cell will say why
        return None
    return needed_bytes(case, costs, costs["memory_bound_bytes"])


def _lack(trial: Trial, *, at_most: bool) -> str | None:
    """What the cell needs, or needs `at_most`, where that is not free, in words.

    A workspace that nobody has declared has no bound. It is tried where the rest fits, and what
    guards the others is the worker's memory limit (`machine.facts.limit_memory`).
    """
    costs, free = trial.costs(), free_bytes(trial.case.device)
    for bound in (None, costs["memory_bound_bytes"]):
        needs = needed_bytes(trial.case, costs, bound)
        if free is not None and needs > free and (at_most or bound is None):
            trial.metrics |= costs
            most, tried = ("", "") if bound is None else ("up to ", " (--no-prune tries it)")
            return f"needs {most}{size(needs)}, {size(free)} free{tried}"
    return None


def needed_bytes(case: Case, costs: dict[str, Any], workspace: int | None = None) -> int:
    """What a cell has live at once, by its `Trial.costs()`: from sizes alone.

    Inputs and outputs, and beside them either the reference (all of that in float64, what floors of
    errors scale with, a block of scores and its softmax) or the call (copies of inputs, true
    results, what is prepared, the workspace). Without a `workspace` that was predicted or is given
    the least: no more than the rest.
    """
    workload = WORKLOADS.get(case.workload)
    core = workload.core_case(replace(case, cache=None))  # as the reference has it
    given, prepared = workload.live_bytes(case, costs)
    scores = core.batch * core.heads * core.seq_len * core.kv_len
    numbers = given // case.element_bytes
    reference = 12 * numbers + 16 * min(scores, block_elements(core, case.device))
    if workspace is None:
        workspace = costs["memory_predicted_bytes"]
    return given + max(reference, 2 * numbers + prepared + (workspace or 0))
