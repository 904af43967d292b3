"""The repository of real changes: every version is right, and each changes what it says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from attnbench.errors import StoreError, WorkerError
from tests.validation.gate import cases
from tests.validation.gate.repository import (
    BASE,
    CHANGES,
    FILE,
    PYPROJECT,
    SOURCE,
    Change,
    check_out,
    make_repository,
)

BY_NAME = {change.name: change for change in CHANGES}


@pytest.fixture(scope="module")
def repository(tmp_path_factory) -> Path:
    folder: Path = tmp_path_factory.mktemp("repository")
    make_repository(folder)
    return folder


def git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        ["git", *arguments], cwd=folder, capture_output=True, text=True, check=True
    )
    return done.stdout


def test_each_change_is_one_commit_on_the_base_and_the_tree_is_clean(repository: Path) -> None:
    assert git(repository, "show", f"{BASE}:{FILE}") == SOURCE
    assert git(repository, "show", f"{BASE}:pyproject.toml") == PYPROJECT
    for change in CHANGES:
        check_out(repository, change)
        assert git(repository, "rev-list", "--count", f"{BASE}..HEAD") == "1\n"
        assert (repository / FILE).read_text() == change.source != SOURCE
        assert git(repository, "log", "-1", "--format=%s") == f"{change.title}\n"
        assert git(repository, "status", "--porcelain") == ""


RIGHT = """
import sys, torch, attnbench
from attnbench.api.loader import load_file
from attnbench.api import IMPLEMENTATIONS

def fresh(file):
    names = load_file(file)
    yield from names
    for name in names:
        IMPLEMENTATIONS.remove(name)

torch.manual_seed(0)
for file in sys.argv[1:]:
    for name in fresh(file):
        for n in (48, 320):
            q, k, v = torch.randn(3, 2, 4, n, 64)
            for causal in (False, True):
                o = attnbench.get(name)(q, k, v, causal=causal, scale=None)
                truth = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
                assert o.dtype == q.dtype, (file, name)
                assert torch.allclose(o, truth, atol=1e-5), (file, name, n, causal)
                print(file, name)
"""


def test_every_version_computes_attention(tmp_path) -> None:
    files = []
    for change in CHANGES:
        files.append(tmp_path / f"{change.name}.py")
        files[-1].write_text(change.source)
    command = [sys.executable, "-c", RIGHT, *map(str, files)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == len(CHANGES) * 3 * 2 * 2


def found(rows: list[tuple[int, str, str]], words: str = "words") -> dict[str, Any]:
    """A gate.json as far as it is read: the verdicts of nine cells of three implementations."""
    told = {cell: (verdict, metrics) for cell, verdict, metrics in rows}
    verdicts = [told.get(cell, ("ok", "")) for cell in range(9)]
    impls = ("ours-chunked", "ours-masked", "ours-plain")
    return {
        "cells": [{"impl": impl} for impl in impls for _ in range(3)],
        "decided": {
            "words": words,
            "rows": [
                {
                    "cell": cell,
                    "verdict": verdict,
                    "reason": "",
                    "changes": [{"metric": metric} for metric in metrics.split()],
                }
                for cell, (verdict, metrics) in enumerate(verdicts)
            ],
        },
    }


def test_a_change_is_as_expected_where_its_implementation_alone_is_named_by_its_metric() -> None:
    copied = BY_NAME["contiguous"]
    grew, slower = "workspace", "time"
    row = cases.row_of(copied, found([(6, "regressed", grew)]), 1, 60.0)
    assert row["met"]
    assert (row["named"], row["metrics"], row["cells"]) == (["ours-plain"], ["workspace"], 1)
    both = cases.row_of(copied, found([(7, "regressed", f"{slower} {grew}")]), 1, 60.0)
    assert both["metrics"] == ["time", "workspace"]
    other = found([(6, "regressed", grew), (0, "regressed", slower)])
    assert not cases.row_of(copied, other, 1, 60.0)["met"]
    assert not cases.row_of(copied, found([]), 0, 60.0)["met"]
    kept = BY_NAME["kept-weights"]
    assert not cases.row_of(kept, found([(6, "regressed", slower)]), 1, 60.0)["met"]


def test_a_change_that_changes_nothing_must_pass() -> None:
    clean = BY_NAME["refactored"]
    assert cases.row_of(clean, found([]), 0, 60.0)["met"]
    assert not cases.row_of(clean, found([]), 3, 60.0)["met"]
    assert not cases.row_of(clean, found([(0, "regressed", "time")]), 1, 60.0)["met"]


def test_changes_that_were_tried_are_not_tried_again(tmp_path, monkeypatch) -> None:
    tried: list[str] = []

    def trial(change: Change, repository: Path, results: Path) -> dict[str, Any]:
        tried.append(change.name)
        if len(tried) == 3:
            raise KeyboardInterrupt
        return cases.row_of(change, found([]), 0, 1.0)

    monkeypatch.setattr(cases, "_try", trial)
    with pytest.raises(KeyboardInterrupt):
        cases.run_cases(tmp_path, print)
    assert [row["name"] for row in cases.load_cases(tmp_path)] == tried[:2]
    cases.run_cases(tmp_path, print)
    assert [row["name"] for row in cases.load_cases(tmp_path)] == [c.name for c in CHANGES]
    assert len(tried) == len(CHANGES) + 1


def test_a_gate_that_gives_no_result_is_said_with_its_last_words(tmp_path, monkeypatch) -> None:
    def dies(command: list[str], **options: Any) -> Any:
        if command[0] == "git":
            return real(command, **options)
        return subprocess.CompletedProcess(command, 4, "", "first\nError: it went wrong\n")

    real = subprocess.run
    monkeypatch.setattr(subprocess, "run", dies)
    with pytest.raises(WorkerError, match="no result for mask-in-call: Error: it went wrong"):
        cases.run_cases(tmp_path, print)


def test_damaged_cases_are_refused(tmp_path) -> None:
    (tmp_path / cases.NAME).write_text("{")
    with pytest.raises(StoreError, match=r"cases\.json cannot be read"):
        cases.load_cases(tmp_path)
