"""`attnbench verify`: does cost grow as declared? Verdicts with intervals, and an exit code."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from attnbench.cli.options import NAMES, device_option, given, output_option, seed_option
from attnbench.errors import UsageError
from attnbench.schema.finding import SIGNS, VERDICTS, WORST_FIRST, exit_code

if TYPE_CHECKING:
    from attnbench.analysis.scaling.results import Scaling

_COLOURS = {"holds": "green", "refuted": "red", "inconclusive": "yellow"}
_SWEEP_ONLY = ("device", "impls", "files", "threads", "seed", "name")


@click.command()
@click.argument("run", required=False)
@click.option("--sweep", "measures", is_flag=True, help="Measure a suitable run first.")
@click.option("--impls", type=NAMES, help="With --sweep: cores by name [the preset's].")
@click.option(
    "--impl",
    "files",
    multiple=True,
    metavar="FILE",
    help="With --sweep: a Python file with implementations of yours, measured in place of the"
    " preset's cores. Repeatable.",
)
@device_option
@click.option(
    "--threads",
    type=click.IntRange(min=1, max=1024),
    help="With --sweep: CPU threads [1: cores that come and go would bend every curve].",
)
@seed_option
@output_option
@click.option("--name", help="With --sweep: the run's name [a time stamp].")
@click.option("--json", "as_json", is_flag=True, help="Every finding with its figures as JSON.")
@click.option(
    "--verbose", "-v", is_flag=True, help="Every finding, also FLOPs and workspace that hold."
)
@click.option("--quiet", is_flag=True, help="With --sweep: no progress.")
def verify(**options: Any) -> None:
    """Ask RUN (a folder, a name, or `latest`) whether cost grows as the laws declare.

    FLOPs and workspace are held against their formulas and laws exactly; time by its exponent
    along each axis, with an interval, and by a model of several terms where sizes vary together.
    Each verdict is holds, refuted or inconclusive, with the reason. Exits 1 if something is
    refuted, 3 if of some implementation nothing holds, else 0.

    --sweep measures some 300 cells on a CPU, in one thread and with an allocator that keeps its
    memory; it takes about five minutes on two cores. With --impls
    or --impl it is they that are measured, as cores alone: no layers, decoding or networks.
    """
    from attnbench.analysis.scaling.verdicts import scaling
    from attnbench.execution.store import find_run, load_run

    _refuse(options)
    if options["measures"]:
        path = _measured(options)
    else:
        path = find_run(options["run"] or "latest", options["output"])
    found = scaling(load_run(path))
    if options["as_json"]:
        import json

        click.echo(json.dumps([finding.to_json() for finding in found.findings], indent=1))
    else:
        _print(found, path, every=options["verbose"])
    raise SystemExit(int(exit_code(found.findings)))


def _refuse(options: dict[str, Any]) -> None:
    if options["measures"] and options["run"]:
        raise UsageError(
            f"--sweep makes a run of its own; remove '{options['run']}', or name it by --name"
        )
    if options["measures"]:
        return
    flags = [flag for name, flag in given().items() if name in _SWEEP_ONLY]
    if flags:
        raise UsageError(f"{', '.join(flags)} goes with --sweep, which measures; add it")


def _measured(options: dict[str, Any]) -> Path:
    from attnbench.cli.progress import Display
    from attnbench.execution.session import sweep_for_verdicts
    from attnbench.execution.settings import Settings

    settings = Settings(
        device=options["device"],
        files=tuple(str(Path(file).resolve()) for file in options["files"]),
        threads=options["threads"],
        seed=options["seed"],
    )
    with Display(quiet=options["quiet"]) as display:
        return sweep_for_verdicts(
            settings,
            display,
            impls=options["impls"] or (),
            output=options["output"],
            name=options["name"],
        )


def _print(found: Scaling, path: Path, *, every: bool) -> None:
    """What is refuted, then time, then what needs no statistics, in short; how many of each."""
    from collections import Counter

    from attnbench.cli.summary import table

    told = found.findings if every else found.notable
    rows = sorted(told, key=lambda finding: WORST_FIRST.index(finding.verdict))
    header = ("", "verdict", "whom", "question", "law", "why")
    if rows:
        table(
            header,
            [(SIGNS[f.verdict], f.verdict, f.subject, f.question, f.law, f.reason) for f in rows],
        )
    if len(told) < len(found.findings):
        click.echo(
            f"{SIGNS['holds']} {len(found.findings) - len(told)} series of FLOPs and workspace hold"
            " as well: counted as predicted, and grown as declared (--verbose shows each)"
        )
    counts = Counter(finding.verdict for finding in found.findings)
    click.echo(
        ", ".join(
            click.style(f"{SIGNS[name]} {counts[name]} {name}", fg=_COLOURS[name])
            for name in VERDICTS
        )
    )
    click.echo(f"run: {path}; plots and intervals: attnbench report {path}")
