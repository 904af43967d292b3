"""`attnbench verify`: does cost grow as declared? Verdicts with intervals, and an exit code."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from attnbench.cli.options import (
    NAMES,
    device_option,
    given,
    impl_files,
    output_option,
    seed_option,
    threads_option,
)
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
@impl_files(
    "With --sweep: a Python file with implementations of yours, measured in place of the preset's"
    " cores."
)
@device_option
@threads_option("1: cores that come and go distort every curve", before="With --sweep: ")
@seed_option
@output_option
@click.option("--name", help="With --sweep: the run's name [a time stamp].")
@click.option("--json", "as_json", is_flag=True, help="Every finding with its figures as JSON.")
@click.option(
    "--verbose", "-v", is_flag=True, help="Every finding, also FLOPs and workspace that hold."
)
@click.option("--quiet", is_flag=True, help="With --sweep: no progress.")
def verify(**options: Any) -> None:
    """Ask whether cost grows as the laws declare.

    RUN is a folder, a name, or `latest`. FLOPs and workspace are compared with their formulas and
    laws exactly; time by its exponent along each axis, with an interval, and by a model of several
    terms where sizes vary together. Each verdict is holds, refuted or inconclusive, with the
    reason. Exits 1 if something is refuted, 3 if nothing holds of some implementation, else 0.

    --sweep measures some 300 cells on a CPU, in one thread and with an allocator that keeps its
    memory; it takes about five minutes on two cores. With --impls or --impl only the named
    implementations are measured, as cores: no layers, decoding or networks.
    """
    from attnbench.analysis.scaling import scaling
    from attnbench.execution.store import find_run, load_run

    flags = [flag for name, flag in given().items() if name in _SWEEP_ONLY]
    if options["measures"] and options["run"]:
        raise UsageError(
            f"--sweep makes a run of its own; remove '{options['run']}', or name it by --name"
        )
    if flags and not options["measures"]:
        raise UsageError(f"{', '.join(flags)} goes with --sweep, which measures; add it")
    if options["measures"]:
        path = _measured(options)
    else:
        path = find_run("latest" if options["run"] is None else options["run"], options["output"])
    found = scaling(load_run(path))
    if options["as_json"]:
        click.echo(json.dumps([finding.to_json() for finding in found.findings], indent=1))
    else:
        _print(found, path, every=options["verbose"])
    raise SystemExit(int(exit_code(found.findings)))


def _measured(options: dict[str, Any]) -> Path:
    from attnbench.cli.progress import SweepDisplay
    from attnbench.execution.process import Settings
    from attnbench.execution.session import sweep_for_verdicts

    settings = Settings(
        device=options["device"],
        files=tuple(str(Path(file).resolve()) for file in options["files"]),
        threads=options["threads"],
        seed=options["seed"],
    )
    names = {"output": options["output"], "name": options["name"]}
    with SweepDisplay(quiet=options["quiet"]) as display:
        return sweep_for_verdicts(settings, display, impls=options["impls"] or (), **names)


def _print(found: Scaling, path: Path, *, every: bool) -> None:
    """What is refuted, then time, then what needs no statistics, in short; how many of each."""
    from attnbench.report.tables import table

    shown = found.findings if every else found.notable
    rows = [
        (SIGNS[f.verdict], f.verdict, f.subject, f.question, f.law, f.reason)
        for f in sorted(shown, key=lambda finding: WORST_FIRST.index(finding.verdict))
    ]
    if rows:
        header = ("", "verdict", "subject", "question", "law", "reason")
        click.echo(table(header, rows), nl=False)
    if len(shown) < len(found.findings):
        click.echo(
            f"{SIGNS['holds']} {len(found.findings) - len(shown)} series of FLOPs and workspace"
            " hold as well: counted as predicted, and grown as declared (--verbose shows each)"
        )
    counts = Counter(finding.verdict for finding in found.findings)
    click.echo(
        ", ".join(
            click.style(f"{SIGNS[name]} {counts[name]} {name}", fg=_COLOURS[name])
            for name in VERDICTS
        )
    )
    click.echo(f"run: {path}; plots and intervals: attnbench report {path}")
