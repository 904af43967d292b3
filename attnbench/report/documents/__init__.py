"""Producers of documents: a file for each command, and what a stored run or gate says."""

from __future__ import annotations

from pathlib import Path

from attnbench.errors import UsageError
from attnbench.machine.host import is_here
from attnbench.report.document import Document
from attnbench.store.folder import GATE, SWEEP, RunFolder


def stored(run: str, output: Path, baseline: str | None = None) -> tuple[Path, Document]:
    """The folder of a run or a gate, which is decided again from its raw data, and its document.

    Raises:
        StoreError: there is none, or its records are damaged.
        UsageError: a baseline that the run does not have, or of a gate.
    """
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
