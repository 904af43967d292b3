"""Which cells of a run a claim speaks of: selections by columns, and pairs that differ in some."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any

from attnbench.analysis.axes import AXES
from attnbench.analysis.claims.formula import Formula
from attnbench.analysis.claims.reading import EXTREMES
from attnbench.analysis.claims.statement import Range, Ratio, Selector, Where
from attnbench.analysis.columns import COLUMNS, TableRow
from attnbench.analysis.scaling.results import Scaling
from attnbench.analysis.scaling.verdicts import scaling
from attnbench.analysis.times import are_times
from attnbench.execution.store import Run
from attnbench.schema.record import Record
from attnbench.theory.traits import case_label


class LackingError(Exception):
    """The run does not have what a claim needs, or has it twice; the message says what."""


class Cells:
    """The cells of a run, as claims ask for them."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self._columns: dict[str, list[Any]] = {}

    @cached_property
    def scaling(self) -> Scaling:
        """What the fits say of how cost grows; made once, when a claim asks."""
        return scaling(self.run)

    def select(self, where: Where) -> list[Record]:
        """The measured records as in `where`.

        Raises:
            LackingError: there are none.
        """
        return _outermost(self._matching(_plain(where)), where)

    def pairs(self, ratio: Ratio) -> list[tuple[Record, Record]]:
        """Records as in `first` with those as in `second` that are like them in all else.

        Raises:
            LackingError: there are none, or one has several counterparts.
        """
        shared = _plain(ratio.where)
        above, below = (
            _grouped(self._matching(shared | _plain(side)), ratio)
            for side in (ratio.first, ratio.second)
        )
        found = {}
        for key in [key for key in above if key in below]:
            pair = _only(above[key], ratio.first), _only(below[key], ratio.second)
            if pair[0] is not pair[1]:
                found[id(pair[0])] = pair
        if not found:
            sides = f"{text(ratio.first)} and {text(ratio.second)}"
            raise LackingError(f"no cells with {text(shared)} differ by {sides} alone")
        kept = _outermost([first for first, _ in found.values()], ratio.where)
        return [found[id(first)] for first in kept]

    def _matching(self, where: Where) -> list[Record]:
        for name in where.keys() - self._columns.keys():  # some look at every sample
            value = COLUMNS.get(name).value
            self._columns[name] = [value(TableRow(r, self.run)) for r in self.run.records]
        rows = [
            record
            for i, record in enumerate(self.run.records)
            if all(_is(self._columns[name][i], selector) for name, selector in where.items())
        ]
        if not rows:
            raise LackingError(f"the run has no cell with {text(where)}")
        ok = [record for record in rows if record.status == "ok"]
        found = [record for record in ok if are_times([s.time_us for s in record.kept])]
        if not found:
            became = ", ".join(dict.fromkeys(record.status for record in rows))
            raise LackingError(f"no cell with {text(where)} has a usable time ({became})")
        return found


def text(where: Where) -> str:
    """A selection for people: `workload = decode, cache = static or concat, seq_len = 64..`."""
    shown = {n: s if isinstance(s, list) else [s] for n, s in where.items()}
    return ", ".join(f"{n} = {' or '.join(map(str, s))}" for n, s in shown.items()) or "anything"


def _plain(where: Where) -> Where:
    """A selection without the axes of which it wants an extreme."""
    return {name: s for name, s in where.items() if not (name in AXES and s in EXTREMES)}


def _is(value: Any, selector: Selector) -> bool:
    if isinstance(selector, Range):
        return value is not None and selector.min <= value <= selector.max
    return value in (selector if isinstance(selector, list) else [selector])


def _outermost(records: Sequence[Record], where: Where) -> list[Record]:
    """The records at the extremes that the selection wants, one axis after the other."""
    found = list(records)
    for name in [name for name in where if name not in _plain(where)]:
        sizes = [record.cell.case.to_json()[name] or 0 for record in found]
        wanted = max(sizes) if where[name] == "largest" else min(sizes)
        found = [record for record, size in zip(found, sizes, strict=True) if size == wanted]
    return found


def _grouped(records: Iterable[Record], ratio: Ratio) -> dict[tuple[Any, ...], list[Record]]:
    """The records by all that the two of a pair have in common."""
    apart, same = {*ratio.first, *ratio.second, *ratio.free}, Formula(ratio.same)
    groups: dict[tuple[Any, ...], list[Record]] = {}
    for record in records:
        row = record.cell.case.to_json() | {"impl": record.cell.impl}
        follows = [n for n, axis in AXES.items() if axis.follows and row[n] == row[axis.follows]]
        row |= dict.fromkeys(follows)  # what follows another size says nothing of its own
        key = tuple(value for name, value in row.items() if name not in apart)
        groups.setdefault((*key, same(record.cell.case)), []).append(record)
    return groups


def _only(records: list[Record], side: Where) -> Record:
    """The one record of a group on this side of a pair."""
    found = _outermost(records, side)
    if len(found) > 1:
        labels = "; ".join(f"{case_label(r.cell.case)} {r.cell.impl}" for r in found[:2])
        raise LackingError(f"{len(found)} cells with {text(side)} fit one other: {labels}")
    return found[0]
