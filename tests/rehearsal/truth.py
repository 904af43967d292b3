"""Is each time of a run the true one? The simulated GPU itself is asked, not a clock.

Usage: python -m tests.rehearsal.truth RUN, in the environment of the rehearsal. Prints what is off
by more than a tick, and exits with 1 if anything is.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from attnbench.analysis import times
from attnbench.api import implementation
from attnbench.api.loader import load_built_in
from attnbench.base.stats import median
from attnbench.machine.state import remember
from attnbench.measure.clock import NEGLIGIBLE
from attnbench.schema.record import Record
from attnbench.store.runs import load_run
from attnbench.worker.inputs import Draw
from attnbench.worker.workloads import WORKLOADS
from tests.rehearsal.cuda import DEVICE
from tests.rehearsal.device import TICK_US

AROUND_US = 2.0  # what recording events adds to the time to the result


def true_us(record: Record) -> tuple[float, float, int]:
    """What the kernels of one call last, its time to the result, and the units that it computes."""
    case, workload = record.cell.case, WORKLOADS.get(record.cell.case.workload)
    tensors = workload.tensors(case)
    workload.fill(case, tensors, Draw(seed=0))
    with torch.set_grad_enabled(case.needs_grad):
        bound = workload.bind(case, implementation(record.cell.impl), tensors)
    with torch.set_grad_enabled(bound.grad):
        bound.call()
        torch.cuda.synchronize()
        if record.metrics["l2"] == "cold":
            DEVICE.evict()
        DEVICE.lasted_us.clear()
        begin_us = DEVICE.host_us
        result = bound.call()
        torch.cuda.synchronize()
    e2e_us = DEVICE.host_us - begin_us
    del result
    return sum(DEVICE.lasted_us), e2e_us, bound.units


def off(record: Record) -> Iterator[str]:
    """What is wrong with the times of a record."""
    kernels_us, true_e2e_us, units = true_us(record)

    def of(name: str) -> float:
        return median((getattr(x, name) or 0.0) * units for x in record.kept)

    time_us, e2e_us, issued_us, hidden_us = map(
        of, ("time_us", "e2e_us", "enqueue_us", "hidden_us")
    )
    if times.launch_bound(record):
        if time_us < kernels_us - TICK_US:
            yield f"launch-bound, and {time_us:.2f} us, in truth {kernels_us:.2f} or more"
        if kernels_us > (issued_us - hidden_us) / times.HOST_BOUND + TICK_US:
            yield "launch-bound, and its kernels outlast their launches"
        return
    events = record.metrics["timer"] == "events"
    # The clock does not hide a launch that is next to nothing of its call.
    unhidden = events and not hidden_us and issued_us <= NEGLIGIBLE * time_us
    if abs(time_us - kernels_us) > TICK_US + issued_us * unhidden:
        yield f"{time_us:.2f} us, in truth {kernels_us:.2f}"
    # Of warm calls it is that of the first one after another implementation's.
    known = events and record.metrics["l2"] == "cold"
    if known and abs(e2e_us - true_e2e_us) > TICK_US + AROUND_US:
        yield f"{e2e_us:.2f} us to the result, in truth {true_e2e_us:.2f}"


def main(run: str) -> int:
    """Compare each cell that was measured."""
    load_built_in()
    remember(1)
    records: list[Any] = [x for x in load_run(Path(run)).records if x.status == "ok"]
    wrong = [f"{x.cell.impl} {x.cell.case.to_json()}: {why}" for x in records for why in off(x)]
    print(f"{len(records)} cells", *wrong, sep="\n")
    return 1 if wrong or not records else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
