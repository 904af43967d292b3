"""What a run offers the claims: its sound records, pairs of them, ratios and growth."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from attnbench.analysis.times import are_times, ratio
from attnbench.base.units import ratio as ratio_text
from attnbench.claims.claim import Answer, LackingError
from attnbench.execution.store import Run
from attnbench.schema.finding import WORST_FIRST, Figure, Finding, Verdict
from attnbench.schema.record import Record
from attnbench.theory.traits import case_label

if TYPE_CHECKING:
    from attnbench.analysis.scaling.results import Scaling

_QUOTED = 2  # findings in one reason

Pairs = list[tuple[Record, Record]]


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A ratio of two times, or an exponent, with its 95 % interval where there is one."""

    label: str
    value: float
    low: float | None
    high: float | None

    def above(self, limit: float) -> bool:
        """Clearly above the limit."""
        return self.low is not None and self.low > limit

    def below(self, limit: float) -> bool:
        """Clearly not above the limit."""
        return self.high is not None and self.high <= limit

    @property
    def width(self) -> float:
        """Of the interval, relative to the value; infinite without one."""
        if self.low is None or self.high is None:
            return math.inf
        return (self.high - self.low) / abs(self.value or 1.0)

    def text(self, written: Callable[[float], str]) -> str:
        """As `1.04× (1.01×–1.08×) at attention forward n=2048 …`."""
        if self.low is None or self.high is None:
            return f"{written(self.value)} (no interval) at {self.label}"
        between = f"{written(self.low)}–{written(self.high)}"
        return f"{written(self.value)} ({between}) at {self.label}"


def _sound(record: Record) -> bool:
    """Measured, and every time that counts is a positive finite number."""
    return record.status == "ok" and are_times([sample.time_us for sample in record.kept])


def plain_fields(record: Record) -> dict[str, Any]:
    """The case's fields and the implementation, flat."""
    return record.cell.case.to_json() | {"impl": record.cell.impl}


