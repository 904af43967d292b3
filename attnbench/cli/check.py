"""`attnbench check`: are implementations right, and in sentences what is wrong with one."""

from __future__ import annotations

import contextlib
import json
import os
import time
import tomllib
from collections import Counter
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from attnbench.base.units import digits
from attnbench.cli.options import (
    command_options,
    impl_files,
    say,
    threads_option,
)
from attnbench.errors import AttnbenchError, ExitCode, UsageError
from attnbench.execution.failures import Failure
from attnbench.theory.traits import case_label

if TYPE_CHECKING:
    from attnbench.execution.checks import CheckResult


@click.command()
@command_options("check", impl=impl_files(), threads=threads_option("1"))
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
            reason = f": {result.reason}" if result.reason else ""
            item = f"{result.item.name}: {case_label(result.item.case)}"
            click.echo(f"{result.status:11} {result.impl}: {item}{reason}")

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
    for impl, own in groupby(kinds, key=lambda kind: kind.impl):
        click.secho(impl, bold=True)
        for number, kind in enumerate(own, start=1):
            for line in lines(kind, number):
                say(line, hang=5)
            click.echo()


def _by_impl(results: list[CheckResult]) -> Iterator[tuple[str, list[CheckResult]]]:
    """The results of each implementation, with those at other parameters."""
    from attnbench.base.parameters import base_name

    for impl in dict.fromkeys(base_name(result.impl) for result in results):
        yield impl, [result for result in results if base_name(result.impl) == impl]


def _print_checks(results: list[CheckResult]) -> None:
    """A row for each implementation: how many checks passed, and why it was not run."""
    from attnbench.report.render.tables import table

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


_SENTENCES = tomllib.loads(Path(__file__).with_name("faults.toml").read_text(encoding="utf-8"))
# Explanations of which it is worth saying which keys a query sees.
_OF_KEYS = ("keys", "one-key", "mask", "always", "top-left", "window", "prefix", "doc", "first-l")


def lines(failure: Failure, number: int) -> Iterator[str]:
    """A kind of failure in lines, its first check in full."""
    result, fault, code = failure.first, failure.first.fault, failure.first.code
    figures = fault | _figures(failure, fault)
    what = _SENTENCES["wrong"].get(code, code).format_map(figures)
    count, alike = len(failure.results), failure.passed_alike
    some = "only" if failure.matching == count else f"{failure.matching} of them"
    where = f", {some} {', '.join(failure.pattern)}" if failure.pattern else ""
    passed = f" ({alike}{' such' * bool(failure.pattern)} passed)" if alike else ""
    texts = [f"{number}. {what}: {count} check{'s' * (count != 1)}{where}{passed}"]
    if failure.explained:
        texts.append(_SENTENCES["explained"][failure.explained].format_map(figures))
    texts.append(f"{result.item.name}: {case_label(result.item.case)}")
    if code == "kept-result":
        pass  # what is there is the first result, or what the harness overwrote that by
    elif "at" in fault:
        place = ", ".join(f"{axis} {index}" for axis, index in fault["at"].items())
        expected, got, allowed = (_number(fault[name]) for name in ("expected", "got", "allowed"))
        texts.append(f"{place}: expected {expected}, got {got}; the error may be {allowed}")
        if isinstance(fault["error"], float) and fault["error"] <= fault["allowed"]:
            rms, most = (_number(fault[name]) for name in ("rms", "rms_allowed"))
            texts.append(f"in the root mean square it is off by {rms}, where {most} is allowed")
        if "keys" in fault and (failure.explained or "").startswith(_OF_KEYS):
            texts.append(_keys(**fault["keys"]))
        if touched := [
            _touched(a, *counts) for a, counts in fault["touched"].items() if counts[1] > 1
        ]:
            texts.append(f"wrong in {', '.join(touched)}")
    elif code not in ("wrote-input", "shape", "dtype", "device", "not-a-tensor", what):
        line = f"{Path(fault['file']).name}:{fault['line']}: " if "line" in fault else ""
        texts.append(line + str(result.reason))
    yield from (texts[0], *(f"   {text}" for text in texts[1:]))


def _figures(failure: Failure, fault: dict[str, Any]) -> dict[str, str]:
    """The figures of a kind in words."""
    low, high = failure.ratios or (1.0, 1.0)
    dtype, times = fault.get("precision", ("", None))
    same = abs(high - low) <= 0.01 * abs(high)
    return {
        "ratio": digits(low) if same else f"{digits(low)} to {digits(high)}",
        "factors": f", which is {' or '.join(failure.factors)}" if failure.factors else "",
        "dtype": dtype or fault.get("dtype", ""),
        "times": digits(times, 2),
    }


def _number(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.4g}"


def _keys(query: int, span: list[int], **which: list[int]) -> str:
    """Which keys the query has lost, or sees without right."""
    ((what, (low, high)),) = which.items()
    keys = f"key {low}" if low == high else f"keys {low} … {high}"
    verb = "sees" if what == "seen" else "misses"
    return f"query {query} {verb} {keys}; it should see {span[0]} … {span[1]}"


def _touched(axis: str, count: int, total: int, first: int, last: int) -> str:
    plural = "queries" if axis == "query" else "batches" if axis == "batch" else f"{axis}s"
    if count == total:
        return f"all {total} {plural}"
    place = f"{first}" if count == 1 else f"{first} … {last}"
    return f"{count} of {total} {plural} ({place})"
