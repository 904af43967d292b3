"""`python impls/naive.py`: what one kernel file registers is checked and timed, and printed."""

from __future__ import annotations

import sys

import torch

from attnbench.api import implementation
from attnbench.api.loader import load_built_in, load_file
from attnbench.base import units
from attnbench.base.stats import robust_least
from attnbench.errors import AttnbenchError
from attnbench.machine.state import remember, take_cores
from attnbench.measure.clock import clock_for
from attnbench.measure.sampling import StoppingRule
from attnbench.measure.watch import Watch
from attnbench.schema.case import Case, parse_mask
from attnbench.schema.record import Cell, Record
from attnbench.theory.traits import case_label
from attnbench.worker.catalogue import reasons_against
from attnbench.worker.checking import Entry, Reporter
from attnbench.worker.measuring import Instruments, measure_group

RULE = StoppingRule(precision=0.02, min_time_s=0.1, max_time_s=1.0)


def line(record: Record) -> str:
    """Whether the result is right, and the fastest sample: on a CPU without what others took."""
    text = f"{record.status}: {record.reason}"
    if record.status == "ok":
        ratio = record.metrics["error_ratio"]
        time = units.time(robust_least(sample.own_us for sample in record.kept))
        on = ", 1 thread" if record.cell.case.device == "cpu" else ""
        text = f"right (error {ratio:.2g} of what is allowed), {time}{on}"
    return f"  {record.cell.impl:<16} {text}"


def main(file: str) -> int:
    """Check and time each implementation of the file in one case; 1 if any failed."""
    try:
        load_built_in()
        remember()
        names = load_file(file, replace=True)
    except AttnbenchError as err:
        print(f"Error: {err}", file=sys.stderr)
        return int(err.exit_code)
    statuses, printed = set(), ""

    def report(_: int, record: Record) -> None:
        statuses.add(record.status)
        print(line(record))

    reporter = Reporter(at=lambda case, impl, stage: None, record=report)
    for name in names:
        impl = implementation(name)
        gpu = torch.cuda.is_available() and "cuda" in impl.devices
        workload, device = impl.workloads[0], "cuda" if gpu else "cpu"
        case = Case(workload=workload, device=device, seq_len=256, mask=parse_mask("causal"))  # type: ignore[arg-type]
        if case_label(case) != printed:
            printed = case_label(case)
            print(f"{printed}, against float64")
        reason = reasons_against([case], [name])[name][0]
        if reason is not None:
            cell = Cell(case=case, impl=name)
            report(0, Record(cell=cell, status="unsupported", reason=reason))
            continue
        if device == "cpu":
            take_cores(case.threads)
        instruments = Instruments(rule=RULE, clock=clock_for(device), watch=Watch())
        measure_group([Entry(index=0, case=case, impls=(name,))], instruments, reporter)
    return 0 if statuses <= {"ok", "unsupported"} else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
