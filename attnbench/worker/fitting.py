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
                trial.reason = pruning.implied(Cell(case=entry.case, impl=name)) or _lack(trial)
                trial.status = "skipped" if trial.reason else None
            if trial.status is None:
                names.append(name)
            else:
                reporter.record(entry.index, trial.record())
        kept += [replace(entry, impls=tuple(names))] if names else []
    return kept


def needs_of(cases: Sequence[Case], names: Sequence[str]) -> dict[str, tuple[int | None, ...]]:
    """For each implementation, case by case, `needed_bytes`; None where its costs raise."""
    return {name: tuple(_needs(case, name) for case in cases) for name in names}


def _needs(case: Case, name: str) -> int | None:
    try:
        costs = Trial(impl=implementation(name), case=case, tensors={}).costs()
    except Exception:  # an author's formula; the cell will say why
        return None
    return needed_bytes(case, costs)


def _lack(trial: Trial) -> str | None:
    """What the cell needs where that is not free, in words."""
    costs, free = trial.costs(), free_bytes(trial.case.device)
    needs = needed_bytes(trial.case, costs)
    if free is None or needs <= free:
        return None
    trial.metrics |= costs
    return f"needs {size(needs)}, {size(free)} free"


def needed_bytes(case: Case, costs: dict[str, Any]) -> int:
    """What a cell has live at once, at least, by its `Trial.costs()`: from sizes alone.

    Inputs and outputs, which are the least traffic of a call, and beside them either the reference
    (all of that in float64, what floors of errors scale with, a block of scores and its softmax) or
    the call (copies of inputs, true results, a cache, the workspace, or half of an estimated one).
    """
    core = WORKLOADS.get(case.workload).core_case(case)
    scores = core.batch * core.heads * core.seq_len * core.kv_len
    numbers = costs["bytes_min"] // case.element_bytes
    reference = 12 * numbers + 16 * min(scores, block_elements(core, case.device))
    workspace = costs["memory_predicted_bytes"] or 0
    workspace //= 2 if costs.get("memory_predicted_source") == "estimate" else 1
    call = 2 * numbers + (costs.get("cache_bytes") or 0) + workspace
    return int(costs["bytes_min"] + max(reference, call))
