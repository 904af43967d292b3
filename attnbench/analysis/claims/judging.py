"""Claims held against a run: what each speaks of in its cells, and the verdict on it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from attnbench.analysis.axes import AXES
from attnbench.analysis.claims.statement import (
    EXTREMES,
    TIME,
    Claim,
    Exponent,
    Formula,
    Quantity,
    Range,
    Ratio,
    Selector,
    Value,
    Where,
)
from attnbench.analysis.columns import COLUMNS, TableRow
from attnbench.analysis.pairs import ratio
from attnbench.analysis.scaling import scaling
from attnbench.analysis.scaling.decide import TO_REFUTE
from attnbench.analysis.scaling.results import ExponentFit, Scaling, Uncertain
from attnbench.analysis.scaling.series import same_text
from attnbench.analysis.times import Interval, are_times, interval_us, time_us
from attnbench.base import units
from attnbench.base.registry import Registry, nearest
from attnbench.base.units import tally
from attnbench.errors import ExitCode
from attnbench.schema.finding import VERDICTS, WORST_FIRST, Figure, Finding, Verdict
from attnbench.schema.record import Record
from attnbench.store.runs import Run
from attnbench.theory.traits import case_label

Judged = tuple[tuple[Claim, Finding], ...]


def judged(claims: Registry[Claim], run: Run, only: Iterable[str] | None = None) -> Judged:
    """Hold every claim, or those whose ids are in `only`, against the run.

    Raises:
        UnknownNameError: a name in `only` is no claim's id; the message gives the nearest.
    """
    chosen = [claims.get(name) for name in (claims.names() if only is None else only)]
    cells = Cells(run)
    return tuple((claim, finding(claim, cells)) for claim in chosen)


def finding(claim: Claim, cells: Cells) -> Finding:
    """Hold one claim against a run's cells; inconclusive where they lack."""
    found: tuple[Verdict, str, dict[str, Figure]]
    try:
        found = _verdict_on(claim, observe(claim.quantity, cells))
    except LackingError as lack:
        found = "inconclusive", str(lack), {}
    verdict, reason, figures = found
    return Finding(
        subject=claim.id, question=claim.says, law=claim.right or claim.says,
        verdict=verdict, reason=reason, figures=figures,
    )  # fmt: skip


def _verdict_on(claim: Claim, seen: Observed) -> tuple[Verdict, str, dict[str, Figure]]:
    """The verdict on all observations, with the sharpest of those that it rests on."""
    verdicts = [claim.relation.verdict(one.low, one.high) for one in seen.observations]
    verdict = min(verdicts, key=WORST_FIRST.index)  # refuted if one is, else holds if one does
    if claim.cells == "alike" and {"holds", "refuted"} <= set(verdicts):
        verdict = "inconclusive"
    judged = list(zip(seen.observations, verdicts, strict=True))
    telling = [one for one, its in judged if its == verdict or verdict not in verdicts]
    one = min(telling, key=lambda one: one.width)
    ends = {"low": one.low, "high": one.high}
    known = {n: e if e is not None and math.isfinite(e) else None for n, e in ends.items()}
    counts = {str(name): verdicts.count(name) for name in VERDICTS}
    reason = f"{seen.what} {one.text(seen.written)} at {one.at}, claimed {claim.relation.text}"
    if len(verdicts) > 1:
        reason += f" (the sharpest of {len(verdicts)}: {tally(verdicts, VERDICTS)})"
    return verdict, reason, {"value": one.value, **known, "at": one.at, **counts}


def agrees(claim: Claim, found: Finding) -> bool:
    """Whether the finding contradicts nothing: an inconclusive one never does."""
    return found.verdict == "inconclusive" or claim.expected in (None, found.verdict)


