"""Runs of one machine taken apart: what moved all cells together, and what each for itself.

Two runs are not paired: the second met the machine in another mood. But the cells of one run, and
even more those of one group, which are interleaved, met the same. So ln(time) of a cell in a run is
its own level + a shift common to the run + one common to its group + what is left, its residual.
The shift is the machine's mood or a change common to all cells: runs alone cannot tell which. The
residual is the cell's own; how far residuals of the same code scatter is known from earlier runs.
Shifts and residuals are natural logarithms of ratios of times.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations, pairwise

from scipy import special

from attnbench.analysis import times
from attnbench.base.stats import median
from attnbench.schema.record import Record

Key = tuple[str, str]  # case_id and implementation
_ROUNDS = 4  # after so many turns levels and shifts of a table move no further to speak of


@dataclass(frozen=True, kw_only=True)
class CellTime:
    """The time of a cell in one run; `group` names the cells that were interleaved with it.

    `error` is how far its ln may be off within the run, as a standard error; `load` is that a core.
    """

    time_us: float
    error: float = 0.0
    group: str = ""
    load: float = math.inf


Times = Mapping[Key, CellTime]


def time_of(record: Record, cores: int | None) -> CellTime | None:
    """The time of a record, if it has one, with its error: what slows all cells is left aside.

    Of a low end: half of how far the third fastest sample lies above it. Where several came out
    alike the bottom was reached; where one stands alone, another run may miss it. Of a median: of
    its interval what is a standard error if it is 3.9 of them wide.
    """
    if (time_us := times.time_us(record)) is None:
        return None
    if "probe_us" in record.metrics:
        alone = [sample.own_us for sample in record.kept if not sample.disturbed]
        pool = sorted(alone if len(alone) >= times.FEWEST else [s.own_us for s in record.kept])
        error = math.log(pool[: times.FEWEST][-1] / pool[0]) / 2
    else:
        low, high = times.interval_us(record) or (1.0, 1.0)
        error = math.log(high / low) / 3.92
    load = (record.metrics.get("load_1m") or math.inf) / (cores or 1)
    group = str(record.metrics.get("group") or "")
    return CellTime(time_us=time_us, error=error, group=group, load=load)


@dataclass(frozen=True, kw_only=True)
class Shift:
    """What moved cells together from one run to another, as ln of a ratio of times.

    `run` is common to all cells, `groups` come on top of it, by the cell's group in either run.
    """

    run: float = 0.0
    groups: Mapping[tuple[str, str], float] = field(default_factory=dict)

    def of(self, after: CellTime, before: CellTime) -> float:
        """The shift of one cell: that of the run and of its group."""
        return self.run + self.groups.get((after.group, before.group), 0.0)


def common_shift(after: Times, before: Times) -> Shift:
    """What moved the cells that two runs share together, by medians: a few may change on their own.

    That of a group is the median of its cells' logarithms and of the run's shift itself: so it
    follows a neighbour who slowed all cells of the group, and in a group of two, where it is open
    which of them moved, stays with the run. Nothing in common: no shift.
    """
    moved = {
        key: math.log(after[key].time_us / before[key].time_us) for key in after if key in before
    }
    if not moved:
        return Shift()
    run = median(moved.values())
    groups: dict[tuple[str, str], list[float]] = defaultdict(list)
    for key, value in moved.items():
        if after[key].group:
            groups[after[key].group, before[key].group].append(value - run)
    return Shift(run=run, groups={names: centre(found) for names, found in groups.items()})


def centre(values: Sequence[float]) -> float:
    """The median of the values and of 0; of two middle ones the one nearer to 0."""
    ordered = sorted([*values, 0.0])
    return min(ordered[(len(ordered) - 1) // 2], ordered[len(ordered) // 2], key=abs)


def residuals(after: Times, before: Times, shift: Shift) -> dict[Key, float]:
    """What is left of the change of each shared cell once what is common is taken off, as ln."""
    return {
        key: math.log(found.time_us / before[key].time_us) - shift.of(found, before[key])
        for key, found in after.items()
        if key in before
    }


def taken_apart(runs: Sequence[Times]) -> tuple[dict[Key, CellTime], list[Shift]]:
    """The level of each cell and the shift of each run against them, by median polish.

    A cell's level is the median over the runs that have it of its time without the shift; the
    shifts are then against the levels, and so on (Tukey, Exploratory Data Analysis, 1977, ch. 11).
    A step in one cell's series stays in its residuals.
    """
    of: dict[Key, list[int]] = defaultdict(list)
    for number, run in enumerate(runs):
        for key in run:
            of[key].append(number)
    shifts = [Shift()] * len(runs)
    levels: dict[Key, CellTime] = {}
    for _ in range(_ROUNDS):
        for key, numbers in of.items():
            blank = CellTime(time_us=1.0)
            found = (
                math.log(runs[n][key].time_us) - shifts[n].of(runs[n][key], blank) for n in numbers
            )
            levels[key] = CellTime(time_us=math.exp(median(found)))
        shifts = [common_shift(run, levels) for run in runs]
    return levels, shifts


# Of equal code at most 1 % may be called changed: half of that is left to tails that are heavy.
ALPHA = 0.005
# The standard deviation of such a ratio between runs of equal code, as ln: what the cases of a run
# share, what each adds, and the part of both at a load below one a core.
RATIO_OF_RUN, RATIO_OF_CASE, CALM = 0.05, 0.08, 0.4
FREEDOM = 8  # how many residuals or runs what is known beforehand counts for
FARTHER = 1.5  # times as far as the other moved the one of two that changed; else it is open:
EITHER = "slower, or the other faster"


@dataclass(frozen=True, kw_only=True)
class RatioChange:
    """By how much time of `impl` / time of `against` changed, as ln: `value` ± `half`.

    `sd`: of equal code, without history. `moved`: of either time, of three or more less the median.
    """

    impl: str
    against: str
    value: float
    sd: float
    half: float
    moved: tuple[float, float]
    load: float

    @property
    def verdict(self) -> str | None:
        """As that of a cell, or `EITHER`; None if the row of `against` says it."""
        itself, other = map(abs, self.moved)
        if abs(self.value) <= self.half:
            return "no change seen"
        if itself > FARTHER * other:
            return "slower" if self.value > 0 else "faster"
        return EITHER if self.value > 0 and other <= FARTHER * itself else None


def ratio_changes(
    after: Times, before: Times, known: Mapping[str, tuple[float, int]] | None = None
) -> Iterator[RatioChange]:
    """One for each implementation that took turns with others in both; `known`: `Spread.ratios`.

    It is held against the one in the middle of its ratios to the others, medians over the cases, of
    two the one with the smaller change: so it stays where it is when some of the others move.
    """
    cases: dict[tuple[str, str, str], dict[str, float]] = defaultdict(dict)
    for key, a in after.items():
        if a.group and (b := before.get(key)):
            cases[a.group, b.group, key[0]][key[1]] = math.log(a.time_us / b.time_us)
    together = [moved for moved in cases.values() if len(moved) > 1]
    impls = dict.fromkeys(impl for moved in together for impl in moved)
    common = median(x for moved in together for x in moved.values()) if len(impls) > 2 else 0.0
    for impl in impls:
        ratios: dict[str, list[float]] = defaultdict(list)
        for moved in (moved for moved in together if impl in moved):
            for other in moved.keys() - {impl}:
                ratios[other].append(moved[impl] - moved[other])
        ordered = sorted((median(values), other) for other, values in ratios.items())
        middle = ordered[(len(ordered) - 1) // 2], ordered[len(ordered) // 2]
        value, against = min(middle, key=lambda of: abs(of[0]))
        alone = [median(m[name] for m in together if name in m) for name in (impl, against)]
        load = max(median(cell.load for cell in run.values()) for run in (after, before))
        sd = math.hypot(RATIO_OF_RUN, RATIO_OF_CASE / math.sqrt(len(ratios[against])))
        sd *= CALM if load < 1 else 1.0
        factor, freedom = (known or {}).get(impl, (1.0, FREEDOM))
        yield RatioChange(
            impl=impl, against=against, value=value, sd=sd, load=load,
            half=float(special.stdtrit(freedom, 1 - ALPHA / 2)) * factor * sd,
            moved=(alone[0] - common, alone[1] - common),
        )  # fmt: skip


# Where a machine has no history: that of a virtual machine of two cores beside other work
# (results/selftest-compare).
UNKNOWN_SPREAD = 0.05
FEWEST_SHIFTS = 3
_PRIOR = 4  # how many runs the typical cell counts for beside a cell's own


@dataclass(frozen=True, kw_only=True)
class Spread:
    """How far the residual of a cell scatters between two runs of the same code.

    `typical` is the standard deviation of ln(time in one / time in the other) of the typical cell
    of the typical pair, `factors` how many times that of its pair a cell's own is. `runs` is how
    many runs it rests on, 0 for the default; `shifts` are those from each to the next of its code.
    `ratios` has, for an implementation, multiples of `RatioChange.sd` and degrees of freedom.
    """

    typical: float = UNKNOWN_SPREAD
    factors: Mapping[Key, float] = field(default_factory=dict)
    ratios: Mapping[str, tuple[float, int]] = field(default_factory=dict)
    runs: int = 0
    shifts: Sequence[float] = ()

    @property
    def shift_bound(self) -> float | None:
        """What 99 % of such shifts stay below, by Student's t; unknown of fewer than three."""
        if len(self.shifts) < FEWEST_SHIFTS:
            return None
        return float(special.stdtrit(len(self.shifts), 0.995)) * scale(self.shifts)


