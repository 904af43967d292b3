"""How long a plan will take on this machine: from runs in the same folder, or a few short calls."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from attnbench.errors import AttnbenchError, StoreError
from attnbench.execution.runner import Executor, LocalRunner
from attnbench.machine.environment import Environment
from attnbench.planning.advice import ROUNDS, TIMING
from attnbench.planning.forecast import QUICK, Forecast
from attnbench.planning.plan import Plan
from attnbench.schema.record import Record
from attnbench.store.folder import SWEEP, RunFolder
from attnbench.store.runs import load_info, load_run

_LEARNED_FROM = 5  # of the runs of a machine the latest


def forecast_of(
    plan: Plan,
    runner: Executor,
    environment: Mapping[str, Any],
    output: Path,
    limit_s: float | None,
) -> Forecast:
    """What is known of how long cells take on a machine like this, from runs in the same folder."""
    race = runner.settings.race_s is not None
    timing = TIMING if race else (runner.settings.min_time_s, runner.settings.max_time_s)
    forecast = Forecast(timing, limit_s=limit_s, rounds=ROUNDS if race else None)
    forecast.needs, forecast.free = runner.needs([c for job in plan.jobs for c in job.cells()])
    for path in runs_here(output, environment)[-_LEARNED_FROM:]:
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


def runs_here(output: Path, environment: Mapping[str, Any]) -> list[Path]:
    """The runs of a machine like this one, the oldest first."""
    found = []
    for folder in RunFolder.all_in(SWEEP, output):
        with contextlib.suppress(StoreError):  # damaged: it is not what was asked about
            known = Environment(load_info(folder.path).get("environment") or {})
            if known.same_machine(Environment(environment)):
                found.append(folder.path)
    return found
