"""How far a gate run is: one live line, or without a terminal a line for whatever is new."""

from __future__ import annotations

from typing import Self

import click
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from attnbench.gate.decide.data import Round
from attnbench.schema.record import Cell


class GateDisplay:
    """A listener of `attnbench.gate.run.session`; everything goes to standard error."""

    def __init__(self, *, quiet: bool) -> None:
        self._quiet = quiet
        self._console = Console(stderr=True, highlight=False)
        self._progress: Progress | None = None
        self._task = TaskID(0)
        self._last = ""

    def said(self, words: str) -> None:
        """Print a line that stays."""
        if not self._quiet:
            self._console.print(words, markup=False, soft_wrap=True)

    def stage(self, words: str) -> None:
        """Name the part of the run that begins."""
        self._show(words)

    def planned(self, cells: tuple[Cell, ...]) -> None:
        """Say how many cells are watched."""
        self.said(f"{len(cells)} cell{'s' * (len(cells) != 1)}")

    def heard(self, found: Round, number: int, words: str) -> None:
        """Count a round; one that is vetoed is told, since it takes time."""
        if found.veto is not None:
            self.said(f"round {number} counts for nothing: {found.veto}")
        self._show(words, f"round {number}: ")

    def warned(self, message: str) -> None:
        """Print a warning, however quiet."""
        self._console.print(f"Warning: {message}", markup=False, soft_wrap=True)

    def __enter__(self) -> Self:
        if self._console.is_terminal and not self._quiet:
            self._progress = Progress(
                SpinnerColumn(),
                TimeElapsedColumn(),
                TextColumn("{task.description}", markup=False),
                console=self._console,
                transient=True,
                refresh_per_second=1,  # each refresh takes time from what is measured
            )
            self._progress.start()
            self._task = self._progress.add_task("starting", total=None)
        return self

    def close(self) -> None:
        """Take the live line away; what was said stays."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close()
        if kind is KeyboardInterrupt:
            click.echo("\nInterrupted; what was checked out is removed.", err=True)

    def _show(self, words: str, before: str = "") -> None:
        if self._progress is not None:
            self._progress.update(self._task, description=before + words)
        elif words != self._last:
            self.said(before + words)
        self._last = words
