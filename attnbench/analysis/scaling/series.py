"""From a run to series: cells that differ along one axis alone, with law and floor."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from attnbench.analysis import notes, times
from attnbench.analysis.scaling.labels import same_text
from attnbench.analysis.scaling.laws import Laws
from attnbench.analysis.scaling.measured import Measured, describes, measured
from attnbench.analysis.scaling.results import Axis, Series
from attnbench.execution.store import Run
from attnbench.machine import limits
from attnbench.schema.case import Case

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


@dataclass(frozen=True, kw_only=True)
class Group:
    """A series with the cells it comes from, size by size."""

    series: Series
    cells: tuple[Measured, ...]

    @property
    def case(self) -> Case:
        """The case of the smallest size."""
        return self.cells[0].record.cell.case


def groups(run: Run, laws: Laws, cells: list[Measured] | None = None) -> list[Group]:
    """Every series of a run that could show how cost grows.

    Along n from two sizes on. Along the other axes from three, and once for all else alike: at the
    n that has most sizes, the largest of those, since a small problem shows its floor. Cells that
    failed or that are suspect have no replicates, and a doubt that says why. `cells` are those of
    the run where they are known already.
    """
    environment = run.info.get("environment") or {}
    ceilings = limits.ceilings_of(environment)
    cells = measured(run) if cells is None else cells
    if not cells:
        return []
    frame = _frame(cells)
    floors = _floors(cells, frame["is_floor"].tolist())
    found = []
    for axis in _FIXED:
        for members in _members(frame, axis):
            chosen = [cells[i] for i in members]
            floor = floors.of(chosen[0])
            known = ceilings if describes(environment, chosen[0].record) else limits.Ceilings()
            found.append(_group(axis, chosen, floor, laws, known, len(cells)))
    return found


def _frame(cells: list[Measured]) -> pd.DataFrame:
    """One row a cell: its kind, sizes, and what follows which of them."""
    rows = []
    for cell in cells:
        case = cell.record.cell.case
        rows.append(
            (cell.kind, case.batch, case.heads, case.kv_heads, case.seq_len, case.kv_len,
             case.head_dim, case.value_dim, case.width or 0, case.workload == "decode")
        )  # fmt: skip
    columns = "kind batch heads kv_heads seq_len kv_len head_dim value_dim width decode".split()
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
    by, size = ["kind", *_FIXED[axis]], _SIZES[axis]
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

    def add(self, cell: Measured) -> None:
        """Keep the cell if it is smaller than what is known."""
        case = cell.record.cell.case
        order = case.seq_len * 10**9 + case.head_dim
        for table, key in ((self._exact, _exact(cell)), (self._near, _near(cell))):
            if key not in table or order < table[key][0]:
                table[key] = order, cell

    def of(self, cell: Measured) -> tuple[float, ...] | None:
        """Replicates of the floor of the series that begins with the cell.

        Of the same sizes but n; else of another head dim at the same heads and batch, which start
        as many kernels. A wider layer is no such floor: for one token it reads more weights.
        """
        found = self._exact.get(_exact(cell)) or self._near.get(_near(cell))
        if found is None or _width(found[1]) > _width(cell):
            return None
        return found[1].times_us


def _exact(cell: Measured) -> tuple[Any, ...]:
    case = cell.record.cell.case
    sizes = (case.batch, case.heads, case.kv_heads, case.head_dim, case.value_dim, case.width)
    return cell.kind, *sizes


def _near(cell: Measured) -> tuple[Any, ...]:
    case = cell.record.cell.case
    return cell.kind, case.batch, case.heads, case.kv_heads


def _width(cell: Measured) -> int:
    return cell.record.cell.case.width or 0


def _floors(cells: list[Measured], is_floor: list[bool]) -> _Floors:
    floors = _Floors()
    for cell, small in zip(cells, is_floor, strict=True):
        if small and cell.times_us:
            floors.add(cell)
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
    doubts = [_doubt(cell, of_cells) for cell in cells]
    series = Series(
        impl=first.impl,
        workload=first.case.workload,
        axis=axis,
        same=same_text(first.case, axis),
        sizes=tuple([_size(cell.record.cell.case, axis) for cell in cells]),
        times_us=tuple([cell.times_us for cell in cells]),
        floor_us=floor,
        law=laws.time(first.impl, first.case),
        kernels=tuple([known.get("kernel") for known in metrics]),
        working_set_bytes=tuple([_working_set(known) for known in metrics]),
        cache_bytes=ceilings.cache_bytes,
        doubts=tuple(doubts),
        excess=tuple(
            [
                times.excess(cell.record) if doubt and cell.times_us else 1.0
                for cell, doubt in zip(cells, doubts, strict=True)
            ]
        ),
        least_floor_us=_least_floor(cells[0], ceilings.launch_us),
        enqueue_us=tuple([known.get("enqueue_us") for known in metrics]),
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
