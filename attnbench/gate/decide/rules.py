"""What the gate promises: the slowdown it finds, and how often it may be wrong."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal, Self, get_args

from attnbench.errors import UsageError

Verdict = Literal["incorrect", "regressed", "inconclusive", "not comparable", "improved", "ok"]
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)  # the worst first


def counted(verdicts: Iterable[Verdict], among: Iterable[Verdict] = VERDICTS) -> str:
    """How often each verdict `among` these came: `1 regressed, 7 ok`."""
    of = Counter(verdicts)
    return ", ".join(f"{of[verdict]} {verdict}" for verdict in among if of[verdict])


# The slowdown to be found unless --threshold says otherwise: a shared CPU is noisier than a GPU.
DEFAULT_THRESHOLD = {"cpu": 0.10, "cuda": 0.05}


@dataclass(frozen=True, kw_only=True)
class Rules:
    """The promise of one gate run. All shares: 0.1 is 10 %.

    `threshold`: a slowdown of this size is found. Its third is the `margin`: what is smaller is
    never reported as a regression. `alpha`: how often a run of identical sides may report one,
    given independent rounds and a bias within the margin. `beta`: how often a cell that is
    slower by the threshold may pass the screen, and how often its confirmation. `growth`: how
    far counted FLOPs and memory may grow. `screen_rounds`: rounds of all cells; `looks`: after
    how many rounds of its confirmation a cell is decided, at most, each time anew. `budget_s`:
    wall time after which no round begins.

    Raises:
        UsageError: a value that cannot be right, named by its flag.
    """

    threshold: float = 0.10
    alpha: float = 0.01
    beta: float = 0.01
    growth: float = 0.01
    screen_rounds: int = 8
    looks: tuple[int, ...] = (8, 12, 16, 24, 32, 48)
    budget_s: float = 300.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.threshold) and 0.001 <= self.threshold <= 1):
            raise UsageError(f"--threshold {self.threshold:.4g} is not a share from 0.1% to 100%")
        if not (math.isfinite(self.growth) and 0 <= self.growth <= 1):
            raise UsageError(f"--growth {self.growth:.4g} is not a share from 0% to 100%")
        if not (math.isfinite(self.budget_s) and self.budget_s >= 1):
            raise UsageError(f"--budget {self.budget_s:g} s is not a time from 1 s on")

    @property
    def margin(self) -> float:
        """The null margin: a slowdown below it is no regression, however surely it is there."""
        return self.threshold / 3

    def to_json(self) -> dict[str, Any]:
        """Plain JSON."""
        return asdict(self) | {"looks": list(self.looks)}

    @classmethod
    def from_json(cls, row: dict[str, Any]) -> Self:
        """Inverse of `to_json`."""
        return cls(**(row | {"looks": tuple(row["looks"])}))
