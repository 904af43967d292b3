"""The axes of a case: which of them a run varies, and how one is written in a few letters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd

from attnbench.base.units import is_unknown
from attnbench.theory.traits import TRAITS


@dataclass(frozen=True, kw_only=True)
class Axis:
    """A column that belongs to the case, or to the device that measured it.

    `follows` is the axis it equals unless given. `plain` is the value that is sorted first, and
    `silent` one that labels leave out: where nothing else names a row, it is `unsaid`.
    """

    column: str
    symbol: str = ""
    follows: str | None = None
    plain: str | None = None
    silent: Any = None
    unsaid: str = ""

    def text(self, value: Any) -> str:
        """Return `n=128`, `causal`, or nothing for an unknown or silent value."""
        if is_unknown(value) or value == self.silent:
            return ""
        return f"{self.symbol}={value}" if self.symbol else str(value)


# In the order in which rows are sorted and labels read.
AXES: dict[str, Axis] = {
    axis.column: axis
    for axis in (
        Axis(column="workload"),
        Axis(column="device"),
        Axis(column="device_name"),  # of a cluster's nodes, or a merged run's
        Axis(column="dtype"),
        Axis(column="pass", plain="forward"),
        Axis(column="mask", plain="full"),
        Axis(column="position", plain="none", silent="none", unsaid="no position encoding"),
        Axis(column="projection", symbol="projection"),
        Axis(column="cache", symbol="cache"),
        Axis(column="width", symbol="E"),
        Axis(column="head_dim", symbol="D"),
        Axis(column="value_dim", symbol="V", follows="head_dim"),
        Axis(column="heads", symbol="H"),
        Axis(column="kv_heads", symbol="G", follows="heads"),
        Axis(column="batch", symbol="B"),
        Axis(column="threads", symbol="threads", silent=1, unsaid="1 thread"),
        Axis(column="new_tokens", symbol="T"),
        Axis(column="layers", symbol="layers", silent=1, unsaid="1 layer"),
        Axis(column="query_tokens", symbol="Q", silent=1, unsaid="one query a step"),
        Axis(column="seq_len", symbol="n"),
        Axis(column="kv_len", symbol="S", follows="seq_len"),
    )
}


def varying(frame: pd.DataFrame) -> list[str]:
    """Axes with more than one value in `frame`; a follower only where it leaves its leader."""
    own = [name for name in AXES if not _follows(frame, name)]
    return [name for name in own if frame[name].nunique(dropna=False) > 1]


def _follows(frame: pd.DataFrame, name: str) -> bool:
    leader = AXES[name].follows
    return leader is not None and frame[name].equals(frame[leader])


def label_axes(frame: pd.DataFrame) -> dict[str, list[str]]:
    """For each workload the axes that a label of its cases needs: those that vary in its rows."""
    several = frame["workload"].nunique() > 1
    return {
        str(workload): [*(["workload"] if several else []), *varying(rows)] or ["seq_len"]
        for workload, rows in frame.groupby("workload", sort=False)
    }


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
    return ", ".join(filter(None, (AXES[name].text(first[name]) for name in names)))


def label(row: pd.Series[Any] | Mapping[Any, Any], names: list[str]) -> str:
    """Write the named axes that a row has: `H=4 B=1 n=128 rope`; a follower where it differs."""
    texts = [
        AXES[name].text(row[name])
        for name in names
        if name in row and (AXES[name].follows is None or row[name] != row[str(AXES[name].follows)])
    ]
    return " ".join(text for text in texts if text)


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
    plain = AXES[str(values.name)].plain
    return values if plain is None else values.where(values != plain, "")


def slices(frame: pd.DataFrame, names: list[str]) -> list[tuple[dict[str, Any], pd.DataFrame]]:
    """Split by the named axes: the values of each slice and its rows, in the axes' order."""
    if frame.empty:
        return []
    if not names:
        return [({}, frame)]
    groups = in_order(frame).groupby(names, dropna=False, sort=False)
    return [(dict(zip(names, key, strict=True)), rows) for key, rows in groups]
