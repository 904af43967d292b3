"""The cells of a run as the fits take them: replicates of a time, or why there are none."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from attnbench.analysis import times
from attnbench.base.stats import median
from attnbench.execution.store import Run
from attnbench.machine import limits
from attnbench.schema.record import Record


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """A cell with the replicates of its time; `doubt` says why there are none.

    `kind` numbers all that makes cells alike but their sizes.
    """

    record: Record
    kind: int
    times_us: tuple[float, ...] = ()
    doubt: str | None = None


def measured(run: Run) -> list[Measured]:
    """Every record of the run. Those that failed or are suspect have a doubt and no times."""
    environment = run.info.get("environment") or {}
    ceilings = limits.ceilings_of(environment)
    kinds: dict[tuple[Any, ...], int] = {}
    return [
        _measured(record, kinds.setdefault(_kind(record), len(kinds)), environment, ceilings)
        for record in run.records
    ]


def describes(environment: dict[str, Any], record: Record) -> bool:
    """Whether the run's environment is that of the record's device."""
    device = record.cell.case.device
    return bool(environment.get("device", device) == device)


def _measured(
    record: Record, kind: int, environment: dict[str, Any], ceilings: limits.Ceilings
) -> Measured:
    if record.status != "ok":
        return Measured(record=record, kind=kind, doubt=f"{record.status}: {record.reason}")
    observed = tuple(times.observations_us(record))
    if not times.are_times(observed):
        return Measured(record=record, kind=kind, doubt="a time that is none (0 or NaN)")
    doubt = _suspect(record, environment, ceilings, observed)
    return Measured(record=record, kind=kind, times_us=() if doubt else observed, doubt=doubt)


def _kind(record: Record) -> tuple[Any, ...]:
    case = record.cell.case
    return (
        record.cell.impl, case.workload, case.pass_, case.device, case.dtype, case.mask.text,
        case.position.text, case.projection, case.cache, case.new_tokens, case.scale,
    )  # fmt: skip


def _suspect(
    record: Record,
    environment: dict[str, Any],
    ceilings: limits.Ceilings,
    observed: tuple[float, ...],
) -> str | None:
    """As the column `suspect`."""
    metrics, executed = record.metrics, record.metrics.get("flops_executed")
    flops = metrics.get("flops_useful") if executed is None else executed
    bytes_min = metrics.get("bytes_min")
    if not flops and not bytes_min:
        return None  # nothing that a limit could be held against
    here = describes(environment, record)
    found = limits.suspect(
        device_name=environment.get("device_name") if here else None,
        dtype=record.cell.case.dtype,
        matmul_precision=environment.get("matmul_precision") if here else None,
        time_us=median(observed),
        flops=flops,
        bytes_min=bytes_min,
        measured=ceilings if here else limits.Ceilings(),
    )
    return f"suspect: {found}" if found else None
