"""The runs of each machine taken apart into lines: of the runs, of their groups, of every cell."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from attnbench.analysis.apart import CellTime, Key, centre, taken_apart
from attnbench.analysis.history.entries import Entry
from attnbench.analysis.history.steps import CONFIRM, FEWEST, LEVEL, Step, steps
from attnbench.base.stats import median
from attnbench.base.units import split_common

Kind = Literal["run", "group", "cell"]
Verdict = Literal["regression", "improvement", "suspicious", "no change", "insufficient data"]
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)
Why = Literal["few runs", "environment", "together"]
NEAR = 2  # runs between a step as found and the change of environment that it goes along with


@dataclass(frozen=True, kw_only=True)
class Mark:
    """What differs in the environment of run `at` from the run before: name, before, after."""

    at: int
    facts: tuple[tuple[str, Any, Any], ...]


@dataclass(frozen=True, kw_only=True)
class Found:
    """A step at run `at` of the series, its verdict, and why it is no more than suspicious."""

    step: Step
    at: int
    verdict: Verdict
    why: tuple[Why, ...] = ()
    mark: Mark | None = None


@dataclass(frozen=True, kw_only=True)
class Line:
    """Times over the runs `at` of a series.

    Of a cell: in µs without what is common to its run and group; of a run or a group: that, as a
    ratio to its median.
    """

    kind: Kind
    name: str
    at: tuple[int, ...]
    values: tuple[float, ...]
    found: tuple[Found, ...]
    enough: bool

    @property
    def verdict(self) -> Verdict:
        """The gravest of its steps'."""
        if not self.enough:
            return "insufficient data"
        return min((f.verdict for f in self.found), key=VERDICTS.index, default="no change")


@dataclass(frozen=True, kw_only=True)
class Series:
    """The runs of one machine, the oldest first, and their lines, what changed most first."""

    runs: tuple[Entry, ...]
    marks: tuple[Mark, ...]
    lines: tuple[Line, ...]


def history(entries: Iterable[Entry], least: float) -> list[Series]:
    """A series for each machine, the one with most runs first; `least` as for `steps`."""
    machines: dict[tuple[Any, ...], list[Entry]] = defaultdict(list)
    for entry in entries:
        machines[tuple(map(str, entry.machine))].append(entry)
    return [_series(runs, least) for runs in sorted(machines.values(), key=len, reverse=True)]


def _series(runs: Sequence[Entry], least: float) -> Series:
    levels, shifts = taken_apart(
        [{c.key: CellTime(time_us=c.time_us, group=c.group) for c in run.cells} for run in runs]
    )
    labels = {cell.key: f"{cell.impl} {cell.label}" for run in runs for cell in run.cells}
    home = {cell.key: cell.group for run in runs for cell in run.cells}
    members: dict[str, set[str]] = defaultdict(set)
    for run in runs:
        for cell in run.cells:
            members[cell.group].add(labels[cell.key])
    cells: dict[Key, dict[int, float]] = defaultdict(dict)
    groups: dict[str, dict[int, float]] = defaultdict(dict)
    for number, (run, shift) in enumerate(zip(runs, shifts, strict=True)):
        moved: dict[str, dict[Key, float]] = defaultdict(dict)
        for cell in run.cells:
            log = math.log(cell.time_us / levels[cell.key].time_us) - shift.run
            moved[cell.group][cell.key] = log
        for group, logs in moved.items():
            for key, log in logs.items():
                rest = [value for other, value in logs.items() if other != key]
                shared = centre(rest) if group else 0.0
                cells[key][number] = math.log(levels[key].time_us) + log - shared
        for (group, _), value in shift.groups.items():
            groups[group][number] = value
    whole = {number: shift.run for number, shift in enumerate(shifts)}
    marks = tuple(_marks(runs))
    tests = sum(max(0, len(line) - 1) for line in (whole, *groups.values(), *cells.values()))

    def line(
        kind: Kind,
        name: str,
        logs: Mapping[int, float],
        common: Sequence[Line] = (),
        others: Sequence[Mapping[int, float]] = (),
    ) -> Line:
        at = tuple(logs)
        found = tuple(
            _judged(step, at, kind, tests, marks, common, others)
            for step in steps(list(logs.values()), least, tests)
        )
        return Line(
            kind=kind, name=name, at=at, values=tuple(map(math.exp, logs.values())), found=found,
            enough=len(at) >= FEWEST,
        )  # fmt: skip

    run_line = line("run", "the whole run", whole)
    group_lines = {
        group: line("group", split_common(list(members[group]))[0], logs, [run_line])
        for group, logs in groups.items()
    }
    cell_lines = []
    for key, own in cells.items():
        common = [run_line, *filter(None, [group_lines.get(home[key])])]
        others = [cells[other] for other in cells if other[0] == key[0] and other != key]
        cell_lines.append(line("cell", labels[key], own, common, others))
    shown = [run_line, *(one for one in group_lines.values() if one.found), *cell_lines]
    shown.sort(key=lambda one: -max((abs(of.step.log) for of in one.found), default=0.0))
    shown.sort(key=lambda one: one.verdict not in ("regression", "improvement"))
    return Series(runs=tuple(runs), marks=marks, lines=tuple(shown))


def _judged(
    step: Step,
    runs: Sequence[int],
    kind: Kind,
    tests: int,
    marks: Iterable[Mark],
    common: Iterable[Line],
    others: Iterable[Mapping[int, float]],
) -> Found:
    """A finding, unless few runs, the environment or what is common may explain it."""
    at = runs[step.at]
    mark = next((mark for mark in marks if abs(mark.at - at) <= NEAR), None)
    why: list[Why] = []
    if step.p > LEVEL / tests or min(step.before, step.after) < CONFIRM:
        why.append("few runs")
    if mark is not None:
        why.append("environment")
    along = any(abs(found.at - at) <= NEAR for line in common for found in line.found)
    if kind != "cell" or along or _share(step, runs, others) >= 0.5:
        why.append("together")
    verdict: Verdict = "regression" if step.log > 0 else "improvement"
    return Found(
        step=step, at=at, verdict="suspicious" if why else verdict, why=tuple(why), mark=mark
    )


def _share(step: Step, runs: Sequence[int], others: Iterable[Mapping[int, float]]) -> float:
    """How far other implementations of a cell's case moved along, as a share of its step."""
    sides = runs[step.at - step.before : step.at], runs[step.at : step.at + step.after]
    moved = [
        (median(found[1]) - median(found[0])) / step.log
        for other in others
        if all(found := [[other[n] for n in side if n in other] for side in sides])
    ]
    return median(moved) if moved else 0.0


def _marks(runs: Sequence[Entry]) -> Iterable[Mark]:
    """Where facts that both runs know differ; one that an older version did not record is none."""
    known: dict[str, Any] = {}
    for at, run in enumerate(runs):
        facts = run.facts
        if found := tuple((n, known[n], v) for n, v in facts.items() if known.get(n, v) != v):
            yield Mark(at=at, facts=found)
        known |= facts
