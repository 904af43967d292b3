"""What a gate compares and watches: commits, files, sweeps, from flags and pyproject.toml."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from attnbench.base.registry import unknown
from attnbench.base.units import parse_duration, parse_names, parse_share, parse_sizes
from attnbench.errors import UsageError
from attnbench.execution.process import Settings
from attnbench.execution.runner import LocalRunner
from attnbench.gate.decide.data import DEFAULT_THRESHOLD, Rules, Version
from attnbench.gate.run import git
from attnbench.gate.run.measuring import GateRequest
from attnbench.planning.plan import Axes
from attnbench.theory.traits import TRAITS

PYPROJECT = "pyproject.toml"
_TABLE, _SWEEPS = "[tool.attnbench.gate]", "[[tool.attnbench.gate.sweeps]]"
DEVICES = ("auto", "cpu", "cuda")
# Unless sizes are given: small ones, in which a slowdown costs least to find.
_DEFAULT = Axes(seq_lens=(128, 256, 512, 1024))
_OF_SIZES = (
    "batch_sizes", "heads", "kv_heads", "seq_lens", "kv_lens", "head_dims", "value_dims",
    "widths", "new_tokens",
)  # fmt: skip
AXES = tuple(axis.name for axis in fields(Axes))


@dataclass(frozen=True, kw_only=True)
class Watched:
    """What is watched, and with which promises.

    `files` are relative to the root of the repository. None: `base` is the default one, and
    `threshold` and `threads` follow from the device.
    """

    files: tuple[str, ...]
    sweeps: tuple[Axes, ...]
    base: str | None = None
    threshold: float | None = None
    budget_s: float = Rules.budget_s
    growth: float = Rules.growth
    threads: int | None = None
    device: str = "auto"

    def rules(self, device: str) -> Rules:
        """The promises on a device: `cpu` or `cuda`."""
        threshold = DEFAULT_THRESHOLD[device] if self.threshold is None else self.threshold
        return Rules(threshold=threshold, budget_s=self.budget_s, growth=self.growth)

    def threads_on(self, device: str) -> int | None:
        """CPU threads: one, the steadiest, unless given; for a GPU as many as torch takes."""
        return 1 if self.threads is None and device == "cpu" else self.threads


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The working tree at `root`, on top of the commit `head`, against the commit `base`."""

    root: Path
    head: str
    changes: git.Changes
    base: git.Base
    watched: Watched

    def missing(self, tree: Path) -> list[str]:
        """The watched files that the base, checked out in `tree`, has not."""
        return [file for file in self.watched.files if not (tree / file).is_file()]

    def request(self, tree: Path, settings: Settings, options: Mapping[str, Any]) -> GateRequest:
        """What to measure with the base checked out in `tree`; threads follow from the device."""
        files, missing = self.watched.files, self.missing(tree)
        return GateRequest(
            base=Version(
                name="base",
                root=str(tree),
                files=tuple(str(tree / file) for file in files if file not in missing),
                ref=self.base.ref,
                commit=self.base.commit,
            ),
            candidate=Version(
                name="candidate",
                root=str(self.root),
                files=tuple(str(self.root / file) for file in files),
                commit=self.head,
                dirty=bool(self.changes.words),
            ),
            sweeps=self.watched.sweeps,
            rules=self.watched.rules(settings.device),
            settings=replace(settings, threads=self.watched.threads_on(settings.device)),
            options=options,
        )


def comparison(folder: Path, flags: Mapping[str, Any], results: Path) -> Comparison:
    """What the flags, and the repository that `folder` lies in, ask for.

    Files below `results`, which gates write, are no changes of the working tree.

    Raises:
        UsageError: no repository, no such commit, no file to watch, a value that cannot be right.
    """
    root = git.repository(folder)
    found = watched(root, folder, flags)
    head = git.resolve(root, "HEAD")
    changes = git.changes(root, besides=results)
    if found.base is None:
        base = git.default_base(root, changes)
    else:
        base = git.Base(commit=git.resolve(root, found.base), ref=found.base)
    return Comparison(root=root, head=head, changes=changes, base=base, watched=found)


