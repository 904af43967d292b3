"""Size is a feature: lines and files are at most what stands here.

A change that makes the code smaller lowers the limit. One that must raise it does so in the same
commit, with the reason in CHANGELOG.md.
"""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SLACK = 200  # lines a limit may stand above what there is
LIMITS = {  # folders, kinds of files: lines, files
    ("attnbench impls", ".py"): (39_758, 224),
    ("tests", ".py .toml .sh"): (27_500, 160),
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
    assert most_lines - SLACK <= lines <= most_lines
    assert len(files) <= most_files


def test_few_tests_are_left_to_ci(request):
    slow = [item for item in request.session.items if item.get_closest_marker("slow")]
    assert len(slow) <= 25
