"""`attnbench advise`: which attention for a model's calls, from a run or within a budget."""

from __future__ import annotations

from typing import Any

import click

from attnbench.base.signals import EndedError
from attnbench.cli.options import (
    AXIS_FIELDS,
    RUN,
    axes_options,
    command_options,
    found_run,
    given,
    impl_files,
    say,
    show,
    threads_option,
)
from attnbench.errors import UsageError

_OF_A_RUN = ("run", "output", "format_", "as_json", "quiet")


class WithProgram(click.Command):
    """What stands behind `--` is a program."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Keep the program in `ctx.meta`, and parse what stands before it."""
        place = args.index("--") if "--" in args else len(args)
        ctx.meta["program"] = tuple(args[place + 1 :])
        return super().parse_args(ctx, args[:place])


@click.command(cls=WithProgram, options_metavar="[OPTIONS] [RUN | -- PROGRAM ARGS]")
@click.argument("run", type=RUN, required=False, metavar="")
@command_options(
    "advise",
    axes=axes_options(),
    impl=impl_files("A Python file with your implementations, tried beside the others."),
    threads=threads_option("1"),
)
def advise(**options: Any) -> None:
    """Say which attention is best for your calls.

    The calls are those of --model, of --case, of the axes, or of a program, which is run first:
    `attnbench advise -- python my_model.py`. sdpa is called first, then all others that support the
    call: what takes more than 3 times as long is dropped, the rest is checked and timed within
    --budget. The calls that a step spends most in come first. With RUN, a folder, a name, `latest`
    or `previous`, nothing is measured. If a stored run of this machine tried all that is asked, it
    is used; --budget measures again.

    For each call: the best implementation, what the default (sdpa) costs beside it, with an
    interval, the memory of both, and the line of torch or transformers to change. Exits 1 if sdpa
    or an implementation of yours is wrong, or yours raises, 2 if there is nothing to compare, 3 if
    no call is decided.
    """
    from attnbench.cli.progress import AdviceDisplay
    from attnbench.execution import advising, session
    from attnbench.execution.events import follow
    from attnbench.machine.host import is_here
    from attnbench.planning.plan import steps_of
    from attnbench.report.documents.advise import document
    from attnbench.store.runs import load_run

    program = click.get_current_context().meta["program"]
    if options["run"] is not None:
        flags = [flag for name, flag in given().items() if name not in _OF_A_RUN]
        if flags := [*flags, *["the program"] * bool(program)]:
            raise UsageError(f"RUN is advice from what was measured; remove {', '.join(flags)}")
        run = found_run(options["run"], options["output"])
        here = is_here(run.shared(run.environments))
        raise SystemExit(show(document(run, here=here), options))
    axes = {name: options[name] for name in (*AXIS_FIELDS, "threads")}
    calls = {name: options[name] for name in ("model", "step", "tokens", "case", "cases")}
    settings = {name: options[name] for name in ("device", "seed")}
    more = {"output": options["output"], "name": options["name"]}
    if program:
        if flags := [flag for name, flag in given().items() if name in (*axes, *calls)]:
            raise UsageError(f"the program says what it calls; remove {', '.join(flags)}")
        request = advising.of_program(
            program, axes, calls, options["files"], options["budget_s"], settings, **more
        )
    else:
        request = advising.request(
            axes, calls, options["files"], options["budget_s"], settings,
            stored="budget_s" not in given(), **more,
        )  # fmt: skip
    with AdviceDisplay(quiet=options["quiet"]) as display:
        try:
            path = follow(session.sweep(request), display.show)
        except (KeyboardInterrupt, EndedError):
            if display.path is not None:  # what is known so far
                display.close()
                show(document(load_run(display.path), interrupted=True), options)
            raise
    assert path is not None, "no dry run was asked for"
    run = load_run(path)
    if display.path is None:
        say(f"from {path}, measured on this machine; --budget 3m measures again", err=True)
    environment = run.shared(run.environments)
    asked = steps_of(request.sweeps, environment["device"], environment["threads"])
    raise SystemExit(show(document(run, asked), options))
