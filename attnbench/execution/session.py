"""One sweep from options to a finished run folder: plan, run, store; it yields what happens."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections import Counter
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec

from attnbench.base import units
from attnbench.base.files import digest
from attnbench.base.git import commit_of
from attnbench.base.registry import require
from attnbench.errors import AttnbenchError, StoreError, UsageError
from attnbench.execution import advising, merging
from attnbench.execution.events import Events, Planned, Starting, Warned
from attnbench.execution.process import Settings
from attnbench.execution.runner import Executor, LocalRunner
from attnbench.machine.environment import Environment, asked
from attnbench.planning.advice import ROUNDS, TIMING
from attnbench.planning.forecast import QUICK, Forecast, balanced
from attnbench.planning.plan import (
    Axes,
    Job,
    Plan,
    check_names,
    chosen,
    expand,
    implementations,
    jobs_of,
    make_plan,
    mismatch,
    named,
    sharded,
    steps_of,
)
from attnbench.planning.presets import PRESETS
from attnbench.schema.messages import Catalogue
from attnbench.schema.record import Cell, Record
from attnbench.store.folder import SWEEP, RunFolder, check_name
from attnbench.store.runs import load_info, load_run, new_run, write_info
from attnbench.version import __version__

Facts = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class SweepRequest:
    """What `attnbench sweep` was asked for. `options` is what `run.json` keeps for people.

    `shard` is the part of the plan to measure, and of how many, from (1, count) on. After
    `max_total_time_s` no group of cells begins any more, nor one that would end later. `ray` is the
    address of a cluster to measure on, in place of this machine. `baseline` is the implementation
    that the run's ratios are against, unless another is asked for when it is read. `left_out` is
    what a model has and no case of the sweeps. If `stored`, a run of this machine will do that
    tried all of it. `forecasts` asks how long it will take; a dry run and a limit do, too. In a
    race (`Settings.race_s`) the time goes first where a step spends most. `program` is the report
    of a program whose calls are the first of the `sweeps`.
    """

    sweeps: tuple[Axes, ...]
    settings: Settings = field(default_factory=Settings)
    output: Path = Path("results")
    name: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    shard: tuple[int, int] | None = None
    max_total_time_s: float | None = None
    ray: str | None = None
    baseline: str | None = None
    left_out: str = ""
    stored: bool = False
    forecasts: bool = False
    program: dict[str, Any] | None = None


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
            runs = _runs_here(request.output, here)
            if known := advising.stored(plan, reversed(runs), request.settings):
                return known
        forecast = None
        if dry_run or request.max_total_time_s or (request.forecasts and not race):
            forecast = _forecast(plan, runner, here, request.output, request.max_total_time_s)
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
            machines = _Machines(folder, load_info(folder.path))
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
            machines = _Machines(folder, run.info, mixed=mixed, nodes=ray is not None)
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
                forecast = _forecast(plan, runner, first, path.parent, max_total_time_s)
            yield Planned(plan, None if dry_run else path, forecast)
            if not dry_run:
                yield from _measure(plan, runner, folder, machines, forecast)
    return path


class _Machines:
    """The environments of a run, as `run.json` has them: whose records may stand beside theirs."""

    def __init__(
        self, folder: RunFolder, info: Facts, *, mixed: bool = True, nodes: bool = False
    ) -> None:
        self.folder, self.info, self._mixed = folder, info, mixed
        self._names = asked("nodes" if nodes else "resume")  # the same experiment
        first = {"attnbench": self.info.get("attnbench")} | self.info["environment"]
        self.environments: dict[str, Facts] = {"": first} | self.info.get("environments", {})
        self._keys: dict[str, str] = {}  # by those of an executor

    def admit(self, facts: Facts) -> Facts:
        """The facts of a machine, with the ceilings that the run knows of it.

        Raises:
            UsageError: it is like none of the run's.
        """
        here = Environment(facts)
        every = [
            Environment(known).differences(here, self._names)
            for known in self.environments.values()
        ]
        if (lines := min(every, key=len)) and not self._mixed:
            raise UsageError(
                f"this is not where the run began: {'; '.join(map(str, lines))} (--resume); start a"
                " new run, or measure the rest here with --mixed: the table then names both"
            )
        known = self.environments.get(self.like(facts), {})
        return facts | ({"ceilings": known["ceilings"]} if "ceilings" in known else {})

    def like(self, facts: Facts) -> str:
        """Under what `run.json` has a machine like this one, or would have it."""
        names, here = (*asked("resume"), *asked("node")), Environment(facts)
        of = ((key, Environment(known)) for key, known in self.environments.items())
        return next((key for key, one in of if not one.differences(here, names)), here.key)

    def key(self, own: str, facts: Facts) -> str:
        """Under what `run.json` has the facts that an executor has as `own`, from now on."""
        if own not in self._keys:
            self._keys[own] = self.like(facts)
        known = self.environments.get(key := self._keys[own], {})
        latest = {name: facts[name] for name in facts.keys() & {"ceilings"}}
        if (found := facts | known | latest) != known:
            self.environments[key] = found
            others = {k: v for k, v in self.environments.items() if k}
            self.info |= {"environment": self.environments[""]}
            self.info |= {"environments": others} if others else {}
            write_info(self.folder, self.info)
        return key


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


_LEARNED_FROM = 5  # of the runs of a machine the latest


def _forecast(
    plan: Plan, runner: Executor, environment: Facts, output: Path, limit_s: float | None
) -> Forecast:
    """What is known of how long cells take on a machine like this, from runs in the same folder."""
    race = runner.settings.race_s is not None
    timing = TIMING if race else (runner.settings.min_time_s, runner.settings.max_time_s)
    forecast = Forecast(timing, limit_s=limit_s, rounds=ROUNDS if race else None)
    forecast.needs, forecast.free = runner.needs([c for job in plan.jobs for c in job.cells()])
    for path in _runs_here(output, environment)[-_LEARNED_FROM:]:
        with contextlib.suppress(StoreError):
            run = load_run(path)
            known = run.info.get("settings") or {}
            own = known.get("min_time_s", 0.1), known.get("max_time_s", 1.0)
            for part in run.parts:
                forecast.learn(part, own)
    if not race and isinstance(runner, LocalRunner):
        _calibrate(forecast, runner, plan)
    return forecast


def _calibrate(forecast: Forecast, runner: LocalRunner, plan: Plan) -> None:
    """Measure a few short calls for the forecast; where that fails, it knows sizes alone."""
    if not (asked := forecast.calibration(cell for cells in plan.passes for cell in cells)):
        return
    (job, limit_s), settings, begin = asked, runner.settings, time.perf_counter()
    runner.settings = replace(settings, min_time_s=QUICK[0], max_time_s=QUICK[1])
    with contextlib.suppress(AttnbenchError):
        for event in runner.run([job]):
            if isinstance(event, Record):
                forecast.learn(event, QUICK)
            if time.perf_counter() - begin > limit_s:
                break
    runner.close()
    runner.settings, forecast.calibrated_s = settings, time.perf_counter() - begin


def _runs_here(output: Path, environment: Facts) -> list[Path]:
    """The runs of a machine like this one, the oldest first."""
    found = []
    for folder in RunFolder.all_in(SWEEP, output):
        with contextlib.suppress(StoreError):  # damaged: it is not what was asked about
            known = Environment(load_info(folder.path).get("environment") or {})
            if known.same_machine(Environment(environment)):
                found.append(folder.path)
    return found


def _measure(
    plan: Plan,
    runner: Executor,
    folder: RunFolder,
    machines: _Machines,
    forecast: Forecast | None,
    counts: Mapping[str, int] | None = None,
) -> Generator[object, None, list[Record]]:
    for record in plan.decided:
        folder.append(record.to_line())
        yield record
    cases = [cell.case for cells in plan.passes for cell in cells]
    runner.limits = sorted({case.dtype for case in cases}), sorted({case.threads for case in cases})
    spent: Any = Counter(machines.info.get("spent"))
    failed: set[tuple[str, str]] = set()
    declined: dict[str, float] = {}
    seen: list[Record] = []

    limit_s = None if forecast is None else forecast.limit_s

    def jobs() -> Iterator[Job]:
        for process, cells in enumerate(plan.passes):
            left = (cell for cell in cells if cell.key not in failed)
            own = jobs_of(left, joined=plan.joined)
            if forecast is not None and limit_s is not None:
                left_s = partial(_left_s, runner.began + limit_s)
                if counts is None:
                    own = balanced(own, forecast, left_s)
                else:
                    own = advising.racing(own, forecast, left_s, counts, declined, seen)
            for job in own:
                yield replace(job, process=max(process, job.process))

    for event in runner.run(jobs()):
        if not isinstance(event, Record):
            yield event
            continue
        own = event.environment
        key = machines.key(own, runner.environments[own]) if own else ""
        record = replace(event, environment=key)
        if counts is not None and record.process and record.status in ("skipped", "timeout"):
            continue  # no time for it once more: what the first process measured stands
        folder.append(record.to_line())
        seen.append(record)
        yield record
        if forecast is not None:
            forecast.learn(record)
        if record.status != "ok":
            failed.add(record.cell.key)  # it stays failed: no need to wait for it again
        spent.update(record.spent_s)
    for own, facts in runner.environments.items():
        machines.key(own, facts)
    spent.update({"ceilings": runner.ceilings_s} if runner.ceilings_s else {})
    spent.update({"start-up": runner.start_up_s, "wall_s": time.perf_counter() - runner.began})
    total = {name: round(seconds, 3) for name, seconds in spent.items()}
    left_out = {"declined": declined} if declined else {}
    write_info(folder, machines.info | {"spent": total} | left_out)
    return seen


def _left_s(until: float) -> float:
    return until - time.perf_counter()


PRESET_ON = {"cpu": "verify", "cuda": "verify-gpu"}


def sweep_for_verdicts(
    settings: Settings, *, impls: tuple[str, ...], output: Path, name: str | None
) -> Events[Path]:
    """Run the sweep that verdicts on growth need on this device; return the run's folder.

    The verdicts themselves are `analysis.scaling`'s, and are the same for any run. `settings` say
    device, threads (None: one), files and seed. With `impls` or files it is they
    that are measured, in the sweeps of core implementations alone (`attention`).

    Raises:
        UsageError: an unknown name, a file that does not load, a device that is not there.
    """
    with LocalRunner(settings) as runner:
        device = runner.catalogue().device
        asked = tuple(chosen(impls, runner.own))
    preset = PRESETS.get(PRESET_ON[device])
    cores = (axes for axes in preset.sweeps if axes.workload == "attention")
    sweeps = tuple(axes.having(impls=asked) for axes in cores) if asked else preset.sweeps
    request = SweepRequest(
        sweeps=tuple(axes.having(threads=(settings.threads or 1,)) for axes in sweeps),
        settings=replace(
            settings,
            device=device,
            threads=None,
            allocator=preset.allocator,
            min_time_s=preset.min_time_s,
            max_time_s=preset.max_time_s,
        ),
        output=output,
        name=name,
        options={"preset": PRESET_ON[device], "command": "verify"}
        | ({"impls": asked} if asked else {})
        | ({"files": settings.files} if settings.files else {}),
    )
    path = yield from sweep(request)
    assert path is not None, "no dry run was asked for"
    return path
