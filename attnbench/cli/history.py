"""`attnbench history`: runs over commits and dates, and where their times changed for good."""

from __future__ import annotations

from pathlib import Path

import click

from attnbench.base.units import counted
from attnbench.cli.options import PATH, RUN, SHARE, output_option


@click.command()
@click.argument("folder", type=PATH)
@click.option(
    "--add", "run", type=RUN, metavar="RUN", help="Append this run to the history; draw nothing."
)
@output_option
@click.option(
    "--least", type=SHARE, default="5%", show_default=True, help="The smallest change to look for."
)
def history(folder: Path, run: str | None, output: Path, least: float) -> None:
    """Show where times changed for good, over the runs in a folder.

    FOLDER holds run folders, or history.jsonl, a line a run, to which --add appends one: a name in
    --output, a folder, `latest` or `previous`. Written into it are history.html and history.md.

    Each cell is a line over the runs of one machine, without what moved all cells of a run. A step
    in it is a regression or an improvement; suspicious where it rests on few runs, where the
    environment changed in the same place, or where other cells moved along. It is for the record:
    to hold one version against another there is `attnbench gate`. Exits 0 whatever it finds.
    """
    from attnbench.analysis.history import entries
    from attnbench.execution.store import find_run, load_run

    if run is not None:
        found = find_run(run, output)
        added = entries.add(folder, load_run(found))
        file, what = folder / entries.FILE, "added to" if added else "is already in"
        click.echo(f"{found.name} {what} {file} ({counted(len(entries.read_file(file)), 'run')})")
        return
    from attnbench.analysis.history.series import history as taken_apart
    from attnbench.analysis.history.steps import Rules
    from attnbench.report import history as report
    from attnbench.report import parts

    machines = taken_apart(entries.read(folder), Rules(least=least))
    page = report.write_all(folder, machines)
    click.echo(parts.terminal(list(map(report.section, machines))), nl=False)
    click.echo(f"page: {page}")
