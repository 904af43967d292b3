"""The built-in battery of `attnbench check`: the cases in which attention kernels go wrong.

Most of it is a covering design, of the tables in `battery.toml`: of all that a kernel may branch
on, any two values meet in a check.
"""

from __future__ import annotations

import random
import tomllib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations, product
from pathlib import Path
from typing import Any

from attnbench.schema.case import Case, Device, Dtype
from attnbench.schema.check import Item
from attnbench.schema.messages import ImplementationInfo

_Fields = dict[str, Any]
_Row = dict[str, tuple[str, _Fields]]
_OF_CASE = Case().to_json().keys()
TABLES: dict[str, Any] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))


def small(info: ImplementationInfo) -> str | None:
    """The implementation with whole parameters an eighth as large; None where it has none.

    At those it is used with, a window or a block may hold all that the battery's cases have.
    """
    values = [
        f"{key}={max(1, parameter.default // 8)}"
        for key, parameter in info.parameters.items()
        if isinstance(parameter.default, int) and parameter.default > 1
    ]
    return ":".join([info.name, *values]) if values else None


def battery(device: Device, dtypes: tuple[Dtype, ...]) -> list[Item]:
    """Every item on `device`: those of attention in each dtype, the others in the first alone.

    `both` passes check the output and all three gradients; an implementation without a
    backward is checked on its forward by the `forward` items. In the first dtype attention is
    checked in both, in each other in one of them, in turn.
    """
    for dtype in dtypes:
        Case(device=device, dtype=dtype)  # what is none is refused here, with its flag
    items = []
    for table in TABLES.values():
        rows, passes = list(_rows(table)), table.get("passes", [None])
        for number, dtype in enumerate(dtypes if "passes" in table else dtypes[:1]):
            for turn, row in enumerate(rows):
                for pass_ in [passes[(turn + number) % 2]] if number else passes:
                    base = {"device": device, "dtype": dtype, "pass": pass_ or "forward"}
                    item = _item(base | table["base"], row)
                    items.append(replace(item, brief=number == 0 and "brief" in row))
    return items


def _rows(table: _Fields) -> Iterator[_Row]:
    """By axis, or what else it is of, the name of each value of an item, and its fields."""
    axes = table.get("axes", {})
    yield from ({"brief": found} for found in table.get("brief", {}).items())
    for row in covering(axes, table.get("stages", ({},)), table.get("never", ())):
        yield {axis: (row[axis], axes[axis][row[axis]]) for axis in axes}
    yield from ({"more": found} for found in table["more"].items())


def _item(base: _Fields, row: _Row) -> Item:
    """The item of a row; its name is what is not plain, and what is of gradients is for these."""
    spare = ("gradient", "without_gradient") if base["pass"] == "forward" else ()
    values = [value for axis, value in row.items() if axis not in spare]
    names = [base.get("workload"), *(name for name, _ in values)]
    every = base | {key: value for _, fields in values for key, value in fields.items()}
    of_case = {key: value for key, value in every.items() if key in _OF_CASE}
    draw = {key: value for key, value in every.items() if key not in _OF_CASE}
    name = ", ".join(filter(None, names)) or "plain"
    return Item(name=name, case=Case.from_json(of_case), draw=draw)


def by_coverage(items: Sequence[Item]) -> Iterator[int]:
    """Places of the `brief` items, then always of one that most pairs of values first meet in."""
    left = {
        place: set(combinations(map(str, (item.case.to_json() | item.draw).items()), 2))
        for place, item in enumerate(items)
    }
    while left:
        place = max(left, key=lambda place: (items[place].brief, len(left[place])))
        seen = left.pop(place)
        for pairs in left.values():
            pairs -= seen
        yield place


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
