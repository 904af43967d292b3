"""The columns of the records table, the rows of `columns.toml`, and how those are computed."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, Literal

from attnbench.analysis import notes, pairs, times
from attnbench.base.parameters import base_name
from attnbench.base.registry import Registry
from attnbench.base.stats import median
from attnbench.machine import limits
from attnbench.schema.axes import AXES
from attnbench.schema.case import Case
from attnbench.schema.record import Record
from attnbench.store.runs import Run
from attnbench.theory.masks import mask_block_density, mask_density
from attnbench.theory.traits import TRAITS

ColumnKind = Literal["int", "float", "text"]


@dataclass(eq=False)
class TableRow:
    """One recorded cell, with what several columns are made of; computed once.

    `ratios` are the columns that other rows take part in (`ratios.set_ratios`).
    """

    record: Record
    run: Run
    ratios: dict[str, Any] = field(default_factory=dict)

    @cached_property
    def case(self) -> dict[str, Any]:
        """The fields of the case, as its JSON writes them."""
        return self.record.cell.case.to_json()

    @cached_property
    def environment(self) -> dict[str, Any]:
        """The facts of its machine in run.json."""
        return self.run.environment_of(self.record)

    @property
    def implementation(self) -> dict[str, Any]:
        """What run.json says of the implementation; empty where it says nothing."""
        name = base_name(self.record.cell.impl)
        rows = self.run.info.get("implementations") or []
        return next((row for row in rows if row.get("name") == name), {})

    @cached_property
    def times(self) -> pairs.CellTimes | None:
        """The reported time, its interval, and the samples that ratios are made of."""
        return pairs.cell_times(self.record) if self.record.samples else None

    @property
    def time_us(self) -> float | None:
        """The reported time."""
        return self.times.time_us if self.times else None

    @property
    def interval_us(self) -> tuple[float | None, float | None]:
        """The ends of its interval."""
        return (self.times and self.times.interval_us) or (None, None)

    @cached_property
    def suspect(self) -> str | None:
        """Why the time cannot be right, or None."""
        return times.suspect(self.record, self.environment, self.time_us)

    @cached_property
    def limits(self) -> dict[str, Any]:
        """The cell against its machine, by column.

        The model is the roofline of Williams, Waterman and Patterson (CACM 2009) with a third
        limit, that every kernel must be started. Times are per unit: a call, or a token of decode.
        """
        case, metrics = self.record.cell.case, self.record.metrics
        ceilings = limits.ceilings_of(self.environment, case.threads)
        known = limits.peaks_of(self.environment.get("device_name"))
        traffic, peak = metrics.get("bytes_min"), ceilings.matmul_tflops.get(case.dtype)
        # Of one call: all the tokens of a decode.
        starts_us = ceilings.starts_us(metrics.get("kernel_count"), l2=metrics.get("l2"))
        least_us = {
            "compute": _quotient(limits.flops(metrics), peak, per=1e-6),
            "memory": _quotient(traffic, ceilings.read_gbps, per=1e-3),
            "launch": None if starts_us is None else starts_us / case.units,
        }
        return {
            "arithmetic_intensity": _quotient(metrics.get("flops_useful"), traffic),
            "fraction_of_compute_peak": _quotient(least_us["compute"], self.time_us),
            "fraction_of_memory_peak": _quotient(least_us["memory"], self.time_us),
            "bound": "launch"
            if times.launch_bound(self.record)
            else _bound(least_us, self.time_us),
            "peak_tflops_measured": peak,
            "peak_tflops_datasheet": limits.peak_tflops(self.environment, case.dtype),
            "read_gbps_measured": ceilings.read_gbps,
            "copy_gbps_measured": ceilings.copy_gbps,
            "memory_gbps_datasheet": 1e3 * known[1].memory_tbps if known else None,
            "launch_us_measured": ceilings.launch_us,
            "ceilings_measured": ceilings.measured,
        }


def _bound(least_us: dict[str, float | None], time_us: float | None) -> str | None:
    """The limit that takes longest; unknown unless all are: the missing one might be it."""
    known = {name: us for name, us in least_us.items() if us is not None}
    all_known = time_us and len(known) == len(least_us)
    return max(known, key=lambda name: known[name]) if all_known else None


def _quotient(amount: float | None, other: float | None, per: float = 1.0) -> float | None:
    """Quotient × `per`; None where either is unknown, or the divisor is nothing."""
    return None if amount is None or not other else amount / other * per


def _rate(row: TableRow, name: str, per_us: float) -> float | None:
    """A metric / the reported time, in the unit that is `per_us` a microsecond."""
    rate = _quotient(row.record.metrics.get(name), row.time_us)
    return None if rate is None else rate / per_us


def _wall_us(record: Record, of: Callable[[list[float]], float]) -> float | None:
    on_cpu = record.samples and record.cell.case.device == "cpu"
    return of([sample.time_us for sample in record.kept]) if on_cpu else None


def _batches_us(record: Record) -> list[list[float]]:
    """The times of the batches of each sample that counts."""
    return [list(sample.blocks_us or (sample.time_us,)) for sample in record.kept]


def _density(of: Callable[[Case], float]) -> Callable[[Record], float | None]:
    """Of workloads that have a square of queries and keys: not of single tokens or a network."""

    def value(record: Record) -> float | None:
        traits = TRAITS.get(record.cell.case.workload)
        return of(record.cell.case) if traits.heads and traits.unit == "call" else None

    return value


def _count(row: TableRow) -> int | None:
    steps, case = (row.run.info.get("steps") or {}).values(), row.record.cell.case.case_id
    counts = {calls[case] for calls in steps if case in calls}
    return counts.pop() if len(counts) == 1 else None


# The columns that are `computed`, from the record alone or with what the run says beside it.
_OF_RECORD: dict[str, Callable[[Record], Any]] = {
    "case_id": lambda r: r.cell.case.case_id,
    "impl": lambda r: r.cell.impl,
    "status": lambda r: r.status,
    "reason": lambda r: r.reason,
    "time_us_median": lambda r: median(s.own_us for s in r.kept) if r.samples else None,
    "time_us_min": lambda r: min((s.own_us for s in r.kept), default=None),
    "clock": times.clock,
    "wall_us_median": lambda r: _wall_us(r, median),
    "wall_us_min": lambda r: _wall_us(r, min),
    "e2e_us_median": lambda r: median(s.e2e_us for s in r.kept) if r.samples else None,
    "n_samples": lambda r: len(r.kept),
    "notes": notes.notes,
    "unsteady": notes.unsteady,
    "processes": lambda r: len({s.process for s in r.samples}) or None,
    "n_discarded": lambda r: len(r.samples) - len(r.kept) if r.samples else None,
    "blocks": lambda r: max(map(len, _batches_us(r)), default=None),
    "wall_us_batches": lambda r: median(chain.from_iterable(_batches_us(r))) if r.samples else None,
    "calls": lambda r: sum(s.calls * (len(s.blocks_us) or 1) for s in r.kept) or None,
    "spent_s": lambda r: sum(r.spent_s.values()) or None,
    "mask_density": _density(mask_density),
    "mask_block_density": _density(mask_block_density),
}
_OF_ROW: dict[str, Callable[[TableRow], Any]] = {
    "run_id": lambda row: row.run.run_id,
    "device_name": lambda row: row.environment.get("device_name"),
    "suspect": lambda row: row.suspect,
    "time_us": lambda row: row.time_us,
    "time_us_low": lambda row: row.interval_us[0],
    "time_us_high": lambda row: row.interval_us[1],
    "tflops": lambda row: _rate(row, "flops_useful", 1e6),
    "gbps": lambda row: _rate(row, "bytes_min", 1e3),
    "created": lambda row: row.run.info.get("created"),
    "family": lambda row: row.implementation.get("family"),
    "count": _count,
}
_SOURCES: dict[str, Callable[[TableRow], Mapping[str, Any]]] = {
    "case": lambda row: row.case,
    "metric": lambda row: row.record.metrics,
    "environment": lambda row: row.environment,
    "limit": lambda row: row.limits,
    "ratio": lambda row: row.ratios,
}


@dataclass(frozen=True, kw_only=True)
class Column:
    """One column: what it is called, where it comes from, its kind, its unit, what it means."""

    name: str
    source: str
    kind: ColumnKind
    unit: str
    meaning: str

    def value(self, row: TableRow) -> Any:
        """Its value in a row; None for what is not known, never 0."""
        if source := _SOURCES.get(self.source):
            return source(row).get(self.name)
        if of_record := _OF_RECORD.get(self.name):
            return of_record(row.record)
        return _OF_ROW[self.name](row)


COLUMNS: Registry[Column] = Registry("column")
_TABLE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
_KINDS = {
    "sizes": "int",
    "threads": "int",
    "scales": "float",
    "caps": "float",
    "sinks": "text",
    "names": "text",
}
for _name in chain(*([n for n in AXES if n not in _TABLE] if n == "axes" else [n] for n in _TABLE)):
    _row = _TABLE.get(_name) or ["case", _KINDS[AXES[_name].kind], "", AXES[_name].meaning]
    _source, _kind, _unit, _meaning = _row
    COLUMNS.add(_name, Column(name=_name, source=_source, kind=_kind, unit=_unit, meaning=_meaning))
