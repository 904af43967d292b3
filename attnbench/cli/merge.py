"""`attnbench merge`: the shards of a sweep as one run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from attnbench.cli.options import RUN, output_option, say


@click.command()
@click.argument("runs", type=RUN, nargs=-1, required=True, metavar="RUN RUN …")
@output_option
@click.option("--name", help="The name of the merged run, a new folder [a time stamp].")
@click.option("--partial", is_flag=True, help="Merge what there is, though shards are missing.")
@click.option("--mixed", is_flag=True, help="Merge runs of different versions of torch, too.")
def merge(runs: tuple[str, ...], output: Path, **options: Any) -> None:
    """Make one run of the shards of a sweep, wherever they were measured.

    RUN is a folder, a name, `latest` or `previous`. What `sweep --shard 1/8` … `--shard 8/8`
    measured becomes the run that one sweep would have made; its records name their machine, its
    run.json the runs it was made of, which stay as they are.
    """
    from attnbench.execution import merging
    from attnbench.execution.store import find_run, load_run

    paths = [find_run(run, output) for run in runs]
    merged = load_run(merging.merge(paths, output, **options))
    say(f"{len(merged.records)} cells of {len(runs)} runs -> {merged.path}")
    if merged.unfinished:
        say(merged.unfinished)
    say(f"report:  attnbench report {merged.path}")
