"""What the gate asks of git: the repository, its refs, what is uncommitted, a commit's files."""

from __future__ import annotations

import contextlib
import re
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from attnbench.base.git import run_git
from attnbench.base.registry import nearest
from attnbench.base.signals import ENDING, end, handled
from attnbench.base.units import counted
from attnbench.errors import UsageError

_UNSHALLOW = "fetch the rest: git fetch --unshallow (in GitHub's checkout action: fetch-depth: 0)"
_DEFAULT_BRANCHES = ("origin/main", "origin/master", "main", "master")


class Base(NamedTuple):
    """The commit to compare with: its full id, the ref that led to it, and why it was chosen."""

    commit: str
    ref: str
    words: str = "as asked for"


def repository(folder: Path) -> Path:
    """The root of the working tree that `folder` lies in, resolved.

    Raises:
        UsageError: git is not installed, or there is no working tree.
    """
    found = run_git(folder, "rev-parse", "--show-toplevel")
    if found.returncode:
        remedy = ""
        if "not a git repository" in found.stderr:
            remedy = "; make one: git init && git add . && git commit, or use --against OLD_FILE"
        elif command := re.search(r"git config .*safe\.directory.*", found.stderr):
            remedy = f"; trust it: {command.group()}"  # it is another user's
        raise UsageError(
            f"{folder} is in no working tree of git, where --base is looked up"
            f" ({_complaint(found)}){remedy}"
        )
    return Path(found.stdout.removesuffix("\n")).resolve()


def resolve(root: Path, ref: str) -> str:
    """The full id of the commit that `ref` names: a branch, a tag, an id, `HEAD~2`.

    Raises:
        UsageError: it names none; the message gives the nearest branch or tag.
    """
    commit = _commit(root, ref)
    if commit is not None:
        return commit
    if _commit(root, "HEAD") is None:
        raise UsageError("the repository has no commit yet to compare with (--base)")
    if _is_shallow(root):
        raise UsageError(f"no commit '{ref}' (--base) in this shallow clone; {_UNSHALLOW}")
    names = _lines(root, "for-each-ref", "--format=%(refname:short)")
    remote = f"origin/{ref}"
    hint = f", did you mean '{remote}'?" if remote in names else nearest(ref, names)
    raise UsageError(
        f"no commit '{ref}' (--base){hint}; take a branch, a tag, a commit or HEAD~1"
        " (git branch -a lists branches)"
    )


def default_base(root: Path, changed: bool) -> Base:
    """The merge base of HEAD with the default branch.

    On that branch itself it would be HEAD: where tracked files are `changed` that is the base, and
    the changes are what is judged; else the first parent is, since HEAD is the same as itself.

    Raises:
        UsageError: there is no default branch or no common commit; a shallow clone is named.
    """
    head = resolve(root, "HEAD")
    named = _lines(root, "symbolic-ref", "--quiet", "--short", "refs/remotes/origin/HEAD")
    known = (branch for branch in (*named, *_DEFAULT_BRANCHES) if _commit(root, branch))
    if (branch := next(known, None)) is None:
        raise _no_base(root, f"no default branch ({', '.join(_DEFAULT_BRANCHES)})")
    found = run_git(root, "merge-base", "HEAD", branch)
    if found.returncode:
        raise _no_base(root, f"no common commit of HEAD and {branch}")
    commit = found.stdout.strip()
    if commit != head:
        return Base(commit, branch, f"where HEAD left {branch}")
    if changed:
        return Base(head, "HEAD", f"the last commit, part of {branch}, without the changes")
    if (parent := _commit(root, "HEAD~1")) is None:
        raise _no_base(root, "HEAD has no parent, and nothing is changed")
    words = f"the parent of HEAD, which is part of {branch} and has no changes on top"
    return Base(parent, "HEAD~1", words)


def _no_base(root: Path, fact: str) -> UsageError:
    if _is_shallow(root):
        return UsageError(f"{fact}, in this shallow clone; {_UNSHALLOW}, or name one: --base REF")
    return UsageError(f"{fact}: there is no default base; name a commit: --base REF")


def changes(root: Path, besides: Path | None = None) -> tuple[bool, str]:
    """Whether tracked files are changed in the working tree; and what is uncommitted, in words.

    The words are empty where nothing is. Ignored files do not count, nor untracked ones in the
    folder `besides`, where results are written.

    Raises:
        UsageError: git cannot read the working tree.
    """
    found = run_git(root, "status", "--porcelain=v1", "-z", "--no-renames", "--untracked-files=all")
    if found.returncode:
        raise UsageError(
            f"git cannot read the working tree of {root} (--base): {_complaint(found)}"
        )
    entries = [entry for entry in found.stdout.split("\0") if entry]
    untracked = [root / entry[3:] for entry in entries if entry.startswith("??")]
    tracked = len(entries) - len(untracked)
    others = [path for path in untracked if besides is None or not path.is_relative_to(besides)]
    words = [f"{counted(tracked, 'file')} changed"] * bool(tracked)
    words += [f"{counted(len(others), 'file')} untracked"] * bool(others)
    return bool(tracked), ", ".join(words)


def is_committed(folder: Path) -> bool:
    """Whether `folder` lies in a repository that has a commit."""
    with contextlib.suppress(UsageError):  # no git at all
        return _commit(folder, "HEAD") is not None
    return False


def _is_shallow(root: Path) -> bool:
    """Whether older commits are missing, as in a clone with `--depth`."""
    return _lines(root, "rev-parse", "--is-shallow-repository") == ["true"]


def _complaint(found: subprocess.CompletedProcess[str]) -> str:
    """The last error of git, as one line."""
    lines = [line.strip() for line in found.stderr.splitlines() if line.strip()]
    fatal = [line for line in lines if line.startswith(("fatal:", "error:"))]
    return " ".join((fatal or lines or ["no reason given"])[-1].split())[:300]


def _commit(root: Path, ref: str) -> str | None:
    if not ref or ref.startswith("-") or "\0" in ref:
        return None  # git would take it for an option
    found = run_git(root, "rev-parse", "--verify", "--quiet", f"{ref}^{{commit}}")
    return found.stdout.strip() if found.returncode == 0 else None


def _lines(root: Path, *arguments: str) -> list[str]:
    return run_git(root, *arguments).stdout.splitlines()


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
            raise UsageError(f"git cannot check out {commit[:12]} (--base): {_complaint(made)}")
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
