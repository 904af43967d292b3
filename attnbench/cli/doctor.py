"""`attnbench doctor`: is this machine fit to measure, and what works on its GPU."""

from __future__ import annotations

import sys
from typing import Any

import click

from attnbench.cli.options import command_options, say, show, threads_option


@click.command()
@command_options("doctor", threads=threads_option("1, as for a sweep"))
def doctor(device: str, threads: int | None, **options: Any) -> None:
    """Examine the machine and test the measuring itself.

    The clock must resolve a microsecond, cold reads must differ from warm ones, and an injected
    slowdown of 5 % must be seen between interleaved loops. Then the noise of this machine, and what
    to do about it. On a GPU also what it is, and what works on it or why not: the kernels of SDPA
    by dtype, FlexAttention, Triton, CUDA graphs, NVML. Takes about 20 s on a CPU, on a GPU longer.
    Exits 0 where the machine is fit to measure and 4 where not; a warning changes nothing.
    """
    from attnbench.analysis.doctor import judge
    from attnbench.execution.doctor import examine
    from attnbench.execution.events import follow
    from attnbench.report.documents.doctor import document

    def tell(event: Any) -> None:
        # A line for each and nothing animated: a thread that draws would disturb what is timed.
        if sys.stderr.isatty():
            say(f"testing {event.test} …", err=True)

    diagnosis = follow(examine(device=device, threads=threads or 1), tell)
    raise SystemExit(show(document(diagnosis, judge(diagnosis)), options))
