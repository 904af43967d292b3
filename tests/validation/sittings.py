"""Runs that are kept line by line, so that a validation goes on where it stopped."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from attnbench.base.files import make_folder
from attnbench.errors import StoreError

Figures = dict[str, Any]
LINES = "runs.jsonl"


def sitting(
    path: Path, asked: Figures, missing: Callable[[list[Figures]], Iterator[Figures]]
) -> tuple[list[Figures], bool]:
    """The runs that the folder has and those that are `missing`; whether an interrupt ended them.

    The first line is what was `asked` of all of them, then a line a run.

    Raises:
        StoreError: the folder cannot be made, or holds runs that were asked for differently.
    """
    if not path.exists():
        make_folder(path.parent, path.name)
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
                kept.append(row)
                file.write(json.dumps(row) + "\n")
                file.flush()
        except KeyboardInterrupt:
            return kept, True
    return kept, False
