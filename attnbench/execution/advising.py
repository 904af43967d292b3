"""Advice measured within a budget: which stored run will do, what fits, and how long each races."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from attnbench.base import units
from attnbench.errors import StoreError, UsageError
from attnbench.planning.advice import by_share
from attnbench.planning.forecast import Forecast
from attnbench.planning.plan import Job, Plan, jobs_of
from attnbench.schema.record import Cell, Record
from attnbench.store.runs import load_run
from attnbench.theory.choices import DEFAULT

if TYPE_CHECKING:
    from attnbench.execution.process import Settings
    from attnbench.execution.runner import Executor

_START_S = 1.0  # of the processes of a group, beside what the forecast has
_FIRST = 0.75  # of the time that is left, for the first process: the second needs some


def stored(plan: Plan, runs: Iterable[Path], settings: Settings) -> Path | None:
    """The first of these runs that tried all that is asked of every call; None of files."""
    counts = Counter(cell.case.case_id for cell in plan.cells)
    asked = {cell.key for cell in plan.cells if counts[cell.case.case_id] > 1}
    defaults = {(case_id, DEFAULT) for case_id, _ in asked}
    for path in () if settings.files else runs:
        with contextlib.suppress(StoreError):  # a damaged one is not what was asked about
            known = {record.cell.key: record for record in load_run(path).records}
            if asked <= known.keys() and all(known[key].samples for key in defaults):
                return path
    return None


def check_budget(plan: Plan, forecast: Forecast, spent_s: float) -> None:
    """Refuse a budget in which no group of cells can end.

    Raises:
        UsageError: with the least budget that works.
    """
    groups = [
        replace(job, groups=(group,))
        for job in plan.jobs
        for group in job.groups
        if max(len(impls) for _, impls in group) > 1
    ]
    least_s = min((forecast.seconds(job.cells()) for job in groups), default=0.0) / _FIRST
    least_s += spent_s + _START_S
    if forecast.limit_s is not None and least_s > forecast.limit_s:
        raise UsageError(
            f"--budget {units.seconds(forecast.limit_s)} is too short for one round of checks and"
            f" calls: give at least {units.seconds(1.2 * least_s)}, or fewer --impls"
        )


def racing(
    jobs: Iterable[Job], runner: Executor, forecast: Forecast, left_s: Callable[[], float],
    counts: Mapping[str, int], declined: dict[str, float], seen: Sequence[Record],
) -> Iterator[Job]:  # fmt: skip
    """The jobs of `by_share`; while one runs, the settings have how long it may race.

    Cases that do not fit are `declined`, by their ids, with the seconds that they would take. Where
    the default lost, by the records `seen`, it meets who beat it in a fresh process once more: two
    of the same code differ by a few percent, which no number of rounds within one shows.
    """
    for process, share in ((0, _FIRST), (1, 1.0)):
        own = jobs if process == 0 else list(jobs_of(_to_confirm(seen)))
        room_s = partial(lambda part: part * (left_s() - _START_S), share)
        for job, seconds in by_share(own, forecast, room_s, counts):
            if seconds > 0:
                runner.settings = replace(runner.settings, race_s=seconds, max_time_s=seconds)
                yield replace(job, process=process)
            elif process == 0:
                declined |= {case.case_id: round(_START_S - seconds, 3) for case, _ in job.cases}


def _to_confirm(seen: Sequence[Record]) -> Iterator[Cell]:
    """The default of each case that it lost, and who did not lose there."""
    lost = {r.cell.key for r in seen if r.metrics.get("lost_to")}
    for case in {r.cell.case for r in seen if r.cell.impl == DEFAULT and r.cell.key in lost}:
        own = [r.cell for r in seen if r.cell.case == case and r.status == "ok"]
        yield from (c for c in own if c.impl == DEFAULT or c.key not in lost)
