"""Ask a machine whether cost grows as declared: measure what the verdicts need.

The verdicts themselves are `analysis.scaling`'s, and are the same for any run.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from attnbench.execution.runner import LocalRunner
from attnbench.execution.session import Listener, Request, sweep
from attnbench.execution.settings import Settings
from attnbench.planning.plan import Axes
from attnbench.planning.presets import PRESETS, Preset

PRESET_ON = {"cpu": "verify", "cuda": "verify-gpu"}


@dataclass(frozen=True, kw_only=True)
class Wish:
    """What `attnbench verify --sweep` was asked for; None means as the preset has it."""

    device: str = "auto"
    impls: tuple[str, ...] | None = None
    files: tuple[str, ...] = ()
    threads: int | None = None
    seed: int = 0
    output: Path = Path("results")
    name: str | None = None


def measure(wish: Wish, listener: Listener) -> Path:
    """Run the sweep that verdicts need on this device; return the run's folder.

    With `impls` or `files` it is they that are measured, in the sweeps of core implementations
    alone: no layers, decoding or networks.

    Raises:
        UsageError: an unknown name, a file that does not load, a device that is not there.
    """
    settings = Settings(device=wish.device, files=wish.files, seed=wish.seed)
    with LocalRunner(settings) as runner:
        device = runner.catalogue()["device"]
        named = (*(wish.impls or ()), *runner.user_names)
    name = PRESET_ON[device]
    preset = PRESETS.get(name)
    request = Request(
        sweeps=_sweeps(preset, tuple(dict.fromkeys(named))),
        settings=replace(
            settings,
            device=device,
            threads=wish.threads or preset.threads,
            allocator=preset.allocator,
            min_time_s=preset.min_time_s,
            max_time_s=preset.max_time_s,
        ),
        output=wish.output,
        name=wish.name,
        options={"preset": name, "command": "verify"} | ({"impls": named} if named else {}),
    )
    path = sweep(request, listener)
    assert path is not None, "no dry run was asked for"
    return path


def _sweeps(preset: Preset, named: tuple[str, ...]) -> tuple[Axes, ...]:
    """The preset's sweeps; with names given, those of cores alone, with these in their place."""
    if not named:
        return preset.sweeps
    return tuple(
        replace(axes, impls=named) for axes in preset.sweeps if axes.workload == "attention"
    )
