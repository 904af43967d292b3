"""How far a sweep, a check or a gate is, on standard error: a live line, or plain lines."""

from __future__ import annotations

import contextlib
import importlib
import shlex
import sys
import textwrap
import time
from pathlib import Path
from typing import Any, Self, TextIO

from rich import progress
from rich.console import Console
from rich.table import Column

from attnbench.base import units
from attnbench.base.signals import EndedError
from attnbench.cli.options import say, silence, wrapped
from attnbench.execution import events
from attnbench.planning.plan import Plan, jobs_of, weight
from attnbench.schema.case import Case
from attnbench.schema.check import CheckResult
from attnbench.schema.record import Record
from attnbench.theory.traits import case_label

_BESIDE = 44  # letters of the live line before its description


class _Unread:
    """Standard error, of which nothing more is written once it has no reader, or no room.

    Rich would put /dev/null in the place of standard output then, and exit.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> None:
        try:
            self._stream.write(text)
            self._stream.flush()
        except OSError:
            silence(self._stream)


class _Display:
    """Prints lines that stay and, on a terminal, one live line below them."""

    on_interrupt = ""  # printed when the user interrupts

    def __init__(self, *, quiet: bool) -> None:
        self._quiet = quiet
        file: Any = sys.stderr and _Unread(sys.stderr)  # None where it is closed
        self._console = Console(file=file, stderr=True, highlight=False, emoji=False)
        self._progress: progress.Progress | None = None
        self._task = progress.TaskID(0)

    def say(self, text: str) -> None:
        """Print a line that stays, unless quiet."""
        if not self._quiet:
            self._console.print(wrapped(text, err=True), markup=False, soft_wrap=True)

    def warned(self, message: str) -> None:
        """Print a warning, however quiet."""
        text = wrapped(f"Warning: {message}", err=True)
        self._console.print(text, markup=False, soft_wrap=True)

    def _begin(self, *columns: progress.ProgressColumn, total: float | None = None) -> None:
        """Show the live line, where there is a terminal: a spinner unless columns are given."""
        if self._console.is_terminal and not self._quiet:
            # Each refresh takes time from what is measured.
            self._progress = progress.Progress(
                *(columns or (progress.SpinnerColumn(), progress.TimeElapsedColumn())),
                progress.TextColumn("{task.description}", markup=False),
                console=self._console, transient=True, refresh_per_second=1,
                speed_estimate_period=3600,  # cells take unlike times: the rate of the whole run
            )  # fmt: skip
            self._progress.start()
            self._task = self._progress.add_task("starting", total=total)

    def _show(self, text: str) -> bool:
        """Put a text into the live line; False where there is none."""
        if self._progress is not None:
            self._progress.update(self._task, description=text)
        return self._progress is not None

    def close(self) -> None:
        """Take the live line away; the lines that were printed stay."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with contextlib.suppress(OSError):  # of a terminal that was closed
            self.close()
            if kind in (KeyboardInterrupt, EndedError) and self.on_interrupt:
                say("", err=True)
                say(self.on_interrupt, err=True)


class SweepDisplay(_Display):
    """Shows how far a sweep is, by the events of `attnbench.execution.session`."""

    def __init__(self, *, quiet: bool) -> None:
        super().__init__(quiet=quiet)
        self._count = self._total = 0
        self._latest = ""  # time and implementation of the last cell

    def show(self, event: object) -> None:
        """Say what will be done, how far it is, and what became of each cell."""
        match event:
            case events.Starting():  # what lines and the table need is loaded meanwhile
                importlib.import_module("attnbench.report.documents.sweep")
                importlib.import_module("attnbench.report.render.terminal")
            case events.Planned(plan, Path() as path, forecast):
                every = [cell for cells in plan.passes for cell in cells]
                if forecast is not None and forecast.limit_s is None and every:
                    self.say(f"takes {forecast.total(every)}")
                self._planned(plan, path)
            case events.Working(stage, case, impl):
                text = f"{impl or 'all'}: {case_label(case)} ({stage})" if case else stage
                room = max(20, self._console.width - _BESIDE)
                shown = f"{self._latest}, now {text}" if self._latest else text
                self._show(textwrap.shorten(shown, room, placeholder=" …"))  # cut between words
            case Record() if event.spent_s or event.status not in ("unsupported", "skipped"):
                self._recorded(event)
            case events.Warned(message):
                self.warned(message)

    def resumable(self, path: Path) -> None:
        """From now on an interrupted run can be continued."""
        again = f"attnbench sweep --resume {shlex.quote(str(path))}"
        self.on_interrupt = f"Interrupted. Continue with: {again}"

    def _planned(self, plan: Plan, path: Path) -> None:
        self.resumable(path)
        measured = [cell for cells in plan.passes for cell in cells]
        self._total = len(measured)
        if not measured and not plan.decided:
            self.say(f"nothing is missing in {path}")
            return
        count = len({cell.key for cell in measured})
        again = f", each {len(plan.passes)} times," if len(measured) > count else ""
        processes = sum(len(list(jobs_of(cells, joined=plan.joined))) for cells in plan.passes)
        decided = f", {len(plan.decided)} unsupported or skipped" if plan.decided else ""
        workers = f"{processes} process{'es' * (processes != 1)}"
        self.say(f"{units.counted(count, 'cell')}{again} in {workers}{decided} -> {path}")
        if plan.not_here:
            self.say(f"cannot run here: {units.by_reason(plan.not_here)}")
        self._begin(
            progress.TextColumn("{task.percentage:.0f} %"),
            progress.BarColumn(bar_width=12),
            progress.TimeElapsedColumn(table_column=Column(min_width=7)),
            progress.TimeRemainingColumn(table_column=Column(min_width=7)),
            progress.TextColumn("left"),
            total=sum(weight(cell.case) for cell in measured),
        )

    def _recorded(self, record: Record) -> None:
        """Count one record; without a terminal print a line for it."""
        self._count += 1
        if self._progress is None:
            self.say(f"[{self._count}/{self._total}] {line(record)}")
            return
        self._progress.advance(self._task, weight(record.cell.case))
        if record.status != "ok":
            self.say(line(record))
        else:
            self._latest = f"{_time(record)} {record.cell.impl}"
            self._show(self._latest)


