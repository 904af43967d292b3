"""Real changes put through the real gate: whether it names the implementation, and by what."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from attnbench.base import units
from attnbench.errors import StoreError, WorkerError
from attnbench.execution.process import Settings, environment_of
from tests.validation.gate.repository import BASE, CHANGES, Change, check_out, make_repository

NAME = "cases.json"
Figures = dict[str, Any]
_AGAINST = ("incorrect", "regressed")


def run_cases(path: Path, tell: Callable[[str], None]) -> None:
    """Put every change through `attnbench gate`; those in cases.json already are left out.

    Raises:
        UsageError: git cannot make the repository.
        StoreError: the folder cannot be written.
        WorkerError: the gate ended without a result.
    """
    done = {row["name"]: row for row in load_cases(path)}
    with tempfile.TemporaryDirectory(prefix="attnbench-cases-") as folder:
        repository, results = Path(folder) / "repository", Path(folder) / "results"
        repository.mkdir()
        make_repository(repository)
        for change in CHANGES:
            if change.name in done:
                continue
            done[change.name] = row = _try(change, repository, results)
            _write(path, [done[c.name] for c in CHANGES if c.name in done])
            tell(
                f"{change.title}: exit {row['exit_code']} in {units.seconds(row['seconds'])},"
                f" {'as expected' if row['met'] else 'NOT as expected'}"
            )


def load_cases(path: Path) -> list[Figures]:
    """What is in cases.json; nothing where there is none.

    Raises:
        StoreError: it is damaged.
    """
    try:
        rows: list[Figures] = json.loads((path / NAME).read_text(encoding="utf-8"))["cases"]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, KeyError, TypeError) as err:
        raise StoreError(f"{path / NAME} cannot be read ({type(err).__name__})") from err
    return rows


def _try(change: Change, repository: Path, results: Path) -> Figures:
    """Run the gate on one change and read what it wrote."""
    check_out(repository, change)
    begin = time.monotonic()
    command = [sys.executable, "-P", "-m", "attnbench", "gate", "--base", BASE, "--device", "cpu",
               "--output", str(results), "--name", change.name, "--quiet"]  # fmt: skip
    done = subprocess.run(
        command, cwd=repository, env=environment_of(Settings()), capture_output=True, text=True
    )
    seconds = time.monotonic() - begin
    try:
        found = json.loads((results / change.name / "gate.json").read_text(encoding="utf-8"))
    except OSError as err:
        words = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise WorkerError(f"attnbench gate gave no result for {change.name}: {words}") from err
    return row_of(change, found, done.returncode, seconds)


def row_of(change: Change, found: Figures, exit_code: int, seconds: float) -> Figures:
    """What the gate made of a change, from its gate.json."""
    impls = [cell["impl"] for cell in found["cells"]]
    against = [row for row in found["decided"]["rows"] if row["verdict"] in _AGAINST]
    named = sorted({impls[row["cell"]] for row in against})
    metrics = sorted({change["metric"] for row in against for change in row["changes"]})
    expected = [change.impl] if change.impl else []
    right = named == expected and exit_code == (1 if change.impl else 0)
    by = set(metrics) & set(change.metrics) or not change.impl
    return {
        "name": change.name,
        "title": change.title,
        "expected": f"{change.impl} ({' or '.join(change.metrics)})" if change.impl else "passes",
        "exit_code": exit_code,
        "named": named,
        "metrics": metrics,
        "cells": len(against),
        "of": sum(impl == change.impl for impl in impls),
        "reasons": [row["reason"] for row in against],
        "words": found["decided"]["words"],
        "seconds": round(seconds, 1),
        "met": bool(right and by),
    }


def _write(path: Path, rows: list[Figures]) -> None:
    text = json.dumps({"cases": rows}, indent=1, ensure_ascii=False) + "\n"
    try:
        path.mkdir(parents=True, exist_ok=True)
        (path / NAME).write_text(text, encoding="utf-8")
    except OSError as err:
        raise StoreError(f"cannot write {path / NAME} ({err.strerror})") from err