def device_of(asked: str) -> str:
    """The device that `auto` means here, which only a process with torch can say.

    Raises:
        UsageError: there is none.
        WorkerError: no process can be started.
    """
    if asked != "auto":
        return asked
    with LocalRunner(Settings()) as runner:
        return runner.catalogue().device


def watched(root: Path, folder: Path, flags: Mapping[str, Any]) -> Watched:
    """What to watch in the repository at `root`, by `flags` before the table of pyproject.toml.

    `flags` hold fields of `Watched` and of `Axes` that were given, None or empty otherwise. Their
    files are looked up in `folder`, where the command runs, and in `root`.

    Raises:
        UsageError: no file, one that is not there or lies elsewhere; a key or value of the table
            that cannot be right, named with the valid ones.
    """
    table = read_table(root)
    given = {name: value for name, value in flags.items() if value not in (None, ())}
    if "files" in given:
        files = [_file(text, root, (folder, root)) for text in given["files"]]
    else:
        files = [found for text in table.get("files", ()) for found in _expanded(text, root)]
    if not files:
        raise UsageError(
            "no file to watch: name one that has implementations, --impl path/in/repo.py, or list"
            f' them in {PYPROJECT}: {_TABLE} files = ["path/in/repo.py"]'
        )
    others = {"files", "sweeps", *AXES}
    chosen = {name: value for name, value in (table | given).items() if name not in others}
    found = Watched(files=tuple(dict.fromkeys(files)), sweeps=_sweeps(table, given), **chosen)
    found.rules("cpu")  # refuses what no rule can be, before anything is done
    return found


