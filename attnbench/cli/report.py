"""`attnbench report`: the page, the plots and the Markdown of a run."""

from __future__ import annotations

from pathlib import Path

import click

from attnbench.cli.options import run_argument


@click.command()
@run_argument
def report(run: str, output: Path) -> None:
    """Draw RUN (a folder, a name, or `latest`): report.html, report.md, plots as PNG and SVG.

    Of a gate run: its page gate.html, decided again from the raw data.
    """
    from attnbench.execution.store import find_run
    from attnbench.gate.decide.stored import folder_of_gate
    from attnbench.report import write_report
    from attnbench.report.gate.page import redraw

    gate = folder_of_gate(run, output)
    click.echo(redraw(gate) if gate else write_report(find_run(run, output)))
