"""The sweep that verdicts on growth need."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from attnbench.execution.events import Events
from attnbench.execution.process import Settings
from attnbench.execution.request import SweepRequest
from attnbench.execution.runner import LocalRunner
from attnbench.execution.session import sweep
from attnbench.planning.plan import chosen
from attnbench.planning.presets import PRESETS

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
