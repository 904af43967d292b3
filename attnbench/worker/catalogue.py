"""What a plan must know of implementations, as JSON, and what fits into memory."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from attnbench.api import FAMILIES, IMPLEMENTATIONS, implementation
from attnbench.api.loader import BUILT_IN
from attnbench.base.units import size
from attnbench.machine.facts import environment, free_bytes, reason_against_device
from attnbench.measure.sensor import GpuSensor
from attnbench.schema.case import DEVICES, Case, Device, parse_mask
from attnbench.schema.messages import Catalogue, ImplementationInfo
from attnbench.schema.record import Cell
from attnbench.theory.flags import DOCS
from attnbench.theory.pruning import Pruning
from attnbench.theory.traits import impossible
from attnbench.worker.checking import Entry, Reporter
from attnbench.worker.reference import block_elements
from attnbench.worker.trial import Trial
from attnbench.worker.workloads import WORKLOADS

At = Callable[[str], None]


def describe(device: str, at: At = lambda stage: None) -> Catalogue:
    """The catalogue: names with what they take, and the machine. `auto` takes a GPU if any.

    `at` is called with what follows, here and below: some kernels are tried to know what they take.
    """
    reasons: dict[str, str | None] = {d: reason_against_device(d) for d in DEVICES}
    if device == "auto":
        device = "cuda" if reasons["cuda"] is None else "cpu"
    usable = reasons.get(device) is None
    return Catalogue(
        device=device,  # type: ignore[arg-type]
        devices=reasons,
        environment=_environment(device) if usable else {},
        implementations=tuple(_row(name, device, at) for name in IMPLEMENTATIONS.names()),
        families=FAMILIES,
        **DOCS,
    )


def _environment(device: str) -> dict[str, Any]:
    found = environment(device)
    if device == "cuda":
        sensor = GpuSensor.open()
        found |= {"compute_mode": sensor.compute_mode(), "driver": sensor.driver()}
        found |= sensor.limits()
        sensor.close()
    return found


def reasons_against(
    cases: Sequence[Case], names: Sequence[str], at: At = lambda stage: None
) -> dict[str, tuple[str | None, ...]]:
    """For each implementation, case by case, why it cannot run, or null."""
    return {name: tuple(_reason(case, name, at) for case in cases) for name in names}


def _reason(case: Case, name: str, at: At) -> str | None:
    at(f"supports of {name}")
    if reason := impossible(case):
        return reason
    try:
        impl = implementation(name)
        unfit = impl.reason_against_workload(case.workload)
        return unfit or WORKLOADS.get(case.workload).reason_against(case, impl)
    except Exception as err:  # an author's `supports` that raises costs the cell, not the sweep
        return f"its supports() raised {type(err).__name__}: {' '.join(str(err).split())[:200]}"


def is_built_in(file: str) -> bool:
    """Whether this file of an implementation is one of attnbench's."""
    package = sys.modules.get(BUILT_IN)
    return package is not None and Path(file).parent in map(Path, package.__path__)


def _shown(file: str) -> str:
    """A built-in's file as it stands in the repository, wherever that was installed."""
    return f"impls/{Path(file).name}" if is_built_in(file) else file


def _row(name: str, device: str, at: At) -> ImplementationInfo:
    impl = implementation(name)
    first = next((kind for kind in WORKLOADS.names() if kind in impl.workloads), "attention")
    on: Device = "cuda" if device == "cuda" else "cpu"
    masks = map(parse_mask, ("full", "document:64", "padding:64"))
    mask = next((mask for mask in masks if mask.name in impl.masks), parse_mask("causal"))
    probe = Case(workload=first, device=on, seq_len=256, mask=mask)
    shown: dict[str, Any] = {"doc": impl.doc.partition("\n")[0], "file": _shown(impl.file)}
    shown |= {"approximates": impl.definition is not None, "unavailable": _reason(probe, name, at)}
    fields = vars(impl) | shown
    return msgspec.convert(fields, ImplementationInfo)


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
