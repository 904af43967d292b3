"""Pairwise covering arrays: few rows in which any two values of different axes meet."""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping, Sequence
from itertools import combinations, product

Row = dict[str, str]


def covering(
    axes: Mapping[str, Collection[str]],
    stages: Sequence[Mapping[str, Collection[str]]] = ({},),
    never: Sequence[Row] = (),
) -> list[Row]:
    """Rows with one value of every axis, such that any two values of different axes are in one.

    Of each stage in turn, which may leave fewer values to some axes: rows with these alone have any
    two of them, too. Values that are `never` found together are left out. Greedy and deterministic:
    each row starts from a pair that is missing, and takes on each other axis the value that
    completes most of the missing pairs, of equal ones any, so that not the same meet in many rows.
    """
    rows: list[Row] = []
    chance = random.Random(0)

    def possible(row: Row) -> bool:
        return not any(pair.items() <= row.items() for pair in never)

    for stage in stages:
        left = {name: stage.get(name, values) for name, values in axes.items()}
        done = [row for row in rows if all(row[name] in left[name] for name in left)]
        missing = {
            pair: None
            for a, b in combinations(left, 2)
            for pair in (frozenset([(a, x), (b, y)]) for x, y in product(left[a], left[b]))
            if possible(dict(pair)) and not any(pair <= row.items() for row in done)
        }
        while missing:
            row = dict(next(iter(missing)))
            for name in left:
                if name not in row:
                    fresh = {
                        value: sum(frozenset([(name, value), at]) in missing for at in row.items())
                        for value in left[name]
                        if possible(row | {name: value})
                    }
                    most = [value for value in fresh if fresh[value] == max(fresh.values())]
                    row[name] = chance.choice(most)
            rows.append(row)
            missing = {pair: None for pair in missing if not pair <= row.items()}
    return rows
