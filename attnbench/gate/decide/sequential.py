"""Decides from rounds: what to measure next, and what each cell has shown."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable
from dataclasses import dataclass, field

from attnbench.base.stats import median
from attnbench.base.units import brief_percent, counted
from attnbench.gate.decide.data import Failure, Round, Rules, Stage
from attnbench.gate.decide.outcome import Controls, Verdict
from attnbench.gate.decide.sign_test import boundaries, enough, rejects

# Rounds in which a cell may fail before it is given up. What strikes one of the three processes at
# random hits the candidate alone five times in a row with a probability of (1/3)^5 = 0.4 %.
BASE_FAILURES, CANDIDATE_FAILURES, ALL_FAILURES = 2, 5, 8


@dataclass(frozen=True, kw_only=True)
class RoundPlan:
    """What the next round measures: `cells` in base, candidate and A/A control.

    `slowed` is the cell of the positive control. It may stand outside of `cells`: then only the
    base and the control are timed in it.
    """

    stage: Stage
    cells: tuple[int, ...]
    slowed: int | None


@dataclass(frozen=True)
class Decision:
    """The verdict on one cell's time."""

    verdict: Verdict
    reason: str
    wins: int | None = None


@dataclass
class _Observations:
    """Of one cell in one stage: ln(candidate / base), ln(A/A control / base)."""

    candidate: list[float] = field(default_factory=list)
    null: list[float] = field(default_factory=list)
    mean: list[float] = field(default_factory=list)  # as candidate, of the means of all batches

    def add(self, found: Round, cell: int) -> bool:
        """Take in a round; False where the cell was not timed in it."""
        ratio, null = found.log_ratio(cell, "candidate"), found.log_ratio(cell, "null")
        if ratio is None or null is None:
            return False
        self.candidate.append(ratio)
        self.null.append(null)
        self.mean.append(found.mean_log_ratio(cell, "candidate"))
        return True


class ControlTest:
    """The controls: a slowdown that must be found, and the base against itself.

    The positive control is judged as a suspect is: by a sign test beyond the margin, at the same
    looks. It visits all cells in turn, so that it is a test of the run, not of one cell.
    """

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._margin = math.log1p(rules.margin)
        self._planted: list[float] = []
        self._null_by_round: list[float] = []

    def add(self, found: Round, cells: Iterable[int]) -> None:
        """Take in a round that counts."""
        if found.slowed is not None:
            ratio = found.log_ratio(found.slowed, "planted")
            assert ratio is not None, "the base is timed wherever the control is"
            self._planted.append(ratio)
        nulls = [x for cell in cells if (x := found.log_ratio(cell, "null")) is not None]
        if nulls:
            self._null_by_round.append(median(nulls))

    @property
    def found(self) -> bool:
        """Whether, at some look, the positive control had been seen often enough."""
        looks = self._rules.looks
        for look, needed in zip(looks, boundaries(looks, self._rules.alpha), strict=True):
            wins = sum(x > self._margin for x in self._planted[:look])
            if len(self._planted) >= look and needed is not None and wins >= needed:
                return True
        return False

    @property
    def over(self) -> bool:
        """Whether the positive control needs no more rounds: found, or never to be."""
        return self.found or len(self._planted) >= self._rules.looks[-1]

    def summary(self) -> Controls:
        """For the outcome."""
        planted, shared = self._planted, self._null_by_round
        # A sign test over all cells, beyond the margin on either side.
        needed = enough(len(shared), self._rules.alpha / 2)
        aside = max(sum(sign * x > self._margin for x in shared) for sign in (1, -1))
        untrusted = (
            f"the A/A control lies beyond the margin in {aside} of {len(shared)} rounds over all"
            " cells: one process has an advantage"
        )
        looks = self._rules.looks
        at = max(sum(look <= len(planted) for look in looks) - 1, 0)  # the last one, or the first
        seen = planted[: looks[at]]
        return Controls(
            found=self.found if planted else None,
            wins=sum(x > self._margin for x in seen),
            rounds=len(seen),
            look=looks[at],
            needed=boundaries(looks, self._rules.alpha)[at],
            planted_ratio=math.exp(median(planted)) if planted else None,
            null_ratio=math.exp(median(shared)) if shared else None,
            untrusted=untrusted if needed is not None and aside >= needed else None,
        )


