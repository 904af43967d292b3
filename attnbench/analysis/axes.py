"""The axes of a case in a table: which of them a run varies, and how they are written."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import pandas as pd

from attnbench.schema import axes as schema
from attnbench.theory.traits import TRAITS

# In the order in which rows are sorted and labels read; a cluster's nodes, or the runs that were
# merged, have device names of their own.
AXES = {name: schema.Axis(field=name) for name in ("workload", "device", "device_name")} | dict(
    sorted(schema.AXES.items(), key=lambda item: item[1].order[0])
)


def varying(frame: pd.DataFrame) -> list[str]:
    """Axes with more than one value in `frame`; a follower only where it leaves its leader."""
    own = [name for name in AXES if not _follows(frame, name)]
    return [name for name in own if frame[name].nunique(dropna=False) > 1]


def _follows(frame: pd.DataFrame, name: str) -> bool:
    leader = AXES[name].follows
    return leader is not None and frame[name].equals(frame[leader])


def label_axes(frame: pd.DataFrame) -> dict[str, list[str]]:
    """For each workload the axes that a label of its cases needs: those that vary in its rows.

    Where none does, the length: of one query that of its keys.
    """
    several = frame["workload"].nunique() > 1
    found: dict[str, list[str]] = {}
    for workload, rows in frame.groupby("workload", sort=False):
        length = "kv_len" if (rows["seq_len"] == 1).all() and "kv_len" in rows else "seq_len"
        found[str(workload)] = [*(["workload"] if several else []), *varying(rows)] or [length]
    return found


_OF_HEADS = {"head_dim", "value_dim", "heads", "kv_heads"}  # left out where there are no heads


def fixed(frame: pd.DataFrame) -> str:
    """What all rows have in common beside the device: `attention, cpu, float32, full, D=64`."""
    if frame.empty:
        return ""
    left_out = {"device_name", *varying(frame)}
    if not any(TRAITS.get(str(name)).heads for name in frame["workload"].unique()):
        left_out |= _OF_HEADS
    first = frame.iloc[0]
    names = [name for name in AXES if name not in left_out and not _follows(frame, name)]
    return ", ".join(filter(None, (_text(first, name) for name in names)))


def label(row: pd.Series[Any] | Mapping[Any, Any], names: list[str]) -> str:
    """Write the named axes that a row has: `H=4 B=1 n=128 rope`; a follower where it differs."""
    return " ".join(filter(None, (_text(row, name) for name in names if name in row)))


def _text(row: pd.Series[Any] | Mapping[Any, Any], name: str) -> str:
    axis = AXES[name]
    return "" if axis.unsaid and row[name] == axis.plain else axis.text(row)


def heading(row: pd.Series[Any] | Mapping[Any, Any], names: list[str]) -> str:
    """As `label`, for a part among others: named even where its values go without saying."""
    return label(row, names) or ", ".join(filter(None, (AXES[name].unsaid for name in names)))


_OVERHEAD_SIZES, _OVERHEAD_GAP = 16, 16  # a length up to this, and so far below the next


def overhead_size(lengths: Iterable[int], least: int = 3) -> int | None:
    """The length that was measured for the overhead alone: small, and far below all others.

    None where there are fewer than `least` lengths.
    """
    ordered = sorted(set(lengths))
    if len(ordered) < least or ordered[0] > _OVERHEAD_SIZES:
        return None
    return ordered[0] if ordered[1] >= _OVERHEAD_GAP * ordered[0] else None


def in_order(frame: pd.DataFrame) -> pd.DataFrame:
    """Sort by the axes in their order, keeping the recorded order within a case."""
    return frame.sort_values(list(AXES), kind="stable", ignore_index=True, key=_plain_first)


def _plain_first(values: pd.Series[Any]) -> pd.Series[Any]:
    axis = AXES[str(values.name)]
    return values.where(values != axis.plain, "") if axis.kind == "names" else values


def slices(frame: pd.DataFrame, names: list[str]) -> list[tuple[dict[str, Any], pd.DataFrame]]:
    """Split by the named axes: the values of each slice and its rows, in the axes' order."""
    if frame.empty:
        return []
    if not names:
        return [({}, frame)]
    # Axes that are not named may come first, as d before n.
    ordered = in_order(frame).sort_values(names, kind="stable", ignore_index=True, key=_plain_first)
    groups = ordered.groupby(names, dropna=False, sort=False)
    return [(dict(zip(names, key, strict=True)), rows) for key, rows in groups]
