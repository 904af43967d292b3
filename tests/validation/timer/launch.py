"""Starts a timing tool in a fresh process, waits for it, and reads what it left."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from attnbench.execution.process import ending
from attnbench.machine import host
from tests.validation.timer.programs import RESULT, Program
from tests.validation.timer.raw import Result


@dataclass(frozen=True, kw_only=True)
class Launch:
    """What every process of a comparison is given alike; budgets are seconds of wall time."""

    device: str
    threads: int
    cells: list[dict[str, Any]]
    timeout_s: float
    user_threads: int | None = None  # as given on the command line


@dataclass(frozen=True, kw_only=True)
class Ended:
    """One process that has ended: why it failed or what it found, and its seconds.

    `startup_s` is until it began to time, `tail_s` from when it ceased until it was gone.
    """

    total_s: float
    startup_s: float = 0.0
    tail_s: float = 0.0
    failure: str | None = None
    cells: dict[str, dict[str, Any]] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def timing_s(self) -> float:
        """Seconds that went to the cells."""
        return self.total_s - self.startup_s - self.tail_s


@dataclass(frozen=True, kw_only=True)
class Share:
    """What one process may use: its whole budget, its end's part of that, seconds for each cell."""

    budget_s: float
    tail_s: float = 0.0
    each_s: float = 0.0


def run_process(program: Program, launch: Launch, share: Share, seed: int) -> Ended:
    """Start the program once and wait until it has ended, or for `timeout_s` at most."""
    with tempfile.TemporaryDirectory(prefix="attnbench-", ignore_cleanup_errors=True) as folder:
        path = Path(folder)
        result = path / RESULT
        spawned_s = time.monotonic()
        job = {
            "device": launch.device,
            "threads": launch.threads,
            "seed": seed,
            "budget_s": share.budget_s,
            "tail_s": share.tail_s,
            "spawned_s": spawned_s,
            "cells": launch.cells,
            "result": str(result),
        }
        start = program.start(json.dumps(job), path, share.each_s)
        variables = environment(program.ours, launch.user_threads) | start.variables
        output = path / "output"
        try:
            failure = _wait(start.command, variables, path, output, launch.timeout_s)
        except OSError as err:
            return Ended(total_s=0.0, failure=f"does not start: {err}")
        total_s = time.monotonic() - spawned_s
        try:
            found = program.read(result)
        except (OSError, ValueError, KeyError) as err:
            return Ended(total_s=total_s, failure=failure or f"left no result ({err})")
        return _ended(found, failure, spawned_s, total_s)


def _ended(found: Result, failure: str | None, spawned_s: float, total_s: float) -> Ended:
    return Ended(
        total_s=total_s,
        startup_s=found.ready_s - spawned_s,
        tail_s=spawned_s + total_s - found.end_s,
        cells=found.cells,
        facts=found.facts | ({"ended": failure} if failure else {}),
    )


def _wait(
    command: list[str], variables: Mapping[str, str], folder: Path, output: Path, timeout_s: float
) -> str | None:
    """Run a command to its end; return why it failed, or None.

    Raises:
        OSError: it cannot be started.
    """
    with output.open("wb") as stream:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # an interrupt is the starter's to handle
        )
        try:
            code = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return f"not done after {timeout_s:.0f} s"
        finally:  # also of an interrupt; whatever it started ends with it
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return f"{ending(code)}: {_last_line(output)}" if code else None


def _last_line(output: Path) -> str:
    lines = output.read_bytes().decode(errors="replace").split("\n")
    return next((line.strip()[:300] for line in reversed(lines) if line.strip()), "no output")


def environment(ours: bool, user_threads: int | None = None) -> dict[str, str]:
    """The variables of this process, the source tree among them; ours get those of workers, too."""
    variables = dict(os.environ)
    root = Path(__file__).resolve().parents[3]
    if (root / "pyproject.toml").exists():  # a source tree, which may not be installed
        paths = [*variables.get("PYTHONPATH", "").split(os.pathsep), str(root)]
        variables["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    if not ours:
        return variables
    variables |= host.allocator_variables(variables)
    if user_threads is not None:
        variables |= dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(user_threads))
    return variables
