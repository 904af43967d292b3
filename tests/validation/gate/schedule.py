"""Which gate runs a validation is made of: kinds, their numbers, and in what order they come."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from attnbench.errors import UsageError
from attnbench.gate.decide.data import DEFAULT_THRESHOLD

CELLS = 8
_LEAST, _MOST = 1.0, 100.0  # percent that can be planted


@dataclass(frozen=True, kw_only=True, order=True)
class Kind:
    """Gate runs of one sort. `share` is the slowdown planted in one cell; 0: identical sides."""

    share: float = 0.0

    @property
    def threshold(self) -> float:
        """What the gate promises to find: the default, or the planted slowdown if that is less."""
        usual = DEFAULT_THRESHOLD["cpu"]
        return min(usual, self.share) if self.share else usual

    @property
    def label(self) -> str:
        """`A/A` or `+10 %`."""
        return f"+{100 * self.share:g} %" if self.share else "A/A"

    def cell(self, number: int, cells: int = CELLS) -> int | None:
        """The cell slowed in the run of this number; it rotates over all cells."""
        return number % cells if self.share else None

    def seed(self, number: int) -> int:
        """Another one for every run of every kind."""
        return round(1e4 * self.share) * 10_000 + number


@dataclass(frozen=True, kw_only=True)
class Todo:
    """One gate run to be made."""

    kind: Kind
    number: int


def kinds_of(percents: tuple[float, ...]) -> tuple[Kind, ...]:
    """A/A first, then a kind for each planted slowdown in percent.

    Raises:
        UsageError: a slowdown that is no number from 1 to 100.
    """
    for percent in percents:
        if not (math.isfinite(percent) and _LEAST <= percent <= _MOST):
            raise UsageError(
                f"--inject {percent:g} is no slowdown in percent from {_LEAST:g} to {_MOST:g}"
            )
    return (Kind(), *(Kind(share=round(percent / 100, 6)) for percent in dict.fromkeys(percents)))


def missing(wanted: Mapping[Kind, int], done: Mapping[Kind, int]) -> list[Todo]:
    """The runs still to be made, the kinds interleaved: the one furthest behind its share is next.

    So a sitting that is stopped anywhere has all kinds in proportion.
    """
    have = {kind: done.get(kind, 0) for kind in wanted}
    todo = []
    while behind := [kind for kind in wanted if have[kind] < wanted[kind]]:
        kind = min(behind, key=lambda each: have[each] / wanted[each])
        todo.append(Todo(kind=kind, number=have[kind]))
        have[kind] += 1
    return todo
