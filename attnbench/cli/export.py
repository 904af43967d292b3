"""`attnbench export`: the table of a run, one row a cell."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from attnbench.cli.options import run_argument
from attnbench.errors import StoreError, UsageError


@click.command()
@run_argument
@click.option(
    "--format",
    "kind",
    type=click.Choice(["csv", "json", "parquet"]),
    default="csv",
    show_default=True,
    help="parquet needs --to.",
)
@click.option("--to", type=click.Path(path_type=Path), help="A file [standard output].")
def export(run: str, output: Path, kind: str, to: Path | None) -> None:
    """Write RUN (a folder, a name, or `latest`) as one row a cell; unknown is null, never 0."""
    from attnbench.analysis.table import load, to_csv, to_json, to_parquet
    from attnbench.execution.store import find_run, load_run

    if kind == "parquet" and to is None:
        raise UsageError("parquet is binary; name a file with --to FILE")
    frame = load(load_run(find_run(run, output)))
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
