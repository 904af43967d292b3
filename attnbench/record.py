"""The record: what became of a cell, one line of JSON."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, Literal, Self, get_args

from attnbench.case import Case
from attnbench.errors import StoreError
from attnbench.sample import Sample

SCHEMA = 1

__all__ = ["SCHEMA", "STATUSES", "Cell", "Record", "Sample", "Status"]

Status = Literal["ok", "unsupported", "incorrect", "oom", "timeout", "crashed", "error", "skipped"]
STATUSES: tuple[Status, ...] = get_args(Status)


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
    `spent_s` maps a stage (build, check, probe, warm-up, samples) to its wall seconds.

    Raises:
        ValueError: a status that contradicts the rest: ok without samples, anything else with
            samples or without a reason.
    """

    cell: Cell
    status: Status
    reason: str | None = None
    samples: tuple[Sample, ...] = ()
    metrics: dict[str, Any] = field(default_factory=dict)
    spent_s: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.status not in STATUSES:
            raise ValueError(f"unknown status {self.status!r}")
        if (self.status == "ok") != bool(self.samples):
            raise ValueError(f"status {self.status} with {len(self.samples)} samples")
        if self.status != "ok" and not self.reason:
            raise ValueError(f"status {self.status} without a reason")

    def to_line(self) -> str:
        """One line of JSON, without the newline. Samples are written as columns."""
        row = {
            "schema": SCHEMA,
            "case_id": self.cell.case.case_id,
            **self.cell.to_json(),
            "status": self.status,
            "reason": self.reason,
            "samples": {name: [getattr(s, name) for s in self.samples] for name in _SAMPLE_FIELDS},
            "metrics": self.metrics,
            "spent_s": self.spent_s,
        }
        return json.dumps(row, separators=(",", ":"), allow_nan=False)

    @classmethod
    def from_line(cls, line: str) -> Self:
        """Inverse of `to_line`.

        Raises:
            StoreError: the line is not a record of a schema this version reads.
        """
        try:
            row = json.loads(line)
            if row["schema"] != SCHEMA:
                raise StoreError(f"records of schema {row['schema']}; this version reads {SCHEMA}")
            columns = [row["samples"][name] for name in _SAMPLE_FIELDS]
            samples = [
                Sample(**dict(zip(_SAMPLE_FIELDS, values, strict=True)))
                for values in zip(*columns, strict=True)
            ]
            return cls(
                cell=Cell.from_json(row),
                status=row["status"],
                reason=row["reason"],
                samples=tuple(samples),
                metrics=row["metrics"],
                spent_s=row["spent_s"],
            )
        except (ValueError, KeyError, TypeError, AttributeError) as err:
            raise StoreError(f"not an attnbench record ({type(err).__name__}: {err})") from err


_SAMPLE_FIELDS = ("round", "position", "calls", "time_us", "e2e_us")
