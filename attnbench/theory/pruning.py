"""Cells that are not tried since a smaller one of the same implementation ran out of memory."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from attnbench.schema.axes import AXES
from attnbench.schema.case import FOLLOWS
from attnbench.schema.record import Cell

# The sizes that memory grows with, as people write them.
_AXES = {name: axis.symbol for name, axis in AXES.items() if axis.kind == "sizes"}


class Pruning:
    """Knows the cells that ran out of memory by themselves; implies nothing unless `enabled`."""

    def __init__(self, oom: Iterable[Cell] = (), *, enabled: bool = True) -> None:
        self.oom, self.enabled = list(oom), enabled

    def implied(self, cell: Cell) -> str | None:
        """The sizes of a smaller cell that ran out of memory, in words, or None.

        Smaller in one size or more, larger in none, and equal in all that is not a size.
        """
        own: dict[str, Any] = {name: getattr(cell.case, name) for name in _AXES}
        for case in (x.case for x in self.oom if x.impl == cell.impl and self.enabled):
            less = {n: getattr(case, n) for n, size in own.items() if getattr(case, n) != size}
            smaller = all((size or 0) < (own[name] or 0) for name, size in less.items())
            if less and smaller and replace(case, **own) == cell.case:
                told = [n for n in less if FOLLOWS.get(n) not in less]
                sizes = ", ".join(f"{_AXES[name]}={less[name]}" for name in told)
                return f"{sizes} ran out of memory (--no-prune tries it)"
        return None