def exit_code(found: Iterable[tuple[Claim, Finding]]) -> ExitCode:
    """1 if a verdict is not the expected one, 3 if none was reached, else 0."""
    rows = list(found)
    if not all(agrees(claim, of) for claim, of in rows):
        return ExitCode.FINDING
    undecided = all(of.verdict == "inconclusive" for _, of in rows)
    return ExitCode.INCONCLUSIVE if undecided else ExitCode.OK


# What a quantity is in a run: one observation a cell, pair or series.

_NOISELESS = ("error_max", "error_rmse", "error_ratio")  # beside whole numbers
_POWER_OF_TIME = {TIME: 1, "tflops": -1, "gbps": -1}  # what has an interval: that of the time
_GROWTH_OF = {"flops_counted": "flops", "memory_workspace_bytes": "workspace"}


@dataclass(frozen=True)
class Observation:
    """A value seen `at` a cell, pair or series, with its 95 % interval (None without one).

    A count is its own interval.
    """

    at: str
    value: float
    low: float | None = None
    high: float | None = None

    @property
    def width(self) -> float:
        """Of the interval, relative to the value; infinite without one."""
        if self.low is None or self.high is None:
            return math.inf
        return (self.high - self.low) / abs(self.value or 1.0)

    def text(self, written: Callable[[float], str]) -> str:
        """As `31.1× (29.3×–32.5×)`; of a count `2.00`."""
        if self.low is None or self.high is None:
            return f"{written(self.value)} (no interval)"
        ends = f" ({written(self.low)}–{written(self.high)})"
        return written(self.value) + ends * (self.low != self.high)


@dataclass(frozen=True)
class Observed:
    """What a quantity is called, its observations, and how one is written."""

    what: str
    observations: Sequence[Observation]
    written: Callable[[float], str]


def observe(quantity: Quantity, cells: Cells) -> Observed:
    """Every observation of a quantity in a run.

    Raises:
        LackingError: there is none; the message says what the run lacks.
    """
    try:
        found = _OBSERVERS[type(quantity)](quantity, cells)
    except ZeroDivisionError as err:
        raise LackingError("a formula is 0 at sizes of this run, and divides") from err
    if not found.observations:
        raise LackingError(f"no {found.what} … with {text(quantity.where)}")
    return found


def _value(quantity: Value, cells: Cells) -> Observed:
    found, per, column = [], Formula(quantity.per), COLUMNS.get(quantity.column)
    for record in cells.select(quantity.where):
        number = column.value(TableRow(record, cells.run))
        if number is not None:
            value = float(number) / per(record.cell.case)
            ends = _ends(column.name, value, time_us(record), interval_us(record))
            found.append(Observation(_label(record), value, *ends))
    if quantity.per != "1":
        return Observed(f"{column.name} / ({quantity.per}) =", found, units.digits)
    return Observed(f"{column.name} =", found, lambda v: f"{units.digits(v)} {column.unit}".strip())


def _ratio(quantity: Ratio, cells: Cells) -> Observed:
    found, per, column = [], Formula(quantity.per), COLUMNS.get(quantity.column)
    for pair in cells.pairs(quantity):
        above, below = (column.value(TableRow(record, cells.run)) for record in pair)
        if above is not None and below:
            value = float(above / per(pair[0].cell.case) / (below / per(pair[1].cell.case)))
            known: tuple[float | None, Interval | None] = None, None
            if power := _POWER_OF_TIME.get(column.name):  # as pairs of samples have it
                known, reported = ratio(*pair), [time_us(record) or math.nan for record in pair]
                value *= (known[0] / (reported[0] / reported[1])) ** power
            found.append(Observation(_label(pair[0]), value, *_ends(column.name, value, *known)))
    sides = " / ".join(map(text, (quantity.first, quantity.second)))
    return Observed(f"{column.name} of {sides} =", found, units.ratio)


