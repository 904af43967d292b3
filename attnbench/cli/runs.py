"""`attnbench list`, `report` and `export`: what there is, the page of a run, and its table."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path

import click

from attnbench.cli.options import (
    PATH,
    device_option,
    impl_files,
    options_of,
    run_argument,
    say,
    wrapped,
)
from attnbench.errors import StoreError, UsageError


@click.command("list")
@click.argument("names", nargs=-1, metavar="[NAME]...")
@impl_files()
@device_option
@click.option("--json", "as_json", is_flag=True, help="The catalogue as JSON.")
def list_(names: tuple[str, ...], files: tuple[str, ...], device: str, as_json: bool) -> None:
    """Show the implementations, by family.

    And which of them cannot run here. With the declared law of time; below them the workloads,
    projections, caches, masks and position encodings. As JSON with parameters, the law of memory,
    devices, passes, dtypes, masks.

    Of a NAME (longformer, gqa, "kv cache", llama …) what makes it up, and how to measure it.
    """
    import msgspec

    from attnbench.execution.process import Settings
    from attnbench.execution.runner import LocalRunner
    from attnbench.planning.lookup import look_up

    with LocalRunner(Settings(device=device, files=files)) as runner:
        catalogue = runner.catalogue()
        for warning in runner.warnings:
            say(f"Warning: {warning}", err=True)
    answers, catalogue = look_up(names, catalogue) if names else ([], catalogue)
    if as_json:
        click.echo(json.dumps(msgspec.to_builtins(catalogue), indent=1))
        return
    for head, _, commands in answers:
        say(head)
        for command in commands:
            click.echo(f"  {command}" + "".join(f" --impl {shlex.quote(file)}" for file in files))
    for family, doc in catalogue.families.items():
        click.secho("\n" * bool(answers) + wrapped(f"{family}: {doc}"), bold=True)
        for row in catalogue.implementations:
            if row.family == family:
                say(f"  {row.name:16} {row.time or '–':8} {row.doc}", hang=28)
        click.echo(nl=not answers)
    for row in catalogue.implementations:
        if row.unavailable:
            say(f"{row.name} cannot run here: {row.unavailable}")
    for kind in ("workloads", "projections", "caches", "masks", "positions"):
        if rows := getattr(catalogue, kind):
            click.echo(f"\n{kind}")
        for name, doc in rows.items():
            say(f"  {name:17} {doc}", hang=20)


@click.command()
@run_argument
def report(run: str, output: Path) -> None:
    """Draw the page, the plots and the Markdown of a run.

    RUN is a folder, a name, `latest` or `previous`. Written into it are report.html, report.md and
    the plots as PNG and SVG; for a gate run gate.html, decided again from the raw data.
    """
    from attnbench.execution.store import find_run
    from attnbench.gate.decide.stored import folder_of_gate, load_gate

    if gate := folder_of_gate(run, output):
        from attnbench.gate.decide.verdict import decide
        from attnbench.report.gate.outputs import write_page

        loaded = load_gate(gate)
        click.echo(write_page(gate, loaded, decide(loaded)))
    else:
        from attnbench.report.pages import write_report

        click.echo(write_report(find_run(run, output)))


@click.command()
@run_argument
@options_of((
    ("--format kind", {"type": click.Choice(["csv", "json", "parquet"]), "default": "csv",
                       "show_default": True}, "parquet needs --to."),
    ("--to", {"type": PATH}, "A file [standard output]."),
))  # fmt: skip
def export(run: str, output: Path, kind: str, to: Path | None) -> None:
    """Write the table of a run, one row for each cell.

    RUN is a folder, a name, `latest` or `previous`. What is unknown is null, never 0.
    """
    from attnbench.analysis.table import load, to_csv, to_json, to_parquet
    from attnbench.execution.store import find_run, load_run

    if kind == "parquet" and to is None:
        raise UsageError("parquet is binary; name a file with --to FILE")
    loaded = load_run(find_run(run, output))
    frame = load(loaded)
    if loaded.unfinished:
        say(loaded.unfinished, err=True)
    write = to_csv if kind == "csv" else to_json
    if to is None:
        write(frame, sys.stdout)
    elif kind == "parquet":
        to_parquet(frame, to)
    else:
        try:
            with to.open("w", encoding="utf-8", errors="replace") as file:
                write(frame, file)
        except OSError as err:
            raise StoreError(f"cannot write {to} ({err.strerror}); choose another --to") from err
