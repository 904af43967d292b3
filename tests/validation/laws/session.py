"""Kernels of exact exponents are measured beside neighbours and held to right and wrong laws."""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from attnbench.analysis.scaling import scaling
from attnbench.base import units
from attnbench.base.stats import median
from attnbench.cli.verdicts import measure_until_decided
from attnbench.execution.process import Settings
from attnbench.execution.store import Run, load_run
from attnbench.planning.plan import Axes
from attnbench.schema.finding import VERDICTS
from attnbench.version import __version__
from tests.validation.neighbours import swept_beside
from tests.validation.page import Table, markdown, write_texts
from tests.validation.sittings import sitting

Figures = dict[str, Any]
SUMMARY, PAGE = "summary.json", "laws.md"
KERNELS = Path(__file__).with_name("kernels.py")
LAWS = {"1": "n", "2": "n^2", "3": "n^3"}  # by the power in a kernel's name
NAMES = tuple(f"{clock}-{power}" for clock in ("spin", "work") for power in LAWS)
HELD, REFUTED = 0.90, 0.95  # goals: right laws held, none refuted; wrong ones refuted


@dataclass(frozen=True, kw_only=True)
class Request:
    """What `make validate PART=laws` was asked for; a run may take `budget_s`, its sweep counted.

    The folder keeps the runs of one number of neighbours and one budget.
    """

    runs: int = 20
    neighbours: int = 2
    budget_s: float = 180.0
    seed: int = 0
    output: Path = Path("results")
    name: str = "selftest-laws"


def examine(request: Request, tell: Callable[[str], None]) -> tuple[Path, Figures]:
    """Make the runs that the folder lacks, and count; an interrupt ends them, and is noted.

    Raises:
        StoreError: the folder cannot be written, or holds runs that were asked for differently.
    """
    path = request.output / request.name
    asked = {name: getattr(request, name) for name in ("neighbours", "budget_s", "seed")}

    def missing(done: list[Figures]) -> Iterator[Figures]:
        for number in range(len(done), request.runs):
            tell(f"run {number + 1} of {request.runs}")
            yield measured(request, request.seed + number)

    rows, interrupted = sitting(path, asked, missing)
    summary = {"attnbench": __version__, "asked": asked, "interrupted": interrupted}
    summary |= summarise(rows)
    page = markdown(f"make validate PART=laws: {path.name}", [table(summary)])
    write_texts(path, {SUMMARY: json.dumps(summary, indent=1) + "\n", PAGE: page})
    return path, summary


def measured(request: Request, seed: int) -> Figures:
    """One run: the sweep, what is missing once more, and the verdicts on every law."""
    axes = Axes(seq_lens=(1, 128, 256, 512, 1024), heads=(1,), head_dims=(16,), impls=NAMES)
    settings = Settings(device="cpu", files=(str(KERNELS),), seed=seed, max_time_s=0.5)
    begin = time.monotonic()
    with swept_beside(request.neighbours, axes, settings) as path:
        swept_s = time.monotonic() - begin
        measure_until_decided(path, begin + request.budget_s, quiet=True)
        run = load_run(path)
    return {
        "seed": seed,
        "swept_s": swept_s,
        "wall_s": time.monotonic() - begin,
        "again": len(run.parts) - len(run.records),
        "verdicts": verdicts(run),
    }


def verdicts(run: Run) -> list[list[str]]:
    """Kernel, law, verdict and reason, of every kernel and every law."""
    found = []
    for law in LAWS.values():
        info = copy.deepcopy(run.info)
        for row in info["implementations"]:
            row["time"] = law
        found += [
            [fit.series.impl, law, fit.finding.verdict, fit.finding.reason]
            for fit in scaling(replace(run, info=info)).exponents
            if fit.finding is not None and fit.series.impl in NAMES
        ]
    return found


def summarise(rows: list[Figures]) -> Figures:
    """Counts by kernel and law, and whether the goals are met."""
    found: list[Figures] = []
    for kernel in NAMES:
        for law in LAWS.values():
            said = [
                v for row in rows for of, a, v, _ in row["verdicts"] if (of, a) == (kernel, law)
            ]
            counts = {verdict: said.count(verdict) for verdict in VERDICTS}
            found.append({"kernel": kernel, "law": law, "right": law == LAWS[kernel[-1]]} | counts)
    right, wrong = ([row for row in found if row["right"] == own] for own in (True, False))
    met = bool(rows)
    for row in right:
        met &= row["refuted"] == 0 and row["holds"] >= HELD * len(rows)
    for row in wrong:
        met &= row["holds"] == 0 and row["refuted"] >= REFUTED * len(rows)
    times = {
        name: median(row[name] for row in rows) if rows else None
        for name in ("swept_s", "wall_s", "again")
    }
    return {"runs": len(rows), "met": met, "counts": found} | times


def table(summary: Figures) -> Table:
    """One row a kernel: holds / refuted / inconclusive for each law."""
    lines = []
    for kernel in NAMES:
        cells = []
        for row in [row for row in summary["counts"] if row["kernel"] == kernel]:
            text = f"{row['holds']} / {row['refuted']} / {row['inconclusive']}"
            cells.append(f"[{text}]" if row["right"] else text)
        lines.append((kernel, *cells))
    asked = summary["asked"]
    note = (
        f"{summary['runs']} runs over n = 128..1024 beside {asked['neighbours']} processes that"
        f" spin and sleep for random 0.2 to 4 s: holds / refuted / inconclusive. [ ]: its own law."
        f" Median: {units.seconds(summary['swept_s'])} for the sweep,"
        f" {units.seconds(summary['wall_s'])} with {summary['again'] or 0:.0f} cells measured"
        f" again."
        f" Goals: own laws never refuted, and held in {HELD:.0%}; others refuted in {REFUTED:.0%}:"
        f" {'met' if summary['met'] else 'MISSED'}."
    )
    header = ("kernel", *LAWS.values())
    return Table(title="Exact exponents", header=header, rows=tuple(lines), note=note)
