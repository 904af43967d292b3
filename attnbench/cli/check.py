"""`attnbench check`: are implementations right, and in sentences what is wrong with one."""

from __future__ import annotations

import contextlib
import os
import time
from typing import Any

import click

from attnbench.cli.options import (
    AXIS_FIELDS,
    axes_options,
    command_options,
    given,
    impl_files,
    say,
    show,
    threads_option,
)
from attnbench.errors import AttnbenchError, UsageError


@click.command()
@command_options(
    "check", impl=impl_files(), threads=threads_option("1"),
    axes=axes_options("the battery's", without=("--impls", "--dtypes")),
)  # fmt: skip
def check(watch: bool, **options: Any) -> None:
    """Check implementations against a float64 reference.

    The battery combines every two of: masks, L against S, heads, D, V, batch, scale, position
    encodings, layouts of the inputs and of the output's gradient, inputs without gradients, dtypes.
    Long inputs, tiny and large values, `layer` and `decode` follow. Each case is checked on two
    draws of inputs in the same tensors, with planted needle keys. Properties of every method are
    checked, too: no look ahead, batch and heads independent, any order of keys, any block size,
    exact in its limit, gradients by finite differences. Cases that an implementation does not
    support are `unsupported`, with the reason. With --case, --cases or an axis of a sweep, such as
    --seq-lens, those cases are checked in place of the battery, with gradients and without unless a
    case or --passes says which. The simplest failure of each kind is shown in full. Exits 1 on any
    failure, 2 if nothing could be checked.
    """
    if not watch:
        raise SystemExit(_check(**options))
    if not options["files"]:
        raise UsageError("--watch needs a file to watch (--impl FILE)")
    while True:
        stamps = _stamps(options["files"])
        try:
            _check(**options, stamps=stamps)
        except ChangedError:
            continue
        except AttnbenchError as err:  # such as a syntax error, which the next change may mend
            say(f"Error: {' '.join(str(err).split())}", err=True)
        say(f"waiting for a change of {', '.join(options['files'])} …", err=True)
        while _stamps(options["files"]) == stamps:
            time.sleep(_POLL_S)


class ChangedError(Exception):
    """A watched file has changed while it was checked."""


_POLL_S = 0.3
_SOURCES = (".py", ".c", ".cc", ".cpp", ".cu", ".cuh", ".h")


def _stamps(files: tuple[str, ...]) -> dict[str, tuple[int, int]]:
    """When the sources in the folders of these files changed, and their sizes."""
    found = {}
    for folder in {os.path.dirname(os.path.abspath(file)) for file in files}:
        with contextlib.suppress(OSError), os.scandir(folder) as entries:
            for entry in entries:
                with contextlib.suppress(OSError):
                    if entry.name.endswith(_SOURCES):
                        status = entry.stat()
                        found[entry.path] = status.st_mtime_ns, status.st_size
    return found


def _check(
    *, impls: tuple[str, ...] | None, verbose: bool, as_json: bool, format_: str,
    stamps: dict[str, Any] | None = None, **options: Any,
) -> int:  # fmt: skip
    """Check once and print what came of it; the exit code of that.

    Raises:
        ChangedError: a source file no longer has the stamp given.
    """
    from attnbench.analysis.failures import failures
    from attnbench.cli.progress import CheckDisplay
    from attnbench.execution.checks import run_checks
    from attnbench.execution.events import follow
    from attnbench.planning.models import asked_sweeps
    from attnbench.planning.plan import Axes
    from attnbench.report.documents.check import document
    from attnbench.schema.check import CheckResult
    from attnbench.theory.traits import case_label

    flags, others = given(), ("impls", "dtypes")
    axes = {name: options.pop(name) for name in AXIS_FIELDS if name not in others}
    asked = {name: value for name, value in axes.items() if name in flags}
    listed = {name: options.pop(name) for name in ("case", "cases")}
    if asked or any(listed.values()):
        over = asked | ({"dtypes": options["dtypes"]} if "dtypes" in flags else {})
        options["sweeps"], _ = asked_sweeps([Axes(**asked)], over, **listed)
    apart = as_json or format_ != "text"

    def output(event: object) -> None:
        if stamps is not None and _stamps(options["files"]) != stamps:
            raise ChangedError
        if isinstance(event, CheckResult) and verbose and event.status != "left":
            reason = f": {event.reason}" if event.reason else ""
            item = f"{event.item.name}: {case_label(event.item.case)}"
            click.echo(f"{event.status:11} {event.impl}: {item}{reason}", err=apart)

    with CheckDisplay(quiet=verbose) as display:
        checks = run_checks(names=impls, failures=failures, **options)
        results = follow(checks, display.show, output)
    return show(document(results, failures(results)), {"as_json": as_json, "format_": format_})
