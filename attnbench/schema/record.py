"""The record: what became of a cell, one line of JSON."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import repeat
from statistics import fmean
from typing import Any, Literal, Self, get_args

import msgspec

from attnbench.base.jsontext import decode, dumps, sealed, unsealed
from attnbench.base.sample import Sample as Sample
from attnbench.base.stats import robust_least
from attnbench.errors import StoreError, UsageError
from attnbench.schema.case import Case

SCHEMA = 3

Status = Literal["ok", "unsupported", "incorrect", "oom", "timeout", "crashed", "error", "skipped"]
STATUSES: tuple[Status, ...] = get_args(Status)
FAILURES = STATUSES[1:]  # all but ok


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One case × one implementation: what is planned, measured and recorded as one row."""

    case: Case
    impl: str

    @property
    def key(self) -> tuple[str, str]:
        """What identifies the cell within a run."""
        return self.case.case_id, self.impl

    def to_json(self) -> dict[str, Any]:
        """Plain JSON."""
        return {"case": self.case.to_json(), "impl": self.impl}

    @classmethod
    def from_json(cls, row: dict[str, Any]) -> Self:
        """Inverse of `to_json`."""
        return cls(case=Case.from_json(row["case"]), impl=row["impl"])


@dataclass(frozen=True, kw_only=True)
class Record:
    """A status with its reason, the samples, and what the probes found.

    `metrics` maps column names to what was predicted, counted or measured beside time;
    `spent_s` maps a stage (profile, reference, build, check, probe, warm-up, samples, core) to its
    wall seconds.
    `process` numbers the fresh process it comes from, where a cell is measured in several;
    `environment` is the key of the machine's facts in `run.json`, empty for the run's first.

    Raises:
        ValueError: a status that contradicts the rest: ok without a sample that counts, anything
            else with samples or without a reason; or a sample that counts without a time.
    """

    cell: Cell
    status: Status
    reason: str | None = None
    samples: tuple[Sample, ...] = ()
    metrics: dict[str, Any] = field(default_factory=dict)
    spent_s: dict[str, float] = field(default_factory=dict)
    process: int = 0
    environment: str = ""

    def __post_init__(self) -> None:
        if self.status not in STATUSES:
            raise ValueError(f"unknown status {self.status!r}")
        if self.status == "ok" and not self.kept:
            raise ValueError(f"status ok, and none of {len(self.samples)} samples counts")
        if any(
            s.time_us <= 0 or s.e2e_us <= 0 or (s.blocks_us and min(s.blocks_us) <= 0)
            for s in self.kept
        ):
            raise ValueError("a sample that counts has no time above 0")
        if self.status != "ok" and self.samples:
            raise ValueError(f"status {self.status} with {len(self.samples)} samples")
        if self.status != "ok" and not self.reason:
            raise ValueError(f"status {self.status} without a reason")

    @property
    def kept(self) -> tuple[Sample, ...]:
        """The samples that count: all but the discarded."""
        return tuple([sample for sample in self.samples if sample.discarded is None])

    def to_line(self) -> str:
        """One line of JSON with its checksum, without the newline; samples as columns."""
        row = {
            "schema": SCHEMA,
            "case_id": self.cell.case.case_id,
            **self.cell.to_json(),
            "status": self.status,
            "reason": self.reason,
            "process": self.process,
            "environment": self.environment,
            "samples": _columns(self.samples),
            "metrics": self.metrics,
            "spent_s": self.spent_s,
        }
        return sealed(dumps(row, separators=(",", ":"), allow_nan=False))

    @classmethod
    def from_line(cls, line: str | bytes) -> Self:
        """Inverse of `to_line`.

        Raises:
            StoreError: the line is not a record of this version's schema, or was changed.
        """
        try:
            data = line.encode() if isinstance(line, str) else line
            row = decode(unsealed(data), _Line)
            case = Case.from_json(row.case)
            if row.case_id != case.case_id:
                raise ValueError(f"its case is {case.case_id}, not {row.case_id!r:.40}")
            return cls(
                cell=Cell(case=case, impl=row.impl),
                status=row.status,
                reason=row.reason,
                samples=_samples(row.samples),
                metrics=row.metrics,
                spent_s=row.spent_s,
                process=row.process,
                environment=row.environment,
            )
        except (ValueError, UsageError) as err:
            raise StoreError(f"not an attnbench record of schema {SCHEMA} ({err})") from err


