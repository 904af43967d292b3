"""What cells are called: the words that all of them share once, and what tells each."""

from __future__ import annotations

from collections.abc import Sequence

from attnbench.base import units
from attnbench.gate.decide.data import GateCell
from attnbench.schema.record import Cell
from attnbench.theory.traits import case_label


def case_words(cell: GateCell) -> str:
    """The case of a cell in short; a test has none."""
    return case_label(cell.case) if isinstance(cell, Cell) else ""


def labels(cells: Sequence[GateCell]) -> tuple[str, list[str]]:
    """What the cases of all cells have in common, and what tells each cell: `sdpa n=512`."""
    common, rest = units.split_common([case_words(cell) for cell in cells], keep="n=")
    own = [f"{cell.impl} {text}".rstrip() for cell, text in zip(cells, rest, strict=True)]
    return common, [
        f"{text} ({cell.case.case_id})" if isinstance(cell, Cell) and own.count(text) > 1 else text
        for cell, text in zip(cells, own, strict=True)
    ]


def shortened(names: Sequence[str]) -> tuple[str, list[str]]:
    """The words that all names have, and each name without them; one name stays as it is."""
    return units.split_common(names) if len(names) > 1 else ("", list(names))
