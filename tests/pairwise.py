"""Rows of parameters in which any two values of different axes meet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from attnbench.planning.battery import covering


def pairwise(axes: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Rows with one value of every axis, which need not be text; see `covering`."""
    rows = covering({name: [str(i) for i in range(len(axes[name]))] for name in axes})
    return [{name: axes[name][int(row[name])] for name in axes} for row in rows]


def ids(rows: list[dict[str, Any]]) -> list[str]:
    """A readable name for each row."""
    return [" ".join(str(value) for value in row.values()) for row in rows]
