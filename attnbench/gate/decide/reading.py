"""From the plain JSON of `gate.json` to a gate run; what cannot be is refused by its place."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any, TypeVar, get_args

from attnbench.errors import UsageError
from attnbench.gate.decide.outcome import Checked, GateRun, Side
from attnbench.gate.decide.round import Arm, Round, Stage
from attnbench.gate.decide.rules import Rules
from attnbench.schema.record import STATUSES, Cell

_ARMS, _STAGES = get_args(Arm), get_args(Stage)
_SIDES = ("base", "candidate")
_LARGEST = 2**63
_TEXTS = ("_source", "_note")  # ends of metrics' names that begin as numbers do

T = TypeVar("T")


class DamagedError(Exception):
    """What is wrong with the data, in one line."""


def run_of(row: dict[str, Any]) -> GateRun:
    """A gate run from the JSON of its file.

    Raises:
        DamagedError: something is missing, of the wrong kind, or a number that cannot be.
    """
    cells = tuple(
        _at(f"cell {i}", Cell.from_json, cell)
        for i, cell in enumerate(_kind(row, "cells", list))
    )  # fmt: skip
    _expect(all(isinstance(cell.impl, str) for cell in cells), "an implementation is no text")
    rounds = _kind(row, "rounds", list)
    return GateRun(
        rules=_at("rules", _rules, _kind(row, "rules", dict)),
        base=_at("base", _side, _kind(row, "base", dict), "base"),
        candidate=_at("candidate", _side, _kind(row, "candidate", dict), "candidate"),
        cells=cells,
        checks=_at("checks", _checks, _kind(row, "checks", dict), len(cells)),
        rounds=tuple(
            _at(f"round {number}", _round, found, len(cells))
            for number, found in enumerate(rounds, start=1)
        ),
        environment=_kind(row, "environment", dict),
        options=_at("options", _options, _kind(row, "options", dict)),
        created=_kind(row, "created", str),
        spent=_at("spent", _seconds, _kind(row, "spent", dict)),
        over_budget=_kind(row, "over_budget", bool),
    )


def _at(place: str, read: Callable[..., T], *args: Any) -> T:
    """Read a part; whatever goes wrong in it is said with its place."""
    try:
        return read(*args)
    except (KeyError, TypeError, ValueError, AttributeError, UsageError, DamagedError) as err:
        said = f"it lacks {err}" if isinstance(err, KeyError) else str(err)
        raise DamagedError(f"{place}: {said:.200}") from err


def _kind(row: Mapping[str, Any], name: str, kind: type[T]) -> T:
    if name not in row:
        raise DamagedError(f"it has no {name}")
    value = row[name]
    if type(value) is not kind:
        raise DamagedError(f"{name} is {type(value).__name__}, not {kind.__name__}")
    return value


def _expect(truth: bool, otherwise: str) -> None:
    if not truth:
        raise DamagedError(otherwise)


def _is_number(value: Any) -> bool:
    """A finite number of at least 0 that a table can hold; True and False are none."""
    return type(value) in (int, float) and 0 <= value < _LARGEST and math.isfinite(value)


def _rules(row: dict[str, Any]) -> Rules:
    for name, value in row.items():
        numbers = value if name == "looks" else [value]
        _expect(all(map(_is_number, numbers)), f"{name} is {value!r:.40}")
    rules = Rules.from_json(row)
    looks = rules.looks
    ascend = all(a < b for a, b in pairwise(looks))
    whole = all(type(n) is int and 1 <= n <= 10_000 for n in (*looks, rules.screen_rounds))
    _expect(bool(looks) and ascend and whole, f"looks {looks!r:.60} or screen_rounds cannot be")
    _expect(0 < rules.alpha < 1 and 0 < rules.beta < 1, "alpha and beta lie between 0 and 1")
    return rules


def _side(row: dict[str, Any], name: str) -> Side:
    _expect(row["name"] == name, f"its name is {row['name']!r:.40}")
    texts = [row["root"], *row["files"]]
    texts += [row[key] for key in ("ref", "commit") if row[key] is not None]
    _expect(all(isinstance(text, str) for text in texts), "a path, ref or commit is no text")
    _expect(type(row["dirty"]) is bool, f"dirty is {row['dirty']!r:.40}")
    return Side(**(row | {"files": tuple(row["files"])}))


def _options(row: dict[str, Any]) -> dict[str, Any]:
    seed = row.get("seed")
    _expect(seed is None or type(seed) is int, f"seed is {seed!r:.40}")
    return row


def _seconds(row: dict[str, Any]) -> dict[str, float]:
    for name, value in row.items():
        _expect(_is_number(value), f"{name} is {value!r:.40}, no time")
    return row


def _checks(row: dict[str, Any], cells: int) -> dict[int, dict[str, Checked]]:
    found = {_cell(key, cells): both for key, both in row.items()}
    missing = sorted(set(range(cells)) - set(found))
    _expect(not missing, f"cell {missing[0] if missing else ''} has none")
    return {
        number: {side: _at(f"cell {number}", _checked, side, checked)
                 for side, checked in both.items()}
        for number, both in sorted(found.items())
    }  # fmt: skip


def _checked(side: str, row: dict[str, Any]) -> Checked:
    _expect(side in _SIDES, f"unknown side {side!r:.40}")
    _expect(row["status"] in (*STATUSES, "absent"), f"unknown status {row['status']!r:.40}")
    _expect(row["reason"] is None or isinstance(row["reason"], str), "the reason is no text")
    for name, value in row["metrics"].items():
        _expect(value is None or _is_metric(name, value), f"{name} is {value!r:.40}")
    return Checked(**row)


def _is_metric(name: str, value: Any) -> bool:
    counted = name.startswith(("flops_", "memory_")) or name.endswith(("_count", "_ratio"))
    if counted and not name.endswith(_TEXTS):
        return _is_number(value)
    return isinstance(value, str | bool | list) or _is_number(abs(value))


def _cell(key: str, cells: int) -> int:
    number = int(key)
    _expect(str(number) == key and 0 <= number < cells, f"there is no cell {key!r:.40}")
    return number


def _round(row: dict[str, Any], cells: int) -> Round:
    _expect(row["stage"] in _STAGES, f"unknown stage {row['stage']!r:.40}")
    _expect(row["veto"] is None or isinstance(row["veto"], str), "the veto is no text")
    _expect(_is_number(row["spent_s"]), f"spent_s is {row['spent_s']!r:.40}")
    _expect(isinstance(row["facts"], dict), "the facts are no table")
    for key, arms in row["turns"].items():
        _turns(_cell(key, cells), arms)
    for key, failure in row["failures"].items():
        _cell(key, cells)
        _expect(failure["arm"] in _ARMS, f"unknown arm {failure['arm']!r:.40}")
        _expect(isinstance(failure["reason"], str), "the reason of a failure is no text")
    found = Round.from_json(row)
    slowed = sum("planted" in arms for arms in found.turns.values())
    _expect(slowed <= 1, f"{slowed} cells are slowed, not one")
    return found


def _turns(cell: int, arms: dict[str, Any]) -> None:
    """Every turn of every arm has blocks, and every block is a whole number of ns above 0."""
    for arm, turns in arms.items():
        _expect(arm in _ARMS, f"unknown arm {arm!r:.40}")
        _expect(isinstance(turns, list) and bool(turns), f"{arm} of cell {cell} has no turns")
        for blocks in turns:
            _expect(isinstance(blocks, list) and bool(blocks), f"{arm} of cell {cell}: no blocks")
            wrong = [ns for ns in blocks if type(ns) is not int or not 0 < ns < _LARGEST]
            _expect(not wrong, f"{arm} of cell {cell} took {wrong[:1]!r:.40} ns")
    _expect("base" in arms or "planted" not in arms, f"cell {cell} is slowed, without its base")
