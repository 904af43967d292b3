"""Where one way overtakes another: the n at which the ratio of their times passes 1."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from typing import Any, Literal, get_args

import numpy as np

from attnbench.analysis.axes import AXES, label, overhead_size
from attnbench.analysis.pairs import CellTimes, cell_times, decided, ratio_of
from attnbench.analysis.ratios import baseline_of
from attnbench.analysis.scaling.results import Uncertain
from attnbench.analysis.times import are_times
from attnbench.base import units
from attnbench.schema.case import Case
from attnbench.store.runs import Run

NEAR = 4.0  # sizes further apart than this factor say little of what lies between them
_STEPS = 4  # parts of a gap in which its band is followed
_ROUNDING = 1e-12  # of a logarithm, where a line through two points passes 0

By = Literal["impl", "cache", "projection", "layout"]
_BYS = get_args(By)
CrossoverOutcome = Literal["crosses", "none", "no difference"]


@dataclass(frozen=True, kw_only=True)
class Crossing:
    """One change of the lead: `faster_below` is ahead below `n`, `faster_above` above it.

    `low` and `high` are the ends of the n at which the ratio's interval holds 1. An end is open
    where that is so at the smallest or largest size already: then the end is that size, and the
    crossing may lie beyond it.
    """

    n: float
    low: float
    high: float
    open_below: bool = False
    open_above: bool = False
    faster_below: str
    faster_above: str

    @property
    def text(self) -> str:
        """One clause: which overtakes which, and where: in `512 … 1,024`, or `below 128 … 300`."""
        low = "below " * self.open_below + size_text(self.low)
        high = "above " * self.open_above + size_text(self.high)
        where = f"at n ≈ {size_text(self.n)} (95 % interval {low} … {high})"
        return f"{self.faster_above} overtakes {self.faster_below} {where}"


@dataclass(frozen=True, kw_only=True)
class Crossover:
    """Two ways to do the same, compared along n.

    `first` and `second` are implementations, or caches, projections or layouts of one: `by`.
    `ratios` are the time of the first / that of the second at `sizes` (n, or the context):
    above 1 the second is faster. `case` is one of their cases, at the largest size, and `impl`
    the implementation that both share unless they differ by it. `left_out` gives sizes at which
    both have a record, and which say nothing: without a time above 0, or too few samples.
    """

    by: By
    first: str
    second: str
    case: Case
    impl: str | None
    sizes: tuple[int, ...]
    ratios: tuple[Uncertain, ...]
    crossings: tuple[Crossing, ...] = ()
    left_out: tuple[int, ...] = ()

    @property
    def same(self) -> str:
        """What both share, for people."""
        names = [name for name in AXES if name not in ("seq_len", "kv_len", self.by)]
        shared = label(self.case.to_json(), names)
        return shared if self.impl is None else f"{self.impl}, {shared}"

    @property
    def outcome(self) -> CrossoverOutcome:
        """Whether the lead changes, does not, or is never shown at all."""
        if self.crossings:
            return "crosses"
        return "none" if any(lead(ratio) for ratio in self.ratios) else "no difference"

    @property
    def text(self) -> str:
        """What became of it, in a sentence without its full stop."""
        between = f"between {size_text(self.sizes[0])} and {size_text(self.sizes[-1])}"
        if self.outcome == "no difference":
            return f"no difference shown {between}"
        if self.crossings:
            return "; ".join(crossing.text for crossing in self.crossings)
        rows = list(zip(self.sizes, self.ratios, strict=True))
        n, ratio = next((n, ratio) for n, ratio in rows[::-1] if lead(ratio))
        second = lead(ratio) > 0
        name, times = (self.second, ratio.value) if second else (self.first, 1 / ratio.value)
        at = f"{units.digits(times)} times at {size_text(n)}"
        if level := ", ".join(size_text(n) for n, ratio in rows if not lead(ratio)):
            return f"none {between}: {name} is faster, {at}, level at {level}"
        return f"none {between}: {name} is faster throughout, {at}"


_Ways = dict[str, dict[int, tuple[Case, CellTimes | None]]]  # cells by name and n


def crossovers(run: Run, baseline: str | None = None) -> tuple[Crossover, ...]:
    """Compare all pairs that share two sizes or more, everything else being equal.

    Pairs are those of implementations on the same cases, and of caches, of projections and of
    layouts of one implementation; the number of keys follows n or stays. The `baseline` is the
    first of its pairs (that of the run unless given). Every pair is looked at, so that the effort
    grows with the square of how many share their cases. Between two sizes the
    logarithm of the ratio is interpolated along log n, and so are the ends of its interval
    (`pairs.ratio_of`), wider between the sizes by what a curve may deviate there; where the sizes
    are more than a factor of `NEAR` apart, a crossing's interval is the whole gap.
    """
    first = baseline_of(run, baseline)
    found = (
        _between(by, impl, names, ways)
        for by, impl, ways in _slices(run)
        for names in combinations(sorted(ways, key=lambda name: (name != first, name)), 2)
    )
    return tuple(crossover for crossover in found if crossover)


def _slices(run: Run) -> Iterator[tuple[By, str | None, _Ways]]:
    """What may be compared: for each slice, the name of each way and its cells by n."""
    slices: dict[tuple[Any, ...], _Ways] = {}
    for record in run.records:
        device_name = run.environment_of(record).get("device_name")
        case, impl = record.cell.case, record.cell.impl
        row = case.to_json()
        n, keys = row.pop("seq_len"), row.pop("kv_len")
        row["kv_len"] = None if keys == n else keys
        observed = [sample.time_us for sample in record.kept]
        timed = case, cell_times(record) if observed and are_times(observed) else None
        for by in _BYS:
            shared = None if by == "impl" else impl
            if (way := (row | {"impl": impl})[by]) is not None:
                key = (by, shared, device_name, *(row | {by: None}).values())
                slices.setdefault(key, {}).setdefault(way, {})[n] = timed
    for (by, shared, *_), ways in sorted(slices.items(), key=lambda item: _BYS.index(item[0][0])):
        yield by, shared, ways


def _between(by: By, impl: str | None, names: tuple[str, str], ways: _Ways) -> Crossover | None:
    first, second = ways[names[0]], ways[names[1]]
    shared = sorted(first.keys() & second.keys())
    overhead = overhead_size(shared, least=2)  # nothing is known of the gap up to the next size
    ratios = {}
    for n in shared:
        above, below = first[n][1], second[n][1]
        if above and below and n != overhead:
            value, interval = ratio_of(above, below)
            if interval:
                ratios[n] = Uncertain(value=value, low=interval[0], high=interval[1])
    if len(ratios) < 2:
        return None
    return Crossover(
        by=by, first=names[0], second=names[1], case=first[max(ratios)][0], impl=impl,
        sizes=tuple(ratios), ratios=tuple(ratios.values()),
        left_out=tuple(n for n in shared if n not in ratios and n != overhead),
        crossings=tuple(crossings(ratios, names)),
    )  # fmt: skip


def crossings(ratios: Mapping[int, Uncertain], names: tuple[str, str]) -> Iterator[Crossing]:
    """Every change of the lead that the intervals show.

    `ratios` by n, ascending, each with an interval. Their interpolated band holds 1 over some
    stretches of n. Over each of them the lead is not known: it has changed if it is another one
    after the stretch than before it. Where the ratio itself passes 1 several times in a stretch,
    the middle one is the crossing. A stretch that reaches the smallest or largest size is open
    there, and the ratio at that size says who leads; if it is the whole range, nothing is shown.
    """
    xs = [math.log(n) for n in ratios]
    values = list(ratios.values())
    roots = _roots(xs, [math.log(ratio.value) for ratio in values])
    if not roots or not any(lead(ratio) for ratio in values):
        return
    for low, high in _stretches(xs, values):
        inside = [(x, sign) for x, sign in roots if low <= x <= high]
        if len(inside) % 2 == 0 or (low, high) == (xs[0], xs[-1]):
            continue
        below, above = names if inside[0][1] > 0 else names[::-1]
        least, most = map(math.exp, _widened(xs, low, high))
        yield Crossing(
            n=math.exp(inside[len(inside) // 2][0]), low=least, high=most,
            open_below=low <= xs[0], open_above=high >= xs[-1],
            faster_below=below, faster_above=above,
        )  # fmt: skip


def lead(ratio: Uncertain) -> int:
    """1 where the second is faster, -1 where the first is, 0 where the interval does not say."""
    return decided(ratio.low, ratio.high)


def _roots(xs: Sequence[float], ys: Sequence[float]) -> list[tuple[float, int]]:
    """Where the line through the points changes sign, and the sign that it then has."""
    found = []
    nonzero = [(x, y) for x, y in zip(xs, ys, strict=True) if y]
    for (x0, y0), (x1, y1) in pairwise(nonzero):
        if (y0 > 0) != (y1 > 0):
            zeros = [x for x in xs if x0 < x < x1]
            at = sum(zeros) / len(zeros) if zeros else x0 + (x1 - x0) * y0 / (y0 - y1)
            found.append((at, 1 if y1 > 0 else -1))
    return found


def _stretches(xs: Sequence[float], ratios: Sequence[Uncertain]) -> list[tuple[float, float]]:
    """Where the interpolated band holds 1, from left to right.

    Between two sizes the band is wider by h²/8 · |f''|, which a curve may deviate from a straight
    line, with f'' from the three points around either end of the gap, whichever is larger.
    """
    at = np.array(xs)
    gaps = np.diff(at)
    slopes = np.diff([math.log(ratio.value) for ratio in ratios]) / gaps
    seconds = np.pad(np.abs(np.diff(slopes)) / ((at[2:] - at[:-2]) / 2), 1)
    deviations = gaps**2 / 8 * np.maximum(seconds[:-1], seconds[1:])
    ends = np.log([sorted((*ratio.ends, ratio.value))[::2] for ratio in ratios]).T
    grid = np.unique([np.linspace(left, right, _STEPS + 1) for left, right in pairwise(xs)])
    place = np.interp(grid, xs, np.arange(len(xs)))
    gap = np.minimum(place.astype(int), len(xs) - 2)
    t = place - gap
    more = 4 * t * (1 - t) * deviations[gap]
    low, high = np.interp(grid, xs, ends[0]) - more, np.interp(grid, xs, ends[1]) + more
    zeros = [x for line in (low, high) for x, _ in _roots(grid.tolist(), line.tolist())]
    points = np.unique([*grid, *zeros])
    inside = np.interp(points, grid, low) <= _ROUNDING
    inside &= np.interp(points, grid, high) >= -_ROUNDING
    edges = np.flatnonzero(np.diff(np.pad(inside, 1))).reshape(-1, 2)
    return [(float(points[first]), float(points[end - 1])) for first, end in edges]


def _widened(xs: Sequence[float], low: float, high: float) -> tuple[float, float]:
    """A stretch that ends within a wide gap between sizes, up to the ends of that gap."""
    for left, right in pairwise(xs):
        if right - left > math.log(NEAR) * (1 + 1e-9):
            low = left if left < low < right else low
            high = right if left < high < right else high
    return low, high


def size_text(n: float) -> str:
    """A size with three digits, more where it is a whole number: `128`, `1,024`, `0.85`."""
    if n >= 100:
        exact = abs(n - round(n)) < 1e-9 * n
        return units.count(round(n) if exact else round(float(units.digits(n))))
    return f"{float(units.digits(n)):g}"
