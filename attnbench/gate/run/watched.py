"""What a gate compares and watches: commits, files, sweeps, from flags and pyproject.toml."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from attnbench.base.parameters import base_name
from attnbench.base.registry import require
from attnbench.errors import UsageError
from attnbench.execution.process import Settings
from attnbench.execution.runner import LocalRunner
from attnbench.gate.decide.data import DEFAULT_THRESHOLD, Environment, Rules, Version
from attnbench.gate.run.measuring import GateRequest
from attnbench.planning.plan import Axes, overridden
from attnbench.schema.axes import KEYWORDS
from attnbench.theory.traits import TRAITS
from attnbench.versions import git
from attnbench.versions.environments import built_in_folder, interpreter_of

_BUILT_IN = "impls/"  # how their files are shown
_COMPARED = ("naive", "sdpa")  # between environments, unless something else is asked for
TABLE = "pyproject.toml [tool.attnbench.gate]"
_FILES = f"'files' in {TABLE}"
# Unless sizes are given: small ones, in which a slowdown costs least to find.
_DEFAULT = Axes(seq_lens=(128, 256, 512, 1024))
_AXES = ("workload", "impls", *(name for name in KEYWORDS if name != "threads"))  # of all cells


@dataclass(frozen=True, kw_only=True)
class Watched:
    """What is watched, and with which promises: fields of `Rules` that were given.

    `files` are relative to the root of the repository. None: `base` is the default one, and
    `threads` follow from the device.
    """

    files: tuple[str, ...]
    sweeps: tuple[Axes, ...]
    base: str | None = None
    threads: int | None = None
    device: str = "auto"
    promises: Mapping[str, Any] = field(default_factory=dict)

    def rules(self, device: str) -> Rules:
        """The promises on a device: `cpu` or `cuda`."""
        return Rules(**{"threshold": DEFAULT_THRESHOLD[device], **self.promises})


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The working tree at `root`, on top of the commit `head`, against the commit `base`.

    `changes` says what is uncommitted, and is empty where nothing is. Of two `environments` the
    first runs the base, the second the candidate; the code may then be the same, without a `base`,
    and `head` unknown where no repository holds it. Of two `versions` of a file, as they were
    given, the first is the base.
    """

    root: Path
    head: str | None
    changes: str
    base: git.Base | None
    watched: Watched
    environments: tuple[Environment, Environment] | None = None
    versions: tuple[str, str] | None = None

    def missing(self, tree: Path) -> list[str]:
        """The watched files that the base, checked out in `tree`, has not."""
        return [file for file in self.watched.files if not (tree / file).is_file()]

    def request(self, tree: Path, settings: Settings, options: Mapping[str, Any]) -> GateRequest:
        """What to measure with the base checked out in `tree`.

        On a CPU in one thread, the steadiest, unless threads are given; on a GPU in as many as
        torch takes.
        """
        files, threads, missing = self.watched.files, self.watched.threads, self.missing(tree)
        if threads is None and settings.device == "cpu":
            threads = 1
        candidate = Version(
            name="candidate", root=str(self.root), commit=self.head, dirty=bool(self.changes),
            changes=self.changes, files=tuple(str(self.root / file) for file in files),
        )  # fmt: skip
        base = replace(candidate, name="base")
        if self.base is not None:
            own = tuple(str(tree / file) for file in files if file not in missing)
            ref, commit = self.base.ref, self.base.commit
            base = Version(name="base", root=str(tree), files=own, ref=ref, commit=commit)
        if self.versions is not None:
            old, candidate = Path(self.versions[0]), replace(candidate, ref=self.versions[1])
            own, ref = (str(old.resolve()),), self.versions[0]
            base = Version(name="base", root=str(old.resolve().parent), files=own, ref=ref)
        before, after = self.environments or (None, None)
        return GateRequest(
            base=replace(base, environment=before), candidate=replace(candidate, environment=after),
            sweeps=tuple(axes.having(threads=(threads or 1,)) for axes in self.watched.sweeps),
            rules=self.watched.rules(settings.device), options=options,
            settings=replace(settings, threads=threads),
        )  # fmt: skip


def comparison(
    root: Path,
    found: Watched,
    results: Path,
    environments: tuple[Environment, Environment] | None = None,
) -> Comparison:
    """What is watched in the repository at `root`, with its base.

    Files below `results`, which gates write, are no changes of the working tree. Between two
    `environments` the code is the same unless a base is asked for, and need not be in a repository.

    Raises:
        UsageError: there is no such commit.
    """
    same = environments is not None and found.base is None
    head, words, base = None, "", None
    if not same or git.is_committed(root):
        head = git.resolve(root, "HEAD")
        tracked, words = git.changes(root, besides=results)
        if found.base is not None:
            base = git.Base(git.resolve(root, found.base), found.base)
        elif not same:
            base = git.default_base(root, tracked)
    return Comparison(
        root=root, head=head, changes=words, base=base, watched=found, environments=environments
    )


