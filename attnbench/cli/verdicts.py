"""`attnbench verify` and `claims`: laws and statements held against a run; an exit code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from attnbench.cli.options import (
    RUN,
    command_options,
    found_run,
    given,
    impl_files,
    run_argument,
    show,
    threads_option,
)
from attnbench.errors import UsageError

_SWEEP_ONLY = ("device", "impls", "files", "threads", "seed", "name")


@click.command()
@click.argument("run", type=RUN, required=False)
@command_options(
    "verify",
    impl=impl_files(
        "With --sweep: a Python file with implementations of yours, in place of the preset's."
    ),
    threads=threads_option("1: what repeats best", before="With --sweep: "),
)
def verify(**options: Any) -> None:
    """Check whether cost grows as the laws declare.

    RUN is a folder, a name, `latest` or `previous`. FLOPs and workspace are compared with their
    formulas and laws exactly; time by its exponent along each axis, with an interval, and by a
    model of several terms where sizes vary together. Each verdict is holds, refuted or
    inconclusive, with the reason; the last line counts them. Exits 1 if something is refuted, 3 if
    an implementation has no law that holds, else 0: laws may be inconclusive beside one that holds,
    unless --strict is given.

    --sweep measures some 300 cells on a CPU, in one thread and with an allocator that keeps its
    memory; it takes about five minutes on two CPUs. With --impls or --impl only the named
    implementations are measured, under `attention` alone.

    Each time is known within an interval. A law holds if all times within the intervals follow it,
    and is refuted if none do; else the reason names the sizes that need more precision, and
    `decide` is the command that measures them for longer in fresh processes.
    """
    from attnbench.analysis.scaling import scaling
    from attnbench.report.documents.verify import document
    from attnbench.store.folder import SWEEP, RunFolder

    flags = [flag for name, flag in given().items() if name in _SWEEP_ONLY]
    if options["measures"] and options["run"]:
        raise UsageError(
            f"--sweep makes a run of its own; remove '{options['run']}', or name it by --name"
        )
    if flags and not options["measures"]:
        raise UsageError(f"{', '.join(flags)} needs --sweep, which measures a run first")
    if options["measures"]:
        from attnbench.cli.progress import SweepDisplay
        from attnbench.execution.events import follow
        from attnbench.execution.process import Settings
        from attnbench.execution.verifying import sweep_for_verdicts

        settings = Settings(
            files=tuple(str(Path(file).resolve()) for file in options["files"]),
            **{name: options[name] for name in ("device", "threads", "seed")},
        )
        names = {"output": options["output"], "name": options["name"]}
        with SweepDisplay(quiet=options["quiet"]) as display:
            events = sweep_for_verdicts(settings, impls=options["impls"] or (), **names)
            text = str(follow(events, display.show))
    else:
        text = "latest" if options["run"] is None else options["run"]
    folder = RunFolder.find(text, options["output"], SWEEP)
    run = found_run(str(folder.path), options["output"])
    found = document(scaling(run), run, strict=options["strict"], every=options["verbose"])
    raise SystemExit(show(found, options))


@click.command()
@run_argument
@command_options("claims")
def claims(
    run: str, output: Path, file: Path | None, only: tuple[str, ...] | None, **options: Any
) -> None:
    """Check claims, such as a paper's table, against a run.

    RUN is a folder, a name, `latest` or `previous`. Without --file the claims are those of four
    lecture notes on attention. A claim is a few lines of TOML:

    \b
      [[claim]]
      id = "sdpa-speed"
      source = "README"
      place = "Results, table 1"
      says = "sdpa is at least 1.5x faster than naive at n = 2048"
      quantity.kind = "ratio"
      quantity.where = { workload = "attention", seq_len = 2048 }
      quantity.first = { impl = "naive" }
      quantity.second = { impl = "sdpa" }
      relation = { is = ">=", limit = 1.5 }

    `where` selects by columns of `attnbench export`. A quantity is a value, ratio or exponent; a
    relation one of ==, <, >, <=, >=, between, about, with a tolerance. `right = "…"` marks what
    should be refuted, and says what is right; `open = true` marks what may go either way. Every
    field: attnbench/analysis/claims/statement.py.

    Each claim holds, is refuted, or is inconclusive, with the reason. Exits 0 when every verdict
    that was reached is the expected one, 1 when one is not, 3 when none could be reached.
    """  # noqa: D301
    from attnbench.analysis.claims.judging import judged
    from attnbench.analysis.claims.statement import NOTES, read
    from attnbench.report.documents.claims import document

    stated = read(file or NOTES)
    loaded = found_run(run, output)
    raise SystemExit(show(document(judged(stated, loaded, only), loaded), options))
