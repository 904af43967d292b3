"""One paired round: what fresh processes of both sides took, taking turns."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, Literal, Self

Stage = Literal["screen", "confirm"]
# `null` is the base once more, in a process of its own; `planted` is that process, slowed by
# the threshold. Both are controls: the first must show nothing, the second must be found.
Arm = Literal["base", "candidate", "null", "planted"]
# Arm -> its turns in order -> the blocks of each: nanoseconds a call.
Turns = Mapping[Arm, tuple[tuple[int, ...], ...]]


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Why a cell has no time in a round, and in which arm's process that was."""

    arm: Arm
    reason: str


@dataclass(frozen=True, kw_only=True)
class Round:
    """The raw data of one round. Cells are numbered as the run lists them.

    `turns` holds the times by cell; `failures` the cells that have none. `veto` says why the round
    counts for nothing: a reason from counters of the system, never from its times. `facts` is what
    the system said meanwhile; `spent_s` the wall time.
    """

    stage: Stage
    turns: Mapping[int, Turns]
    failures: Mapping[int, Failure] = field(default_factory=dict)
    veto: str | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    spent_s: float = 0.0

    def log_ratio(self, cell: int, above: Arm, below: Arm = "base") -> float | None:
        """ln(fastest block of `above` / fastest block of `below`) in a cell; None if not timed.

        The round's one observation. Other work on the machine only ever adds to a time; of short
        blocks spread over the round's turns the fastest has met the least of it.
        """
        arms = self.turns.get(cell, {})
        if above not in arms or below not in arms:
            return None
        return math.log(_fastest(arms[above]) / _fastest(arms[below]))

    def mean_log_ratio(self, cell: int, above: Arm) -> float | None:
        """ln(mean over all blocks of `above` / that of the base) in a cell; None if not timed.

        It shows what the fastest block hides: a call that is slow now and then. Nothing is called
        a regression by it, since all that goes on beside it is in it, too.
        """
        arms = self.turns.get(cell, {})
        if above not in arms or "base" not in arms:
            return None
        return math.log(_mean(arms[above]) / _mean(arms["base"]))

    @property
    def planted(self) -> int | None:
        """The cell whose control was slowed in this round, if any."""
        return next((cell for cell, arms in self.turns.items() if "planted" in arms), None)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON, with cells as text, since JSON has no other keys."""
        return {
            "stage": self.stage,
            "turns": {
                str(cell): {arm: [list(blocks) for blocks in turns] for arm, turns in arms.items()}
                for cell, arms in self.turns.items()
            },
            "failures": {
                str(cell): {"arm": failure.arm, "reason": failure.reason}
                for cell, failure in self.failures.items()
            },
            "veto": self.veto,
            "facts": dict(self.facts),
            "spent_s": round(self.spent_s, 3),
        }

    @classmethod
    def from_json(cls, row: dict[str, Any]) -> Self:
        """Inverse of `to_json`; raises KeyError, TypeError or ValueError for anything else."""
        turns = {
            int(cell): {arm: tuple(tuple(map(int, blocks)) for blocks in rows)
                        for arm, rows in arms.items()}
            for cell, arms in row["turns"].items()
        }  # fmt: skip
        return cls(
            stage=row["stage"],
            turns=turns,
            failures={int(cell): Failure(**found) for cell, found in row["failures"].items()},
            veto=row["veto"],
            facts=row["facts"],
            spent_s=row["spent_s"],
        )


def _mean(turns: tuple[tuple[int, ...], ...]) -> float:
    return max(1.0, fmean(ns for blocks in turns for ns in blocks))


def _fastest(turns: tuple[tuple[int, ...], ...]) -> int:
    return max(1, min(min(blocks) for blocks in turns))
