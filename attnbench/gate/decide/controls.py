"""The control arm: a planted slowdown that must be found, and the base against itself."""

from __future__ import annotations

import math
from collections.abc import Iterable

from attnbench.base.stats import median
from attnbench.gate.decide.outcome import Controls
from attnbench.gate.decide.round import Round
from attnbench.gate.decide.rules import Rules
from attnbench.gate.decide.sequential import boundaries, enough


class ControlArm:
    """What the controls of a run have shown so far.

    The planted slowdown is judged as a suspect is: by a sign test beyond the margin, at the same
    looks. It visits all cells in turn, so that it is a test of the run, not of one cell.
    """

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._margin = math.log1p(rules.margin)
        self._planted: list[float] = []
        self._null_by_round: list[float] = []

    def hear(self, found: Round, cells: Iterable[int]) -> None:
        """Take in a round that counts."""
        if found.planted is not None:
            ratio = found.log_ratio(found.planted, "planted")
            assert ratio is not None, "a planted arm stands beside its base"
            self._planted.append(ratio)
        nulls = [x for cell in cells if (x := found.log_ratio(cell, "null")) is not None]
        if nulls:
            self._null_by_round.append(median(nulls))

    @property
    def found(self) -> bool:
        """Whether, at some look, the planted slowdown had been seen often enough."""
        looks = self._rules.looks
        for look, needed in zip(looks, boundaries(looks, self._rules.alpha), strict=True):
            wins = sum(x > self._margin for x in self._planted[:look])
            if len(self._planted) >= look and needed is not None and wins >= needed:
                return True
        return False

    @property
    def over(self) -> bool:
        """Whether the planted slowdown needs no more rounds: found, or never to be."""
        return self.found or len(self._planted) >= self._rules.looks[-1]

    def summary(self) -> Controls:
        """For the outcome."""
        planted, shared = self._planted, self._null_by_round
        return Controls(
            found=self.found if planted else None,
            wins=sum(x > self._margin for x in planted),
            rounds=len(planted),
            planted_ratio=math.exp(median(planted)) if planted else None,
            null_ratio=math.exp(median(shared)) if shared else None,
            untrusted=self._why_untrusted(),
        )

    def _why_untrusted(self) -> str | None:
        """Why base against itself forbids to believe anything else, or None.

        A sign test over all cells, beyond the margin on either side: one side has an advantage.
        """
        shared = self._null_by_round
        needed = enough(len(shared), self._rules.alpha / 2)
        aside = max(sum(sign * x > self._margin for x in shared) for sign in (1, -1))
        if needed is not None and aside >= needed:
            return (
                f"base against itself lies beyond the margin in {aside} of {len(shared)} rounds"
                " over all cells: one side has an advantage"
            )
        return None
