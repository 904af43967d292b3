"""`attnbench doctor`: is this machine fit to measure, and what works on its GPU."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from attnbench.base.units import counted
from attnbench.cli.options import device_option, say, threads_option

if TYPE_CHECKING:
    from attnbench.execution.doctor import Examination

_SIGNS = {"ok": ("✓", "green"), "warning": ("!", "yellow"), "fail": ("✗", "red")}


@click.command()
@device_option
@threads_option("1, as for a sweep")
@click.option("--json", "as_json", is_flag=True, help="Facts, tests and findings as one object.")
def doctor(device: str, threads: int | None, as_json: bool) -> None:
    """Examine the machine and test the measuring itself.

    The clock must resolve a microsecond, cold reads must differ from warm ones, and an injected
    slowdown of 5 % must be seen between interleaved loops. Then the noise of this machine, and what
    to do about it. On a GPU also what it is, and what works on it or why not: the kernels of SDPA
    by dtype, FlexAttention, Triton, CUDA graphs, NVML. Takes about 20 s on a CPU, on a GPU longer.
    Exits 0 where the machine is fit to measure and 4 where not; a warning changes nothing.
    """
    from attnbench.execution.doctor import examine
    from attnbench.execution.events import follow

    shows = sys.stderr.isatty() and not as_json

    def show(event: Any) -> None:
        # A line for each and nothing animated: a thread that draws would disturb what is timed.
        if shows:
            say(f"testing {event.test} …", err=True)

    examination = follow(examine(device=device, threads=threads or 1), show)
    if as_json:
        click.echo(json.dumps(examination.to_json(), indent=1))
    else:
        _print_examination(examination)
    raise SystemExit(int(examination.exit_code))


def _print_examination(examination: Examination) -> None:
    """The machine in a line, the self-tests in a table, the warnings, the verdict."""
    from attnbench.machine.host import ranges
    from attnbench.report.render.tables import table

    facts = examination.diagnosis["facts"]
    machine = (
        facts["device_name"],
        f"{counted(facts['threads'], 'thread')} on CPUs {ranges(facts['affinity']) or 'unknown'}",
        f"torch {facts['torch']}" + (f" ({facts['blas']})" if facts.get("blas") else ""),
        f"python {facts['python']}",
    )
    tests = [finding for finding in examination.findings if finding.kind == "test"]
    rows = [(_SIGNS[f.level][0], f.name, f.fact, f.limit or "") for f in tests]
    say(" · ".join(machine))
    click.echo()
    click.echo(table(("", "self-test", "measured", "limit"), rows))
    if gpu := examination.diagnosis["gpu"]:
        click.echo(table(("", "on this GPU", "found"), _of_the_gpu(gpu, facts)))
    for finding in examination.findings:
        if finding.level != "ok":
            sign, colour = _SIGNS[finding.level]
            name = f"{finding.name}: " if finding.kind == "test" else ""
            say(f"{sign} {name}{finding.fact}", fg=colour)
            say(f"  → {finding.remedy}")
    wall_s = examination.diagnosis["meanwhile"]["wall_s"]
    sign, colour = _SIGNS["fail" if examination.failed else "ok"]
    say(f"{sign} {examination.verdict}, tested for {wall_s:.0f} s", fg=colour)


def _of_the_gpu(gpu: dict[str, Any], facts: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    """What it is, then what works on it: a row for each kernel and for each reason against it."""
    from attnbench.report.document import facts as values
    from attnbench.report.render import written

    known = written.facts(values(gpu))
    processors = f"compute capability {known['capability']}, {known['processors']} SMs"
    yield "", "processors", f"{processors}, L2 {known['l2_bytes']}"
    versions = f"driver {known['driver']}, CUDA {facts['cuda']}, cuDNN {known['cudnn']}"
    yield "", "software", versions
    yield "", "memory", f"{known['memory_free_bytes']} of {known['memory_total_bytes']} free"
    part = ", an instance of MIG" if gpu["mig"] else ""
    yield "", "compute mode", f"{known['compute_mode']}{part}"
    answers = {"NVML": gpu["problem"], "energy counter": None if gpu["energy_counter"] else "none"}
    for name, reason in answers.items():
        yield _sign(reason is None), name, reason or ""
    found: dict[tuple[str, str | None], list[str]] = {}
    for trial in gpu["works"]:
        found.setdefault((trial["name"], trial["reason"]), []).append(trial["dtype"] or "")
    for (name, reason), dtypes in found.items():
        yield _sign(reason is None), name, ": ".join(filter(None, (", ".join(dtypes), reason)))


def _sign(works: bool) -> str:
    return _SIGNS["ok" if works else "fail"][0]