class AdviceDisplay(SweepDisplay):
    """Shows what a race has decided, as it is decided."""

    path: Path | None = None  # of the run, once it is begun
    _case: Case | None = None  # that the last line was about

    def _planned(self, plan: Plan, path: Path) -> None:
        self.path, self.on_interrupt = path, f"Interrupted. This is advice from: {path}"
        cases = units.counted(len({cell.case.case_id for cell in plan.passes[0]}), "case")
        self.say(f"{cases}, {units.counted(len(plan.passes[0]), 'cell')} at most -> {path}")
        self._begin()

    def _recorded(self, record: Record) -> None:
        if record.status == "ok" and (faster := record.metrics.get("lost_to")):
            where = f"{case_label(record.cell.case)}: " if record.cell.case != self._case else ""
            self._case = record.cell.case
            self.say(f"{where}{record.cell.impl} is slower than {faster}")
        elif record.status not in ("ok", "unsupported", "skipped"):
            self.say(line(record))


class CheckDisplay(_Display):
    """Shows how far checks are, by the events of `attnbench.execution.checks`."""

    _EACH_S = 10.0  # without a terminal

    def __init__(self, *, quiet: bool) -> None:
        super().__init__(quiet=quiet)
        self._count = self._failed = self._total = 0
        self._said = time.monotonic()
        self._begin()

    def show(self, event: object) -> None:
        """Count results, and show the check and the stage that the worker is at."""
        match event:
            case events.Total(number):
                self._total = number
                self._counted("begins")
            case events.Working(stage, Case() as case, impl):
                self._counted(f"{impl}: {case_label(case)} ({stage})")
            case CheckResult():
                self._count += 1
                self._failed += event.failed
                self._counted(f"{event.impl}: {case_label(event.item.case)}")
            case events.Warned(message):
                self.warned(message)

    def _counted(self, text: str) -> None:
        failed = f", {self._failed} failed" if self._failed else ""
        text = f"{self._count} of {self._total} checks{failed}: {text}"
        if not self._show(text) and time.monotonic() - self._said > self._EACH_S:
            self._said = time.monotonic()
            self.say(text)


class GateDisplay(_Display):
    """Shows how far a gate is, by the events of `attnbench.gate.run.measuring`."""

    on_interrupt = "Interrupted; what was checked out is removed."
    _last = ""

    def __enter__(self) -> Self:
        self._begin()
        return self

    def show(self, event: object) -> None:
        """Name the part of the run that begins, and each round that is discarded: it takes time."""
        match event:
            case events.Working(stage):
                self._stage(stage)
            case events.Total(number):
                self.say(units.counted(number, "cell"))
            case events.RoundMeasured(number, discarded, stage):
                if discarded is not None:
                    self.say(f"round {number} is discarded: {discarded}")
                self._stage(stage, f"round {number}: ")
            case events.Warned(message):
                self.warned(message)

    def _stage(self, stage: str, before: str = "") -> None:
        if not self._show(before + stage) and stage != self._last:
            self.say(before + stage)
        self._last = stage


def line(record: Record) -> str:
    """A record in a line: its time as tables show it, or what became of the cell."""
    cell = f"{record.cell.impl}: {case_label(record.cell.case)}"
    if record.status != "ok":
        return f"{record.status:11} {cell}: {record.reason}"
    return f"{_time(record):>11} {cell}"


def _time(record: Record) -> str:
    from attnbench.analysis import times

    return units.time(times.time_us(record))
