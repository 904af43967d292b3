"""`attnbench sweep`: measure, with a live display and a table at the end."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from attnbench.base.units import ALL_THREADS, counted, seconds
from attnbench.cli.options import (
    AXIS_FIELDS,
    axes_options,
    command_options,
    given,
    impl_files,
    say,
)
from attnbench.errors import ExitCode, UsageError

if TYPE_CHECKING:
    import pandas as pd

    from attnbench.execution.events import Events
    from attnbench.execution.session import SweepRequest
    from attnbench.store.runs import Run

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
_GOES_WITH = {"ray_address": "--on ray", "retry": "--resume RUN", "mixed": "--resume RUN"}


@click.command()
@command_options(
    "sweep",
    axes=axes_options(),
    impl=impl_files(
        "A Python file with implementations of yours: all of them, or those in --impls; beside them"
        " all that are installed, unless --impls names some."
    ),
)
def sweep(**options: Any) -> None:
    """Measure implementations over lengths, heads, batch and more.

    Axes multiply. Every cell is checked against a float64 reference before it is timed; each
    result is stored as soon as it exists, so that --resume continues after any interruption.
    Exits 1 if a result was incorrect, 2 if no cell was measured.
    """
    from attnbench.cli.progress import SweepDisplay, print_plan
    from attnbench.execution import session
    from attnbench.execution.events import follow
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
            events = session.sweep(_request(options, ray), dry_run=dry_run)
        path = follow(events, display.show, print_plan)
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
    from attnbench.report.render.tables import condensed, table

    frame = load(run)
    for sentence in leads(run, frame):
        say(sentence)
    measured = frame[frame["status"] == "ok"]
    rows = summary_rows(measured)
    shown = rows if len(rows) <= _SHOWN else _largest(rows, measured)
    columns = summary_columns(frame)
    names = [name for name in _COLUMNS if name in columns]
    lines = [[row["case"], *(row[name] for name in names)] for row in shown]
    heads = {name: column.header for name, column in columns.items()} | {"impl": "impl"}
    kept, header = [heads[name] for name in _KEPT], ["case", *(heads[name] for name in names)]
    header, lines, alike = condensed(header, lines, kept)
    if lines:
        if header[0] == "case":  # once for the rows of a case
            firsts = [line[0] for line in lines]
            for before, line in zip(firsts, lines[1:], strict=False):
                line[0] = "" if line[0] == before else line[0]
        numbers = [head for head in header if head not in ("case", "impl", "status")]
        spare = [head for name in _SPARE if (head := heads.get(name)) in header]
        click.echo()
        click.echo(table(header, lines, numbers, spare, cut="impl"), nl=False)
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
