"""`attnbench sweep`: measure, with a live display and a table at the end."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from attnbench.base.units import ALL_THREADS, counted, seconds
from attnbench.cli.options import (
    AXIS_FIELDS,
    DURATION,
    POSITIVE,
    RUN,
    SHARD,
    THREADS,
    Rows,
    axes_options,
    baseline_option,
    device_option,
    given,
    impl_files,
    options_of,
    output_option,
    say,
    seed_option,
)
from attnbench.errors import ExitCode, UsageError

if TYPE_CHECKING:
    import pandas as pd

    from attnbench.execution.session import SweepRequest
    from attnbench.execution.store import Run

_SHOWN = 60  # rows of the table at the end
# Its columns; those that are always shown; and in which order the others give way.
_COLUMNS = (
    "impl", "time", "interval", "speed", "speed_interval", "behind", "rate", "workspace", "error",
    "approx", "mask", "status",
)  # fmt: skip
_KEPT = ("impl", "time", "interval", "speed", "speed_interval")
_SPARE = ("mask", "error", "rate", "behind", "workspace", "approx")
_WITH_RESUME = (
    "resume", "retry", "output", "dry_run", "quiet", "max_total_time", "on", "ray_address", "mixed",
)  # fmt: skip
_SWEEP: Rows = (
    ("--preset", {"metavar": "NAME"},
     "A ready sweep: quick, families, positions, gpu, verify or verify-gpu; other options"
     " override it. Those for a GPU run without one only by --device cpu."),
    axes_options(),
    impl_files(
        "A Python file with implementations of yours: all of them, or those in --impls; beside them"
        " all that are installed, unless --impls names some."
    ),
    device_option,
    ("--threads", {"type": THREADS},
     "CPU threads: 1,2 or all, as many as torch takes by itself; one thread is pinned to a CPU of"
     " its own [1]."),
    ("--precision", {"type": POSITIVE, "default": 0.02, "show_default": True},
     "Stop a cell when the 95 % interval of its samples' median is within ± this share."),
    ("--min-time", {"type": POSITIVE}, "Seconds of samples for each cell, at least [0.1]."),
    ("--max-time", {"type": POSITIVE}, "Seconds of samples at most [1]."),
    ("--processes", {"type": click.IntRange(min=1, max=100), "default": 1, "show_default": True},
     "Fresh processes to measure each cell in; the interval is then over them."),
    ("--l2", {"type": click.Choice(["cold", "warm"])},
     "The last cache before each call [cold on a GPU, warm on a CPU]."),
    ("--timer", {"type": click.Choice(["events", "graph"])},
     "On a GPU: events around the calls, or calls replayed as a CUDA graph [events]."),
    ("--allocator", {"type": click.Choice(["settled", "keep"])},
     "On a CPU: blocks from 32 MiB on go back to the system after each call, as in any long"
     " process, or the process keeps them [settled]."),
    ("--energy", {"is_flag": True},
     "On a GPU: joules per call, from a loop of at least 2 s for each cell."),
    baseline_option,
    seed_option,
    ("--timeout", {"type": POSITIVE, "default": 300.0, "show_default": True},
     "Give a cell up after so many seconds without a heartbeat of its worker."),
    ("--memory-limit", {"metavar": "SIZE", "default": "90%", "show_default": True},
     "The most that a worker may allocate: 8GB, a share of what is free when it starts, or none."),
    ("--ceilings", {"type": click.Choice(["fresh", "cached", "none"]), "default": "cached",
                    "show_default": True},
     "What the machine can do at most: measured now, or by a sweep of the last day, or unknown."),
    ("--no-prune", {"is_flag": True},
     "Try cells, too, that are larger than one of the same implementation that ran out of memory;"
     " without it they are skipped."),
    ("--max-total-time", {"type": DURATION},
     "End the sweep within 20m, 8h or so: no cell begins that would take longer, and those measured"
     " cover all axes evenly; --resume measures the rest."),
    ("--shard", {"type": SHARD},
     "Measure one part of many, such as 3/8, in a Slurm array or a CI matrix; `attnbench merge`"
     " joins the parts."),
    ("--on", {"type": click.Choice(["local", "ray"])},
     "Measure on this machine, or on all GPUs of a Ray cluster, its CPUs if it has none [local]."),
    ("--ray-address", {"metavar": "ADDRESS"},
     "With --on ray: auto for the cluster that runs, HOST:PORT, or local to start one here [auto]."
     ),
    output_option,
    ("--name", {}, "The run's name, a new folder [a time stamp]."),
    ("--resume", {"type": RUN, "metavar": "RUN"},
     "Measure what a run (or `latest`) planned and has not yet."),
    ("--retry", {"metavar": "STATUSES"},
     "With --resume: measure cells of these statuses again, such as crashed,timeout."),
    ("--mixed", {"is_flag": True},
     "With --resume: go on although the machine or versions differ; the table names both."),
    ("--dry-run", {"is_flag": True},
     "Print the plan, with the memory and the time it will take; measure and write nothing."),
    ("--quiet", {"is_flag": True}, "No progress and no table; the run's path alone."),
)  # fmt: skip
_GOES_WITH = {"ray_address": "--on ray", "retry": "--resume RUN", "mixed": "--resume RUN"}


@click.command()
@options_of(_SWEEP)
def sweep(**options: Any) -> None:
    """Measure implementations over lengths, heads, batch and more.

    Axes multiply. Every cell is checked against a float64 reference before it is timed; each
    result is stored as soon as it exists, so that --resume continues after any interruption.
    Exits 1 if a result was incorrect, 2 if no cell was measured.
    """
    from attnbench.cli.progress import SweepDisplay
    from attnbench.execution import session
    from attnbench.execution.store import find_run, load_run
    from attnbench.schema.record import FAILURES

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
    with SweepDisplay(quiet=quiet) as display:
        if options["resume"] is not None:
            flags = [flag for name, flag in given().items() if name not in _WITH_RESUME]
            if flags:
                raise UsageError(
                    f"--resume takes everything from the run itself; remove {', '.join(flags)}"
                )
            path: Path | None = find_run(options["resume"], options["output"])
            assert path is not None
            display.resumable(path)
            session.resume(
                path, display, retry=retry, max_total_time_s=options["max_total_time"],
                dry_run=dry_run, ray=ray, mixed=options["mixed"],
            )  # fmt: skip
        else:
            path = session.sweep(_request(options, ray), display, dry_run=dry_run)
    if dry_run or path is None:
        return
    run = load_run(path)
    if quiet:
        click.echo(path)
    else:
        _print_summary(run)
    found = {record.status for record in run.records}
    if "incorrect" in found:
        raise SystemExit(ExitCode.FINDING)
    if "ok" not in found:
        raise SystemExit(ExitCode.USAGE)


def _request(options: dict[str, Any], ray: str | None) -> SweepRequest:
    """What was asked for: the preset, and above it whatever stands on the command line."""
    from attnbench.execution.process import Settings
    from attnbench.execution.session import SweepRequest
    from attnbench.planning.plan import Axes, overridden
    from attnbench.planning.presets import PRESETS, Preset

    plain = Preset(doc="", sweeps=(Axes(),), min_time_s=0.1, max_time_s=1.0)
    preset = PRESETS.get(options["preset"]) if options["preset"] else plain
    least, most = options["min_time"], options["max_time"]
    taken = ("seed", "precision", "processes", "l2", "timer", "energy", "memory_limit", "ceilings")
    return SweepRequest(
        sweeps=overridden(
            preset.sweeps, {name: options[name] for name in (*AXIS_FIELDS, "threads")}
        ),
        settings=Settings(
            device=preset.device if options["device"] == "auto" else options["device"],
            files=tuple(str(Path(file).resolve()) for file in options["files"]),
            # Where one alone is given, the preset's other gives way.
            min_time_s=least or min(preset.min_time_s, most or preset.min_time_s),
            max_time_s=most or max(preset.max_time_s, least or preset.max_time_s),
            timeout_s=options["timeout"],
            prune=not options["no_prune"],
            allocator=options["allocator"] or preset.allocator,
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


def _print_summary(run: Run) -> None:
    """Who is fastest, the rows best first, what failed, where the time went, the next command."""
    from attnbench.analysis.highlights import (
        measured_on,
        models_sentence,
        summary_columns,
        summary_rows,
    )
    from attnbench.analysis.leads import leads
    from attnbench.analysis.notes import doubt_sentence, suspect_sentence
    from attnbench.analysis.table import failures, load, spent
    from attnbench.report.tables import condensed, table

    frame = load(run)
    for sentence in leads(run, frame):
        say(sentence)
    measured = frame[frame["status"] == "ok"]
    rows = summary_rows(measured)
    shown = rows if len(rows) <= _SHOWN else _largest(rows, measured)
    columns = summary_columns(frame)
    names = [name for name in _COLUMNS if name in columns]
    lines = [[row["case"], *(row[name] for name in names)] for row in shown]
    header = ["case", *(columns[name].header for name in names)]
    header, lines, alike = condensed(header, lines, keep=[columns[n].header for n in _KEPT])
    if lines:
        if header[0] == "case":  # once for the rows of a case
            firsts = [line[0] for line in lines]
            for before, line in zip(firsts, lines[1:], strict=False):
                line[0] = "" if line[0] == before else line[0]
        numbers = [h for h in header if h not in ("case", "implementation", "status")]
        spare = [columns[name].header for name in _SPARE if name in columns]
        spare = [name for name in spare if name in header]
        click.echo()
        click.echo(table(header, lines, numbers, spare, cut="implementation"), nl=False)
        if alike:
            say(f"in all rows: {alike}")
    odd = measured[measured["speedup_reason"].notna() & (measured["impl"] != measured["baseline"])]
    for row in odd[odd["speedup"].notna()].head(3).to_dict("records"):
        say(f"* {row['impl']}, n={row['seq_len']}: {row['speedup_reason']}")
    if len(shown) < len(rows):
        say(
            f"{len(shown)} of {len(rows)} rows: the largest sizes; all: attnbench export"
            f" {shlex.quote(str(run.path))} --format csv"
        )
    device, how = measured_on(run, frame)
    if how:
        say(f"{device}: {how}")
    doubts = suspect_sentence(frame), doubt_sentence(run, frame)
    for sentence in filter(None, (run.unfinished, models_sentence(frame), *doubts)):
        say(sentence)
    failed = failures(frame).to_dict("records")
    if failed:
        say("not measured:" if rows else "no cell was measured:")
    for cell in failed:
        count = counted(cell["cells"], "cell")
        say(f"  {cell['status']}: {cell['impl']} ({count}): {cell['reason']}", hang=4)
    wall_s = run.info.get("spent", {}).get("wall_s")
    if wall_s is not None:
        stages = ", ".join(f"{stage} {seconds(value)}" for stage, value in spent(run))
        say(f"wall time {seconds(wall_s)}: {stages}")
    click.echo(f"records: {run.path / 'records.jsonl'}")
    click.echo(f"report:  attnbench report {shlex.quote(str(run.path))}")


def _largest(rows: list[dict[str, str]], frame: pd.DataFrame) -> list[dict[str, str]]:
    """The rows of the largest n of each workload, at most `_SHOWN`."""
    top = frame.groupby("workload")["seq_len"].transform("max")
    return [r for r, keep in zip(rows, frame["seq_len"] == top, strict=True) if keep][:_SHOWN]
