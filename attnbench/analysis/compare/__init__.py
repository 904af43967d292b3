"""Two or more measurements held against each other: runs, and files of pytest-benchmark."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attnbench.analysis.apart import spread
from attnbench.analysis.compare import elsewhere, same
from attnbench.analysis.compare.sources import Source, read
from attnbench.errors import UsageError
from attnbench.machine.environment import Environment


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The first source against another: `same` on one machine, else `elsewhere`.

    `environment` are the facts that differ: name, before, after.
    """

    before: Source
    after: Source
    environment: tuple[tuple[str, Any, Any], ...]
    same: same.Compared | None = None
    elsewhere: elsewhere.Elsewhere | None = None


def compare(texts: Sequence[str], output: Path) -> list[Comparison]:
    """The first of the sources against each of the others; history is looked for in `output`, too.

    Raises:
        UsageError: fewer than two, one that cannot be read, or two that share no cell.
    """
    if len(texts) < 2:
        raise UsageError(
            f"compare takes two or more runs or files, not {len(texts)}; runs: attnbench compare"
            " previous latest"
        )
    first, *others = [read(text, output) for text in texts]
    return [_compared(first, other, [output, output / "history"]) for other in others]


def _compared(first: Source, other: Source, folders: Sequence[Path]) -> Comparison:
    together = across = None
    before, after = Environment(first.environment), Environment(other.environment)
    if before.same_machine(after):
        together = same.compare(first, other, spread(same.earlier([first, other], folders)))
    else:
        across = elsewhere.compare(first, other)
    if not ((together and together.rows) or (across and across.standings)):
        why = "share no cell that has a time"
        if across:
            why = (
                "are of different machines, whose times are not divided, and share no case of a"
                " run whose order could be compared"
            )
        raise UsageError(f"{first.name} and {other.name} {why}")
    return Comparison(
        before=first, after=other, same=together, elsewhere=across,
        environment=before.differences(after),
    )  # fmt: skip
