"""Decides from rounds: what to measure next, and what each cell has shown."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from attnbench.base.stats import median
from attnbench.base.units import brief_percent
from attnbench.gate.decide.controls import ControlArm
from attnbench.gate.decide.outcome import Controls
from attnbench.gate.decide.round import Failure, Round, Stage
from attnbench.gate.decide.rules import Rules, Verdict
from attnbench.gate.decide.sequential import enough, rejects

# Rounds in which a cell may fail before it is given up. What strikes one of the three processes at
# random hits the candidate alone five times in a row with a probability of (1/3)^5 = 0.4 %.
BASE_FAILURES, CANDIDATE_FAILURES, ALL_FAILURES = 2, 5, 8
WRONG = "incorrect: "  # how the reason of a wrong result begins: once is enough


@dataclass(frozen=True, kw_only=True)
class Order:
    """What the next round measures: `cells` in base, candidate and null, one of them slowed, too.

    `planted` may stand outside of `cells`: then base and the slowed control alone are timed in it.
    """

    stage: Stage
    cells: tuple[int, ...]
    planted: int | None


@dataclass(frozen=True, kw_only=True)
class Decision:
    """The verdict on one cell's time; `logs` are the observations it rests on."""

    verdict: Verdict
    reason: str
    stage: Stage | None = None
    wins: int | None = None
    logs: tuple[float, ...] = ()


@dataclass
class _Seen:
    """The observations of one cell in one stage: ln(candidate / base), ln(null / base)."""

    candidate: list[float] = field(default_factory=list)
    null: list[float] = field(default_factory=list)
    mean: list[float] = field(default_factory=list)  # as candidate, of the means of all blocks

    def hear(self, found: Round, cell: int) -> bool:
        """Take in a round; False where the cell was not timed in it."""
        ratio, null = found.log_ratio(cell, "candidate"), found.log_ratio(cell, "null")
        if ratio is None or null is None:
            return False
        self.candidate.append(ratio)
        self.null.append(null)
        mean = found.mean_log_ratio(cell, "candidate")
        self.mean += [] if mean is None else [mean]
        return True


