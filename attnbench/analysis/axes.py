"""The axes of a case: which of them a run varies, and how one is written in a few letters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd

from attnbench.base.units import is_unknown
from attnbench.theory.traits import KINDS


@dataclass(frozen=True, kw_only=True)
class Axis:
    """A column that belongs to the case.

    `follows` is the axis it equals unless given, `plain` the value that is sorted first; one that
    is `silent` goes without saying.
    """

    column: str
    symbol: str = ""
    follows: str | None = None
    plain: str | None = None
    silent: bool = False

    def text(self, value: Any) -> str:
        """Return `n=128`, `causal`, or nothing for what is unknown or goes without saying."""
        if is_unknown(value) or (self.silent and value == self.plain):
            return ""
        return f"{self.symbol}={value}" if self.symbol else str(value)


# In the order in which rows are sorted and labels read.
AXES: dict[str, Axis] = {
    axis.column: axis
    for axis in (
        Axis(column="workload"),
        Axis(column="device"),
        Axis(column="dtype"),
        Axis(column="pass", plain="forward"),
        Axis(column="mask", plain="full"),
        Axis(column="position", plain="none", silent=True),
        Axis(column="projection", symbol="projection"),
        Axis(column="cache", symbol="cache"),
        Axis(column="width", symbol="E"),
        Axis(column="head_dim", symbol="D"),
        Axis(column="value_dim", symbol="V", follows="head_dim"),
        Axis(column="heads", symbol="H"),
        Axis(column="kv_heads", symbol="G", follows="heads"),
        Axis(column="batch", symbol="B"),
        Axis(column="new_tokens", symbol="T"),
        Axis(column="seq_len", symbol="n"),
        Axis(column="kv_len", symbol="S", follows="seq_len"),
    )
}


def varying(frame: pd.DataFrame) -> list[str]:
    """Axes with more than one value in `frame`; a follower only where it leaves its leader."""
    return [name for name, axis in AXES.items() if _varies(frame, axis)]


def telling(frame: pd.DataFrame) -> dict[str, list[str]]:
    """For each workload the axes that a label of its cases needs.

    Those that vary among its own rows: that a layer has a width tells no two layers apart.
    """
    several = frame["workload"].nunique() > 1
    return {
        str(workload): [*(["workload"] if several else []), *varying(rows)] or ["seq_len"]
        for workload, rows in frame.groupby("workload", sort=False)
    }


def _varies(frame: pd.DataFrame, axis: Axis) -> bool:
    values = frame[axis.column]
    if axis.follows is not None and values.equals(frame[axis.follows]):
        return False
    return values.nunique(dropna=False) > 1


_OF_HEADS = {"head_dim", "value_dim", "heads", "kv_heads"}  # no word on them where there are none


def fixed(frame: pd.DataFrame) -> str:
    """What all rows have in common: `attention, cpu, float32, forward, full, D=64`."""
    if frame.empty:
        return ""
    changing = set(varying(frame))
    if not any(KINDS.get(str(name)).heads for name in frame["workload"].unique()):
        changing |= _OF_HEADS
    first = frame.iloc[0]
    texts = [
        axis.text(first[name])
        for name, axis in AXES.items()
        if name not in changing and not (axis.follows and frame[name].equals(frame[axis.follows]))
    ]
    return ", ".join(text for text in texts if text)


def label(row: pd.Series[Any] | Mapping[Any, Any], names: list[str]) -> str:
    """Write the named axes of one row: `H=4 B=1 n=128 rope`; a follower where it differs."""
    texts = [
        AXES[name].text(row[name])
        for name in names
        if AXES[name].follows is None or row[name] != row[str(AXES[name].follows)]
    ]
    return " ".join(text for text in texts if text)


_FLOOR_SIZES, _FLOOR_GAP = 16, 16  # a length up to this, and so far below the next


def floor_size(lengths: Iterable[int], least: int = 3) -> int | None:
    """The length that is there for the floor alone: small, and far below all others.

    None where there are fewer than `least` lengths.
    """
    ordered = sorted(set(lengths))
    if len(ordered) < least or ordered[0] > _FLOOR_SIZES or ordered[1] < _FLOOR_GAP * ordered[0]:
        return None
    return ordered[0]


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
