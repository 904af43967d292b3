"""What a sweep is asked for."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from attnbench.execution.process import Settings
from attnbench.planning.plan import Axes


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
