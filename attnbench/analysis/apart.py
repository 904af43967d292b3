"""Runs of one machine taken apart: what moved all cells together, and what each for itself.

Two runs are not paired: the second met the machine in another mood. But the cells of one run, and
even more those of one group, which are interleaved, met the same. So ln(time) of a cell in a run is
its own level + a shift common to the run + one common to its group + what is left, its residual.
The shift is the machine's mood or a change common to all cells: runs alone cannot tell which. The
residual is the cell's own; how far residuals of the same code scatter is known from earlier runs.
Shifts and residuals are natural logarithms of ratios of times.

What moved two implementations that took turns cancels in the ratio of their times: so that ratio
differs less from run to run than either time does.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations, pairwise
from statistics import mean
from typing import Literal

from scipy import special

from attnbench.analysis import times
from attnbench.base.stats import median
from attnbench.schema.record import Record

Key = tuple[str, str]  # case_id and implementation
_ROUNDS = 4  # after so many turns levels and shifts of a table move no further to speak of


@dataclass(frozen=True, kw_only=True)
class CellTime:
    """The time of a cell in one run; `group` names the cells that were interleaved with it.

    `error` is how far its ln may be off within the run, as a standard error; `load` is the load
    average for each core at its end.
    """

    time_us: float
    error: float = 0.0
    group: str = ""
    load: float | None = None


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
    load, group = record.metrics.get("load_1m"), str(record.metrics.get("group") or "")
    busy = None if load is None or not cores else load / cores
    return CellTime(time_us=time_us, error=error, group=group, load=busy)


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


# How far the ratio of two implementations differs between two runs of equal code, as a standard
# deviation of its ln: what all cases of a run share, and what each adds. On a calm machine, with a
# load below one for each core, it is a part of that (results/selftest-compare).
RATIO_OF_RUN, RATIO_OF_CASE, CALM = 0.05, 0.08, 0.4
FREEDOM = 8  # what that counts for beside a machine's stored runs
FARTHER = 1.5  # times as far as the other moved the one of two that changed


@dataclass(frozen=True, kw_only=True)
class RatioChange:
    """By how much time of `impl` / time of `against` changed from one run to another, as ln.

    A median over `cases`, which lies within ± `half`; `sd` is how far such changes scatter where
    nothing is stored. `moved` is the change of either time: beyond what most implementations share,
    or with only two of them the whole.
    """

    impl: str
    against: str
    cases: int
    value: float
    sd: float
    moved: tuple[float, float]
    half: float = math.inf

    @property
    def verdict(self) -> Literal["slower", "faster", "open", "no change seen"] | None:
        """`open` if it may be `against` that got faster; None if that of `against` says it."""
        itself, other = map(abs, self.moved)
        if abs(self.value) <= self.half:
            return "no change seen"
        if itself > FARTHER * other:
            return "slower" if self.value > 0 else "faster"
        return "open" if self.value > 0 and other <= FARTHER * itself else None


def ratio_changes(after: Times, before: Times) -> Iterator[RatioChange]:
    """One for each implementation that took turns with others in both runs.

    It is held against the one in the middle of its ratios to the others, of two the one with the
    smaller change: so it stays where it is when some of the others move.
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
        count = len(ratios[against])
        sd = math.hypot(RATIO_OF_RUN, RATIO_OF_CASE / math.sqrt(count))
        yield RatioChange(
            impl=impl, against=against, cases=count, value=value,
            sd=sd if max(load_of(after), load_of(before)) >= 1 else CALM * sd,
            moved=(alone[0] - common, alone[1] - common),
        )  # fmt: skip


def load_of(run: Times) -> float:
    """The typical load of a run; without end where it is unknown."""
    return median(math.inf if cell.load is None else cell.load for cell in run.values())


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
    `ratios` is, for an implementation, how many times `RatioChange.sd` the change of its ratio is,
    and with how many degrees of freedom.
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
    (Smyth, Stat. Appl. Genet. Mol. Biol. 3 (2004), art. 3).
    """
    found: dict[Key, list[float]] = defaultdict(list)
    freedom: Counter[Key] = Counter()
    typical: list[float] = []
    shifts: list[float] = []
    count = 0
    series = list(series)
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
    if not typical:
        return Spread()
    factors = {
        key: math.sqrt((_PRIOR + freedom[key] * scale(values) ** 2) / (_PRIOR + freedom[key]))
        for key, values in found.items()
    }
    ratios = _ratio_factors(series)
    return Spread(
        typical=median(typical), factors=factors, ratios=ratios, runs=count, shifts=shifts
    )


def _ratio_factors(series: Iterable[Sequence[Times]]) -> dict[str, tuple[float, int]]:
    """`Spread.ratios`, from means of squares, as tails count; drawn towards 1 as in `spread`."""
    squares: dict[str, list[float]] = defaultdict(list)
    total: Counter[str] = Counter()
    for runs in series:
        known = [run for run in runs if run and load_of(run) < math.inf]
        changes = [c for a, b in combinations(known, 2) for c in ratio_changes(b, a)]
        for change in changes:
            squares[change.impl].append((change.value / change.sd) ** 2)
        total.update({change.impl: len(known) - 1 for change in changes})
    return {
        impl: (math.sqrt((FREEDOM + total[impl] * mean(of)) / (FREEDOM + total[impl])),
               FREEDOM + total[impl])
        for impl, of in squares.items()
    }  # fmt: skip


def scale(values: Collection[float]) -> float:
    """The standard deviation of normal residuals around 0 whose sizes have this median; 0 of none.

    1.4826 × median |value|, so that a few large ones do not matter. A residual of exactly 0 is that
    of a group's own median, and no sign of little scatter.
    """
    sizes = [abs(value) for value in values if value]
    return 1.4826 * median(sizes) if sizes else 0.0
