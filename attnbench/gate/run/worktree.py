"""A commit checked out in a temporary folder, which is gone afterwards in every case."""

from __future__ import annotations

import contextlib
import fcntl
import os
import platform
import re
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from attnbench.errors import UsageError
from attnbench.gate.run.git import complaint, run_git

# Hosts may share the folder, and repositories, but not each other's locks.
_PREFIX = f"attnbench-gate-{re.sub(r'[^0-9A-Za-z]+', '-', platform.node())}-"
_YOUNG_S = 60.0  # so long a folder may be without the lock of its maker
# A filter of git-lfs would download; without it a large file stays the pointer it is in the commit.
_LFS = "filter.lfs"
_NO_LFS = ("-c", f"{_LFS}.smudge=", "-c", f"{_LFS}.process=", "-c", f"{_LFS}.required=false")
# What CI sends to a job that is cancelled; what a terminal sends when it closes.
_ENDING = (signal.SIGTERM, signal.SIGHUP)
_DEAF = (signal.SIGINT, *_ENDING)


@contextlib.contextmanager
def checked_out(root: Path, commit: str) -> Iterator[Path]:
    """The tree of `commit` in a fresh folder outside `root`, as a detached worktree.

    Hooks do not run; submodules stay empty and files of git-lfs stay pointers. What is not in the
    commit, such as extensions that were built in place, is not there. The worktree and its entry
    in the repository are removed whatever happens: SIGTERM and SIGHUP end the process by
    SystemExit meanwhile. Those of earlier processes that were killed are removed first.

    Raises:
        UsageError: git cannot make it: no space, no right to write, a damaged repository.
    """
    remove_stale(root)
    with _signals(_ENDING, _end), temporary_folder() as folder:
        try:
            made = run_git(root, *_NO_LFS, "worktree", "add", "--detach", str(folder), commit)
            if made.returncode:
                why = complaint(made)
                raise UsageError(f"git cannot check out {commit[:12]} (--base): {why}")
            yield folder
        finally:
            with _signals(_DEAF, signal.SIG_IGN):  # a second Ctrl-C must not stop half-way
                remove(root, folder)


@contextlib.contextmanager
def temporary_folder() -> Iterator[Path]:
    """A fresh folder, gone afterwards; if this process is killed, `remove_stale` removes it.

    Raises:
        UsageError: it cannot be made.
    """
    try:
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX)).resolve()
    except OSError as err:
        raise UsageError(f"cannot make a temporary folder ({err}); set TMPDIR") from err
    with contextlib.ExitStack() as held:
        held.callback(shutil.rmtree, folder, ignore_errors=True)
        descriptor = os.open(folder, os.O_RDONLY)
        held.callback(os.close, descriptor)
        with contextlib.suppress(OSError):  # a file system without such locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)  # as long as this process lives
        yield folder


def remove(root: Path, folder: Path) -> None:
    """Remove a worktree and its entry in the repository, or what is there of either.

    Twice `--force`: git locks the entry of one that it is still making. A general `git worktree
    prune` would also forget worktrees of the user's whose disk is not mounted.
    """
    take_away = ("worktree", "remove", "--force", "--force", str(folder))
    run_git(root, *take_away)
    if folder.exists():
        shutil.rmtree(folder, ignore_errors=True)
        run_git(root, *take_away)  # with the folder gone, git forgets the entry


def remove_stale(root: Path) -> None:
    """Remove what gates that were killed have left: of this repository, and in its folders.

    Raises:
        UsageError: temporary folders lie in the repository, whose files would surround them.
    """
    temporary = Path(tempfile.gettempdir()).resolve()
    if temporary.is_relative_to(root):
        raise UsageError(
            f"the folder for temporary files, {temporary}, lies in the repository;"
            " set TMPDIR to one outside"
        )
    listed = run_git(root, "worktree", "list", "--porcelain").stdout.splitlines()
    entries = [Path(line.removeprefix("worktree ")) for line in listed if line[:9] == "worktree "]
    for folder in dict.fromkeys((*entries, *temporary.glob(f"{_PREFIX}*"))):
        if folder.name.startswith(_PREFIX) and _left_behind(folder):
            remove(root, folder)


def _left_behind(folder: Path) -> bool:
    """Whether nobody holds the folder's lock any more; not where nobody can tell."""
    try:
        if time.time() - folder.stat().st_mtime < _YOUNG_S:
            return False
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        finally:
            os.close(descriptor)
    except OSError as err:
        return isinstance(err, FileNotFoundError)
    return True


def _end(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


@contextlib.contextmanager
def _signals(numbers: tuple[signal.Signals, ...], handler: Any) -> Iterator[None]:
    """Handle signals in another way for a while. Only the main thread may; others leave them."""
    numbers = numbers if threading.current_thread() is threading.main_thread() else ()
    before = {number: signal.getsignal(number) for number in numbers}
    # None was not set from Python and cannot be put back; what nohup ignores stays ignored.
    ours = {number: old for number, old in before.items() if old not in (None, signal.SIG_IGN)}
    try:
        for number in ours:
            signal.signal(number, handler)
        yield
    finally:
        for number, old in ours.items():
            signal.signal(number, old)
