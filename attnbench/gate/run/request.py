"""From the repository a command runs in to a gate request: which commit, which files, how."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from attnbench.execution.runner import LocalRunner
from attnbench.execution.settings import Settings
from attnbench.gate.decide.data import Version
from attnbench.gate.run import git
from attnbench.gate.run.session import GateRequest
from attnbench.gate.run.watched import Watched, watched


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
        missing = self.missing(tree)
        here = [file for file in self.watched.files if file not in missing]
        return GateRequest(
            base=Version(
                name="base",
                root=str(tree),
                files=tuple(str(tree / file) for file in here),
                ref=self.base.ref,
                commit=self.base.commit,
            ),
            candidate=Version(
                name="candidate",
                root=str(self.root),
                files=tuple(str(self.root / file) for file in self.watched.files),
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
