"""The group of commands, and how errors end: one line, the right exit code, no traceback."""

from __future__ import annotations

import os
import sys
from typing import Any

import click

from attnbench.cli.check import check
from attnbench.cli.export import export
from attnbench.cli.listing import list_
from attnbench.cli.report import report
from attnbench.cli.sweep import sweep
from attnbench.errors import AttnbenchError
from attnbench.version import __version__


class _Commands(click.Group):
    """Prints our own errors as click prints its usage errors, and exits with their code."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except AttnbenchError as err:
            click.echo(f"Error: {err}", err=True)
            ctx.exit(int(err.exit_code))
        except BrokenPipeError:  # `attnbench export RUN | head`
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            ctx.exit(0)


@click.group(
    cls=_Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, prog_name="attnbench")
def main() -> None:
    """Benchmark and profile attention implementations.

    No time without a proof of correctness: every cell is checked against a float64 reference
    before it is timed, and what fails is a row too.
    """


for command in (list_, check, sweep, report, export):
    main.add_command(command)
