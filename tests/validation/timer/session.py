"""`make validate PART=tools` from options to a finished folder."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from attnbench.base.files import make_folder
from attnbench.base.registry import unknown
from attnbench.errors import UsageError
from attnbench.execution.process import Settings
from attnbench.execution.runner import LocalRunner
from attnbench.schema.case import Case
from attnbench.schema.messages import Catalogue
from attnbench.schema.record import Cell
from attnbench.theory.traits import case_label
from attnbench.version import __version__
from tests.validation.page import free_folder, markdown, write_texts
from tests.validation.timer.experiment import SAMPLES, Experiment
from tests.validation.timer.launch import Launch
from tests.validation.timer.summary import Figures, summarise
from tests.validation.timer.tables import facts, sentences, tables

SUMMARY, PAGE = "summary.json", "timer.md"
SPIN, SPIN_US = "spin 1 ms", 1000.0
FEWEST_RUNS = 2


@dataclass(frozen=True, kw_only=True)
class Request:
    """What `make validate PART=tools` was asked for; the defaults are the eight usual cells."""

    impls: tuple[str, ...] = ("naive", "sdpa")
    seq_lens: tuple[int, ...] = (128, 256, 512, 1024)
    heads: tuple[int, ...] = (4,)
    head_dims: tuple[int, ...] = (64,)
    device: str = "auto"
    threads: int | None = None
    budget_s: float = 10.0
    runs: int = 10
    seed: int = 0
    output: Path = Path("results")
    name: str | None = None


@dataclass(frozen=True, kw_only=True)
class Finished:
    """A comparison as it was made: its folder, its figures, and whether it was interrupted."""

    path: Path
    summary: Figures = field(repr=False)
    interrupted: bool

    @property
    def own_runs(self) -> int:
        """Runs of ours in one process that succeeded."""
        rows = self.summary["rows"]
        return next(int(row["runs"]) for row in rows if row["program"] == "attnbench")


def compare(request: Request, tell: Callable[[str], None]) -> Finished:
    """Make the comparison and write its folder; `tell` hears of the progress.

    Raises:
        UsageError: something in the request makes no sense; nothing was written.
        StoreError: the folder is taken or cannot be written.
    """
    if request.runs < FEWEST_RUNS:
        raise UsageError(f"--runs {request.runs} gives no spread; at least {FEWEST_RUNS}")
    path = free_folder(request.output, request.name, "timer")
    settings = Settings(device=request.device, threads=request.threads, seed=request.seed)
    with LocalRunner(settings) as runner:
        catalogue = runner.catalogue()
        cells = _cells(request, catalogue, runner)
    env = catalogue.environment
    spin = None if catalogue.device == "cuda" else (SPIN, SPIN_US)
    impls = {cell["name"]: cell["impl"] for cell in cells}
    if spin:
        cells.append({"name": spin[0], "spin_us": spin[1]})
    launch = Launch(
        device=catalogue.device,
        threads=env["threads"],
        cells=cells,
        timeout_s=3 * request.budget_s + 60,
        user_threads=request.threads,
    )
    experiment = Experiment(
        launch=launch, budget_s=request.budget_s, runs=request.runs, seed=request.seed, tell=tell
    )
    created = datetime.now(UTC).isoformat(timespec="seconds")
    experiment.pilot()
    make_folder(path.parent, path.name)
    experiment.run(path / SAMPLES)
    facts = {"created": created, "attnbench": __version__, "environment": env}
    summary = facts | {"threads": env["threads"]} | summarise(experiment, spin)
    _write(path, summary, impls)
    return Finished(path=path, summary=summary, interrupted=experiment.interrupted)


def _cells(request: Request, catalogue: Catalogue, runner: LocalRunner) -> list[dict[str, Any]]:
    """Every implementation at every size, by name.

    Raises:
        UsageError: an implementation is unknown, is not available here or cannot take a case.
    """
    known = {info.name: info for info in catalogue.implementations}
    for impl in request.impls:
        if impl not in known:
            raise unknown("implementation", impl, list(known), "--impls")
        if known[impl].unavailable:
            raise UsageError(f"{impl} (--impls) cannot run: {known[impl].unavailable}")
    cases = [
        Case(device=catalogue.device, seq_len=n, heads=heads, head_dim=head_dim)
        for heads in request.heads
        for head_dim in request.head_dims
        for n in request.seq_lens
    ]
    cells = [Cell(case=case, impl=impl) for impl in request.impls for case in cases]
    reasons = runner.reasons(cells)
    for cell in cells:
        if reason := reasons[cell.key]:
            label = case_label(cell.case)
            raise UsageError(f"{cell.impl} (--impls) cannot take {label}: {reason}")
    return [{"name": _name(request, cell.impl, cell.case), **cell.to_json()} for cell in cells]


def _name(request: Request, impl: str, case: Case) -> str:
    parts = [impl, f"n={case.seq_len}"]
    if len(request.heads) > 1:
        parts.append(f"H={case.heads}")
    if len(request.head_dims) > 1:
        parts.append(f"D={case.head_dim}")
    return " ".join(parts)


def _write(path: Path, summary: Figures, impls: dict[str, str]) -> None:
    """summary.json, timer.md and the picture.

    Raises:
        StoreError: the folder cannot be written.
    """
    from tests.validation.timer.draw import draw  # here: matplotlib comes with it

    title = f"make validate PART=tools: {path.name}"
    lists = facts(summary), sentences(summary)
    page = markdown(title, tables(summary), *lists, picture=draw(summary, impls, path))
    write_texts(path, {SUMMARY: json.dumps(summary, indent=1) + "\n", PAGE: page})
