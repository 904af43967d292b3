"""Git repositories for tests: made from texts, in a folder, with nothing of the user's git."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

KERNEL = """from attnbench.api import attention


@attention("{name}")
def kernel(q, k, v, *, causal, scale):
    return ((q @ k.mT) * scale).softmax(-1) @ v
"""
_APART = {
    "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull, "GIT_AUTHOR_NAME": "A",
    "GIT_AUTHOR_EMAIL": "a@example.org", "GIT_COMMITTER_NAME": "A",
    "GIT_COMMITTER_EMAIL": "a@example.org",
}  # fmt: skip


def git(root: Path, *arguments: str) -> str:
    """What git prints in `root`; it must succeed."""
    ran = subprocess.run(
        ["git", "-c", "protocol.file.allow=always", *arguments],
        cwd=root, env=os.environ | _APART, capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    return ran.stdout.strip()


def new(root: Path) -> Path:
    """An empty repository whose branch is `main`."""
    root.mkdir(parents=True, exist_ok=True)
    git(root, "init", "--quiet", "--initial-branch", "main")
    return root


def commit(root: Path, **files: str) -> str:
    """Write files, with `__` for a slash in their names, commit all there is; the commit's id."""
    write(root, **files)
    git(root, "add", "--all")
    git(root, "commit", "--quiet", "--allow-empty", "--message", "more")
    return git(root, "rev-parse", "HEAD")


def write(root: Path, **files: str) -> None:
    """Write Python files into the working tree; `a__b` is a/b.py."""
    for name, text in files.items():
        path = root / f"{name.replace('__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def kernel(name: str = "mine") -> str:
    """The source of an implementation called `name`."""
    return KERNEL.format(name=name)
