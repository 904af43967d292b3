"""Size is a feature: lines and files are at most what stands here.

A change that makes the code smaller lowers the limit. One that must raise it does so in the same
commit, with the reason in CHANGELOG.md.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import SLOW

ROOT = Path(__file__).resolve().parents[1]
SLACK = 200  # lines a limit may stand above what there is
LIMITS = {  # folders, kinds of files: lines, files
    ("attnbench impls", ".py"): (45_319, 266),
    ("tests", ".py .toml .sh"): (30_569, 164),
}


@pytest.mark.parametrize(("folders", "kinds"), LIMITS)
def test_lines_and_files_are_at_most_the_limit_which_follows_them_down(folders, kinds):
    files = [
        file
        for folder in folders.split()
        for file in (ROOT / folder).rglob("*")
        if file.suffix in kinds.split() and file.is_file()
    ]
    lines = sum(file.read_bytes().count(b"\n") for file in files)
    most_lines, most_files = LIMITS[folders, kinds]
    rule = f"{folders} has {lines} lines in {len(files)} files: set LIMITS in {__file__} to that"
    assert lines <= most_lines, f"{rule}, and give the reason in CHANGELOG.md"
    assert len(files) <= most_files, f"{rule}, and give the reason in CHANGELOG.md"
    assert lines >= most_lines - SLACK, f"{rule}: the limit follows the code down"


def test_few_tests_are_left_to_ci(pytestconfig):
    slow = pytestconfig.stash[SLOW]
    assert len(slow) <= 25, "a slow test more needs another less: CI alone runs them"
