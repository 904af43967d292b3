"""`attnbench gate`: is the working tree slower than another commit? Verdicts, and an exit code."""

from __future__ import annotations

from typing import Any

import click

from attnbench.cli.axes import axes_options
from attnbench.cli.options import POSITIVE, Command, given, output_option, seed_option
from attnbench.errors import AttnbenchError, UsageError

# The options that mean something beside --replay, which measures nothing.
_WITH_REPLAY = ("replay", "output", "name", "advisory", "quiet")


def _share(context: click.Context, option: click.Parameter, text: str | None) -> float | None:
    from attnbench.base.lists import parse_share

    return None if text is None else parse_share(text, option.opts[0])


def _duration(context: click.Context, option: click.Parameter, text: str | None) -> float | None:
    from attnbench.base.lists import parse_duration

    return None if text is None else parse_duration(text, option.opts[0])


_PROMISES = (
    click.option(
        "--threshold",
        metavar="SHARE",
        callback=_share,
        help="The slowdown to be found; less than a third of it is never called one [10% on a CPU,"
        " 5% on a GPU].",
    ),
    click.option(
        "--budget",
        "budget_s",
        metavar="TIME",
        callback=_duration,
        help="Wall time, such as 90s or 5m, after which no round begins; what is open then is"
        " inconclusive [5m].",
    ),
    click.option(
        "--growth",
        metavar="SHARE",
        callback=_share,
        help="How far counted FLOPs and memory may grow [1%].",
    ),
    click.option(
        "--threads",
        type=click.IntRange(min=1, max=1024),
        help="CPU threads [1, the steadiest; on a GPU torch's default].",
    ),
    click.option(
        "--device",
        type=click.Choice(["auto", "cpu", "cuda"]),
        help="Where to run; auto takes a GPU where there is one [auto].",
    ),
    click.option(
        "--timeout",
        type=POSITIVE,
        default=120.0,
        show_default=True,
        help="Seconds without a sign of life after which a process is given up.",
    ),
    click.option(
        "--replay",
        metavar="FILE",
        help="Decide again from the raw data of a gate.json, a folder, a name or `latest`.",
    ),
)


def _options(command: Command) -> Command:
    for option in reversed(_PROMISES):
        command = option(command)
    return command


@click.command()
@click.option(
    "--base",
    metavar="REF",
    help="A branch, tag or commit to compare with [where HEAD left the default branch].",
)
@click.option(
    "--impl",
    "files",
    multiple=True,
    metavar="FILE",
    help="A file of the repository whose implementations are watched. Repeatable.",
)
@axes_options(seq_lens="128..1024")
@_options
@seed_option
@output_option
@click.option("--name", help="The result's name, a new folder [gate- and a time stamp].")
@click.option("--advisory", is_flag=True, help="Exit 0 whatever is found; say what it would be.")
@click.option("--quiet", is_flag=True, help="No progress and no table; the result's path alone.")
def gate(**options: Any) -> None:
    """Compare the working tree with another commit: correctness, FLOPs and memory, then time.

    The base is checked out beside the repository, the candidate is the working tree as it is.
    Both sides are measured by this installation, in turns, in rounds of fresh processes. What to
    watch stands in pyproject.toml, [tool.attnbench.gate], with the same names as the options, or
    in the options themselves.

    A slowdown of the threshold is found; code that is the same is called slower in at most 1 %
    of runs. Exits 1 if a cell is incorrect, grown or slower, 3 if something stays open, 4 if the
    machine was not to be trusted, 2 if nothing could be compared, else 0.
    """
    from attnbench.cli.gate_modes import compare, replay

    typed = given()
    strange = [flag for name, flag in typed.items() if name not in _WITH_REPLAY]
    if "replay" in typed and strange:
        raise UsageError(f"--replay decides again from what is stored; remove {', '.join(strange)}")
    try:
        code = (replay if "replay" in typed else compare)(options)
    except AttnbenchError as err:
        if not options["advisory"] or isinstance(err, UsageError):
            raise
        click.echo(f"Error: {err}", err=True)
        code = err.exit_code
    if options["advisory"] and code:
        click.echo(f"advisory: exit code {int(code)} was changed to 0 (--advisory)", err=True)
    elif code:
        raise SystemExit(int(code))
