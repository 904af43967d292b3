"""The live display of a sweep: a bar with the time to go, or plain lines without a terminal."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Self

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from attnbench.base import units
from attnbench.execution.session import Listener
from attnbench.planning.plan import Plan, jobs_of, work
from attnbench.schema.case import Case
from attnbench.schema.record import Record
from attnbench.theory.traits import case_label

# What a cell costs whatever its size, as multiply-adds: checks, probes and samples of a small one.
_BASE_WORK = 1.5e9


class Display(Listener):
    """Shows how far a sweep is. A listener of `attnbench.execution.session`."""

    def __init__(self, *, quiet: bool) -> None:
        self.interrupted_hint: Path | None = None
        self._quiet = quiet
        self._console = Console(stderr=True)
        self._progress: Progress | None = None
        self._task = TaskID(0)
        self._count = self._total = 0
        self._work_done = self._work_total = 0.0
        self._begin = time.monotonic()

    def planned(self, plan: Plan, path: Path | None) -> None:
        """Say what will be done; for a dry run, list it."""
        self.interrupted_hint = path
        measured = [cell for cells in plan.passes for cell in cells]
        self._total = len(measured)
        self._work_total = sum(_cell_work(cell.case) for cell in measured)
        self._begin = time.monotonic()
        if path is None:
            _print_plan(plan)
            return
        if self._quiet:
            return
        decided = f", {len(plan.decided)} decided without running" if plan.decided else ""
        self._console.print(
            f"{_cells(plan)} in {_processes(plan)} processes{decided} -> {path}",
            highlight=False,
        )
        if self._console.is_terminal:
            self._progress = Progress(
                TextColumn("{task.completed:.0%}"),
                BarColumn(bar_width=24),
                TimeElapsedColumn(),
                TextColumn("{task.fields[left]}"),
                TextColumn("{task.description}", markup=False),
                console=self._console,
                transient=True,
                refresh_per_second=2,  # each refresh takes time from the worker
            )
            self._progress.start()
            self._task = self._progress.add_task("starting", total=1.0, left="")

    def working(self, case: Case | None, impl: str | None, stage: str) -> None:
        """Show the cell and the stage the worker is at."""
        if self._progress is not None:
            who = f"{impl or 'all'}: {case_label(case)} ({stage})" if case else stage
            self._progress.update(self._task, description=who, left=self._left())

    def recorded(self, record: Record) -> None:
        """Count one record; without a terminal print a line for it."""
        if record.status in ("unsupported", "skipped") and not record.spent_s:
            return
        self._count += 1
        self._work_done += _cell_work(record.cell.case)
        if self._progress is not None:
            share = self._work_done / max(self._work_total, 1.0)
            self._progress.update(self._task, completed=share, left=self._left())
            if record.status != "ok":
                self._progress.console.print(_line(record), markup=False, highlight=False)
        elif not self._quiet:
            click.echo(f"[{self._count}/{self._total}] {_line(record)}", err=True)

    def warned(self, message: str) -> None:
        """Print a warning."""
        click.echo(f"Warning: {message}", err=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._progress is not None:
            self._progress.stop()
        if kind is KeyboardInterrupt:
            hint = self.interrupted_hint
            if hint is not None:
                click.echo(
                    f"\nInterrupted. Continue with: attnbench sweep --resume {hint}", err=True
                )
            sys.exit(130)

    def _left(self) -> str:
        elapsed = time.monotonic() - self._begin
        if not self._work_done or elapsed < 2:
            return ""
        return f"about {units.seconds(elapsed * (self._work_total / self._work_done - 1))} left"


def _cells(plan: Plan) -> str:
    count = len({cell.key for cells in plan.passes for cell in cells})
    again = f", each {len(plan.passes)} times," if len(plan.passes) > 1 else ""
    return f"{count} cells{again}"


def _processes(plan: Plan) -> int:
    return sum(len(list(jobs_of(cells))) for cells in plan.passes)


def _cell_work(case: Case) -> float:
    return _BASE_WORK + work(case)


def _line(record: Record) -> str:
    from attnbench.analysis import times

    case = record.cell.case
    if record.status != "ok":
        return f"{record.status:11} {record.cell.impl}: {case_label(case)}: {record.reason}"
    reported_us = times.time_us(record)
    assert reported_us is not None, "what is ok has a time"
    return f"{units.time(reported_us):>11} {record.cell.impl}: {case_label(case)}"


def _print_plan(plan: Plan) -> None:
    for number, job in enumerate(plan.jobs, start=1):
        click.echo(f"process {number}")
        for case, impls in job.cases:
            click.echo(f"  {case.case_id}  {case_label(case)}: {', '.join(impls)}")
    for record in plan.decided:
        click.echo(
            f"{record.status}: {record.cell.impl}: {case_label(record.cell.case)}: {record.reason}"
        )
    count = sum(len(list(job.cells())) for job in plan.jobs)
    click.echo(f"{count} cells to measure, {len(plan.decided)} decided without running")
