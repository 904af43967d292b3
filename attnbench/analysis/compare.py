"""Comparisons within one run: speed against the baseline, the cost of RoPE, what failed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pandas as pd

from attnbench.analysis.axes import in_order
from attnbench.analysis.table import load
from attnbench.analysis.times import ratio
from attnbench.execution.store import Run
from attnbench.schema.case import Position
from attnbench.schema.record import Record

BASELINE = "naive"
CellKey = tuple[str, str]
Ratio = tuple[float | None, float | None, float | None]  # value, low, high

_UNKNOWN: Ratio = (None, None, None)


def time_ratio(above: Record | None, below: Record | None) -> Ratio:
    """Median time of `above` / that of `below` with its 95 % interval; None where not known."""
    if above is None or below is None or not (above.samples and below.samples):
        return _UNKNOWN
    if above is below:
        return 1.0, None, None  # by definition; an interval would suggest otherwise
    value, interval = ratio(above, below)
    return value, *(interval or (None, None))


def compared(run: Run) -> pd.DataFrame:
    """The records table, sorted by case and best first, with three more columns.

    `speed`, `speed_low`, `speed_high`: how many times as fast as `naive` on the same case, with
    the interval of `attnbench.analysis.times.ratio`. Cells without a time come last in their case.
    """
    cells = {record.cell.key: record for record in run.records}
    ratios = [time_ratio(cells.get((key[0], BASELINE)), cells[key]) for key in cells]
    frame = load(run)
    frame[["speed", "speed_low", "speed_high"]] = pd.DataFrame(
        ratios, columns=["speed", "speed_low", "speed_high"], dtype="float64"
    )
    return in_order(frame.sort_values("time_us_median", kind="stable", na_position="last"))


def rope_cost(run: Run) -> pd.DataFrame:
    """Time with a position encoding / time without it: same case and implementation otherwise.

    The records table's rows of the encoded cells, with `cost`, `cost_low` and `cost_high`; only
    pairs of which both halves were measured.
    """
    cells = {record.cell.key: record for record in run.records}
    ratios = [time_ratio(record, _unencoded(cells, record)) for record in run.records]
    frame = load(run)
    frame[["cost", "cost_low", "cost_high"]] = pd.DataFrame(
        ratios, columns=["cost", "cost_low", "cost_high"], dtype="float64"
    )
    return in_order(frame[frame["cost"].notna()])


def _unencoded(cells: Mapping[CellKey, Record], record: Record) -> Record | None:
    if record.cell.case.position == Position():
        return None
    plain = replace(record.cell.case, position=Position())
    return cells.get((plain.case_id, record.cell.impl))


def failures(frame: pd.DataFrame) -> pd.DataFrame:
    """Cells without a result, gathered by implementation, status and reason.

    Columns `impl`, `status`, `reason`, `cells` (how many), and `smallest_n`, `largest_n`. What is
    wrong (incorrect, crashed, error) comes before what is merely absent.
    """
    bad = frame[frame["status"] != "ok"]
    if bad.empty:
        columns = ["impl", "status", "reason", "cells", "smallest_n", "largest_n"]
        return pd.DataFrame(columns=columns)
    gathered = bad.groupby(["status", "impl", "reason"], sort=False, dropna=False).agg(
        cells=("seq_len", "size"), smallest_n=("seq_len", "min"), largest_n=("seq_len", "max")
    )
    rows = gathered.reset_index()
    order = rows["status"].map({status: i for i, status in enumerate(WORST_FIRST)})
    return rows.iloc[order.argsort(kind="stable")].reset_index(drop=True)


WORST_FIRST = ("incorrect", "crashed", "error", "oom", "timeout", "unsupported", "skipped")


def spent(run: Run) -> list[tuple[str, float]]:
    """Where the wall time went: (stage, seconds), and last what no stage accounts for.

    From run.json; of a run that was killed, the sum of what its records say.
    """
    told: dict[str, Any] = dict(run.info.get("spent") or {})
    wall_s = told.pop("wall_s", None)
    if not told:
        for record in run.records:
            for stage, seconds in record.spent_s.items():
                told[stage] = told.get(stage, 0.0) + seconds
    stages = [(stage, float(seconds)) for stage, seconds in told.items()]
    rest = 0.0 if wall_s is None else wall_s - sum(seconds for _, seconds in stages)
    return [*stages, ("elsewhere", rest)] if rest > 0.005 else stages
