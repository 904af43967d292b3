"""`attnbench sweep`: measure, with a live display and a table at the end."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from attnbench.base.units import ALL_THREADS
from attnbench.cli.options import (
    AXIS_FIELDS,
    axes_options,
    command_options,
    given,
    impl_files,
    show,
)
from attnbench.errors import UsageError

if TYPE_CHECKING:
    from attnbench.execution.events import Events
    from attnbench.execution.request import SweepRequest

_WITH_RESUME = (
    "resume", "retry", "output", "dry_run", "quiet", "max_total_time", "on", "ray_address", "mixed",
)  # fmt: skip
_GOES_WITH = {"ray_address": "--on ray", "retry": "--resume RUN", "mixed": "--resume RUN"}


@click.command()
@command_options(
    "sweep",
    axes=axes_options(),
    impl=impl_files(
        "A Python file with your implementations: all, unless --impls names some of them. Beside"
        " them run those that --impls names [the preset's, else all exact ones]."
    ),
)
def sweep(**options: Any) -> None:
    """Measure implementations over lengths, heads, batch and more.

    Axes multiply. Every cell is checked against a float64 reference before it is timed; each
    result is stored as soon as it exists, so that --resume continues after any interruption.
    Exits 1 if a result was incorrect, 2 if no cell was measured.
    """
    from attnbench.cli.plan import document as plan_document
    from attnbench.cli.progress import SweepDisplay
    from attnbench.execution import session
    from attnbench.execution.events import Planned, follow
    from attnbench.report.documents.sweep import document
    from attnbench.schema.record import FAILURES
    from attnbench.store.folder import SWEEP, RunFolder
    from attnbench.store.runs import load_run

    quiet, dry_run = options.pop("quiet"), options.pop("dry_run")
    text = options["retry"]
    retry = [] if text is None else [status.strip() for status in text.split(",")]
    for status in (status for status in retry if status not in FAILURES):
        raise UsageError(f"--retry takes any of {', '.join(FAILURES)}, not {status!r:.40}")
    there = {"--on ray": options["on"] == "ray", "--resume RUN": options["resume"] is not None}
    for name, other in _GOES_WITH.items():
        if options[name] and not there[other]:
            raise UsageError(f"--{name.replace('_', '-')} goes with {other}")
    ray = (options["ray_address"] or "auto") if options["on"] == "ray" else None

    def planned(event: object) -> None:
        if dry_run and isinstance(event, Planned):
            show(plan_document(event))

    with SweepDisplay(quiet=quiet) as display:
        if options["resume"] is not None:
            flags = [flag for name, flag in given().items() if name not in _WITH_RESUME]
            if flags:
                raise UsageError(
                    f"--resume takes everything from the run itself; remove {', '.join(flags)}"
                )
            folder = RunFolder.find(options["resume"], options["output"], SWEEP)
            display.resumable(folder.path)
            events: Events[Path | None] = session.resume(
                folder, retry=retry, max_total_time_s=options["max_total_time"],
                dry_run=dry_run, ray=ray, mixed=options["mixed"],
            )  # fmt: skip
        else:
            request = replace(_request(options, ray), forecasts=not quiet)
            events = session.sweep(request, dry_run=dry_run)
        path = follow(events, display.show, planned)
    if dry_run or path is None:
        return
    run = load_run(path)
    found = document(run, brief=True)
    if quiet:
        click.echo(path)
    else:
        show(found)
    if found.exit_code:
        raise SystemExit(found.exit_code)


def _request(options: dict[str, Any], ray: str | None) -> SweepRequest:
    """What was asked for: the preset, and above it whatever stands on the command line."""
    from attnbench.execution.process import Settings
    from attnbench.execution.request import SweepRequest
    from attnbench.planning.models import asked_sweeps, model_sizes
    from attnbench.planning.plan import Axes
    from attnbench.planning.presets import PRESETS, Preset

    plain = Preset(doc="", sweeps=(Axes(),), min_time_s=0.1, max_time_s=1.0)
    preset = PRESETS.get(options["preset"]) if options["preset"] else plain
    least, most = options["min_time"], options["max_time"]
    sweeps, left_out = asked_sweeps(
        preset.sweeps,
        {name: options[name] for name in (*AXIS_FIELDS, "threads")},
        **{name: options[name] for name in ("preset", "model", "step", "tokens", "case", "cases")},
    )
    taken = ("seed", "precision", "processes", "l2", "timer", "energy", "memory_limit", "ceilings")
    return SweepRequest(
        sweeps=sweeps,
        left_out=left_out,
        settings=Settings(
            device=preset.device if options["device"] == "auto" else options["device"],
            files=tuple(str(Path(file).resolve()) for file in options["files"]),
            # Where one alone is given, the preset's other gives way.
            min_time_s=least or min(preset.min_time_s, most or preset.min_time_s),
            max_time_s=most or max(preset.max_time_s, least or preset.max_time_s),
            timeout_s=options["timeout"],
            prune=not options["no_prune"],
            allocator=options["allocator"] or preset.allocator,
            model=model_sizes(options["model"], options["workload"]),
            **{name: options[name] for name in taken},
        ),
        output=options["output"],
        name=options["name"],
        shard=options["shard"],
        ray=ray,
        baseline=options["baseline"],
        max_total_time_s=options["max_total_time"],
        options={name: _written(v) for name, v in options.items() if v},
    )


def _written(value: Any) -> Any:
    """An option as run.json keeps it for people."""
    if isinstance(value, tuple):
        return ["all" if part == ALL_THREADS else part for part in value]
    return str(value) if isinstance(value, Path) else value
