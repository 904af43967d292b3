"""`attnbench sweep`: measure, with a live display and a table at the end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from attnbench.cli.axes import AXES, axes_options
from attnbench.cli.options import (
    POSITIVE,
    Command,
    device_option,
    given,
    impl_files,
    output_option,
    seed_option,
)
from attnbench.errors import ExitCode, UsageError

_BUDGET = (
    click.option(
        "--precision",
        type=POSITIVE,
        default=0.02,
        show_default=True,
        help="Stop a cell when the 95 % interval of its median is within ± this share.",
    ),
    click.option(
        "--min-time",
        type=POSITIVE,
        help="Seconds of samples at least; more make each robust [0.1].",
    ),
    click.option("--max-time", type=POSITIVE, help="Seconds of samples at most [1]."),
    click.option(
        "--processes",
        type=click.IntRange(min=1, max=100),
        default=1,
        show_default=True,
        help="Fresh processes to measure each cell in; the interval is then over them.",
    ),
    click.option(
        "--timeout",
        type=POSITIVE,
        default=300.0,
        show_default=True,
        help="Seconds without a sign of life after which a cell is given up.",
    ),
)
_CLOCK = (
    click.option(
        "--l2",
        type=click.Choice(["cold", "warm"]),
        help="The last cache before each call [cold on a GPU, warm on a CPU].",
    ),
    click.option(
        "--timer",
        type=click.Choice(["events", "graph"]),
        help="On a GPU: events around the calls, or calls replayed as a CUDA graph [events].",
    ),
    click.option(
        "--allocator",
        type=click.Choice(["settled", "keep"]),
        help="On a CPU: blocks from 32 MiB on go back to the system after each call, as in any long"
        " process, or the process keeps them [settled].",
    ),
    click.option(
        "--energy",
        is_flag=True,
        help="On a GPU: joules per call, from a loop of 2 s at least for each cell.",
    ),
)


def _timing(command: Command) -> Command:
    for option in reversed(_BUDGET + _CLOCK):
        command = option(command)
    return command


@click.command()
@click.option(
    "--preset",
    metavar="NAME",
    help="A ready sweep: quick, gpu, verify or verify-gpu; what is given overrides it.",
)
@axes_options()
@impl_files
@device_option
@click.option(
    "--threads", type=click.IntRange(min=1, max=1024), help="CPU threads [torch's default]."
)
@_timing
@seed_option
@output_option
@click.option("--name", help="The run's name, a new folder [a time stamp].")
@click.option("--resume", metavar="RUN", help="Measure what is missing in an existing run.")
@click.option("--dry-run", is_flag=True, help="Print the plan; measure and write nothing.")
@click.option("--quiet", is_flag=True, help="No progress and no table; the run's path alone.")
def sweep(**options: Any) -> None:
    """Measure implementations over sequence length, heads, batch, head size and more.

    Axes multiply. Every cell is checked against a float64 reference before it is timed; each
    result is stored as soon as it exists, so that --resume continues after any interruption.
    Exits 1 if a result was incorrect.
    """
    from attnbench.cli.progress import Display
    from attnbench.execution.session import resume as resume_run
    from attnbench.execution.session import sweep as start
    from attnbench.execution.store import find_run, load_run

    quiet, dry_run = options.pop("quiet"), options.pop("dry_run")
    with Display(quiet=quiet) as display:
        if options["resume"] is not None:
            _refuse_beside_resume()
            path: Path | None = find_run(options["resume"], options["output"])
            assert path is not None
            display.interrupted_hint = path
            resume_run(path, display, dry_run=dry_run)
        else:
            path = start(_request(options), display, dry_run=dry_run)
    if dry_run or path is None:
        return
    run = load_run(path)
    if quiet:
        click.echo(path)
    else:
        from attnbench.cli.summary import print_summary

        print_summary(run)
    if any(record.status == "incorrect" for record in run.records):
        raise SystemExit(ExitCode.FINDING)


def _request(options: dict[str, Any]) -> Any:
    from attnbench.execution.session import SweepRequest
    from attnbench.execution.settings import Settings
    from attnbench.planning.expansion import with_overrides
    from attnbench.planning.plan import Axes
    from attnbench.planning.presets import PRESETS

    given = {name: options[name] for _, name, _, _ in AXES}
    given["workload"] = options["workload"]
    preset = PRESETS.get(options["preset"]) if options["preset"] else None
    base = preset.sweeps if preset else (Axes(),)
    if preset and options["workload"] is None:
        _refuse_unused(options["preset"], [axes.workload for axes in base], given)
    elif preset:
        base = tuple(axes for axes in base if axes.workload == options["workload"]) or base[:1]
    min_time = options["min_time"] or (preset.min_time_s if preset else 0.1)
    max_time = options["max_time"] or (preset.max_time_s if preset else 1.0)
    return SweepRequest(
        sweeps=tuple(
            with_overrides(axes, _relevant(axes.workload, given) if preset else given)
            for axes in base
        ),
        settings=Settings(
            device=options["device"],
            threads=options["threads"] or (preset.threads if preset else None),
            files=tuple(str(Path(file).resolve()) for file in options["files"]),
            seed=options["seed"],
            precision=options["precision"],
            min_time_s=min_time,
            max_time_s=max_time,
            timeout_s=options["timeout"],
            processes=options["processes"],
            l2=options["l2"],
            timer=options["timer"],
            energy=options["energy"],
            allocator=options["allocator"] or (preset.allocator if preset else "settled"),
        ),
        output=options["output"],
        name=options["name"],
        options={name: str(v) if isinstance(v, Path) else v for name, v in options.items() if v},
    )


def _refuse_unused(preset: str, workloads: list[str], given: dict[str, Any]) -> None:
    """Refuse an axis that none of a preset's workloads has: it would change nothing."""
    from attnbench.theory.traits import TRAITS

    for flag, name, _, _ in AXES:
        if given[name] and all(name in TRAITS.get(kind).foreign() for kind in workloads):
            having = ", ".join(dict.fromkeys(workloads))
            raise UsageError(
                f"{flag} changes nothing in --preset {preset}, which measures {having}; leave it"
                " out, or name a --workload"
            )


def _relevant(workload: str, given: dict[str, Any]) -> dict[str, Any]:
    """In a preset of several workloads, the axes of one apply to that one alone."""
    if given["workload"]:
        return given
    from attnbench.theory.traits import TRAITS

    foreign = TRAITS.get(workload).foreign()
    return {name: None if name in foreign else value for name, value in given.items()}


_KEPT_BESIDE_RESUME = ("resume", "output", "dry_run", "quiet")


def _refuse_beside_resume() -> None:
    flags = [flag for name, flag in given().items() if name not in _KEPT_BESIDE_RESUME]
    if flags:
        raise UsageError(
            f"--resume takes everything from the run itself; remove {', '.join(flags)}"
        )
