"""How far off the forecasts of `sweep --dry-run` are, by the runs in a folder."""

from __future__ import annotations

from pathlib import Path

from attnbench.base.units import ratio, seconds
from attnbench.execution.store import Run, load_run, runs_in
from attnbench.planning.forecast import Forecast
from tests.validation.page import Table


def tables(output: Path) -> list[Table]:
    """Of each run: its wall time against what its sizes say, and what each other run here says."""
    runs = [run for run in map(load_run, runs_in(output)) if "wall_s" in run.info.get("spent", {})]
    rows = []
    for run in runs:
        name = run.environments[""].get("device_name")
        others = [o for o in runs if o is not run and o.environments[""].get("device_name") == name]
        rows += [_row(run, other) for other in (None, *others)]
    held = sum(row[-1] == "yes" for row in rows)
    return [
        Table(
            title=f"Forecasts: {held} of {len(rows)} wall times between their ends",
            header=("run", "by", "forecast", "took", "took / forecast", "between"),
            rows=tuple(rows),
        )
    ]


def _row(run: Run, known: Run | None) -> tuple[str, ...]:
    forecast = Forecast(_timing(run))
    for part in known.parts if known else ():
        forecast.learn(part, _timing(known or run))
    found = forecast.total(part.cell for part in run.parts if part.spent_s)
    took_s: float = run.info["spent"]["wall_s"]
    between = "yes" if found.low <= took_s <= found.high else "no"
    by = known.run_id if known else "sizes"
    return run.run_id, by, str(found), seconds(took_s), ratio(took_s / found.seconds), between


def _timing(run: Run) -> tuple[float, float]:
    settings = run.info["settings"]
    return settings["min_time_s"], settings["max_time_s"]