def spread(series: Iterable[Sequence[Times]]) -> Spread:
    """The spread of residuals, from all pairs of runs within each sequence of equal code.

    Medians, so that a few odd runs, or a change of code that nobody recorded, count for little.
    A machine is now calm, now busy: residuals are taken as multiples of the typical one of their
    pair. A cell's own variance is drawn towards that of all as if there were `_PRIOR` runs more
    (Smyth, Stat. Appl. Genet. Mol. Biol. 3 (2004), art. 3). Of ratios mean squares count.
    """
    found: dict[Key, list[float]] = defaultdict(list)
    freedom: Counter[Key] = Counter()
    typical: list[float] = []
    shifts: list[float] = []
    squares: dict[str, list[float]] = defaultdict(list)
    count = 0
    for runs in series:
        count += len(runs)
        freedom.update(key for run in runs for key in run)
        freedom.subtract({key for run in runs for key in run})  # the level of each
        shifts += [
            common_shift(after, before).run
            for before, after in pairwise(runs)
            if before.keys() & after.keys()
        ]
        for before, after in combinations(runs, 2):
            shift = common_shift(after, before)
            left = residuals(after, before, shift)
            if here := scale(left.values()):
                typical.append(here)
                for key, value in left.items():
                    found[key].append(value / here)
                for change in ratio_changes(after, before):
                    if change.load < math.inf:
                        squares[change.impl].append((change.value / change.sd) ** 2)
    if not typical:
        return Spread()
    factors = {
        key: math.sqrt((_PRIOR + freedom[key] * scale(values) ** 2) / (_PRIOR + freedom[key]))
        for key, values in found.items()
    }
    ratios = {}
    for impl, of in squares.items():
        several = round((math.sqrt(8 * len(of) + 1) - 1) / 2)  # runs but one, of so many pairs
        square = (FREEDOM + several * sum(of) / len(of)) / (FREEDOM + several)
        ratios[impl] = math.sqrt(square), FREEDOM + several
    usual = median(typical)
    return Spread(typical=usual, factors=factors, ratios=ratios, runs=count, shifts=shifts)


def scale(values: Collection[float]) -> float:
    """The standard deviation of normal residuals around 0 whose sizes have this median; 0 of none.

    1.4826 × median |value|, so that a few large ones do not matter. A residual of exactly 0 is that
    of a group's own median, and no sign of little scatter.
    """
    sizes = [abs(value) for value in values if value]
    return 1.4826 * median(sizes) if sizes else 0.0
