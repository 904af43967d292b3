"""`attnbench capture`: run a program and say which attention it calls, as a case list."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from attnbench.base.files import write_whole
from attnbench.base.jsontext import plain
from attnbench.base.signals import handled
from attnbench.base.units import counted
from attnbench.cli.options import command_options
from attnbench.errors import UsageError
from attnbench.planning.caselist import is_captured

_VERIFIED = 200  # calls
_SITE = Path(__file__).parents[1] / "capturing" / "site"


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.argument("program", nargs=-1, required=True, metavar="-- PROGRAM ARGS")
@command_options("capture")
def capture(program: tuple[str, ...], **options: Any) -> None:
    """Run a program and list its attention calls.

    `attnbench capture -- python my_model.py ARGS` runs it as it would run by itself: output, input,
    arguments and exit code stay, results do not change. What was seen goes to standard error, after
    the program's own output, and into a file for the option --cases of advise and sweep. An
    exception, sys.exit and Ctrl-C keep it. Calls in functions that torch.compile took are not seen.

    Exits as the program does; 2 if it called no attention.
    """
    from attnbench.report.documents.capture import document
    from attnbench.report.render import rendered

    output: Path = options["output"]
    _refuse(program, output)
    asked = {"calls": options["calls"], "seconds": options["seconds"], "verify": False}
    seen, code = _run(program, asked)
    if "calls" in seen and options["verify"]:
        asked |= {"verify": True, "calls": min(options["calls"] or _VERIFIED, _VERIFIED)}
        again, _ = _run(program, asked, subprocess.DEVNULL)
        seen["verified"] = {"calls": again.get("calls", 0), "unseen": again.get("unseen", {})}
    if not seen.get("calls"):
        raise UsageError(f"no attention was seen: {_reason(seen, program)}; it exited with {code}")
    code = 0 if seen["stopped"] else code
    write_whole(output, json.dumps(seen, indent=1) + "\n")
    click.echo(rendered(document(seen, str(output), code), "text"), nl=False, err=True)
    raise SystemExit(code)


def _refuse(program: tuple[str, ...], output: Path) -> None:
    """Say before the program runs what could not work."""
    if shutil.which(program[0]) is None:
        hint = f"; write -- python {program[0]}" if program[0].endswith(".py") else ""
        raise UsageError(f"no program {program[0]}{hint}")
    if not output.parent.is_dir() or output.is_dir():
        raise UsageError(f"--output {output}: it must be a file in a folder that exists")
    if output.exists() and not is_captured(output):
        raise UsageError(f"--output {output} exists and is not of a capture; give another name")


def _run(
    program: tuple[str, ...], asked: Mapping[str, Any], streams: int | None = None
) -> tuple[dict[str, Any], int]:
    """What was seen of the program, empty where no Python read our hooks, and its exit code."""
    before = os.environ.get("PYTHONPATH")
    with tempfile.TemporaryDirectory(prefix="attnbench-capture-") as folder:
        file = Path(folder, "seen.json")
        asked = {"file": str(file), "root": str(_SITE.parents[2]), "pythonpath": before, **asked}
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join([str(_SITE), *([before] if before else [])]),
            "ATTNBENCH_CAPTURE": json.dumps(asked),
        }
        with subprocess.Popen(
            program, env=environment, stdin=streams, stdout=streams, stderr=streams
        ) as process:
            try:  # a terminal sends Ctrl-C to the program, too, which ends as it wants to
                with handled((signal.SIGINT,), lambda *_: None):
                    code = process.wait()
            except BaseException:
                process.terminate()
                raise
        text = file.read_text("utf-8") if file.exists() else "{}"
    return json.loads(text or "{}"), code if code >= 0 else 128 - code


def _reason(seen: Mapping[str, Any], program: tuple[str, ...]) -> str:
    if not seen:
        return f"{program[0]} is not a Python that reads PYTHONPATH (python -I and -E do not)"
    if seen.get("stopped"):
        return f"the program was stopped {seen['stopped']}, before its first call"
    if "calls" in seen:
        more = ["; functions that torch.compile took are not seen"] * bool(seen["compiled"])
        unseen = seen.get("verified", {}).get("unseen", {})
        more += [f"; {counted(n, 'call')} of {op} ran unseen" for op, n in unseen.items()]
        return (
            "the program made no call, looked for scaled_dot_product_attention under any name,"
            " nn.MultiheadAttention, nn.TransformerEncoder and the attention of transformers"
        ) + "".join(more)
    if seen["lacks"]:
        return f"its Python cannot load attnbench ({plain(seen['lacks'])}); install attnbench there"
    return "the program imported no torch"
