"""`attnbench check`: correctness alone, over the built-in battery."""

from __future__ import annotations

from collections import Counter
from typing import Any

import click

from attnbench.cli.options import NAMES, device_option, impl_files, seed_option
from attnbench.errors import ExitCode


@click.command()
@click.option("--impls", type=NAMES, help="Implementations by name [all, or those of --impl].")
@impl_files
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
def check(**options: Any) -> None:
    """Check implementations against a float64 reference; exits 1 on any failure.

    The battery has odd lengths, L != S both ways, grouped heads, D != V, n = 1, large logits,
    strided inputs, rows without keys, rotary encodings and decoding, each on two draws of inputs
    in the same tensors, with planted needle keys. What an implementation cannot take is
    `unsupported`, with the reason.
    """
    from attnbench.execution.checks import run_checks

    results = run_checks(
        names=options["impls"],
        files=options["files"],
        device=options["device"],
        dtypes=options["dtypes"],
        seed=options["seed"],
        full=options["full"],
        seen=None if options["as_json"] else _printer(options["verbose"]),
    )
    if options["as_json"]:
        import json

        click.echo(json.dumps([result.to_json() for result in results], indent=1))
    else:
        _summary(results)
    if any(result.failed for result in results):
        raise SystemExit(ExitCode.FINDING)


def _worst(ratio: float) -> str:
    from attnbench.base.units import digits

    return digits(ratio) if ratio < 1000 else "> 1000"


def _printer(verbose: bool) -> Any:
    from attnbench.theory.traits import case_label

    def seen(result: Any) -> None:
        if verbose or result.failed:
            reason = f": {result.reason}" if result.reason else ""
            click.echo(
                f"{result.status:11} {result.impl}: {result.item.name}:"
                f" {case_label(result.item.case)}{reason}"
            )

    return seen


def _summary(results: list[Any]) -> None:
    from attnbench.cli.summary import table

    by_impl: dict[str, list[Any]] = {}
    for result in results:
        by_impl.setdefault(result.impl, []).append(result)
    rows = []
    for impl, own in by_impl.items():
        counts = Counter(result.status for result in own)
        failed = sum(result.failed for result in own)
        ratios = [r.metrics["error_ratio"] for r in own if r.metrics.get("error_ratio") is not None]
        verdict = "FAILED" if failed else "right" if counts["ok"] else "not run"
        told = [r.reason for r in own if r.failed] or [r.reason for r in own if r.reason]
        reasons = Counter(told).most_common(1)
        rows.append(
            (
                impl,
                verdict,
                str(counts["ok"]),
                str(failed),
                str(counts["unsupported"]),
                _worst(max(ratios)) if ratios else "–",
                reasons[0][0] if reasons else "",
            )
        )
    header = ("implementation", "verdict", "passed", "failed", "unsupported", "worst error/allowed")
    table((*header, "most frequent reason"), rows)
