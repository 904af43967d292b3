"""`make validate PART=scaling` from options to a finished folder."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from attnbench.base.files import make_folder
from attnbench.version import __version__
from tests.validation.page import free_folder, markdown, write_texts
from tests.validation.scaling.kernels import KERNELS, RANGES
from tests.validation.scaling.summary import Figures, summarise
from tests.validation.scaling.tables import facts, tables
from tests.validation.scaling.trial import ask

SUMMARY, PAGE = "summary.json", "scaling.md"


@dataclass(frozen=True, kw_only=True)
class Request:
    """What `make validate PART=scaling` was asked for."""

    draws: int = 200
    seed: int = 0
    output: Path = Path("results")
    name: str | None = None


@dataclass(frozen=True, kw_only=True)
class Finished:
    """A validation as it was made: its folder and its figures."""

    path: Path
    summary: Figures = field(repr=False)

    @property
    def met(self) -> bool:
        """True where every goal is."""
        return bool(self.summary["met"])


def examine(request: Request, tell: Callable[[str], None]) -> Finished:
    """Ask every law of every kernel over every range; write the folder. `tell` hears of progress.

    Raises:
        StoreError: the folder is taken or cannot be written.
    """
    path = free_folder(request.output, request.name, "scaling")
    created = datetime.now(UTC).isoformat(timespec="seconds")
    answers, picks = [], []
    for over in RANGES:
        tell(f"n = {over.label}: {len(KERNELS)} kernels, {request.draws} draws each")
        for kernel in KERNELS:
            found, picked = ask(kernel, over, request.draws, request.seed)
            answers += found
            picks.append(picked)
    facts: Figures = {"created": created, "attnbench": __version__}
    facts |= {"draws": request.draws, "seed": request.seed}
    summary = facts | summarise(answers, picks)
    make_folder(path.parent, path.name)
    _write(path, summary)
    return Finished(path=path, summary=summary)


def _write(path: Path, summary: Figures) -> None:
    """summary.json and scaling.md.

    Raises:
        StoreError: the folder cannot be written.
    """
    rows = "\n".join(f"  {json.dumps(row)}," for row in summary["answers"]).removesuffix(",")
    head = json.dumps(summary | {"answers": "ROWS"}, indent=1)
    text = head.replace('"ROWS"', f"[\n{rows}\n ]")  # a line a row: a third of the size
    title = f"make validate PART=scaling: {path.name}"
    write_texts(
        path, {SUMMARY: text + "\n", PAGE: markdown(title, tables(summary), facts(summary))}
    )
