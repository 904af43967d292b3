"""The base is checked out in a temporary folder, and is gone afterwards whatever happens."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from attnbench.errors import UsageError
from attnbench.versions.git import checked_out
from tests import repositories
from tests.conftest import environment
from tests.repositories import commit, git

FOREVER = """
import sys, time
from pathlib import Path
from attnbench.versions.git import checked_out
with checked_out(Path(sys.argv[1]), sys.argv[2]) as tree:
    print(tree, flush=True)
    time.sleep(60)
"""


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where trees go in this test."""
    folder = tmp_path.resolve() / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


@pytest.fixture
def root(tmp_path: Path, temporary: Path) -> Path:
    """A repository with two commits: `a.py` was "old" and is "new"."""
    made = repositories.new(tmp_path.resolve() / "repo")
    commit(made, a="old")
    commit(made, a="new")
    return made


@pytest.fixture
def old(root: Path) -> str:
    return git(root, "rev-parse", "HEAD~1")


def assert_nothing_is_left(temporary: Path) -> None:
    assert list(temporary.iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_ends_the_process_and_leaves_nothing(root, old, temporary, number):
    with running(root, old, temporary) as process:
        process.send_signal(number)
        assert process.wait(timeout=30) in (128 + number, -signal.SIGINT)
    assert_nothing_is_left(temporary)


def test_what_cannot_be_checked_out_is_one_line_and_leaves_nothing(
    root, old, temporary, monkeypatch
):
    with pytest.raises(UsageError, match=r"cannot check out .*--base"), checked_out(root, "0" * 40):
        pass
    assert_nothing_is_left(temporary)
    for folder, says in (
        (root, "lies in the repository"),
        (root.parent / "gone", "cannot make a temp"),
    ):
        monkeypatch.setattr(tempfile, "tempdir", str(folder))
        with pytest.raises(UsageError, match=f"{says}.*TMPDIR"), checked_out(root, old):
            pass


class running:  # noqa: N801
    """A process of its own that holds a commit checked out; killed at the end."""

    def __init__(self, root: Path, commit: str, temporary: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", FOREVER, str(root), commit],
            env=environment(TMPDIR=str(temporary)),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),
        )

    def __enter__(self) -> subprocess.Popen[bytes]:
        assert self._process.stdout is not None
        assert os.path.isdir(self._process.stdout.readline().decode().strip())
        return self._process

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()
