"""Advice measured within a budget: which stored run will do, what fits, and how long each races."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnbench.base import units
from attnbench.errors import StoreError, UsageError
from attnbench.machine.host import same_machine
from attnbench.planning.advice import by_share
from attnbench.planning.forecast import Forecast
from attnbench.planning.plan import Job, Plan
from attnbench.store.folder import SWEEP, RunFolder
from attnbench.store.runs import load_info, load_run
from attnbench.theory.choices import DEFAULT

if TYPE_CHECKING:
    from attnbench.execution.runner import Executor
    from attnbench.execution.session import SweepRequest

_START_S = 1.0  # of the processes of a group, beside what the forecast has


def counts_of(steps: Mapping[str, Mapping[str, int]]) -> dict[str, int]:
    """How often any step makes each call, by the case's id."""
    found: dict[str, int] = {}
    for calls in steps.values():
        for case_id, count in calls.items():
            found[case_id] = found.get(case_id, 0) + count
    return found


def stored(plan: Plan, environment: Mapping[str, Any], request: SweepRequest) -> Path | None:
    """The latest run of this machine in which every case has the default and another one timed."""
    every = Counter(cell.case.case_id for cells in plan.passes for cell in cells)
    asked = [case_id for case_id, count in every.items() if count > 1]
    for folder in reversed(RunFolder.all_in(SWEEP, request.output)):
        with contextlib.suppress(StoreError):  # a damaged one is not what was asked about
            if not same_machine(load_info(folder.path).get("environment") or {}, environment):
                continue
            timed: dict[str, set[str]] = {}
            for record in load_run(folder.path).records:
                if record.samples:
                    timed.setdefault(record.cell.case.case_id, set()).add(record.cell.impl)
            if all(DEFAULT in (found := timed.get(i, set())) and len(found) > 1 for i in asked):
                return folder.path
    return None


def check_budget(plan: Plan, forecast: Forecast, spent_s: float) -> None:
    """Refuse a budget in which no group of cells can end.

    Raises:
        UsageError: with the least budget that works.
    """
    groups = [replace(job, groups=(group,)) for job in plan.jobs for group in job.groups]
    least_s = min((forecast.seconds(job.cells()) for job in groups), default=0.0)
    least_s += spent_s + _START_S
    if forecast.limit_s is not None and least_s > forecast.limit_s:
        raise UsageError(
            f"--budget {units.seconds(forecast.limit_s)} is too short for one round of checks and"
            f" calls: give at least {units.seconds(1.2 * least_s)}, or fewer --impls"
        )


def racing(
    jobs: Iterable[Job], runner: Executor, forecast: Forecast, left_s: Callable[[], float],
    counts: Mapping[str, int], declined: dict[str, float],
) -> Iterator[Job]:  # fmt: skip
    """The jobs of `by_share`; while one runs, the settings have how long it may race.

    Cases that do not fit are `declined`, by their ids, with the seconds that they would take.
    """
    for job, seconds in by_share(jobs, forecast, lambda: left_s() - _START_S, counts):
        if seconds < 0:
            declined |= {case.case_id: round(_START_S - seconds, 3) for case, _ in job.cases}
            continue
        runner.settings = replace(runner.settings, race_s=seconds, max_time_s=seconds)
        yield job
