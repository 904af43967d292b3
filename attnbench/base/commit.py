"""Which commit a folder's files are, where git knows it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

# No lock beside a user's own git, and no watching daemon that would outlive the question.
_GIT = ("git", "-c", "core.fsmonitor=false")
_SETTINGS = {"GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"}
_DIRTY = "-dirty"
PATIENCE_S = 10.0


def commit_of(folder: Path) -> dict[str, Any]:
    """`commit`, the full id that HEAD is at, and `dirty`, whether tracked files differ from it.

    Both are None where the folder lies in no repository, where that has no commit yet, and where
    git is missing or does not answer within `PATIENCE_S`.
    """
    asked = [*_GIT, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        found = subprocess.run(
            asked, cwd=folder, env=os.environ | _SETTINGS, stdin=subprocess.DEVNULL,
            capture_output=True, text=True, timeout=PATIENCE_S, check=True,
        ).stdout.strip()  # fmt: skip
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return {"commit": None, "dirty": None}
    return {"commit": found.removesuffix(_DIRTY), "dirty": found.endswith(_DIRTY)}
