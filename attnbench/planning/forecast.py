"""How long cells will take: by what others took on the same machine, or by their sizes alone."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from attnbench.base import units
from attnbench.planning.plan import GROUPS_PER_JOB, Job, Plan, cell_s, work
from attnbench.schema.record import Cell, Record

_SWEEP_S, _PROCESS_S = 3.0, 0.3  # that any sweep and any process take
# How far off a forecast is, as the standard deviation of its logarithm, counted over the runs in
# results/: from run to run, by other sizes of the implementation, by others, by nothing.
_RUN, _SIZES, _OTHERS, _NOTHING = 0.2, 0.3, 0.6, 0.75


class Span(NamedTuple):
    """Seconds, and between which they will probably be, the machine being as busy as it was."""

    seconds: float
    low: float
    high: float

    def __str__(self) -> str:
        found, low, high = map(units.seconds, self)
        return f"about {found} ({low} to {high})"


@dataclass
class Forecast:
    """Seconds of cells, the better the more records it has learned of.

    A cell takes what it took; else what its sizes suggest, times how much longer than that the
    nearest like it took: of its implementation, its workload, or any.
    `timing` are the least and the most seconds of samples that were asked for. `needs` are the
    bytes that cells need at least, by their keys, of which `free` are free; None if unknown.
    `limit_s` is what all may take, if that is limited. `rounds` are those that a race will take at
    least: what was sampled beyond them is not learned.
    """

    timing: tuple[float, float]
    needs: dict[tuple[str, str], int | None] = field(default_factory=dict)
    free: int | None = None
    limit_s: float | None = None
    rounds: int | None = None
    learned: int = 0  # cells
    _known: dict[object, tuple[float, float]] = field(default_factory=dict)

    def learn(self, record: Record, timing: tuple[float, float] | None = None) -> None:
        """Take in what a cell took; `timing` is that of its run, where it is another."""
        took_s, count = sum(record.spent_s.values()), len(record.samples)
        if self.rounds and count > self.rounds:
            took_s -= record.spent_s.get("samples", 0.0) * (1 - self.rounds / count)
        if record.status == "ok" and took_s:
            self.learned += 1
            by_sizes_s = cell_s(record.cell.case, timing or self.timing)
            for key, _ in _alike(record.cell):
                before_s, before_by_sizes_s = self._known.get(key, (0.0, 0.0))
                self._known[key] = before_s + took_s, before_by_sizes_s + by_sizes_s

    def of(self, cell: Cell) -> tuple[float, float]:
        """Seconds of a cell, and how far off they may be: the logarithm's standard deviation."""
        by_sizes_s = cell_s(cell.case, self.timing)
        for key, off in _alike(cell):
            if key in self._known:
                took_s, by_their_sizes_s = self._known[key]
                return took_s / by_their_sizes_s * by_sizes_s, off
        return by_sizes_s, _NOTHING

    def too_large(self, cell: Cell) -> bool:
        """Whether the cell needs more memory than is free, so that it will be skipped."""
        return self.free is not None and (self.needs.get(cell.key) or 0) > self.free

    def seconds(self, cells: Iterable[Cell]) -> float:
        """Of all these that fit, without start-up."""
        return sum(self.of(cell)[0] for cell in cells if not self.too_large(cell))

    def total(self, cells: Iterable[Cell]) -> Span:
        """Of all these that fit, start-up included. Errors do not cancel: cells are much alike."""
        every = [self.of(cell) for cell in cells if not self.too_large(cell)]
        cells_s = sum(seconds for seconds, _ in every)
        off = sum(seconds * off for seconds, off in every) / cells_s if cells_s else 0.0
        total_s = _SWEEP_S + _PROCESS_S * len(every) / GROUPS_PER_JOB + cells_s
        factor = math.exp(2 * math.hypot(off, _RUN))
        return Span(total_s, total_s / factor, total_s * factor)


def balanced(jobs: Iterable[Job], forecast: Forecast, left_s: Callable[[], float]) -> Iterator[Job]:
    """Groups as jobs of their own that each will end within `left_s()`, when it is asked for.

    Wherever the sequence ends all axes had their share: cases that differ in more than their sizes
    get the same time, by a forecast that learns meanwhile, and of their sizes the smallest comes
    first, then the middle one, the quarters, and so on.
    """
    alike: dict[tuple[object, ...], list[Job]] = {}
    for job in jobs:
        for group in job.groups:
            case = group[0][0]
            key = case.workload, case.pass_, case.dtype, case.threads, case.mask.text
            alike.setdefault(key, []).append(replace(job, groups=(group,)))
    queue = [(0.0, number, _halved(own)) for number, own in enumerate(alike.values())]
    too_long = []

    while queue:
        spent_s, number, own = heapq.heappop(queue)
        left = left_s()
        soon = next((job for job in own if forecast.seconds(job.cells()) <= left), None)
        if soon is None:
            too_long.append((spent_s, number, own))
            continue
        own.remove(soon)
        yield soon
        # Once more is known, what seemed too long may not be.
        queue += [(spent_s + forecast.seconds(soon.cells()), number, own)] * bool(own) + too_long
        too_long.clear()
        heapq.heapify(queue)


def within(plan: Plan, forecast: Forecast, limit_s: float) -> Plan:
    """The plan with the jobs alone that a sweep of `limit_s` seconds will probably measure."""
    left_s, kept = [limit_s - _SWEEP_S], []
    for job in balanced(plan.jobs, forecast, lambda: left_s[0]):
        left_s[0] -= forecast.seconds(job.cells())
        kept.append(job)
    return replace(plan, jobs=tuple(kept))


def _halved(jobs: list[Job]) -> list[Job]:
    """By their work in the order 0, 1/2, 1/4, 3/4, …: van der Corput's, in base 2."""
    ordered = sorted(jobs, key=lambda job: work(job.groups[0][0][0]))
    bits = len(jobs).bit_length()
    return [ordered[i] for i in sorted(range(len(jobs)), key=lambda i: f"{i:0{bits}b}"[::-1])]


def _alike(cell: Cell) -> list[tuple[object, float]]:
    """What the seconds of a cell can be known by, the nearest first, and how far off that is."""
    case = cell.case
    kind = case.workload, case.pass_, case.device
    of_impl = cell.impl, *kind
    return [(cell.key, 0.0), (of_impl, _SIZES), (kind, _OTHERS), (case.device, _NOTHING)]
