"""`attnbench history`: runs over commits and dates, and where their times changed for good."""

from __future__ import annotations

from pathlib import Path

import click

from attnbench.cli.options import SHARE, output_option, say
from attnbench.errors import UsageError


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--add", "run", metavar="RUN", help="Append this run to the history; draw nothing.")
@click.option("--commit", help="With --add: the commit that the run is of [as it recorded].")
@output_option
@click.option(
    "--least", type=SHARE, default="5%", show_default=True, help="The smallest change to look for."
)
@click.option(
    "--confirm", type=click.IntRange(min=2), default=5, show_default=True,
    help="Runs on either side without which a step is no more than suspicious.",
)  # fmt: skip
@click.option(
    "--fewest", type=click.IntRange(min=6), default=12, show_default=True,
    help="Runs of a cell without which nothing is said of it.",
)  # fmt: skip
@click.option(
    "--panels", type=click.IntRange(min=1), default=24, show_default=True,
    help="Lines drawn of each machine, what changed most first.",
)  # fmt: skip
def history(
    folder: Path, run: str | None, commit: str | None, output: Path, least: float, confirm: int,
    fewest: int, panels: int,
) -> None:  # fmt: skip
    """Show where times changed for good, over the runs in a folder.

    FOLDER holds run folders, or history.jsonl, a line a run, to which --add appends one: a name in
    --output, a folder, or `latest`. Written into it are history.html and history.md.

    Each cell is a line over the runs of one machine, without what moved all cells of a run. A step
    in it is a regression or an improvement; suspicious where it rests on few runs, where the
    environment changed in the same place, or where other cells moved along. It is for the record:
    to hold one version against another there is `attnbench gate`. Exits 0 whatever it finds.
    """
    from attnbench.analysis.history import entries
    from attnbench.execution.store import find_run, load_run

    if run is not None:
        found = find_run(run, output)
        added = entries.add(folder, load_run(found), commit)
        file, what = folder / entries.FILE, "added to" if added else "is already in"
        click.echo(f"{found.name} {what} {file} ({len(entries.read_file(file))} runs)")
        return
    if commit is not None:
        raise UsageError("--commit needs --add, which says of which run")
    from attnbench.analysis.history.series import history as taken_apart
    from attnbench.analysis.history.steps import Rules
    from attnbench.report.history import terminal, write_page

    rules = Rules(least=least, confirm=confirm, fewest=fewest)
    machines = taken_apart(entries.read(folder), rules)
    page = write_page(folder, machines, panels)
    click.echo(terminal(machines), nl=False)
    say(f"page: {page}")