class Referee:
    """Screens all cells, confirms the suspects on fresh rounds, and watches the controls.

    A cell passes where an exact sign test excludes a slowdown of the threshold, and its median lies
    within the margin. All others are suspects. A suspect regressed where an exact sign test on
    fresh rounds puts it beyond the margin, at the level alpha / number of suspects: whatever
    the noise, a run of identical sides then reports a regression with a probability of alpha at
    most, given independent rounds and a bias within the margin. The null arm can only widen
    a margin. Rounds are heard in the order in which they were measured; vetoed ones count for
    nothing.
    """

    def __init__(self, cells: Iterable[int], rules: Rules, seed: int = 0) -> None:
        self.rules = rules
        self.cells = tuple(cells)
        self.decided: dict[int, Decision] = {}
        self.suspects: tuple[int, ...] | None = None  # None: the screen is not over
        self._screen = {cell: _Seen() for cell in self.cells}
        self._fresh = {cell: _Seen() for cell in self.cells}
        self._screened = self._heard = 0
        self._control = ControlArm(rules)
        self._failures: dict[int, list[Failure]] = {}
        self._rotation = list(self.cells)
        random.Random(seed).shuffle(self._rotation)
        self._margin = math.log1p(rules.margin)
        self._threshold = math.log1p(rules.threshold)

    def wanted(self) -> Order | None:
        """What to measure next, or None where nothing is left to decide."""
        open_cells = self._open()
        alive = [cell for cell in self._rotation if self._alive(cell)]
        if not alive:
            return None
        planted = alive[self._heard % len(alive)]
        if self.suspects is None:
            return Order(stage="screen", cells=open_cells, planted=planted)
        control = None if self._control.over else planted
        if not open_cells and control is None:
            return None
        return Order(stage="confirm", cells=open_cells, planted=control)

    def hear(self, found: Round) -> None:
        """Take in a round that was measured, and decide what it lets decide."""
        self._heard += 1
        if found.veto is not None:
            return
        for cell, failure in found.failures.items():
            self._fail(cell, failure)
        if found.failures:
            return  # it was broken off: the others are measured again
        self._control.hear(found, self.cells)
        if found.stage == "screen":
            self._hear_screen(found)
        else:
            self._hear_confirmation(found)

    def open(self) -> dict[int, str]:
        """The cells without a verdict, and how far each has come."""
        done = {c: len(self._fresh[c].candidate) for c in self.cells}
        if self.suspects is None:
            words = f"after {self._screened} of {self.rules.screen_rounds} screening rounds"
            return dict.fromkeys(self._open(), words)
        return {c: f"after {done[c]} confirmation rounds" for c in self._open()}

    def observations(self, cell: int) -> tuple[Stage, tuple[float, ...]]:
        """What a verdict on the cell rests on, or would: fresh rounds, if it is a suspect."""
        fresh = self._basis(cell) is self._fresh[cell]
        return "confirm" if fresh else "screen", tuple(self._basis(cell).candidate)

    def controls(self) -> Controls:
        """What the planted slowdown and the base against itself have shown so far."""
        return self._control.summary()

    def _basis(self, cell: int) -> _Seen:
        """Fresh rounds, if the cell is a suspect, else the screen's."""
        suspect = self.suspects is not None and cell in self.suspects
        return (self._fresh if suspect else self._screen)[cell]

    def _open(self) -> tuple[int, ...]:
        among = self.cells if self.suspects is None else self.suspects
        return tuple(cell for cell in among if cell not in self.decided)

    def _alive(self, cell: int) -> bool:
        decided = self.decided.get(cell)
        return decided is None or decided.stage is not None

    def _fail(self, cell: int, failure: Failure) -> None:
        """A failure in a round; a wrong result decides, whatever was decided before."""
        seen = self._failures.setdefault(cell, [])
        seen.append(failure)
        by_candidate = failure.arm == "candidate"
        if by_candidate and failure.reason.startswith(WRONG):
            reason = f"{failure.reason.removeprefix(WRONG)} (in one round's process)"
            self.decided[cell] = Decision(verdict="incorrect", reason=reason)
        if cell in self.decided:
            return
        base = [found for found in seen if found.arm != "candidate"]
        times = f" ({len(base)} times the base)" if base else ""
        reason = f"failed in {len(seen)} rounds{times}: {failure.reason}"
        if not base and len(seen) >= CANDIDATE_FAILURES:
            self.decided[cell] = Decision(verdict="incorrect", reason=reason)
        elif len(base) >= BASE_FAILURES:
            self.decided[cell] = Decision(verdict="not comparable", reason=reason)
        elif len(seen) >= ALL_FAILURES:
            self.decided[cell] = Decision(verdict="inconclusive", reason=reason)

    def _hear_screen(self, found: Round) -> None:
        self._screened += 1
        for cell in self._open():
            self._screen[cell].hear(found, cell)
        if self._screened < self.rules.screen_rounds:
            return
        for cell in self._open():
            cleared = self._cleared(self._screen[cell])
            if cleared is not None:
                self.decided[cell] = cleared
        self.suspects = tuple(cell for cell in self.cells if cell not in self.decided)

    def _cleared(self, seen: _Seen) -> Decision | None:
        """The verdict `ok`, if the screen gives it: nothing in it may point anywhere else."""
        logs = seen.candidate
        below = sum(x < self._threshold for x in logs)
        needed = enough(len(logs), self.rules.beta)
        if needed is None or below < needed:
            return None
        if max(abs(median(logs)), abs(median(seen.null))) > self._margin:
            return None
        if self._now_and_then(seen):
            return None
        return self._excluded("screen", logs, below)

    def _excluded(self, stage: Stage, logs: Sequence[float], below: int) -> Decision:
        reason = (
            f"slower by {brief_percent(self.rules.threshold)} is excluded:"
            f" {below} of {len(logs)} rounds lie below"
        )
        return Decision(verdict="ok", reason=reason, stage=stage, wins=below, logs=tuple(logs))

    def _hear_confirmation(self, found: Round) -> None:
        for cell in self._open():
            if self._fresh[cell].hear(found, cell):
                decision = self._confirmed(self._fresh[cell])
                if decision is not None:
                    self.decided[cell] = decision

    def _confirmed(self, seen: _Seen) -> Decision | None:
        """The verdict on a suspect after one more fresh round, if this is a look and it shows."""
        logs, looks = seen.candidate, self.rules.looks
        if len(logs) not in looks:
            return None
        margin = self._widened(seen)
        if margin >= self._threshold:
            return self._hopeless(margin, logs)
        level = self.rules.alpha / len(self.suspects or (0,))
        slower, faster = sum(x > margin for x in logs), sum(x < -margin for x in logs)
        below = sum(x < self._threshold for x in logs)
        if rejects(slower, len(logs), looks, level):
            return self._beyond("regressed", "slower", margin, logs, slower)
        if rejects(faster, len(logs), looks, level):
            return self._beyond("improved", "faster", margin, logs, faster)
        # What looks faster waits for later looks to show it; at the last one it is not slower.
        within = abs(median(logs)) <= margin or (len(logs) == looks[-1] and median(logs) < 0)
        if within and rejects(below, len(logs), looks, self.rules.beta):
            doubt = self._now_and_then(seen)
            if doubt is None:
                return self._excluded("confirm", logs, below)
            return Decision(verdict="inconclusive", reason=doubt, stage="confirm", logs=tuple(logs))
        if len(logs) < looks[-1]:
            return None
        beyond, threshold = brief_percent(math.expm1(margin)), brief_percent(self.rules.threshold)
        reason = (
            f"{len(logs)} rounds show neither that it is slower beyond {beyond}, nor that it is not"
            f" slower by {threshold}"
        )
        return Decision(
            verdict="inconclusive", reason=reason, stage="confirm", wins=slower, logs=tuple(logs)
        )

    def _now_and_then(self, seen: _Seen) -> str | None:
        """Why fast blocks alone do not clear a cell: their mean is slower by the threshold."""
        beyond = sum(x > self._threshold for x in seen.mean)
        needed = enough(len(seen.mean), self.rules.beta)
        if needed is None or beyond < needed:
            return None
        return (
            "slow now and then: its fastest blocks are as fast, the mean of all blocks is slower by"
            f" {brief_percent(math.expm1(median(seen.mean)))}, beyond the threshold in {beyond} of"
            f" {len(seen.mean)} rounds"
        )

    def _hopeless(self, margin: float, logs: Sequence[float]) -> Decision | None:
        """Base against itself differs as much as what is to be found: later looks may be better."""
        if len(logs) < self.rules.looks[-1]:
            return None
        reason = f"base against itself differs by {brief_percent(math.expm1(margin))} in it"
        return Decision(verdict="inconclusive", reason=reason, stage="confirm", logs=tuple(logs))

    def _beyond(
        self, verdict: Verdict, word: str, margin: float, logs: Sequence[float], wins: int
    ) -> Decision:
        beyond = brief_percent(math.expm1(margin))
        reason = f"{word} beyond the margin of {beyond} in {wins} of {len(logs)} fresh rounds"
        return Decision(
            verdict=verdict, reason=reason, stage="confirm", wins=wins, logs=tuple(logs)
        )

    def _widened(self, seen: _Seen) -> float:
        """The margin as a logarithm: at least what base against itself showed in these rounds."""
        return max(self._margin, abs(median(seen.null)))


def hear_all(rounds: Iterable[Round], cells: Iterable[int], rules: Rules, seed: int = 0) -> Referee:
    """A referee that has heard these rounds."""
    referee = Referee(cells, rules, seed)
    for found in rounds:
        referee.hear(found)
    return referee
