"""One sweep from options to a finished run folder: plan, run, store; it yields what happens."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec

from attnbench.base import units
from attnbench.base.files import digest
from attnbench.base.git import commit_of
from attnbench.base.registry import require
from attnbench.errors import StoreError, UsageError
from attnbench.execution import advising, merging
from attnbench.execution.events import Events, Planned, Starting, Warned
from attnbench.execution.forecasting import forecast_of, runs_here
from attnbench.execution.machines import Machines
from attnbench.execution.process import Settings
from attnbench.execution.request import SweepRequest
from attnbench.execution.runner import Executor, LocalRunner
from attnbench.execution.schedule import Schedule
from attnbench.planning.forecast import Forecast
from attnbench.planning.plan import (
    Plan,
    check_names,
    chosen,
    expand,
    implementations,
    make_plan,
    mismatch,
    named,
    sharded,
    steps_of,
)
from attnbench.schema.messages import Catalogue
from attnbench.schema.record import Cell, Record
from attnbench.store.folder import RunFolder, check_name
from attnbench.store.runs import load_info, load_run, new_run, write_info
from attnbench.version import __version__

Facts = dict[str, Any]


def sweep(request: SweepRequest, *, dry_run: bool = False) -> Events[Path | None]:
    """Plan and measure everything asked for; return the run's folder (None for a dry run).

    Raises:
        UsageError: nothing in the request makes sense; nothing was written.
        StoreError: the run's folder cannot be made or written.
    """
    if request.name is not None:
        check_name(request.name)
    if request.settings.l2 is None and any(
        a.step and (a.workload == "decode" or a.values.get("kv_lens")) for a in request.sweeps
    ):
        request = replace(request, settings=replace(request.settings, l2="step"))
    with _executor(request.settings, request.ray) as runner:
        if request.left_out:
            yield Warned(f"the cases leave out what the model has: {request.left_out}")
        catalogue = yield from _catalogue(runner)
        check_names(request.sweeps, catalogue)
        for name in ("timer", "energy"):
            if getattr(request.settings, name) and catalogue.device != "cuda":
                where = f"this run is on {catalogue.device}"
                raise UsageError(f"--{name} needs a GPU ({where}); leave it out")
        whole = plan = _plan(request, catalogue, runner)
        names = dict.fromkeys(cell.impl for cell in plan.cells)
        require("implementation", filter(None, [request.baseline]), names, "--baseline")
        if request.shard is not None:
            plan = sharded(whole, *request.shard)
        plan = _joined(plan, runner, request.max_total_time_s)
        here, race = catalogue.environment, request.settings.race_s is not None
        if request.stored:
            runs = runs_here(request.output, here)
            if known := advising.stored(plan, reversed(runs), request.settings):
                return known
        forecast = None
        if dry_run or request.max_total_time_s or (request.forecasts and not race):
            forecast = forecast_of(plan, runner, here, request.output, request.max_total_time_s)
        if race and request.max_total_time_s:
            advising.check_budget(request.max_total_time_s, time.perf_counter() - runner.began)
        steps = steps_of(request.sweeps, catalogue.device, here["threads"])
        if dry_run:
            yield Planned(plan, None, forecast, steps)
            return None
        info = {
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "attnbench": __version__,
            **commit_of(Path.cwd()),
            "options": request.options,
            "settings": msgspec.to_builtins(request.settings),
            "files": {file: digest(Path(file)) for file in request.settings.files},
            "environment": catalogue.environment,
            "implementations": msgspec.to_builtins(catalogue.implementations),
            "plan": [cell.to_json() for cell in plan.cells],
        }
        if runner.own:
            info["own"] = [name for names in runner.own for name in names]
        if request.program is not None:
            calls = zip(request.program["cases"], request.sweeps, strict=False)
            [*ids] = (next(expand(of, catalogue.device, here["threads"])) for _, of in calls)
            info["program"] = request.program | {"case_ids": [case.case_id for case in ids]}
        if plan.not_here:
            info["not_here"] = dict(plan.not_here)
        if request.baseline is not None:
            info["baseline"] = request.baseline
        if steps:
            info["steps"] = steps
        if request.left_out:
            info["left_out"] = request.left_out
        if request.shard is not None:
            info["shard"] = merging.shard_of(whole, *request.shard)
        with new_run(request.output, request.name, info) as folder:
            yield Planned(plan, folder.path, forecast)
            machines = Machines(folder, load_info(folder.path))
            counts = sum(map(Counter, steps.values()), Counter()) if race else None
            records = yield from _measure(plan, runner, folder, machines, forecast, counts)
            try:
                advising.check_called(records if race else (), request.max_total_time_s or 0.0)
            except UsageError:
                shutil.rmtree(folder.path)
                raise
            return folder.path


def _executor(settings: Settings, ray: str | None) -> Executor:
    if ray is None:
        return LocalRunner(settings)
    from attnbench.execution.cluster import RayRunner

    return RayRunner(settings, ray)


def resume(
    folder: RunFolder,
    *,
    retry: Sequence[str] = (),
    max_total_time_s: float | None = None,
    dry_run: bool = False,
    ray: str | None = None,
    mixed: bool = False,
) -> Events[Path]:
    """Measure what a run planned and has no record of, as the run was set up.

    What has a status of `retry` counts as missing. `max_total_time_s` and `ray` are as in
    `SweepRequest`; with `mixed` any machine will do, and its records name it.

    Raises:
        StoreError: the folder is not a run, its plan is damaged, or a file of the user's changed.
        UsageError: this machine or installation is not the one that began the run.
    """
    path = folder.path
    with contextlib.ExitStack() as held:
        # Locked before it is read: a process that still measures adds records, seconds, machines.
        if not dry_run:
            held.enter_context(folder.lock())
        run = load_run(path)
        try:
            settings = msgspec.convert(vars(Settings(**run.info["settings"])), Settings)
            settings = replace(settings, files=run.files)  # refused if changed since
            machines = Machines(folder, run.info, mixed=mixed, nodes=ray is not None)
        except (KeyError, TypeError, ValueError, AttributeError, UsageError) as err:
            raise StoreError(
                f"{folder.file} has no plan to resume ({type(err).__name__}: {err})"
            ) from err
        parts = [record for record in run.parts if record.status not in retry]
        suspects = {r.cell.key: f"{r.status}: {r.reason}" for r in run.parts if r.status in retry}
        done = {(record.cell.key, record.process) for record in parts}
        # One that failed in any process has failed for good.
        over = {record.cell.key for record in parts if record.status != "ok"}
        asked = [cell for cell in run.cells if cell.key not in over]
        processes = settings.processes
        missing = [c for c in asked if any((c.key, i) not in done for i in range(processes))]
        plan = Plan(cells=(), jobs=())
        with _executor(settings, ray) as runner:
            runner.admit, runner.suspects = machines.admit, suspects
            if missing:
                catalogue = yield from _catalogue(runner)
                named((cell.impl for cell in missing), catalogue)  # raises where one is gone
                plan = make_plan(missing, runner.reasons(missing), processes=processes, done=done)
                plan = _joined(plan, runner, max_total_time_s)
                here = machines.like(catalogue.environment)  # others may have more memory
                out = (part for part in parts if part.status == "oom" and part.environment == here)
                runner.pruning.oom += [part.cell for part in out]
            forecast = None
            if dry_run or max_total_time_s:
                first = machines.environments[""]
                forecast = forecast_of(plan, runner, first, path.parent, max_total_time_s)
            yield Planned(plan, None if dry_run else path, forecast)
            if not dry_run:
                yield from _measure(plan, runner, folder, machines, forecast)
    return path


def _catalogue(runner: Executor) -> Events[Catalogue]:
    runner.start()
    yield Starting()
    catalogue = runner.catalogue()
    yield from map(Warned, runner.warnings)
    return catalogue


def _plan(request: SweepRequest, catalogue: Catalogue, runner: Executor) -> Plan:
    cells: list[Cell] = []
    mismatches: dict[str, str | None] = {}
    for axes in request.sweeps:
        names = implementations(axes, catalogue, runner.own)
        for case in expand(axes, catalogue.device, catalogue.environment["threads"]):
            mismatches[case.case_id] = mismatch(axes, case)
            cells += [Cell(case=case, impl=name) for name in names]
    every = (chosen(axes.impls or (), runner.own) for axes in request.sweeps)
    asked = set(named(chain.from_iterable(every), catalogue))
    plan = make_plan(
        cells, runner.reasons(cells), processes=request.settings.processes, mismatches=mismatches,
        unnamed={cell.impl for cell in cells} - asked,
    )  # fmt: skip
    if not plan.jobs:
        why = units.by_reason({each.cell.impl: str(each.reason) for each in plan.decided})
        if all(record.status == "skipped" for record in plan.decided):
            why = str(plan.decided[0].reason)  # nobody could make sense of any of it
        raise UsageError(why)
    runs = {cell.impl for job in plan.jobs for cell in job.cells()}
    by_preset = request.options.get("preset") and not request.options.get("impls")
    for record in () if by_preset else plan.decided:
        name = record.cell.impl
        if ":" in name and name not in runs:  # parameters that fit none of the cases
            raise UsageError(f"{name} (--impls) can take no case of this sweep: {record.reason}")
    return plan


def _joined(plan: Plan, runner: Executor, limit_s: float | None) -> Plan:
    """The plan with lengths that share rounds, unless jobs go to other machines or end early."""
    return replace(plan, joined=isinstance(runner, LocalRunner) and not limit_s)


def _measure(
    plan: Plan, runner: Executor, folder: RunFolder, machines: Machines,
    forecast: Forecast | None, counts: Mapping[str, int] | None = None,
) -> Generator[object, None, list[Record]]:  # fmt: skip
    for record in plan.decided:
        folder.append(record.to_line())
        yield record
    cases = [cell.case for cells in plan.passes for cell in cells]
    runner.limits = sorted({case.dtype for case in cases}), sorted({case.threads for case in cases})
    spent: Any = Counter(machines.info.get("spent"))
    limit_s = None if forecast is None else forecast.limit_s
    until = None if limit_s is None else runner.began + limit_s
    schedule = Schedule(plan, forecast, until, counts)
    for event in runner.run(schedule.jobs()):
        if not isinstance(event, Record):
            yield event
            continue
        own = event.environment
        key = machines.key(own, runner.environments[own]) if own else ""
        record = replace(event, environment=key)
        if schedule.learn(record):
            folder.append(record.to_line())
            yield record
            spent.update(record.spent_s)
    for own, facts in runner.environments.items():
        machines.key(own, facts)
    spent.update({"ceilings": runner.ceilings_s} if runner.ceilings_s else {})
    spent.update({"start-up": runner.start_up_s, "wall_s": time.perf_counter() - runner.began})
    total = {name: round(seconds, 3) for name, seconds in spent.items()}
    left_out = {"declined": schedule.declined} if schedule.declined else {}
    write_info(folder, machines.info | {"spent": total} | left_out)
    return schedule.records