class SequentialDecision:
    """Screens all cells, confirms the suspects on fresh rounds, and watches the controls.

    A cell passes where an exact sign test excludes a slowdown of the threshold, and its median lies
    within the margin. All others are suspects. A suspect regressed where an exact sign test on
    fresh rounds puts it beyond the margin, at the level alpha / number of suspects: whatever
    the noise, a run of identical versions then reports a regression with a probability of alpha at
    most, given independent rounds and a bias within the margin. The A/A control can only widen
    a margin. Rounds are added in the order in which they were measured; discarded ones count for
    nothing.
    """

    def __init__(self, cells: Iterable[int], rules: Rules, seed: int = 0) -> None:
        self.rules = rules
        self.cells = tuple(cells)
        self.decided: dict[int, Decision] = {}
        self.suspects: tuple[int, ...] | None = None  # None: the screen is not over
        self._screen = {cell: _Observations() for cell in self.cells}
        self._fresh = {cell: _Observations() for cell in self.cells}
        self._screened = self._added = 0
        self.controls = ControlTest(rules)
        self._failures: dict[int, list[Failure]] = {}
        self._given_up: set[int] = set()  # decided by failures, not by times
        self._rotation = list(self.cells)
        random.Random(seed).shuffle(self._rotation)
        self._margin = math.log1p(rules.margin)
        self._threshold = math.log1p(rules.threshold)

    def next_round(self) -> RoundPlan | None:
        """What to measure next, or None where nothing is left to decide."""
        cells = self._open()
        alive = [cell for cell in self._rotation if cell not in self._given_up]
        if not alive:
            return None
        slowed = alive[self._added % len(alive)]
        stage: Stage = "screen" if self.suspects is None else "confirm"
        over = stage == "confirm" and self.controls.over
        if over and not cells:
            return None
        return RoundPlan(stage=stage, cells=cells, slowed=None if over else slowed)

    def add(self, found: Round) -> None:
        """Take in a round that was measured, and decide what it lets decide."""
        self._added += 1
        if found.discarded is not None:
            return
        for cell, failure in found.failures.items():
            self._fail(cell, failure)
        if found.failures:
            return  # it was broken off: the others are measured again
        self.controls.add(found, self.cells)
        if found.stage == "screen":
            self._add_screening(found)
            return
        for cell in self._open():
            seen = self._fresh[cell]
            if seen.add(found, cell) and (decision := self._confirmed(seen)) is not None:
                self.decided[cell] = decision

    def progress(self) -> dict[int, str]:
        """The cells without a verdict, and how far each has come."""
        if self.suspects is None:
            words = f"after {self._screened} of {self.rules.screen_rounds} screening rounds"
            return dict.fromkeys(self._open(), words)
        done = {cell: len(self._fresh[cell].candidate) for cell in self._open()}
        return {cell: f"after {counted(n, 'confirmation round')}" for cell, n in done.items()}

    def wrong(self, cell: int) -> bool:
        """Whether the candidate's result was wrong in a round."""
        found = self._failures.get(cell, ())
        return any(why.variant == "candidate" and why.code == "incorrect" for why in found)

    def observations(self, cell: int) -> tuple[Stage, tuple[float, ...]]:
        """What a verdict on the cell rests on, or would: fresh rounds, if it is a suspect."""
        if cell in (self.suspects or ()):
            return "confirm", tuple(self._fresh[cell].candidate)
        return "screen", tuple(self._screen[cell].candidate)

    def _open(self) -> tuple[int, ...]:
        among = self.cells if self.suspects is None else self.suspects
        return tuple(cell for cell in among if cell not in self.decided)

    def _fail(self, cell: int, failure: Failure) -> None:
        """A failure in a round; a wrong result decides, whatever was decided before."""
        seen = self._failures.setdefault(cell, [])
        seen.append(failure)
        if failure.variant == "candidate" and failure.code == "incorrect":
            self.decided.pop(cell, None)
            self._give_up(cell, "incorrect", f"{failure.reason} (in one round's process)")
        base = sum(found.variant != "candidate" for found in seen)
        times = f" ({base} times the base)" if base else ""
        reason = f"failed in {len(seen)} rounds{times}: {failure}"
        if not base and len(seen) >= CANDIDATE_FAILURES:
            self._give_up(cell, "incorrect", reason)
        elif base >= BASE_FAILURES:
            self._give_up(cell, "not comparable", reason)
        elif len(seen) >= ALL_FAILURES:
            self._give_up(cell, "inconclusive", reason)

    def _give_up(self, cell: int, verdict: Verdict, reason: str) -> None:
        if cell not in self.decided:
            self._given_up.add(cell)
            self.decided[cell] = Decision(verdict=verdict, reason=reason)

    def _add_screening(self, found: Round) -> None:
        self._screened += 1
        for cell in self._open():
            self._screen[cell].add(found, cell)
        if self._screened < self.rules.screen_rounds:
            return
        for cell in self._open():
            if (decision := self._cleared(self._screen[cell])) is not None:
                self.decided[cell] = decision
        self.suspects = tuple(cell for cell in self.cells if cell not in self.decided)

    def _cleared(self, seen: _Observations) -> Decision | None:
        """The verdict `ok`, if the screen gives it: nothing in it may point anywhere else."""
        logs = seen.candidate
        below = sum(x < self._threshold for x in logs)
        needed = enough(len(logs), self.rules.beta)
        if needed is None or below < needed:
            return None
        if max(abs(median(logs)), abs(median(seen.null))) > self._margin:
            return None
        return None if self._now_and_then(seen) else self._excluded(len(logs), below)

    def _excluded(self, rounds: int, below: int) -> Decision:
        slower = f"slower by {brief_percent(self.rules.threshold)}"
        reason = f"{slower} is excluded: {below} of {rounds} rounds lie below"
        return Decision(verdict="ok", reason=reason, wins=below)

    def _confirmed(self, seen: _Observations) -> Decision | None:
        """The verdict on a suspect after one more fresh round, if this is a look and it shows."""
        logs, looks = seen.candidate, self.rules.looks
        if len(logs) not in looks:
            return None
        last = len(logs) == looks[-1]
        # At least what the A/A control showed in these rounds.
        margin = max(self._margin, abs(median(seen.null)))
        beyond = brief_percent(math.expm1(margin))
        if margin >= self._threshold:  # later looks may be better
            reason = f"its A/A control differs by {beyond}"
            return Decision("inconclusive", reason) if last else None
        level = self.rules.alpha / len(self.suspects or (0,))
        slower, faster = sum(x > margin for x in logs), sum(x < -margin for x in logs)
        fresh = f"of {len(logs)} fresh rounds"
        if rejects(slower, len(logs), looks, level):
            reason = f"slower beyond the margin of {beyond} in {slower} {fresh}"
            return Decision("regressed", reason, slower)
        if rejects(faster, len(logs), looks, level):
            reason = f"faster beyond the margin of {beyond} in {faster} {fresh}"
            return Decision("improved", reason, faster)
        below = sum(x < self._threshold for x in logs)
        # What looks faster waits for later looks to show it; at the last one it is not slower.
        within = abs(median(logs)) <= margin or (last and median(logs) < 0)
        if within and rejects(below, len(logs), looks, self.rules.beta):
            doubt = self._now_and_then(seen)
            if doubt is not None:
                return Decision("inconclusive", doubt)
            return self._excluded(len(logs), below)
        if not last:
            return None
        reason = (
            f"{len(logs)} rounds show neither that it is slower beyond {beyond}, nor that it is not"
            f" slower by {brief_percent(self.rules.threshold)}"
        )
        return Decision("inconclusive", reason, slower)

    def _now_and_then(self, seen: _Observations) -> str | None:
        """Why fast batches alone do not clear a cell: their mean is slower by the threshold."""
        beyond = sum(x > self._threshold for x in seen.mean)
        needed = enough(len(seen.mean), self.rules.beta)
        if needed is None or beyond < needed:
            return None
        return (
            "slow now and then: its fastest batches are as fast, the mean of all batches is slower"
            f" by {brief_percent(math.expm1(median(seen.mean)))}, beyond the threshold in {beyond}"
            f" of {len(seen.mean)} rounds"
        )
