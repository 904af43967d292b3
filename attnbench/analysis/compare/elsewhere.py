"""Measurements of different machines: no ratio of times, but what each says within itself.

Rankings, ratios to a baseline, shares of the machine's own ceiling and slopes in n are free of the
machine's speed; where two implementations change places is named.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import combinations

from attnbench.analysis import pairs
from attnbench.analysis.columns import TableRow
from attnbench.analysis.compare.sources import Source, SourceCell
from attnbench.analysis.ratios import PREFERRED
from attnbench.schema.case import Case
from attnbench.theory.traits import case_label

FEWEST_SIZES = 3  # of n, for a slope


@dataclass(frozen=True, kw_only=True)
class Standing:
    """One implementation in one case, within the first source and within the second.

    `ranks` from 1, `speeds` are baseline's time / its time, `shares` of the measured ceiling of
    compute; None is unknown.
    """

    label: str
    impl: str
    ranks: tuple[int, int]
    speeds: tuple[float | None, ...]
    shares: tuple[float | None, float | None]


@dataclass(frozen=True, kw_only=True)
class Reversal:
    """In one case `ahead` is faster than `behind` in the first source, and slower in the second.

    `ratios` are time of `behind` / time of `ahead` in either.
    """

    label: str
    ahead: str
    behind: str
    ratios: tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class Slope:
    """How the time of one implementation grows with n over the sizes that both have, in either."""

    label: str
    impl: str
    sizes: tuple[int, ...]
    exponents: tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class Elsewhere:
    """What two sources of different machines say of the cases that they share."""

    baseline: str
    standings: tuple[Standing, ...]
    reversals: tuple[Reversal, ...]
    slopes: tuple[Slope, ...]


def compare(before: Source, after: Source) -> Elsewhere:
    """Cases are shared whatever device they ran on; implementations by name."""
    first, second = _by_case(before), _by_case(after)
    shared = {
        label: [impl for impl in cells if impl in second[label]]
        for label, cells in first.items()
        if label in second
    }
    names = {impl for impls in shared.values() for impl in impls}
    baseline = next((name for name in PREFERRED if name in names), min(names, default=""))
    standings, reversals = [], []
    for label, impls in shared.items():
        both = first[label], second[label]
        old, new = (sorted(impls, key=lambda impl: _time(of[impl])) for of in both)
        for impl in old:
            speeds = (
                _time(of[baseline]) / _time(of[impl]) if baseline in of else None for of in both
            )
            standings.append(Standing(
                label=label, impl=impl, ranks=(old.index(impl) + 1, new.index(impl) + 1),
                speeds=tuple(speeds),
                shares=(_share(before, both[0][impl]), _share(after, both[1][impl])),
            ))  # fmt: skip
        for ahead, behind in combinations(old, 2):
            then, now = (_ratio(of[behind], of[ahead]) for of in both)
            if then > 1 > now:
                found = Reversal(label=label, ahead=ahead, behind=behind, ratios=(then, now))
                reversals.append(found)
    return Elsewhere(
        baseline=baseline, standings=tuple(standings), reversals=tuple(reversals),
        slopes=tuple(_slopes(first, second)),
    )  # fmt: skip


Cells = Mapping[str, SourceCell]  # by implementation


def _by_case(source: Source) -> dict[str, dict[str, SourceCell]]:
    """The cells with a time to be trusted, by the label of their case."""
    found: dict[str, dict[str, SourceCell]] = defaultdict(dict)
    for cell in source.cells.values():
        if cell.case and cell.time and not cell.unsteady:
            found[cell.label][cell.impl] = cell
    return found


def _time(cell: SourceCell) -> float:
    assert cell.time is not None, "cells without a time are left out"
    return cell.time.time_us


def _share(source: Source, cell: SourceCell) -> float | None:
    """Of the rate of a large matmul there."""
    if source.run is None or cell.record is None:
        return None
    return TableRow(cell.record, source.run).limits["fraction_of_compute_peak"]  # type: ignore[no-any-return]


def _ratio(a: SourceCell, b: SourceCell) -> float:
    """Time of one / that of the other; 1 where the run does not tell them apart."""
    assert a.record is not None, "cells with a case are of runs"
    assert b.record is not None, "cells with a case are of runs"
    value, interval = pairs.ratio(a.record, b.record)
    return value if pairs.decided(*(interval or (None, None))) else 1.0


def _slopes(first: Mapping[str, Cells], second: Mapping[str, Cells]) -> list[Slope]:
    """Of ln time over ln n by least squares, where both have the same three sizes or more."""
    series: dict[tuple[Case, str], dict[int, tuple[float, float]]] = defaultdict(dict)
    for label in first.keys() & second.keys():
        for impl in first[label].keys() & second[label].keys():
            case = first[label][impl].case
            assert case is not None, "cells without a case are left out"
            if case.kv_len != case.seq_len:
                continue
            same = replace(case, seq_len=1, kv_len=1, device="cpu")
            series[same, impl][case.seq_len] = _time(first[label][impl]), _time(second[label][impl])
    found = []
    for (case, impl), times in series.items():
        sizes = sorted(times)
        if len(sizes) < FEWEST_SIZES:
            continue
        logs = [math.log(n) for n in sizes]
        slopes = [
            statistics.linear_regression(logs, [math.log(times[n][i]) for n in sizes]).slope
            for i in (0, 1)
        ]
        label = case_label(case).replace("n=1 ", "")
        found.append(
            Slope(label=label, impl=impl, sizes=tuple(sizes), exponents=(slopes[0], slopes[1]))
        )
    return sorted(found, key=lambda slope: (slope.label, slope.impl))
