"""How a part's runs are kept, counted and shown.

Runs stand line by line in `runs.jsonl`, so that the same command goes on where it stopped; summary,
tables and page are made from all of them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attnbench.errors import StoreError
from attnbench.version import __version__
from tests.validation.page import Table, markdown, write_texts

Figures = dict[str, Any]
Tell = Callable[[str], None]
LINES, SUMMARY = "runs.jsonl", "summary.json"


@dataclass(frozen=True, kw_only=True)
class Ended:
    """What a part found: tables and lines to show, and whether all is as it should be."""

    met: bool
    tables: Sequence[Table] = ()
    lines: Sequence[str] = ()
    page: Path | None = None
    interrupted: bool = False


def go_on(
    path: Path,
    asked: Figures,
    missing: Callable[[list[Figures]], Iterator[Figures]],
    summarise: Callable[[list[Figures]], Figures],
    tables: Callable[[Figures], Sequence[Table]],
) -> Ended:
    """Make the runs that the folder lacks, then count all of them; `met` is in the summary.

    The first line of the file is what was `asked` of all runs.

    Raises:
        StoreError: the folder cannot be written, or holds runs that were asked for differently.
    """
    rows, interrupted = _kept(path, json.loads(json.dumps(asked)), missing)
    summary: Figures = {"attnbench": __version__, "asked": asked} | summarise(rows)
    found, page = tables(summary), path / f"{path.name.removeprefix('selftest-')}.md"
    texts = {SUMMARY: json.dumps(summary, indent=1) + "\n", page.name: markdown(path.name, found)}
    write_texts(path, texts)
    return Ended(met=summary["met"], tables=found, page=page, interrupted=interrupted)


def _kept(
    path: Path, asked: Figures, missing: Callable[[list[Figures]], Iterator[Figures]]
) -> tuple[list[Figures], bool]:
    if not path.exists():
        path.mkdir(parents=True)
    lines = path / LINES
    rows = [json.loads(line) for line in lines.read_text().splitlines()] if lines.exists() else []
    if rows and rows[0] != asked:
        raise StoreError(
            f"{path} holds runs that were asked for differently; choose another --name"
        )
    kept = rows[1:]
    with lines.open("a", encoding="utf-8") as file:
        if not rows:
            file.write(json.dumps(asked) + "\n")
        try:
            for row in missing(list(kept)):
                file.write(json.dumps(row) + "\n")
                file.flush()
                kept.append(json.loads(json.dumps(row)))
        except KeyboardInterrupt:
            return kept, True
    return kept, False