_SAMPLE = {item.name: item.default for item in msgspec.structs.fields(Sample)}


class _Line(msgspec.Struct, kw_only=True):
    """A record as it is stored: a column of values for each field of its samples."""

    schema: Literal[3]
    case_id: str
    case: dict[str, Any]
    impl: str
    status: Status
    reason: str | None
    samples: dict[str, list[Any]]
    metrics: dict[str, str | int | float | None]
    spent_s: dict[str, float]
    process: int = 0
    environment: str = ""


def _columns(samples: tuple[Sample, ...]) -> dict[str, list[Any]]:
    """Samples by field; a field in which all have its default is left out."""
    columns = {name: [getattr(sample, name) for sample in samples] for name in _SAMPLE}
    return {
        name: values
        for name, values in columns.items()
        if _SAMPLE[name] is msgspec.NODEFAULT or any(value != _SAMPLE[name] for value in values)
    }


def _samples(columns: dict[str, list[Any]]) -> tuple[Sample, ...]:
    """Inverse of `_columns`."""
    count = len(columns.get("round", ()))
    whole = [columns.get(name) or repeat(default, count) for name, default in _SAMPLE.items()]
    return msgspec.convert(list(zip(*whole, strict=True)), tuple[Sample, ...])


def merged(records: list[Record]) -> Record:
    """One record of a cell from those of its processes, in their order.

    It is ok only if all are: an implementation that fails in one process of three fails. Memory
    and counts are the same in every process, or the largest is what a user must reckon with; the
    conditions are averaged; times spent add up. Texts that differ are joined, each with the number
    of processes that say so. Environments that differ are joined by spaces.
    """
    ordered = sorted(records, key=lambda record: record.process)
    if len(ordered) == 1:
        return ordered[0]
    bad = next((record for record in ordered if record.status != "ok"), None)
    environment = " ".join(dict.fromkeys(record.environment for record in ordered))
    spent_s: dict[str, float] = {}
    for record in ordered:
        for stage, seconds in record.spent_s.items():
            spent_s[stage] = spent_s.get(stage, 0.0) + seconds
    if bad is not None:
        reason = f"in process {bad.process + 1} of {len(ordered)}: {bad.reason}"
        return replace(bad, reason=reason, spent_s=spent_s, process=0)
    samples = [
        msgspec.structs.replace(s, process=record.process)
        for record in ordered
        for s in record.samples
    ]
    metrics = {
        name: _merged_metric(name, [record.metrics.get(name) for record in ordered])
        for name in dict.fromkeys(name for record in ordered for name in record.metrics)
    }
    return replace(
        ordered[0],
        samples=tuple(samples),
        metrics=metrics,
        spent_s=spent_s,
        environment=environment,
    )


def _merged_metric(name: str, values: list[Any]) -> Any:
    known = [value for value in values if value is not None]
    if name == "group":  # one for each process, in their order
        return " ".join(map(str, values))
    if known and all(isinstance(value, str) for value in known):
        if known.count(known[0]) == len(values):
            return known[0]
        return "; ".join(
            f"{text} ({known.count(text)} of {len(values)})" for text in dict.fromkeys(known)
        )
    if not all(isinstance(value, (int, float)) for value in known) or not known:
        return known[0] if known else None
    return _MERGES.get(name, max)(known)


_CONDITIONS = (
    "interruptions_per_s cpu_share full_speed_share stolen_share throttled_share load_1m"
    " power_w temperature_c sm_mhz energy_j idle_power_w enqueue_us hidden_us"
)
_MERGES: dict[str, Callable[[list[Any]], Any]] = dict.fromkeys(_CONDITIONS.split(), fmean)
_MERGES["kept_disturbed"] = sum
_MERGES |= {"cpu_quota": min, "probe_us": robust_least}
