"""Correctness alone: one implementation in one item of the battery, without any timing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from attnbench.api import IMPLEMENTATIONS
from attnbench.schema.case import Case
from attnbench.worker.inputs import Draw
from attnbench.worker.trial import Trial, classify
from attnbench.worker.workloads import WORKLOADS


def check_item(case: Case, name: str, options: dict[str, Any], seed: int) -> dict[str, Any]:
    """Check `name` in `case` on two draws of inputs; status, reason and errors as plain JSON.

    `options` are the fields of `Draw` that the battery sets (amplitude, layout).
    """
    workload = WORKLOADS.get(case.workload)
    try:
        draw = Draw(seed=seed, needles="query_amplitude" not in options, **options)
        tensors = workload.tensors(case, strided=draw.strided)
        trial = Trial(impl=IMPLEMENTATIONS.get(name), case=case, tensors=tensors)
        for first in (True, False):
            workload.fill(
                case, tensors, draw if first else replace(draw, seed=seed + 1, needles=False)
            )
            truth = workload.truth(case, tensors)
            with trial.stage("build"):
                trial.build() if first else trial.refresh()
            if trial.status is None:
                with trial.stage("check"):
                    trial.check(truth, first=first)
            if trial.status is not None:
                break
        status, reason = trial.status or "ok", trial.reason
        metrics = trial.metrics
    except Exception as err:
        status, reason = classify(err, "inputs and reference")
        metrics = {}
    return {"status": status, "reason": reason, "metrics": metrics}
