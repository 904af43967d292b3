"""`attnbench check` and `doctor`: are implementations right, and is this machine fit to measure."""

from __future__ import annotations

import json
import sys
from collections import Counter
from typing import TYPE_CHECKING, Any

import click

from attnbench.cli.options import (
    NAMES,
    device_option,
    impl_files,
    say,
    seed_option,
    threads_option,
)
from attnbench.errors import ExitCode

if TYPE_CHECKING:
    from attnbench.execution.checks import CheckResult
    from attnbench.execution.doctor import Examination

_SIGNS = {"ok": ("✓", "green"), "warning": ("!", "yellow"), "fail": ("✗", "red")}
_STAGES = {
    "clock": "the clock",
    "spin": "a spin of known length",
    "matmul": "a matmul",
    "cold": "cold and warm reads",
    "planted": "an injected slowdown",
    "noise": "the noise, for 10 s",
}


@click.command()
@click.option("--impls", type=NAMES, help="Implementations by name [all, or those of --impl].")
@impl_files()
@device_option
@click.option(
    "--dtypes",
    type=NAMES,
    default="float32,bfloat16,float16,float64",
    show_default=True,
    help="Dtypes to check in; decoding is checked in the first.",
)
@seed_option
@click.option("--full", is_flag=True, help="The whole battery for those that compile, too (slow).")
@click.option("--verbose", "-v", is_flag=True, help="A line for each check, also those that pass.")
@click.option("--json", "as_json", is_flag=True, help="Every result as JSON.")
def check(impls: tuple[str, ...] | None, as_json: bool, verbose: bool, **options: Any) -> None:
    """Check implementations against a float64 reference.

    The battery has odd lengths, L != S both ways, grouped heads, D != V, n = 1, large logits,
    strided inputs, rows without keys, rotary encodings and decoding, each on two draws of inputs
    in the same tensors, with planted needle keys. What an implementation cannot take is
    `unsupported`, with the reason. Exits 1 on any failure.
    """
    from attnbench.execution.checks import run_checks

    def seen(result: CheckResult) -> None:
        if not as_json and (verbose or result.failed):
            click.echo(_line(result))

    results = run_checks(names=impls, seen=seen, **options)
    if as_json:
        click.echo(json.dumps([result.to_json() for result in results], indent=1))
    else:
        _print_checks(results)
    if any(result.failed for result in results):
        raise SystemExit(ExitCode.FINDING)


def _line(result: CheckResult) -> str:
    from attnbench.theory.traits import case_label

    reason = f": {result.reason}" if result.reason else ""
    item = f"{result.item.name}: {case_label(result.item.case)}"
    return f"{result.status:11} {result.impl}: {item}{reason}"


def _print_checks(results: list[CheckResult]) -> None:
    """A row for each implementation: how many checks passed, and the most frequent reason."""
    from attnbench.base.units import digits
    from attnbench.report.tables import table

    rows = []
    for impl in dict.fromkeys(result.impl for result in results):
        own = [result for result in results if result.impl == impl]
        counts = Counter(result.status for result in own)
        failed = [result for result in own if result.failed]
        ratios = [r.metrics["error_ratio"] for r in own if r.metrics.get("error_ratio") is not None]
        worst = max(ratios, default=None)
        reasons = Counter(r.reason for r in failed or own if r.reason).most_common(1)
        rows.append(
            (
                impl,
                "FAILED" if failed else "right" if counts["ok"] else "not run",
                str(counts["ok"]),
                str(len(failed)),
                str(counts["unsupported"]),
                "> 1000" if worst is not None and worst >= 1000 else digits(worst),
                str(reasons[0][0]) if reasons else "",
            )
        )
    header = (
        "implementation", "verdict", "passed", "failed", "unsupported", "worst error/allowed",
        "most frequent reason",
    )  # fmt: skip
    click.echo(table(header, rows, spare=("unsupported", "worst error/allowed")), nl=False)


@click.command()
@device_option
@threads_option()
@click.option("--json", "as_json", is_flag=True, help="Facts, tests and findings as one object.")
def doctor(device: str, threads: int | None, as_json: bool) -> None:
    """Examine the machine and test the measuring itself.

    The clock must resolve a microsecond and read a spin of known length within 1 %, a matmul must
    stay under the peak, cold reads must differ from warm ones, and an injected slowdown of 5 %
    must be seen between interleaved loops. Then the noise of this machine, and what to do about
    it. Takes about 20 s. Exits 0 where the machine is fit to measure and 4 where not; a warning
    changes nothing.
    """
    from attnbench.execution.doctor import examine

    shows = sys.stderr.isatty() and not as_json

    def tell(test: str) -> None:
        # A line for each and nothing animated: a thread that draws would disturb what is timed.
        if shows:
            click.echo(f"testing {_STAGES.get(test, test)} …", err=True)

    examination = examine(device=device, threads=threads, began=tell)
    if as_json:
        click.echo(json.dumps(examination.to_json(), indent=1))
    else:
        _print_examination(examination)
    raise SystemExit(int(examination.exit_code))


def _print_examination(examination: Examination) -> None:
    """The machine in a line, the self-tests in a table, the warnings, the verdict."""
    from attnbench.machine.host import ranges
    from attnbench.report.tables import table

    facts = examination.diagnosis["facts"]
    machine = (
        facts["device_name"],
        f"{facts['threads']} threads on CPUs {ranges(facts['affinity']) or 'unknown'}",
        f"torch {facts['torch']}" + (f" ({facts['blas']})" if facts.get("blas") else ""),
        f"python {facts['python']}",
    )
    tests = [finding for finding in examination.findings if finding.kind == "test"]
    rows = [(_SIGNS[f.level][0], f.name, f.fact, f.limit or "") for f in tests]
    say(" · ".join(machine))
    click.echo()
    click.echo(table(("", "self-test", "measured", "limit"), rows))
    for finding in examination.findings:
        if finding.level != "ok":
            sign, colour = _SIGNS[finding.level]
            name = f"{finding.name}: " if finding.kind == "test" else ""
            say(f"{sign} {name}{finding.fact}", fg=colour)
            say(f"  → {finding.remedy}")
    wall_s = examination.diagnosis["meanwhile"]["wall_s"]
    sign, colour = _SIGNS["fail" if examination.failed else "ok"]
    say(f"{sign} {examination.verdict}, tested for {wall_s:.0f} s", fg=colour)
