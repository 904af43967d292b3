"""What each cell of a run takes on the simulated GPU in truth: asked of the device, not of a clock.

Usage: python -m tests.rehearsal.truth RUN FILE, in the environment of the rehearsal.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from attnbench.analysis import times
from attnbench.api import implementation
from attnbench.api.loader import load_built_in
from attnbench.execution.store import load_run
from attnbench.machine.state import remember
from attnbench.worker.inputs import Draw
from attnbench.worker.workloads import WORKLOADS
from tests.rehearsal.device import Device


def true_us(device: Device, call: Any, *, cold: bool) -> tuple[float, float]:
    """What the kernels of one call last, summed; and the host's time from call to result."""
    call()
    torch.cuda.synchronize()
    if cold:
        device.evict()
    device.kernels.clear()
    begin_us = device.host_us
    result = call()
    torch.cuda.synchronize()
    e2e_us = device.host_us - begin_us
    del result
    return sum(kernel.end_us - kernel.begin_us for kernel in device.kernels), e2e_us


def main(run: str, file: str) -> None:
    """Write a row for each cell that was measured: its times in the run, and the true ones."""
    from tests.rehearsal import nvml

    load_built_in()
    remember(1)
    rows = []
    for record in load_run(Path(run)).records:
        if record.status != "ok":
            continue
        case, workload = record.cell.case, WORKLOADS.get(record.cell.case.workload)
        tensors = workload.tensors(case)
        workload.fill(case, tensors, Draw(seed=0))
        impl = implementation(record.cell.impl)
        with torch.set_grad_enabled(case.needs_grad):
            bound = workload.bind(case, impl, tensors)
        cold = record.metrics["l2"] == "cold"
        with torch.set_grad_enabled(bound.grad):
            kernels_us, e2e_us = true_us(nvml.GPU, bound.call, cold=cold)
        rows.append(
            {
                "case": case.to_json(),
                "impl": impl.name,
                "timer": record.metrics["timer"],
                "launch_bound": times.launch_bound(record),
                "cold": cold,
                "units": bound.units,
                "kernels": len(nvml.GPU.kernels),
                "true_us": kernels_us,
                "true_e2e_us": e2e_us,
                "samples_us": [x.time_us * bound.units for x in record.kept],
                "e2e_us": [x.e2e_us * bound.units for x in record.kept],
                "enqueue_us": [(x.enqueue_us or 0) * bound.units for x in record.kept],
                "hidden_us": [(x.hidden_us or 0) * bound.units for x in record.kept],
            }
        )
        bound = tensors = None  # type: ignore[assignment]
    Path(file).write_text(json.dumps(rows))


if __name__ == "__main__":
    main(*sys.argv[1:])
