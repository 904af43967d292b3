"""Kernels of exact exponents are measured beside neighbours and held to right and wrong laws."""

from __future__ import annotations

import copy
import time
from dataclasses import replace
from pathlib import Path

from attnbench.analysis.scaling import scaling
from attnbench.base import units
from attnbench.base.stats import median
from attnbench.execution.process import Settings
from attnbench.planning.plan import Axes
from attnbench.schema.finding import VERDICTS
from attnbench.store.runs import Run, load_run
from tests.validation.neighbours import swept_beside
from tests.validation.page import Table
from tests.validation.runner import Figures

KERNELS = Path(__file__).with_name("kernels.py")
LAWS = {"1": "n", "2": "n^2", "3": "n^3"}  # by the power in a kernel's name
NAMES = tuple(f"{clock}-{power}" for clock in ("spin", "work") for power in LAWS)
HELD, REFUTED = 0.90, 0.95  # goals: right laws held, none refuted; wrong ones refuted


def measured(neighbours: int, seed: int) -> Figures:
    """One run: the sweep, and the verdicts on every law."""
    axes = Axes(seq_lens=(1, 128, 256, 512, 1024), heads=(1,), head_dims=(16,), impls=NAMES)
    settings = Settings(device="cpu", files=(str(KERNELS),), seed=seed, max_time_s=0.5)
    begin = time.monotonic()
    with swept_beside(neighbours, axes, settings) as path:
        swept_s = time.monotonic() - begin
        run = load_run(path)
    return {"seed": seed, "swept_s": swept_s, "verdicts": verdicts(run)}


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
    counts = []
    for kernel in NAMES:
        for law in LAWS.values():
            said = [
                v for row in rows for of, a, v, _ in row["verdicts"] if (of, a) == (kernel, law)
            ]
            found: Figures = {verdict: said.count(verdict) for verdict in VERDICTS}
            counts.append(found | {"kernel": kernel, "law": law, "right": law == LAWS[kernel[-1]]})
    met = all(
        row["refuted"] == 0 and row["holds"] >= HELD * len(rows)
        if row["right"]
        else row["holds"] == 0 and row["refuted"] >= REFUTED * len(rows)
        for row in counts
    )
    swept_s = median(row["swept_s"] for row in rows) if rows else None
    return {"runs": len(rows), "met": met, "counts": counts, "swept_s": swept_s}


def table(summary: Figures) -> Table:
    """One row a kernel: holds / refuted / inconclusive for each law."""
    found, lines = summary["live"], []
    for kernel in NAMES:
        cells = []
        for row in [row for row in found["counts"] if row["kernel"] == kernel]:
            text = f"{row['holds']} / {row['refuted']} / {row['inconclusive']}"
            cells.append(f"[{text}]" if row["right"] else text)
        lines.append((kernel, *cells))
    note = (
        f"{found['runs']} runs over n = 128..1024 beside {summary['asked']['neighbours']} processes"
        " that spin and sleep for random 0.2 to 4 s: holds / refuted / inconclusive. [ ]: its own"
        f" law. A sweep took {units.seconds(found['swept_s'])} in the median."
        f" Goals: own laws never refuted, and held in {HELD:.0%}; others refuted in {REFUTED:.0%}:"
        f" {'met' if found['met'] else 'MISSED'}."
    )
    header = ("kernel", *LAWS.values())
    return Table(title="Exact exponents", header=header, rows=tuple(lines), note=note)