class Evidence:
    """A run as the claims ask it."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.records = [record for record in run.records if _sound(record)]
        self._fields = [plain_fields(record) for record in self.records]

    def cells(self, **fields: Any) -> list[Record]:
        """The sound records whose case and implementation have these values.

        Raises:
            LackingError: there are none.
        """
        known = zip(self.records, self._fields, strict=True)
        found = [record for record, plain in known if fields.items() <= plain.items()]
        if not found:
            wanted = " ".join(str(value) for value in fields.values())
            raise LackingError(f"the run has no measured cell of {wanted}")
        return found

    def pairs(self, above: Mapping[str, Any], below: Mapping[str, Any], **fields: Any) -> Pairs:
        """Records that differ in the named fields alone: those as in `above`, those as in `below`.

        Raises:
            LackingError: there is no such pair.
        """
        by_rest = {_rest(r, below): r for r in self.cells(**fields, **below)}
        uppers = self.cells(**fields, **above)
        found = [(r, by_rest[_rest(r, above)]) for r in uppers if _rest(r, above) in by_rest]
        if not found:
            raise LackingError(f"no cells differ by {dict(above)} and {dict(below)} alone")
        return found

    @staticmethod
    def at_largest(pairs: Pairs) -> Pairs:
        """The pairs of the largest n."""
        largest = max(above.cell.case.seq_len for above, _ in pairs)
        return [pair for pair in pairs if pair[0].cell.case.seq_len == largest]

    @staticmethod
    def ratios(pairs: Pairs) -> list[Comparison]:
        """Time of the first of each pair / that of the second."""
        return [_compared(above, below) for above, below in pairs]

    def series(self, **fields: Any) -> list[list[Record]]:
        """The records that differ in n alone, smallest first, for each of the rest."""
        found: dict[tuple[Any, ...], list[Record]] = {}
        lengths = {"seq_len": None, "kv_len": None}
        for record in self.cells(**fields):
            found.setdefault(_rest(record, lengths), []).append(record)
        return [sorted(rows, key=lambda r: r.cell.case.seq_len) for rows in found.values()]

    def exponents(self, **fields: Any) -> list[Comparison]:
        """How time grows with n over the top two octaves of each series: log ratio / log range.

        Raises:
            LackingError: no series has them.
        """
        found = [_exponent(rows) for rows in self.series(**fields)]
        known = [exponent for exponent in found if exponent is not None]
        if not known:
            wanted = " ".join(str(value) for value in fields.values())
            raise LackingError(f"no series of {wanted} spans two octaves of n")
        return known

    @cached_property
    def scaling(self) -> Scaling:
        """What the fits say of how cost grows; made once, when a claim asks."""
        from attnbench.analysis.scaling.verdicts import scaling

        return scaling(self.run)

    def at_most(
        self, compared: Sequence[Comparison], limit: float, what: str, *, exponent: bool = False
    ) -> Answer:
        """Holds where one is clearly not above the limit and none clearly is; else vice versa."""
        return _voted(compared, limit, what, exponent=exponent, more=False)

    def more_than(
        self, compared: Sequence[Comparison], limit: float, what: str, *, exponent: bool = False
    ) -> Answer:
        """Holds where one is clearly above the limit and none clearly not; else vice versa."""
        return _voted(compared, limit, what, exponent=exponent, more=True)


def _rest(record: Record, without: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(value for name, value in plain_fields(record).items() if name not in without)


def _compared(above: Record, below: Record) -> Comparison:
    value, interval = ratio(above, below)
    low, high = interval or (None, None)
    label = f"{case_label(above.cell.case)} {above.cell.impl}"
    return Comparison(label=label, value=value, low=low, high=high)


def _exponent(rows: list[Record]) -> Comparison | None:
    largest = rows[-1].cell.case.seq_len
    lower = [row for row in rows if row.cell.case.seq_len * 4 <= largest]
    if not lower:
        return None
    octaves = math.log(largest / lower[-1].cell.case.seq_len)
    times = _compared(rows[-1], lower[-1])
    low, high = (
        None if end is None else math.log(end) / octaves for end in (times.low, times.high)
    )
    return Comparison(
        label=f"{times.label}, from n={lower[-1].cell.case.seq_len} on",
        value=math.log(times.value) / octaves,
        low=low,
        high=high,
    )


def _power_text(exponent: float) -> str:
    return f"n^{exponent:.2f}"


def _voted(
    compared: Sequence[Comparison], limit: float, what: str, *, exponent: bool, more: bool
) -> Answer:
    above = sum(one.above(limit) for one in compared)
    below = sum(one.below(limit) for one in compared)
    fors, againsts = (above, below) if more else (below, above)
    verdict: Verdict = "inconclusive"
    if bool(fors) != bool(againsts):
        verdict = "holds" if fors else "refuted"
    sharpest = min(compared, key=lambda one: one.width)
    written = _power_text if exponent else ratio_text
    reason = f"{what} {sharpest.text(written)}"
    if len(compared) > 1:
        reason += (
            f" (the sharpest of {len(compared)}: {above} above {limit:g}, {below} not,"
            f" {len(compared) - above - below} undecided)"
        )
    name = "exponent" if exponent else "ratio"
    figures: dict[str, Figure] = {
        name: sharpest.value,
        f"{name}_low": sharpest.low,
        f"{name}_high": sharpest.high,
        "at": sharpest.label,
        "compared": len(compared),
        "above": above,
        "not_above": below,
        "limit": limit,
    }
    return Answer(verdict=verdict, reason=reason, figures=figures)


def combined(findings: Iterable[Finding | None]) -> Answer:
    """One answer of several verdicts: refuted if any is, else holds if any does.

    Raises:
        LackingError: there are none.
    """
    known = [finding for finding in findings if finding is not None]
    if not known:
        raise LackingError("the run has no series to judge this by")
    verdict = min((finding.verdict for finding in known), key=WORST_FIRST.index)
    found = [finding for finding in known if finding.verdict == verdict]
    figures = {f"{f.subject}: {name}": value for f in found for name, value in f.figures.items()}
    reason = "; ".join(f"{finding.subject}: {finding.reason}" for finding in found[:_QUOTED])
    if len(found) > _QUOTED:
        reason += f"; and {len(found) - _QUOTED} more are {verdict}"
    return Answer(verdict=verdict, reason=reason, figures=figures)
