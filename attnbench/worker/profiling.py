"""Which kernels a cell runs, asked where nothing is timed: a GPU's profiler slows what follows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from attnbench.api import implementation
from attnbench.machine.state import settle
from attnbench.schema.case import Case
from attnbench.schema.record import Status
from attnbench.worker.inputs import Draw
from attnbench.worker.trial import Trial, classify
from attnbench.worker.workloads import WORKLOADS

# compile_s: the process that times finds on disk what this one has compiled.
_METRICS = (
    "kernel", "kernel_count", "device_waits", "sdpa_backend", "kernel_note", "compile_s",
)  # fmt: skip


def profile_cell(
    case: Case, name: str, seed: int, at: Callable[[str], None] = lambda stage: None
) -> tuple[Status, dict[str, Any]]:
    """Build and profile `name` in `case`; what became of that, and the metrics of its record.

    It is neither checked nor timed. `at` is called with each stage as it begins.
    """
    workload = WORKLOADS.get(case.workload)
    try:
        settle()
        at("inputs")
        tensors = workload.tensors(case)
        workload.fill(case, tensors, Draw(seed=seed))
        trial = Trial(impl=implementation(name), case=case, tensors=tensors, checks_alone=True)
    except Exception as err:
        status, reason = classify(err, "inputs")
        return status, {"kernel_note": f"not profiled: {reason}"}
    for stage, step in (("build", trial.build), ("profile", trial.profile)):
        at(stage)
        with trial.stage(stage):
            step()
        if trial.status is not None:
            return trial.status, {"kernel_note": f"not profiled: {trial.reason}"}
    return "ok", {name: trial.metrics[name] for name in _METRICS if name in trial.metrics}
