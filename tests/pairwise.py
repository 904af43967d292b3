"""Pairwise covering arrays: few rows in which any two values of different axes meet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations, product
from typing import Any


def pairwise(axes: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Rows with one value of every axis, such that every pair of values of two axes is in one.

    Greedy and deterministic: each row starts from a pair that is missing, and takes on each other
    axis the value that completes most of the missing pairs.
    """
    names = list(axes)
    missing = {
        frozenset([(a, i), (b, j)]): None
        for a, b in combinations(names, 2)
        for i, j in product(range(len(axes[a])), range(len(axes[b])))
    }
    rows = []
    while missing:
        row = dict(next(iter(missing)))
        for name in names:
            if name in row:
                continue

            def completed(index: int, name: str = name, row: dict[str, int] = row) -> int:
                return sum(frozenset([(name, index), pair]) in missing for pair in row.items())

            row[name] = max(range(len(axes[name])), key=completed)
        for pair in combinations(row.items(), 2):
            missing.pop(frozenset(pair), None)
        rows.append({name: axes[name][row[name]] for name in names})
    return rows


def ids(rows: list[dict[str, Any]]) -> list[str]:
    """A readable name for each row."""
    return [" ".join(str(value) for value in row.values()) for row in rows]
