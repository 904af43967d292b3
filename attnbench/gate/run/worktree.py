"""A commit checked out beside the repository, in a folder that is gone afterwards in every case."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from attnbench.errors import UsageError
from attnbench.gate.run.git import complaint, run_git

_PREFIX = "attnbench-gate-"
# A filter of git-lfs would download; without it a large file stays the pointer it is in the commit.
_NO_LFS = tuple(
    part
    for setting in ("smudge=", "process=", "required=false")
    for part in ("-c", f"filter.lfs.{setting}")
)
_ENDING = tuple(
    getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)
)  # what CI sends to a job that is cancelled; what a terminal sends when it closes
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
    try:
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=_temporary(root)))
    except OSError as err:
        raise UsageError(f"cannot make a temporary folder ({err}); set TMPDIR") from err
    held = os.open(folder, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)  # as long as this process lives: see `_left_behind`
    with _signals(_ENDING, _end):
        try:
            made = run_git(root, *_NO_LFS, "worktree", "add", "--detach", str(folder), commit)
            if made.returncode:
                why = complaint(made)
                raise UsageError(f"git cannot check out {commit[:12]} (--base): {why}")
            yield folder
        finally:
            with _signals(_DEAF, signal.SIG_IGN):  # a second Ctrl-C must not stop half-way
                remove(root, folder)
                os.close(held)


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
    """Remove what gates that were killed have left: of this repository, and in its folders."""
    listed = run_git(root, "worktree", "list", "--porcelain", "-z").stdout.split("\0")
    entries = [Path(line.removeprefix("worktree ")) for line in listed if line[:9] == "worktree "]
    for folder in dict.fromkeys((*entries, *_temporary(root).glob(f"{_PREFIX}*"))):
        if folder.name.startswith(_PREFIX) and _left_behind(folder):
            remove(root, folder)


def _left_behind(folder: Path) -> bool:
    """Whether nobody holds the folder's lock any more; not where it is another user's."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        finally:
            os.close(descriptor)
    except OSError as err:
        return isinstance(err, FileNotFoundError)
    return True


def _temporary(root: Path) -> Path:
    """Where folders for a while go: never in the repository, whose files would surround it."""
    folder = Path(tempfile.gettempdir()).resolve()
    if folder.is_relative_to(root):
        raise UsageError(
            f"the folder for temporary files, {folder}, lies in the repository; set TMPDIR to one"
            " outside"
        )
    return folder


def _end(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


@contextlib.contextmanager
def _signals(numbers: tuple[signal.Signals, ...], handler: Any) -> Iterator[None]:
    """Handle signals in another way for a while. Only the main thread may; others leave them."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in numbers}
    # None was not set from Python and cannot be put back; what nohup ignores stays ignored.
    ours = [number for number, old in before.items() if old not in (None, signal.SIG_IGN)]
    try:
        for number in ours:
            signal.signal(number, handler)
        yield
    finally:
        for number in ours:
            signal.signal(number, before[number])
