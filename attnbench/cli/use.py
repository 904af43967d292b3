"""`attnbench use`: run a program with the attention that was advised for its calls."""

from __future__ import annotations

from typing import Any

import click

from attnbench.cli.advise import WithProgram
from attnbench.cli.options import RUN, command_options, found_run, impl_files
from attnbench.errors import UsageError


@click.command(cls=WithProgram, options_metavar="[OPTIONS] ADVICE -- PROGRAM ARGS")
@click.argument("run", type=RUN, required=False, metavar="")
@command_options("use", impl=impl_files("A Python file with implementations that were advised."))
def use(**options: Any) -> None:
    """Run a program with the attention that was advised.

    `attnbench use latest -- python my_model.py ARGS` calls, for each case of `attnbench advise`,
    what was advised, in the program and its children. All other calls stay. The first call of each
    case is checked; one that raises or is wrong raises DispatchError in the program. Output, input,
    arguments and exit code are the program's; the counts go to standard error.

    Exits as the program does; 2 if no call matched.
    """
    from attnbench.analysis.advice import picks
    from attnbench.execution.programs import check_program, run_with
    from attnbench.report.documents.use import document
    from attnbench.report.render import rendered

    program = click.get_current_context().meta["program"]
    if options["run"] is None or not program:
        raise UsageError(
            "it takes advice and a program; write attnbench use latest -- python my_model.py"
        )
    check_program(program)
    run, dry = found_run(options["run"], options["output"]), options["dry_run"]
    asked = {"picks": [[case.to_json(), name] for case, name in picks(run)], "dry": dry}
    if not asked["picks"]:
        raise UsageError(f"{run.path} has no advice; attnbench advise makes it")
    stats, code = run_with(
        program, asked | {"files": options["files"], "lenient": options["lenient"]}
    )
    if not stats and not code:
        raise UsageError("nothing was used: no Python of the program imported torch with our hooks")
    if stats:
        click.echo(rendered(document(stats, code, dry=dry), "text"), nl=False, err=True)
    raise SystemExit(code if code or any(stats["hits"].values()) else 2)
