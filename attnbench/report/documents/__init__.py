"""Producers of documents: a file for each command, and what a stored run or gate says."""

from __future__ import annotations

import os
from pathlib import Path

from attnbench.errors import UsageError
from attnbench.machine.host import is_here
from attnbench.report.document import Document
from attnbench.schema.profile import FILE, read_profile
from attnbench.store.folder import GATE, SWEEP, RunFolder


def stored(run: str, output: Path, baseline: str | None = None) -> tuple[Path, Document]:
    """The folder of a run, a gate or a profile, and its document, made again from its raw data.

    Raises:
        StoreError: there is none, or its records are damaged.
        UsageError: a baseline that the run does not have, or of a gate.
    """
    for place in (Path(run), output / run):
        for parts in ([place], [place / "a", place / "b"]):
            if all(os.path.isfile(part / FILE) for part in parts):
                return place, _profile(parts)
    found = RunFolder.find(run, output, SWEEP, GATE)
    if found.kind is SWEEP:
        from attnbench.report.documents import advise, sweep
        from attnbench.store.runs import load_run

        loaded = load_run(found.path)
        advised = loaded.info.get("options", {}).get("command") == "advise" and not baseline
        if not advised:
            return found.path, sweep.document(loaded, baseline)
        here = is_here(loaded.shared(loaded.environments))
        return found.path, advise.document(loaded, here=here)
    if baseline:
        raise UsageError(f"{found.path} is a gate, which has a base of its own; drop --baseline")
    from attnbench.gate.decide.stored import load_gate
    from attnbench.gate.decide.verdict import decide
    from attnbench.report.documents import gate

    rounds = load_gate(found.file)
    return found.path, gate.document(rounds, decide(rounds))


def _profile(folders: list[Path]) -> Document:
    """One profile, or two and what differs between them."""
    from attnbench.analysis.profiles import difference
    from attnbench.report.documents import profile

    both = [(read_profile(folder), folder) for folder in folders]
    found = difference(both[0][0], both[1][0]) if len(both) == 2 else None
    return profile.document(both, found)
