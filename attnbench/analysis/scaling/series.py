"""From a run to series: cells that differ along one axis alone, with law and floor."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from attnbench.analysis import limits, notes, times
from attnbench.analysis.scaling.labels import same_text
from attnbench.analysis.scaling.laws import Laws
from attnbench.analysis.scaling.results import Axis, Series
from attnbench.case import Case
from attnbench.record import Record
from attnbench.stats import median
from attnbench.store import Run

FLOOR_CONTEXT = 16  # a decode step after so few tokens is its floor
LEAST_SIZES: dict[Axis, int] = {
    "n": 2, "d": 3, "heads": 3, "heads at fixed width": 3, "batch": 3,
}  # fmt: skip
NEVER_RAN = ("unsupported", "skipped")
MOST_WITH_NOTES = 5000  # cells; notes look at every sample, which takes longer than the fits

# What a series has in common beside its implementation, as columns of `_frame`.
_FIXED: dict[Axis, tuple[str, ...]] = {
    "n": ("batch", "heads", "kv_heads", "head_dim", "value_dim", "width"),
    "d": ("batch", "heads", "kv_heads", "seq_len", "kv_len"),
    "heads": ("batch", "group", "head_dim", "value_dim", "seq_len", "kv_len"),
    "heads at fixed width": ("batch", "group", "inner", "width", "seq_len", "kv_len"),
    "batch": ("heads", "kv_heads", "head_dim", "value_dim", "width", "seq_len", "kv_len"),
}
_SIZES: dict[Axis, str] = {
    "n": "seq_len", "d": "dim", "heads": "heads", "heads at fixed width": "heads", "batch": "batch",
}  # fmt: skip
# Which cells an axis can take: what follows it must do so.
_NEEDS: dict[Axis, tuple[str, ...]] = {
    "n": ("keys_follow",),
    "d": ("value_follows", "width_follows"),
    "heads": ("width_follows",),
    "heads at fixed width": ("value_follows",),
    "batch": (),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """A cell with the replicates of its time; `doubt` says why there are none."""

    record: Record
    times_us: tuple[float, ...]
    doubt: str | None


@dataclass(frozen=True, kw_only=True)
class Group:
    """A series with the cells it comes from, size by size."""

    series: Series
    cells: tuple[Measured, ...]

    @property
    def case(self) -> Case:
        """The case of the smallest size."""
        return self.cells[0].record.cell.case


def groups(run: Run, laws: Laws) -> list[Group]:
    """Every series of a run that could show how cost grows.

    Along n from two sizes on. Along the other axes from three, and once for all else alike: at the
    n that has most sizes, the largest of those, since a small problem shows its floor. Cells that
    failed or that are suspect have no replicates, and a doubt that says why.
    """
    environment = run.info.get("environment") or {}
    ceilings = limits.ceilings_of(environment)
    cells = [_measured(record, environment, ceilings) for record in run.records]
    if not cells:
        return []
    frame = _frame([cell.record for cell in cells])
    codes = frame["code"].tolist()
    floors = _floors(cells, codes, frame["is_floor"].tolist())
    found = []
    for axis in _FIXED:
        for members in _members(frame, axis):
            chosen = [cells[i] for i in members]
            floor = floors.of(codes[members[0]], chosen[0].record.cell.case)
            known = ceilings if _describes(environment, chosen[0].record) else limits.Ceilings()
            found.append(_group(axis, chosen, floor, laws, known, len(cells)))
    return found


def _measured(record: Record, environment: dict[str, Any], ceilings: limits.Ceilings) -> Measured:
    if record.status != "ok":
        return Measured(record=record, times_us=(), doubt=f"{record.status}: {record.reason}")
    observed = tuple(times.observations_us(record))
    if not all(0 < value < float("inf") for value in observed):
        return Measured(record=record, times_us=(), doubt="a time that is none (0 or NaN)")
    here = environment if _describes(environment, record) else {}
    known = ceilings if here else limits.Ceilings()
    doubt = _suspect(record, here, known, median(observed))
    return Measured(record=record, times_us=() if doubt else observed, doubt=doubt)


def _describes(environment: dict[str, Any], record: Record) -> bool:
    """Whether the run's environment is that of the record's device."""
    device = record.cell.case.device
    return bool(environment.get("device", device) == device)


def _suspect(
    record: Record, environment: dict[str, Any], ceilings: limits.Ceilings, time_us: float
) -> str | None:
    """As the column `suspect`."""
    metrics, executed = record.metrics, record.metrics.get("flops_executed")
    found = limits.suspect(
        device_name=environment.get("device_name"),
        dtype=record.cell.case.dtype,
        matmul_precision=environment.get("matmul_precision"),
        time_us=time_us,
        flops=metrics.get("flops_useful") if executed is None else executed,
        bytes_min=metrics.get("bytes_min"),
        measured=ceilings,
    )
    return f"suspect: {found}" if found else None


def _frame(records: list[Record]) -> pd.DataFrame:
    """One row a cell: `code` numbers whatever is no size, the rest are sizes and what follows."""
    codes: dict[tuple[Any, ...], int] = {}
    rows = []
    for record in records:
        case, impl = record.cell.case, record.cell.impl
        kind = (
            impl, case.workload, case.pass_, case.device, case.dtype, case.mask.text,
            case.position.text, case.projection, case.cache, case.new_tokens, case.scale,
        )  # fmt: skip
        code = codes.setdefault(kind, len(codes))
        rows.append(
            (code, case.batch, case.heads, case.kv_heads, case.seq_len, case.kv_len,
             case.head_dim, case.value_dim, case.width or 0, case.workload == "decode")
        )  # fmt: skip
    columns = "code batch heads kv_heads seq_len kv_len head_dim value_dim width decode".split()
    frame = pd.DataFrame(np.array(rows, dtype=np.int64), columns=columns)
    frame["inner"] = frame["heads"] * frame["head_dim"]
    frame["group"] = frame["heads"] // frame["kv_heads"]
    frame["dim"] = np.where(frame["width"] > 0, frame["width"], frame["head_dim"])
    frame["keys_follow"] = frame["kv_len"] == frame["seq_len"]
    frame["value_follows"] = frame["value_dim"] == frame["head_dim"]
    frame["width_follows"] = (frame["width"] == 0) | (frame["width"] == frame["inner"])
    most = np.where(frame["decode"] > 0, FLOOR_CONTEXT, 1)
    frame["is_floor"] = frame[["seq_len", "kv_len"]].max(axis=1) <= most
    return frame


def _members(frame: pd.DataFrame, axis: Axis) -> Iterator[list[int]]:
    """Row numbers of each series along `axis`, in ascending order of size."""
    fit = ~frame["is_floor"]
    for name in _NEEDS[axis]:
        fit &= frame[name]
    rows = frame[fit]
    by, size = ["code", *_FIXED[axis]], _SIZES[axis]
    grouped = rows.groupby(by, sort=False)
    distinct = grouped[size].transform("nunique")
    kept = rows.assign(series=grouped.ngroup(), distinct=distinct)[distinct >= LEAST_SIZES[axis]]
    if axis != "n":
        kept = _largest(kept, [name for name in by if name not in ("seq_len", "kv_len")])
    kept = kept.sort_values(["series", size], kind="stable")
    where, series = kept.index.to_numpy(), kept["series"].to_numpy()
    for part in np.split(where, np.flatnonzero(np.diff(series)) + 1):
        if len(part):
            yield part.tolist()


def _largest(rows: pd.DataFrame, by: list[str]) -> pd.DataFrame:
    """Of series that differ in n alone, the one with most sizes, and of those the largest n."""
    order = ["distinct", "seq_len", "kv_len"]
    best = rows.sort_values(order, kind="stable").groupby(by, sort=False)["series"].last()
    return rows[rows["series"].isin(best)]


class _Floors:
    """The cells with next to nothing to do: n = 1, or a decode step after a few tokens."""

    def __init__(self) -> None:
        self._exact: dict[tuple[Any, ...], tuple[int, Measured]] = {}
        self._near: dict[tuple[Any, ...], tuple[int, Measured]] = {}

    def add(self, code: int, cell: Measured) -> None:
        """Keep the cell if it is smaller than what is known."""
        case = cell.record.cell.case
        order = case.seq_len * 10**9 + case.head_dim
        for table, key in ((self._exact, _exact(code, case)), (self._near, _near(code, case))):
            if key not in table or order < table[key][0]:
                table[key] = order, cell

    def of(self, code: int, case: Case) -> tuple[float, ...] | None:
        """Replicates of the floor of what begins with `case`.

        Of the same sizes but n; else of another head dim at the same heads and batch, which start
        as many kernels. A wider layer is no such floor: for one token it reads more weights.
        """
        found = self._exact.get(_exact(code, case)) or self._near.get(_near(code, case))
        if found is None or (found[1].record.cell.case.width or 0) > (case.width or 0):
            return None
        return found[1].times_us


def _exact(code: int, case: Case) -> tuple[Any, ...]:
    sizes = (case.batch, case.heads, case.kv_heads, case.head_dim, case.value_dim, case.width)
    return code, *sizes


def _near(code: int, case: Case) -> tuple[Any, ...]:
    return code, case.batch, case.heads, case.kv_heads


def _floors(cells: list[Measured], codes: list[int], is_floor: list[bool]) -> _Floors:
    floors = _Floors()
    for cell, code, small in zip(cells, codes, is_floor, strict=True):
        if small and cell.times_us:
            floors.add(code, cell)
    return floors


def _group(
    axis: Axis,
    cells: list[Measured],
    floor: tuple[float, ...] | None,
    laws: Laws,
    ceilings: limits.Ceilings,
    of_cells: int,
) -> Group:
    first = cells[0].record.cell
    metrics = [cell.record.metrics for cell in cells]
    series = Series(
        impl=first.impl,
        workload=first.case.workload,
        axis=axis,
        same=same_text(first.case, axis),
        sizes=tuple(_size(cell.record.cell.case, axis) for cell in cells),
        times_us=tuple(cell.times_us for cell in cells),
        floor_us=floor,
        law=laws.time(first.impl, first.case),
        kernels=tuple(known.get("kernel") for known in metrics),
        working_set_bytes=tuple(_working_set(known) for known in metrics),
        cache_bytes=ceilings.cache_bytes,
        doubts=tuple(_doubt(cell, of_cells) for cell in cells),
        least_floor_us=_least_floor(cells[0], ceilings.launch_us),
        enqueue_us=tuple(known.get("enqueue_us") for known in metrics),
    )
    return Group(series=series, cells=tuple(cells))


def _size(case: Case, axis: Axis) -> float:
    if axis == "d":
        return float(case.width or case.head_dim)
    return float(getattr(case, _SIZES[axis]))


def _working_set(metrics: dict[str, Any]) -> float | None:
    peak = metrics.get("memory_peak_bytes")
    return metrics.get("bytes_min") if peak is None else peak


def _least_floor(smallest: Measured, launch_us: float | None) -> float | None:
    """Time to start the kernels of the smallest size one after another, per call or token."""
    kernels = smallest.record.metrics.get("kernel_count")
    if not kernels or not launch_us:
        return None
    return float(kernels) * launch_us / (smallest.record.cell.case.new_tokens or 1)


def _doubt(cell: Measured, of_cells: int) -> str | None:
    """Why there is no time; of a cell that has one, what its serious notes say."""
    if cell.doubt or of_cells > MOST_WITH_NOTES:
        return cell.doubt
    unsteady = notes.unsteady(cell.record)
    return f"unsteady ({unsteady})" if unsteady else None