def of_files(folder: Path, old: str, flags: Mapping[str, Any]) -> Comparison:
    """The one file of the flags against `old`; both are looked up in `folder`, without git.

    Raises:
        UsageError: a file is not there, or not one is given; a value that cannot be right.
    """
    new = flags.get("files", ())
    if len(new) != 1:
        raise UsageError(f"--against takes one --impl, the new version of {old}; got {len(new)}")
    root, other = ((folder / file).resolve().parent for file in (*new, old))
    _file(old, other, (folder,), "--against")
    found = watched(root, folder, {}, flags)
    return Comparison(
        root=root, head=None, changes="", base=None, watched=found, versions=(old, *new)
    )


def surveyed(asked: str, environment: Environment | None = None) -> tuple[str, dict[str, str]]:
    """The device that `auto` means, and the files of the built-in implementations by name.

    Only a process with torch can say: that of `environment`, or of this installation.

    Raises:
        UsageError: there is no such device.
        WorkerError: no process can be started.
    """
    with (
        interpreter_of(environment) as own,
        LocalRunner(Settings(device=asked, **own)) as runner,
    ):
        found = runner.catalogue()
    rows = found.implementations
    return found.device, {row.name: row.file for row in rows if row.file.startswith(_BUILT_IN)}


def of_built_in(known: Mapping[str, str], flags: Mapping[str, Any]) -> tuple[Path, dict[str, Any]]:
    """Watch built-in implementations: the folder of their files, and the flags that name them.

    `known` is what `surveyed` returns. Without `impls` those are naive and sdpa.

    Raises:
        UsageError: there is no such implementation.
    """
    names = flags.get("impls") or _COMPARED
    require("implementation", [base_name(text, known) for text in names], known, "--impls")
    folder = built_in_folder()
    files = dict.fromkeys(str(folder / Path(known[base_name(name)]).name) for name in names)
    return folder, {**flags, "impls": names, "files": tuple(files)}


def watched(
    root: Path, folder: Path, table: Mapping[str, Any], flags: Mapping[str, Any]
) -> Watched:
    """What to watch in the repository at `root`, by `flags` before the table of pyproject.toml.

    Both hold fields of `Watched`, `Rules` and `Axes` that were given, None or empty otherwise. The
    files of flags are looked up in `folder`, where the command runs, and in `root`. Of `sweeps` in
    the table each has axes of its own, which go before those that the table shares.

    Raises:
        UsageError: no file, one that is not there or lies elsewhere; a value that cannot be right.
    """
    given = {name: value for name, value in flags.items() if value not in (None, ())}
    if "files" in given:
        files = [_file(text, root, (folder, root)) for text in given["files"]]
    else:
        files = [file for text in table.get("files", ()) for file in _fitting(text, root)]
    if not files:
        raise UsageError(
            "no file to watch: name one that has implementations, --impl path/in/repo.py, or list"
            f' them in {TABLE}: files = ["path/in/repo.py"]'
        )
    chosen = {**table, **given}
    found = Watched(
        files=tuple(dict.fromkeys(files)),
        sweeps=_sweeps(table, given),
        promises={n: chosen[n] for n in ("threshold", "budget_s", "growth") if n in chosen},
        **{name: chosen[name] for name in ("base", "threads", "device") if name in chosen},
    )
    found.rules("cpu")  # what cannot be is refused before anything is done
    for axes in found.sweeps:
        TRAITS.get(axes.workload)
    return found


def _sweeps(table: Mapping[str, Any], flags: Mapping[str, Any]) -> tuple[Axes, ...]:
    # The implementations that the table names may be in other files than those of the flags.
    own = [name for name in _AXES if name != "impls" or "files" not in flags]
    rows = [{n: row[n] for n in own if n in row} for row in table.get("sweeps") or [{}]]
    usual = table.get("workload", _DEFAULT.workload)
    shared = {name: table[name] for name in own if name in table and name != "workload"}
    sweeps = [_DEFAULT.having(workload=row.get("workload", usual)) for row in rows]
    sweeps = [a.having(**row) for a, row in zip(overridden(sweeps, shared), rows, strict=True)]
    return overridden(sweeps, {name: flags[name] for name in _AXES if name in flags})


def _fitting(pattern: str, root: Path) -> list[str]:
    """The files of an entry of the table; a pattern passes over names such as `__init__.py`."""
    if os.path.isfile(root / pattern) or not any(sign in pattern for sign in "*?["):
        return [_file(pattern, root, (root,), _FILES)]
    try:
        found = sorted(path for path in root.glob(pattern) if path.suffix == ".py")
    except (ValueError, NotImplementedError):
        found = []  # it is no pattern of relative paths
    files = [_file(str(path), root, (root,), _FILES) for path in found if path.name[0] not in "_."]
    if not files:
        raise UsageError(f"{_FILES}: no Python file in {root} fits {pattern!r}")
    return files


def _file(text: str, root: Path, folders: Iterable[Path], named: str = "--impl") -> str:
    """The path of a file of the working tree, relative to its root."""
    paths = (folder / text for folder in folders)
    found = next((path for path in paths if os.path.isfile(path)), None)  # False if too long a name
    if found is None:
        raise UsageError(f"no file {text} in {root} ({named})")
    path = found.resolve()
    if not path.is_relative_to(root):
        why = f"({named}), so that no base has it; name a file in it"
        raise UsageError(f"{path} lies outside the repository {root} {why}")
    return path.relative_to(root).as_posix()
