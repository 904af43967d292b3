"""Where one way overtakes another: the n at which the ratio of their times passes 1."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import Any, Literal

from attnbench.analysis.axes import AXES, floor_size, label
from attnbench.analysis.compare import BASELINE
from attnbench.analysis.crossing import Crossing, crossings, lead, size_text
from attnbench.analysis.scaling.results import Estimate
from attnbench.analysis.times import Side, are_times, ratio_of, side
from attnbench.base import units
from attnbench.execution.store import Run
from attnbench.schema.case import Case
from attnbench.schema.record import Record

By = Literal["impl", "cache", "projection"]
Outcome = Literal["crosses", "none", "no difference"]


@dataclass(frozen=True, kw_only=True)
class Crossover:
    """Two ways to do the same, held against each other along n.

    `first` and `second` are implementations, or caches or projections of one (`by` says which).
    `ratios` are the time of the first / that of the second at `sizes` (n, or the context):
    above 1 the second is faster. `case` is one of their cases, at the largest size, and `impl`
    the implementation that both share where `by` is no implementation. `left_out` gives sizes
    at which both have a record but not both a time above 0.
    """

    by: By
    first: str
    second: str
    case: Case
    impl: str | None
    sizes: tuple[int, ...]
    ratios: tuple[Estimate, ...]
    crossings: tuple[Crossing, ...] = ()
    left_out: tuple[int, ...] = ()

    @property
    def same(self) -> str:
        """What both share, for people."""
        names = [name for name in AXES if name not in ("seq_len", "kv_len", self.by)]
        shared = label(self.case.to_json(), names)
        return shared if self.impl is None else f"{self.impl}, {shared}"

    @property
    def outcome(self) -> Outcome:
        """Whether the lead changes, does not, or is never shown at all."""
        if self.crossings:
            return "crosses"
        return "none" if any(lead(ratio) for ratio in self.ratios) else "no difference"

    @property
    def level(self) -> tuple[int, ...]:
        """The sizes at which the interval holds 1."""
        return tuple(n for n, r in zip(self.sizes, self.ratios, strict=True) if not lead(r))

    @property
    def text(self) -> str:
        """What became of it, in a sentence without its full stop."""
        between = f"between {size_text(self.sizes[0])} and {size_text(self.sizes[-1])}"
        if self.outcome == "no difference":
            return f"no difference shown {between}"
        if self.crossings:
            return "; ".join(crossing.text for crossing in self.crossings)
        return f"none {between}: {self._leader()}"

    def _leader(self) -> str:
        n, ratio = next(
            (n, r) for n, r in zip(self.sizes[::-1], self.ratios[::-1], strict=True) if lead(r)
        )
        second = lead(ratio) > 0
        name, times = (self.second, ratio.value) if second else (self.first, 1 / ratio.value)
        by = f"{units.digits(times)} times at {size_text(n)}"
        if self.level:
            return f"{name} is faster, {by}, level at {_sizes(self.level)}"
        return f"{name} is faster throughout, {by}"

    def to_json(self) -> dict[str, Any]:
        """Plain JSON, with the outcome and its text."""
        kept = asdict(self) | {"case": self.case.to_json()}
        return kept | {"same": self.same, "outcome": self.outcome, "text": self.text}


@dataclass(frozen=True)
class _Timed:
    """One cell of a way: its case, and its side of a ratio; None without a usable time."""

    case: Case
    side: Side | None


def crossovers(run: Run) -> tuple[Crossover, ...]:
    """Hold all pairs against each other that share two sizes or more, everything else being equal.

    Pairs are those of implementations on the same cases, of caches of one implementation, and of
    projections of one; the number of keys follows n or stays. Every pair is looked at, so that
    the effort grows with the square of how many share their cases. Between two sizes the
    logarithm of the ratio is interpolated along log n, and so are the ends of its interval
    (`times.ratio_of`), wider between the sizes by what a curve may bend there; where the sizes
    are more than a factor of `crossing.NEAR` apart, a crossing's interval is the whole gap.
    """
    found = []
    for by, impl, ways in _slices(run.records):
        for first, second in combinations(sorted(ways, key=lambda n: (n != BASELINE, n)), 2):
            crossover = _between(by, impl, (first, second), (ways[first], ways[second]))
            found += [crossover] if crossover else []
    return tuple(found)


_Ways = dict[str, dict[int, _Timed]]


def _slices(records: Sequence[Record]) -> Iterator[tuple[By, str | None, _Ways]]:
    """What may be compared: for each slice, the name of each way and its cells by n."""
    slices: dict[By, dict[tuple[Any, ...], _Ways]] = {"impl": {}, "cache": {}, "projection": {}}
    for record in records:
        case, impl = record.cell.case, record.cell.impl
        row = case.to_json()
        n, keys = row.pop("seq_len"), row.pop("kv_len")
        row["kv_len"] = None if keys == n else keys
        timed = _Timed(case, _side(record))
        same = slices["impl"].setdefault((None, *row.values()), {})
        same.setdefault(impl, {})[n] = timed
        for by in ("cache", "projection"):
            if row[by] is not None:
                key = (impl, *(row | {by: None}).values())
                slices[by].setdefault(key, {}).setdefault(row[by], {})[n] = timed
    for by, groups in slices.items():
        for key, ways in groups.items():
            yield by, key[0], ways


def _side(record: Record) -> Side | None:
    times = [sample.time_us for sample in record.kept]
    return side(record) if times and are_times(times) else None


def _between(
    by: By, impl: str | None, names: tuple[str, str], cells: tuple[dict[int, _Timed], ...]
) -> Crossover | None:
    first, second = cells
    shared = sorted(first.keys() & second.keys())
    floor = floor_size(shared, least=2)  # nothing is known of the wide gap between it and the rest
    shared = [n for n in shared if n != floor]
    sizes, ratios = [], []
    for n in shared:
        above, below = first[n].side, second[n].side
        if above and below:
            value, interval = ratio_of(above, below)
            sizes.append(n)
            low, high = interval or (None, None)
            ratios.append(Estimate(value=value, low=low, high=high))
    if len(sizes) < 2:
        return None
    left_out = tuple(n for n in shared if n not in set(sizes))
    return Crossover(
        by=by, first=names[0], second=names[1], case=first[sizes[-1]].case, impl=impl,
        sizes=tuple(sizes), ratios=tuple(ratios), left_out=left_out,
        crossings=tuple(crossings(sizes, ratios, names)),
    )  # fmt: skip


def _sizes(sizes: Sequence[int]) -> str:
    return ", ".join(map(size_text, sizes))
