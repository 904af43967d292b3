"""`attnbench capture`: run a program and say which attention it calls, as a case list."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from attnbench.base.files import write_whole
from attnbench.cli.options import command_options
from attnbench.errors import UsageError
from attnbench.planning.caselist import is_captured

_VERIFIED = 200  # calls


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.argument("program", nargs=-1, required=True, metavar="-- PROGRAM ARGS")
@command_options("capture")
def capture(program: tuple[str, ...], **options: Any) -> None:
    """Run a program and list its attention calls.

    `attnbench capture -- python my_model.py ARGS` runs it as it would run by itself: output, input,
    arguments and exit code stay, results do not change. What was seen goes to standard error, after
    the program's own output, and into a file for the option --cases of advise and sweep. An
    exception, sys.exit and Ctrl-C keep it. What torch.compile took counts, without a time.

    Exits as the program does; 2 if it called no attention.
    """
    from attnbench.execution.programs import check_program, run_program, why_nothing
    from attnbench.report.documents.capture import document
    from attnbench.report.render import rendered

    output: Path = options["output"]
    check_program(program)
    _check_output(output)
    seen, code = run_program(program, calls=options["calls"], seconds=options["seconds"])
    if "calls" in seen and options["verify"]:
        few = min(options["calls"] or _VERIFIED, _VERIFIED)
        again, _ = run_program(program, calls=few, seconds=options["seconds"], verify=True)
        seen["verified"] = {"calls": again.get("calls", 0), "unseen": again.get("unseen", {})}
    if not seen.get("calls"):
        why = why_nothing(seen, program)
        raise UsageError(f"no attention was seen: {why}; it exited with {code}")
    code = 0 if seen["stopped"] else code
    write_whole(output, json.dumps(seen, indent=1) + "\n")
    click.echo(rendered(document(seen, str(output), code), "text"), nl=False, err=True)
    raise SystemExit(code)


def _check_output(output: Path) -> None:
    """Say before the program runs that its calls could not be written."""
    if not output.parent.is_dir() or output.is_dir():
        raise UsageError(f"--output {output}: it must be a file in a folder that exists")
    if output.exists() and not is_captured(output):
        raise UsageError(f"--output {output} exists and is not of a capture; give another name")