def _ends(
    column: str, value: float, time: float | None, interval: Interval | None
) -> Interval | tuple[None, None]:
    """The interval of a value: itself where it is a count, else as wide as that of the time."""
    if column in _NOISELESS or COLUMNS.get(column).kind == "int":
        return value, value
    if column not in _POWER_OF_TIME or not time or interval is None:
        return None, None
    low, high = sorted(value * (end / time) ** _POWER_OF_TIME[column] for end in interval)
    return low, high


def _exponent(quantity: Exponent, cells: Cells) -> Observed:
    """Of counts the growth over the largest octave, of times the slope that `_slope` gives."""
    axis, column, scaling = quantity.axis, quantity.column, cells.scaling
    wanted = {(r.cell.impl, same_text(r.cell.case, axis)) for r in cells.select(quantity.where)}
    found = [
        _slope(fit)
        for fit in scaling.exponents
        if column == TIME and fit.octaves >= TO_REFUTE - 1e-9
        if fit.series.axis == axis and (fit.series.impl, fit.series.same) in wanted
    ] + [
        Observation(f"{fit.impl}, {fit.same}", fit.growth, fit.growth, fit.growth)
        for fit in scaling.exact
        if fit.growth is not None and fit.quantity == _GROWTH_OF.get(column)
        if fit.axis == axis and (fit.impl, fit.same) in wanted
    ]
    return Observed(f"{column} grows as", found, lambda v: f"{axis}^{v:.2f}")


def _slope(fit: ExponentFit) -> Observation:
    """The slope over all sizes that count; its interval holds that of the last two octaves, too.

    So a series that bends at its end decides little.
    """
    unknown = Uncertain(value=math.nan)
    whole, top = fit.exponent or unknown, fit.top or unknown
    ends = [end for end in (whole.low, whole.high, top.low, top.high) if end is not None]
    interval = (min(ends), max(ends)) if len(ends) == 4 else (None, None)
    return Observation(fit.series.subject, whole.value, *interval)


def _label(record: Record) -> str:
    return f"{case_label(record.cell.case)} {record.cell.impl}"


_OBSERVERS: dict[type, Callable[[Any, Cells], Observed]] = {
    Value: _value, Ratio: _ratio, Exponent: _exponent
}  # fmt: skip


# Which cells a claim speaks of: selections by columns, and pairs that differ in some.


class LackingError(Exception):
    """The run does not have what a claim needs, or has it twice; the message says what."""


class Cells:
    """The cells of a run, as claims ask for them."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self._columns: dict[str, list[Any]] = {}

    @cached_property
    def scaling(self) -> Scaling:
        """How cost grows; fitted once, when a claim asks."""
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
            if pair[0] is not pair[1] and self.run.same_model(*pair):
                found[id(pair[0])] = pair
        if not found:
            sides = f"{text(ratio.first)} and {text(ratio.second)}"
            raise LackingError(f"no cells with {text(shared)} differ by {sides} alone")
        kept = _outermost([first for first, _ in found.values()], ratio.where)
        pairs, out = [found[id(first)] for first in kept], dict[int, Record]()
        for row in (TableRow(r, self.run) for pair in pairs for r in pair if ratio.unless):
            if all(_is(COLUMNS.get(n).value(row), s) for n, s in ratio.unless.items()):
                out[id(row.record)] = row.record
        left = [pair for pair in pairs if not out.keys() & set(map(id, pair))]
        if not left:
            one = next(iter(out.values()))
            raise LackingError(f"{_label(one)} has {text(ratio.unless)}, which decides nothing")
        return left

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
            known, asked = {r.cell.impl for r in self.run.records}, where.get("impl", [])
            names = asked if isinstance(asked, list) else [asked]
            hints = [nearest(str(name), sorted(known)) for name in names if name not in known]
            raise LackingError(f"the run has no cell with {text(where)}{next(iter(hints), '')}")
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
        labels = "; ".join(map(_label, found[:2]))
        raise LackingError(f"{len(found)} cells with {text(side)} fit one other: {labels}")
    return found[0]
