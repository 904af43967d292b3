"""`attnbench check`: are implementations right."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from attnbench.cli.options import (
    NAMES,
    POSITIVE,
    Rows,
    device_option,
    impl_files,
    options_of,
    say,
    seed_option,
    threads_option,
)
from attnbench.errors import AttnbenchError, ExitCode, UsageError

if TYPE_CHECKING:
    from attnbench.execution.checks import CheckResult
    from attnbench.execution.failures import Failure


_CHECK: Rows = (
    ("--impls", {"type": NAMES}, "Implementations by name [all, or those of --impl]."),
    impl_files(),
    device_option,
    ("--dtypes", {"type": NAMES, "default": "float32,bfloat16,float16,float64",
                  "show_default": True},
     "Dtypes to check in; decoding is checked in the first."),
    threads_option("1"),
    ("--timeout timeout_s", {"type": POSITIVE, "default": 60.0, "show_default": True},
     "Seconds without a heartbeat after which a check is given up."),
    seed_option,
    ("--full", {"is_flag": True},
     "The whole battery for those that compile, too [what fits into a minute]."),
    ("--watch", {"is_flag": True},
     "Check again whenever a file of --impl, or beside it, changes."),
    ("--verbose -v", {"is_flag": True}, "A line for each check, also those that pass."),
    ("--json as_json", {"is_flag": True}, "Every result and kind of failure as JSON."),
)  # fmt: skip


@click.command()
@options_of(_CHECK)
def check(watch: bool, **options: Any) -> None:
    """Check implementations against a float64 reference.

    Of masks, L against S, heads, D, V, batch, scale, position encodings, layouts of the inputs
    and of the output's gradient, inputs that require none, and dtypes, the battery has any two
    together in some check; and long, tiny and large inputs, layers and decoding. Each is checked on
    two draws of inputs in the same tensors, with planted needle keys; and so are properties that
    hold for every method: no look ahead, batch and heads apart, any order of keys, any block size,
    exact in its limit, gradients by finite differences. What an implementation cannot take is
    `unsupported`, with the reason. Of each kind of failure the simplest is shown in full. Exits 1
    on any failure, but 2 where nothing could be judged: a definition is wrong, or nothing can run.
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
    *,
    impls: tuple[str, ...] | None,
    verbose: bool,
    as_json: bool,
    stamps: dict[str, Any] | None = None,
    **options: Any,
) -> ExitCode:
    """Check once and print what came of it; the exit code of that.

    Raises:
        ChangedError: a source file no longer has the stamp given.
    """
    from attnbench.cli.progress import CheckDisplay
    from attnbench.execution.checks import run_checks
    from attnbench.execution.failures import failures

    def seen(result: CheckResult | None) -> None:
        if stamps is not None and _stamps(options["files"]) != stamps:
            raise ChangedError
        if result is not None and verbose and not as_json:
            click.echo(_line(result))

    with CheckDisplay(seen, quiet=verbose and not as_json) as display:
        results = run_checks(
            names=impls,
            watch=display.working,
            planned=display.planned,
            checked=display.checked,
            **options,
        )
    kinds = failures(results)
    if as_json:
        found = {
            "counts": {impl: Counter(r.status for r in own) for impl, own in _by_impl(results)},
            "checks": [result.to_json() for result in results],
            "failures": [kind.to_json() for kind in kinds],
        }
        click.echo(json.dumps(found, indent=1))
    else:
        _print_failures(kinds)
        _print_checks(results)
        for impl in {r.impl: 0 for r in results if r.metrics.get("reuses_output") == "yes"}:
            say(f"{impl} returns the same memory at each call; reuses_output=True declares that")
    by_nothing = any(kind.first.code == "definition" for kind in kinds)
    if by_nothing or not any(result.failed or result.status == "ok" for result in results):
        return ExitCode.USAGE  # nothing could be judged, and it was said why
    return ExitCode.FINDING if kinds else ExitCode.OK


def _print_failures(kinds: list[Failure]) -> None:
    from attnbench.cli.faults import lines

    impl, number = None, 0
    for kind in kinds:
        if kind.impl != impl:
            impl, number = kind.impl, 0
            click.secho(impl, bold=True)
        number += 1
        for line in lines(kind, number):
            say(line, hang=5)
        click.echo()


def _line(result: CheckResult) -> str:
    from attnbench.theory.traits import case_label

    reason = f": {result.reason}" if result.reason else ""
    item = f"{result.item.name}: {case_label(result.item.case)}"
    return f"{result.status:11} {result.impl}: {item}{reason}"


def _by_impl(results: list[CheckResult]) -> Iterator[tuple[str, list[CheckResult]]]:
    """The results of each implementation, with those at other parameters."""
    from attnbench.base.parameters import base_name

    for impl in dict.fromkeys(base_name(result.impl) for result in results):
        yield impl, [result for result in results if base_name(result.impl) == impl]


def _print_checks(results: list[CheckResult]) -> None:
    """A row for each implementation: how many checks passed, and why it was not run."""
    from attnbench.base.units import digits
    from attnbench.report.tables import table

    rows = []
    for impl, own in _by_impl(results):
        counts = Counter(result.status for result in own)
        failed = sum(result.failed for result in own)
        ratios = [r.metrics["error_ratio"] for r in own if r.metrics.get("error_ratio") is not None]
        worst = max(ratios, default=None)
        reasons = Counter(r.reason for r in own if r.reason and not (failed or counts["ok"]))
        passed, left = counts["ok"], counts["left"]
        part = f" ({passed} of {passed + left}; --full)" if left else ""
        rows.append(
            (
                impl,
                "FAILED" if failed else f"right{part}" if passed else "not run",
                str(passed),
                str(failed),
                str(counts["unsupported"]),
                "> 1000" if worst is not None and worst >= 1000 else digits(worst),
                str(reasons.most_common(1)[0][0]) if reasons else "",
            )
        )
    numbers = ("passed", "failed", "unsupported", "worst error/allowed")
    header = ["implementation", "verdict", *numbers, *["why"] * any(row[-1] for row in rows)]
    shown = [row[: len(header)] for row in rows]
    click.echo(table(header, shown, right=numbers, spare=numbers[2:]), nl=False)
