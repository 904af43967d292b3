"""What `attnbench gate` does in each of its modes. Imported once it is known that one runs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from attnbench.base.files import make_folder
from attnbench.cli.axes import AXES
from attnbench.cli.gate_output import show, write_all
from attnbench.cli.gate_progress import GateDisplay
from attnbench.cli.options import given
from attnbench.cli.summary import console
from attnbench.errors import ExitCode, StoreError
from attnbench.execution.settings import Settings
from attnbench.gate.decide.data import GateRun, Round
from attnbench.gate.decide.stored import NAME, ROUNDS, keep_round, load_gate
from attnbench.gate.decide.verdict import decide
from attnbench.gate.run.request import Comparison, comparison, device_of
from attnbench.gate.run.session import run_gate
from attnbench.gate.run.worktree import checked_out

# What the table of pyproject.toml may hold beside the axes.
_SETTINGS = (
    "workload", "files", "base", "threshold", "budget_s", "growth", "threads", "device",
)  # fmt: skip
_LEAST_SPACE = 4 << 20  # bytes, more than what a run of many cells and rounds leaves


def compare(options: dict[str, Any]) -> ExitCode:
    """The working tree and a commit, measured in turns."""
    names = [name for _, name, _, _ in AXES] + list(_SETTINGS)
    asked = comparison(
        Path.cwd(), {name: options[name] for name in names}, options["output"].resolve()
    )
    head = f"the working tree at {asked.head[:10]}"
    with GateDisplay(quiet=options["quiet"]) as display:
        display.said(f"base: {asked.base.ref} at {asked.base.commit[:10]}, {asked.base.words}")
        display.said(f"candidate: {head}, {asked.changes.words or 'nothing changed'}")
        with _result_folder(options["output"], options["name"]) as folder:
            run = _measured(asked, options, display, folder)
            display.close()
            return _finish(run, folder, options["quiet"])


def _measured(
    asked: Comparison, options: dict[str, Any], display: GateDisplay, folder: Path
) -> GateRun:
    settings = Settings(
        device=device_of(asked.watched.device), seed=options["seed"], timeout_s=options["timeout"]
    )
    typed = {flag: _plain(options[name]) for name, flag in given().items()}
    with checked_out(asked.root, asked.base.commit) as tree:
        for file in asked.missing(tree):
            display.warned(f"the base has no {file}: what is in it cannot be compared")
        request = asked.request(tree, settings, typed)
        return run_gate(replace(request, keep=_keeper(folder, display)), display)


def _keeper(folder: Path, display: GateDisplay) -> Callable[[GateRun, Round], None]:
    """Keeps rounds in `folder`; a disk that is full is warned of, once, and ends no run."""
    writes = True

    def keep(run: GateRun, found: Round) -> None:
        nonlocal writes
        if writes:
            try:
                keep_round(folder, run, found)
            except StoreError as err:
                writes = False
                display.warned(f"{err}: rounds are saved only at the end of the run")

    return keep


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value


def replay(options: dict[str, Any]) -> ExitCode:
    """A stored run, decided again; files are written where a name or folder was given for them."""
    run = load_gate(Path(options["replay"]), options["output"])
    if options["name"] is None:
        return _finish(run, None, options["quiet"])
    with _result_folder(options["output"], options["name"]) as folder:
        return _finish(run, folder, options["quiet"])


def _finish(run: GateRun, folder: Path | None, quiet: bool) -> ExitCode:
    """Decide, write all files, and print; what cannot be written hides no verdict."""
    outcome = decide(run)
    failure = None
    if folder is not None:
        try:
            write_all(folder, run, outcome)
        except StoreError as err:
            failure = err
    if not quiet:
        show(run, outcome, console(), folder if failure is None else None)
    elif folder is not None:
        click.echo(folder)
    if failure is not None:
        raise failure
    return outcome.exit_code


@contextlib.contextmanager
def _result_folder(output: Path, name: str | None) -> Iterator[Path]:
    """A new folder for the result, in which something can be written; gone if nothing was.

    Where the run ends before its result is written, the rounds it has kept are pointed out.

    Raises:
        StoreError: the name is taken or none, the folder cannot be made or the disk is full.
    """
    new = not output.exists()
    folder = make_folder(output, name, "gate-")
    try:
        _try_to_write(folder)
        yield folder
    finally:
        if (folder / ROUNDS).exists() and not (folder / NAME).exists():
            kept = f"the rounds so far are kept; decide from them: attnbench gate --replay {folder}"
            click.echo(kept, err=True)
        with contextlib.suppress(OSError):  # not empty: something was measured
            folder.rmdir()
            if new:
                output.rmdir()


def _try_to_write(folder: Path) -> None:
    """Notice a full disk before minutes of measuring."""
    trial = folder / ".trial"
    try:
        trial.write_bytes(bytes(_LEAST_SPACE))
    except OSError as err:
        raise StoreError(f"cannot write {folder} ({err.strerror}); choose --output DIR") from err
    finally:
        with contextlib.suppress(OSError):
            trial.unlink()
