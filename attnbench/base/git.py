"""Git, as it is asked for facts: by its executable, which no library stands in for in all cases."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

from attnbench.errors import UsageError

# Git sets these for its hooks, where they would point every command at one repository and index;
# in `git commit --only` even at an index of that commit alone.
_OF_HOOKS = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_COMMON_DIR", "GIT_PREFIX")
_SETTINGS = {
    "LC_ALL": "C",  # `fatal:` begins its last word
    "GIT_TERMINAL_PROMPT": "0",
    "GIT_OPTIONAL_LOCKS": "0",  # `git status` must not write the index beside a user's own git
}
# A watching daemon that git started for a checkout would outlive it.
_CONFIGURATION = ("-c", f"core.hooksPath={os.devnull}", "-c", "core.fsmonitor=false")
_PATIENCE_S = 10.0


def run_git(
    folder: Path, *arguments: str, index: Path | None = None, timeout_s: float | None = None
) -> subprocess.CompletedProcess[str]:
    """Run git in `folder`, deaf to the terminal's Ctrl-C; an interrupt of ours ends it.

    With the file `index` as its index, if that is given.

    Raises:
        UsageError: git is not installed, or cannot be started in `folder`.
        subprocess.TimeoutExpired: it takes longer than `timeout_s`.
    """
    environment = {name: value for name, value in os.environ.items() if name not in _OF_HOOKS}
    environment |= _SETTINGS | ({} if index is None else {"GIT_INDEX_FILE": str(index)})
    try:
        return subprocess.run(
            ["git", *_CONFIGURATION, *arguments], cwd=folder, env=environment, timeout=timeout_s,
            stdin=subprocess.DEVNULL, capture_output=True, start_new_session=True,
            encoding="utf-8", errors="surrogateescape",  # file names may be any bytes
        )  # fmt: skip
    except OSError as err:
        hint = ": install git" if err.filename == "git" else ""
        raise UsageError(
            f"git cannot be run in {folder} ({err.strerror}), which --base needs{hint}"
        ) from err


def commit_of(folder: Path) -> dict[str, Any]:
    """`commit`, the full id that HEAD is at, and `dirty`, whether tracked files differ from it.

    Both are None where the folder lies in no repository, where that has no commit yet, and where
    git is missing or does not answer within `_PATIENCE_S`.
    """
    asked = ("describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")
    try:
        found = run_git(folder, *asked, timeout_s=_PATIENCE_S)
        found.check_returncode()
    except (UsageError, subprocess.SubprocessError):
        return {"commit": None, "dirty": None}
    told = found.stdout.strip()
    return {"commit": told.removesuffix("-dirty"), "dirty": told.endswith("-dirty")}
