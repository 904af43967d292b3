"""`attnbench doctor`: whether this machine is fit to measure, and what to do where it is not."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import click

from attnbench.cli.options import device_option

if TYPE_CHECKING:
    from attnbench.execution.doctor import Examination
    from attnbench.machine.symptoms import Finding

_MARKS = {"ok": ("✓", "green"), "warning": ("!", "yellow"), "fail": ("✗", "red")}
_STAGES = {
    "clock": "the clock",
    "spin": "a spin of known length",
    "matmul": "a matmul",
    "cold": "cold and warm reads",
    "planted": "a planted slowdown",
    "noise": "the noise, for 10 s",
}


@click.command()
@device_option
@click.option(
    "--threads", type=click.IntRange(min=1, max=1024), help="CPU threads [torch's default]."
)
@click.option("--json", "as_json", is_flag=True, help="Facts, tests and findings as one object.")
def doctor(device: str, threads: int | None, as_json: bool) -> None:
    """Examine the machine and test the measuring itself; takes about 20 s.

    The clock must resolve a microsecond and read a spin of known length within 1 %, a matmul must
    stay under the peak, cold reads must be told from warm ones, and a planted slowdown of 5 %
    must be seen between interleaved twins. Then the noise of this machine, and what to do about
    it. Exits 0 where it is fit to measure and 4 where not; a warning changes nothing.
    """
    from attnbench.execution.doctor import examine

    if as_json:
        import json

        examination = examine(device=device, threads=threads)
        click.echo(json.dumps(examination.to_json(), indent=1))
    else:
        with _spinner() as tell:
            examination = examine(device=device, threads=threads, tell=tell)
        _print(examination)
    raise SystemExit(int(examination.exit_code))


@contextlib.contextmanager
def _spinner() -> Iterator[Callable[[str], None]]:
    """Say on standard error what is being tested, where that is a terminal.

    Drawn once a test and not animated: a thread that draws would disturb what is timed.
    """
    shows = sys.stderr.isatty()

    def tell(test: str) -> None:
        if shows:
            click.echo(f"\r\x1b[Ktesting {_STAGES.get(test, test)} …", nl=False, err=True)

    try:
        yield tell
    finally:
        if shows:
            click.echo("\r\x1b[K", nl=False, err=True)


def _print(examination: Examination) -> None:
    """The machine in a line, the self-tests in a table, the warnings, the verdict."""
    from attnbench.cli.summary import table

    click.echo(_machine(examination.diagnosis["facts"]))
    click.echo()
    tests = [finding for finding in examination.findings if finding.kind == "test"]
    rows = [(_MARKS[f.level][0], f.name, f.fact, f.limit or "") for f in tests]
    table(("", "self-test", "measured", "limit"), rows)
    click.echo()
    for finding in examination.findings:
        if finding.level != "ok":
            _print_remedy(finding)
    wall_s = examination.diagnosis["meanwhile"]["wall_s"]
    mark, colour = _MARKS["fail" if examination.failed else "ok"]
    click.echo(click.style(f"{mark} {examination.verdict}, tested for {wall_s:.0f} s", fg=colour))


def _print_remedy(finding: Finding) -> None:
    mark, colour = _MARKS[finding.level]
    named = f"{finding.name}: {finding.fact}" if finding.kind == "test" else finding.fact
    click.echo(click.style(f"{mark} {named}", fg=colour))
    click.echo(f"  → {finding.remedy}")


def _machine(facts: dict[str, Any]) -> str:
    from attnbench.machine.host import ranges

    parts = [
        facts["device_name"],
        f"{facts['threads']} threads on CPUs {ranges(facts['affinity']) or 'unknown'}",
        f"torch {facts['torch']}" + (f" ({facts['blas']})" if facts.get("blas") else ""),
        f"python {facts['python']}",
    ]
    return " · ".join(parts)
