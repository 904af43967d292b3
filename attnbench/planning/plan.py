"""What a sweep varies, and from its cells to ordered groups, with the reason for each skip."""

from __future__ import annotations

import itertools
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from attnbench.schema.case import Case, Position
from attnbench.schema.record import Cell, Record
from attnbench.theory.traits import TRAITS, impossible

# A process serves this many groups, so that its start-up (seconds) is shared but no cell lives
# in a process with a long past.
GROUPS_PER_JOB = 10


@dataclass(frozen=True, kw_only=True)
class Axes:
    """What one sweep multiplies out. None means "as the axis it follows", or all of them.

    `widths` E without `head_dims` keep the heads, and D = E/H; with `head_dims` and without
    `heads` they keep D, and H = E/D.
    """

    workload: str = "attention"
    passes: tuple[str, ...] = ("forward",)
    dtypes: tuple[str, ...] = ("float32",)
    batch_sizes: tuple[int, ...] = (1,)
    heads: tuple[int, ...] | None = None
    kv_heads: tuple[int, ...] | None = None
    seq_lens: tuple[int, ...] = (512,)
    kv_lens: tuple[int, ...] | None = None
    head_dims: tuple[int, ...] | None = None
    value_dims: tuple[int, ...] | None = None
    masks: tuple[str, ...] = ("full",)
    positions: tuple[str, ...] = ("none",)
    widths: tuple[int, ...] | None = None
    projections: tuple[str, ...] | None = None
    caches: tuple[str, ...] | None = None
    new_tokens: tuple[int, ...] | None = None
    impls: tuple[str, ...] | None = None


# A case with the implementations to measure in it.
Entry = tuple[Case, tuple[str, ...]]


@dataclass(frozen=True, kw_only=True)
class Job:
    """Cells that share a process, group by group; all cells of a group are interleaved.

    A group holds what will be compared with each other: every implementation of a case, and the
    cases that differ in nothing but the position encoding, the projection or the cache.
    """

    groups: tuple[tuple[Entry, ...], ...]

    @property
    def cases(self) -> tuple[Entry, ...]:
        """Every case with its implementations, in order."""
        return tuple(itertools.chain.from_iterable(self.groups))

    def cells(self) -> Iterator[Cell]:
        """Every cell of the group, in order."""
        for case, impls in self.cases:
            for impl in impls:
                yield Cell(case=case, impl=impl)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """All cells in order, the groups to measure, and the rows that are decided without it.

    `passes` are the cells to measure in the first fresh process of each, in the second, and so
    on: all of them, unless a run is resumed.
    """

    cells: tuple[Cell, ...]
    jobs: tuple[Job, ...]
    decided: tuple[Record, ...] = field(default=())
    passes: tuple[tuple[Cell, ...], ...] = field(default=())


def make_plan(
    cells: Iterable[Cell],
    reasons: dict[tuple[str, str], str | None],
    *,
    processes: int = 1,
    done: Container[tuple[tuple[str, str], int]] = (),
    misfits: Mapping[str, str | None] | None = None,
) -> Plan:
    """Order the cells, group those to be measured, and decide the others.

    `reasons` maps a cell's key to why its implementation cannot take its case, or None, and
    `misfits` the id of a case to why it is not what was asked for. Each cell is measured in as
    many fresh `processes`; `done` has the keys and processes that were already.
    """
    unique = {cell.key: cell for cell in cells}
    decided, wanted = [], []
    for cell in unique.values():
        senseless = impossible(cell.case) or (misfits or {}).get(cell.case.case_id)
        against = reasons.get(cell.key)
        if senseless:
            decided.append(Record(cell=cell, status="skipped", reason=senseless))
        elif against:
            decided.append(Record(cell=cell, status="unsupported", reason=against))
        else:
            wanted.append(cell)
    return Plan(
        cells=tuple(unique.values()),
        jobs=tuple(jobs_of(wanted)),
        decided=tuple(decided),
        passes=tuple(
            tuple(cell for cell in wanted if (cell.key, process) not in done)
            for process in range(processes)
        ),
    )


def jobs_of(cells: Iterable[Cell]) -> Iterator[Job]:
    """Groups of one workload, pass and dtype share processes, the small ones first in each."""
    by_case: dict[str, tuple[Case, list[str]]] = {}
    for cell in cells:
        by_case.setdefault(cell.case.case_id, (cell.case, []))[1].append(cell.impl)
    groups: dict[str, list[Entry]] = {}
    for case, impls in by_case.values():
        alike = replace(case, position=Position(), projection=None, cache=None)
        groups.setdefault(alike.case_id, []).append((case, tuple(impls)))
    kinds: dict[tuple[str, str, str], list[tuple[Entry, ...]]] = {}
    for group in groups.values():
        case = group[0][0]
        kinds.setdefault((case.workload, case.pass_, case.dtype), []).append(tuple(group))
    for kind in kinds.values():
        kind.sort(key=lambda group: work(group[0][0]))
        count = -(-len(kind) // GROUPS_PER_JOB)
        for first in range(count):  # dealt out one by one: each process gets small and large ones
            yield Job(groups=tuple(kind[first::count]))


def work(case: Case) -> float:
    """Rough number of multiply-adds of a case: for ordering and for the time still to go."""
    return TRAITS.get(case.workload).work(case)