def read_table(root: Path) -> dict[str, Any]:
    """The table `[tool.attnbench.gate]` of the repository, by field; empty where there is none.

    Raises:
        UsageError: the file or the table is damaged; a key or value that cannot be right.
    """
    try:
        table: Any = tomllib.loads((root / PYPROJECT).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as err:
        raise UsageError(f"{root / PYPROJECT} cannot be read ({err})") from err
    for name in ("tool", "attnbench", "gate"):
        table = table.get(name, {})
        if not isinstance(table, dict):
            raise UsageError(f"'{name}' in {PYPROJECT} is not a table; {_TABLE} is one")
    found = _read(table, _READERS | {"sweeps": None}, _TABLE)
    rows = table.get("sweeps", [])
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise UsageError(f"'sweeps' in {PYPROJECT} {_TABLE} takes tables: {_SWEEPS}")
    if rows:
        found["sweeps"] = [_read(row, _AXIS_READERS, _SWEEPS) for row in rows]
    try:
        Rules(
            **{name: found[name] for name in ("threshold", "budget_s", "growth") if name in found}
        )
    except UsageError as err:
        raise UsageError(f"{PYPROJECT} {_TABLE}: {err}") from err
    return found


def _read(
    table: Mapping[str, Any], readers: Mapping[str, _Reader | None], title: str
) -> dict[str, Any]:
    """The values by field, read as on the command line; lists as if joined by commas."""
    found = {}
    valid = {name.removesuffix("_s").replace("_", "-"): name for name in readers}
    for key, value in table.items():
        if key not in valid:
            raise unknown("key", key, list(valid), f"{PYPROJECT} {title}")
        read, where = readers[valid[key]], f"'{key}' in {PYPROJECT} {title}"
        if read is None:
            continue
        parts = value if isinstance(value, list) else [value]
        if not all(type(part) in (str, int, float) for part in parts):
            raise UsageError(
                f"{where} takes a text as on the command line, a number or a list, not {value!r}"
            )
        found[valid[key]] = read(",".join(map(str, parts)), where)
    return found


def _sizes(text: str, where: str) -> tuple[int, ...]:
    return tuple(parse_sizes(text, where))


def _names(text: str, where: str) -> tuple[str, ...]:
    return tuple(parse_names(text, where))


def _text(text: str, where: str) -> str:
    if not text:
        raise UsageError(f"{where} takes a text")
    return text


def _device(text: str, where: str) -> str:
    if text not in DEVICES:
        raise UsageError(f"{where} takes {', '.join(DEVICES)}, not {text!r}")
    return text


def _count(text: str, where: str) -> int:
    sizes = _sizes(text, where)
    if len(sizes) != 1:
        raise UsageError(f"{where} takes one whole number, not {text!r}")
    return sizes[0]


_Reader = Callable[[str, str], Any]
_AXIS_READERS: dict[str, _Reader] = {
    axis: _text if axis == "workload" else _sizes if axis in _OF_SIZES else _names for axis in AXES
}
_READERS: dict[str, _Reader] = {
    "files": _names, "base": _text, "threshold": parse_share, "budget_s": parse_duration,
    "growth": parse_share, "threads": _count, "device": _device, **_AXIS_READERS,
}  # fmt: skip


def _expanded(text: str, root: Path) -> list[str]:
    """The files of an entry of the table. A pattern passes over names such as `__init__.py`."""
    where = f"'files' in {PYPROJECT} {_TABLE}"
    if not any(sign in text for sign in "*?["):
        return [_file(text, root, (root,), where)]
    try:
        found = sorted(path for path in root.glob(text) if path.is_file() and path.suffix == ".py")
    except (ValueError, NotImplementedError) as err:
        raise UsageError(f"{where}: {text!r} is not a pattern of paths in the repository") from err
    files = [_file(str(path), root, (root,), where) for path in found if path.name[0] not in "_."]
    if not files:
        raise UsageError(f"{where}: no Python file in {root} fits {text!r}")
    return files


def _file(text: str, root: Path, folders: Iterable[Path], where: str = "--impl") -> str:
    """The path of a file of the working tree, relative to its root."""
    paths = (folder / text for folder in folders)
    found = next((path for path in paths if os.path.isfile(path)), None)  # False if too long a name
    if found is None:
        raise UsageError(f"no file {text} in the working tree {root} ({where})")
    path = found.resolve()
    if not path.is_relative_to(root):
        raise UsageError(
            f"{path} lies outside the repository {root} ({where}), so that no base has it; name a"
            " file in it"
        )
    return path.relative_to(root).as_posix()


def _sweeps(table: Mapping[str, Any], flags: Mapping[str, Any]) -> tuple[Axes, ...]:
    """The sweeps of the table, or one; flags go before a sweep's own keys, these before shared.

    A workload that was asked for leaves the sweeps of that workload alone.
    """
    shared, flags = (
        {name: value for name, value in row.items() if name in AXES} for row in (table, flags)
    )
    usual = shared.get("workload", _DEFAULT.workload)
    sweeps: list[Mapping[str, Any]] = table.get("sweeps") or [{}]
    workloads = [row.get("workload", usual) for row in sweeps]
    if "workload" in flags:
        wanted = flags["workload"]
        sweeps = [row for row, own in zip(sweeps, workloads, strict=True) if own == wanted] or [{}]
        workloads = [wanted] * len(sweeps)
    found = []
    for row, own in zip(sweeps, workloads, strict=True):
        axes = {**_fitting(shared, own, workloads), **row, **_fitting(flags, own, workloads)}
        given = {name: value for name, value in axes.items() if value is not None}
        found.append(replace(_DEFAULT, **given | {"workload": own}))
    return tuple(found)


def _fitting(axes: Mapping[str, Any], own: str, workloads: Iterable[str]) -> dict[str, Any]:
    """Axes that several sweeps share, without those that only the others of them have."""
    foreign = TRAITS.get(own).foreign()
    elsewhere = {
        name for name in axes if any(name in TRAITS.get(other).axes for other in workloads)
    }
    return {name: value for name, value in axes.items() if name not in foreign.keys() & elsewhere}
