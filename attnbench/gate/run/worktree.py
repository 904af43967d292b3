"""A commit checked out in a temporary folder, which is gone afterwards in every case."""

from __future__ import annotations

import contextlib
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

from attnbench.base.signals import ENDING, end, handled
from attnbench.errors import UsageError
from attnbench.gate.run.git import complaint, run_git

# A filter of git-lfs would download; without it a large file stays the pointer it is in the commit.
_LFS = "filter.lfs"
_NO_LFS = ("-c", f"{_LFS}.smudge=", "-c", f"{_LFS}.process=", "-c", f"{_LFS}.required=false")
_DEAF = (signal.SIGINT, *ENDING)


@contextlib.contextmanager
def checked_out(root: Path, commit: str) -> Iterator[Path]:
    """The tree of `commit` in a fresh folder outside `root`, with an index of its own.

    So the repository learns nothing of it. Hooks do not run; submodules stay empty and files of
    git-lfs stay pointers. What is not in the commit, such as extensions that were built in place,
    is not there. The folder is removed whatever happens: SIGTERM and SIGHUP end the process by
    SystemExit meanwhile.

    Raises:
        UsageError: git cannot make it: no space, no right to write, a damaged repository; or
            temporary folders lie in the repository, whose files would surround them.
    """
    temporary = Path(tempfile.gettempdir()).resolve()
    if temporary.is_relative_to(root):
        raise UsageError(
            f"the folder for temporary files, {temporary}, lies in the repository;"
            " set TMPDIR to one outside"
        )
    with handled(ENDING, end), temporary_folder() as folder:
        tree = folder / "tree"
        tree.mkdir()
        read = ("read-tree", "--reset", "-u", "--no-recurse-submodules", commit)
        made = run_git(root, *_NO_LFS, f"--work-tree={tree}", *read, index=folder / "index")
        if made.returncode:
            why = complaint(made)
            raise UsageError(f"git cannot check out {commit[:12]} (--base): {why}")
        yield tree


@contextlib.contextmanager
def temporary_folder() -> Iterator[Path]:
    """A fresh folder, gone afterwards.

    Raises:
        UsageError: it cannot be made.
    """
    try:
        folder = Path(tempfile.mkdtemp(prefix="attnbench-gate-")).resolve()
    except OSError as err:
        raise UsageError(f"cannot make a temporary folder ({err}); set TMPDIR") from err
    try:
        yield folder
    finally:
        with handled(_DEAF, signal.SIG_IGN):  # a second Ctrl-C must not stop half-way
            shutil.rmtree(folder, ignore_errors=True)
