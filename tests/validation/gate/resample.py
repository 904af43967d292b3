"""Gate runs resampled from the rounds of live ones: many more of them, though of the same hours.

A resampled run is decided by the same decision. Each of its rounds is a whole one of a live run of
identical sides, drawn with replacement, so that what cells of a round have in common stays. A
slowdown in it is a real one, with base and null arm of the round it was measured in: of a slowed
candidate, or of a control that was slowed as much, with that round's candidate as the null arm.

What such runs can be held against is what they were drawn from: the true ratio of a cell is the
median of all of its rounds here. How far that is from the ratio known is a matter of live runs.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from attnbench.base.stats import median
from attnbench.gate.decide.data import Checked, GateRun, Round, Samples, Stage, Variant, VersionName
from attnbench.gate.decide.sequential import RoundPlan, SequentialDecision
from attnbench.gate.decide.verdict import decide
from tests.validation.gate.pool import Live
from tests.validation.gate.schedule import Kind
from tests.validation.gate.tally import Judged

_FEWEST = 5  # rounds and, in each cell, slowed controls to draw from
Logs = Mapping[Variant, float]  # ln(arm / base) in one cell and round


class Drawn(Round, frozen=True, kw_only=True):
    """A round made of observations of others: it has ratios, but no times of its own."""

    samples: Mapping[int, Mapping[Variant, Samples]] = {}
    logs: Mapping[int, Logs]

    def log_ratio(self, cell: int, above: Variant) -> float | None:
        """As that of a round with times."""
        return self.logs.get(cell, {}).get(above)

    def mean_log_ratio(self, cell: int, above: Variant) -> float:
        """None of the cells is slow now and then."""
        return 0.0

    @property
    def slowed(self) -> int | None:
        """The cell of the positive control in this round, if any."""
        return next((cell for cell, logs in self.logs.items() if "planted" in logs), None)


@dataclass(frozen=True, kw_only=True)
class Stock:
    """What is drawn from: whole rounds of identical sides; and slowed ones by cell and share.

    `seconds` is what a round of each stage takes in the middle, `start_s` what comes before.
    """

    rounds: tuple[Mapping[int, Logs], ...]
    slowed: Mapping[tuple[int, float], tuple[Logs, ...]]
    seconds: Mapping[Stage, float]
    start_s: float
    like: GateRun

    @property
    def cells(self) -> int:
        """How many."""
        return len(self.like.cells)

    def truth(self, kind: Kind, slowed: int | None) -> tuple[float, ...]:
        """What the ratio of each cell scatters about in a run where one is slowed."""
        return tuple(
            self.middle[cell, kind.share if cell == slowed else 0.0] for cell in range(self.cells)
        )

    @property
    def off_most(self) -> float:
        """How far the middle of what is drawn lies from the truth, at most: a share."""
        return max((m / (1 + share) - 1 for (_, share), m in self.middle.items()), key=abs)

    @cached_property
    def middle(self) -> Mapping[tuple[int, float], float]:
        """The median ratio by cell and share that it was slowed by."""
        alike = {
            (c, 0.0): [each[c]["candidate"] for each in self.rounds] for c in range(self.cells)
        }
        logs = alike | {
            k: [each["candidate"] for each in found] for k, found in self.slowed.items()
        }
        return {key: math.exp(median(found)) for key, found in logs.items()}

    def enough(self, kind: Kind) -> bool:
        """Whether runs of this kind can be resampled: controls must have been slowed as much."""
        if kind.share not in (0, kind.threshold):
            return False
        fewest = min(len(self.slowed.get((c, kind.threshold), ())) for c in range(self.cells))
        return len(self.rounds) >= _FEWEST and fewest >= _FEWEST


def stock(runs: Sequence[Live]) -> Stock | None:
    """All that the live runs offer; None without a run of identical sides."""
    whole: list[Mapping[int, Logs]] = []
    slowed: dict[tuple[int, float], list[Logs]] = {}
    seconds: dict[Stage, list[float]] = {"screen": [], "confirm": []}
    for live in runs:
        for found in live.run.rounds:
            if found.discarded is not None or found.failures:
                continue
            seconds[found.stage].append(found.spent_s)
            if not live.kind.share and (every := _whole(found, len(live.run.cells))) is not None:
                whole.append(every)
            for key, logs in _slowed(live, found):
                slowed.setdefault(key, []).append(logs)
    alike = [live for live in runs if not live.kind.share]
    if not alike or not whole:
        return None
    screen_s = median(seconds["screen"])
    return Stock(
        rounds=tuple(whole),
        slowed={key: tuple(pairs) for key, pairs in slowed.items()},
        seconds={"screen": screen_s, "confirm": median(seconds["confirm"] or [screen_s])},
        start_s=median([live.run.spent.get("checks_s", 0.0) for live in runs]),
        like=alike[0].run,
    )


def _whole(found: Round, cells: int) -> Mapping[int, Logs] | None:
    logs = {cell: _logs(found, cell, ("candidate", "null")) for cell in range(cells)}
    return logs if all(len(each) == 2 for each in logs.values()) else None


def _slowed(live: Live, found: Round) -> Iterator[tuple[tuple[int, float], Logs]]:
    """The slowed cells of a round, with the share: candidates, and controls in their place.

    The candidate then stands for the null arm: that one and the control are the same process,
    and would err alike.
    """
    if live.cell is not None and len(logs := _logs(found, live.cell, ("candidate", "null"))) == 2:
        yield (live.cell, live.kind.share), logs
    cell = found.slowed
    if cell is not None and cell != live.cell:
        logs = _logs(found, cell, ("planted", "candidate"))
        if len(logs) == 2:
            swapped: Logs = {"candidate": logs["planted"], "null": logs["candidate"]}
            yield (cell, live.run.rules.threshold), swapped


def _logs(found: Round, cell: int, arms: tuple[Variant, ...]) -> dict[Variant, float]:
    ratios = {arm: found.log_ratio(cell, arm) for arm in arms}
    return {arm: ratio for arm, ratio in ratios.items() if ratio is not None}


def resample(kind: Kind, stock: Stock, count: int, seed: int = 0) -> list[Judged]:
    """`count` gate runs of a kind; the slowed cell rotates as in live ones."""
    return [_one(kind, stock, number, seed) for number in range(count)]


def _one(kind: Kind, stock: Stock, number: int, seed: int) -> Judged:
    chance = random.Random(f"{seed} {kind.share} {number}")
    cell = kind.cell(number, stock.cells)
    rules = replace(stock.like.rules, threshold=kind.threshold)
    decision = SequentialDecision(range(stock.cells), rules, number)
    rounds: list[Drawn] = []
    spent_s, over = stock.start_s, False
    while (order := decision.next_round()) is not None:
        if spent_s + stock.seconds[order.stage] > rules.budget_s:
            over = True
            break
        spent_s += stock.seconds[order.stage]
        rounds.append(_drawn(order, kind, cell, stock, chance))
        decision.add(rounds[-1])
    run = replace(
        stock.like, rules=rules, rounds=tuple(rounds), options={"seed": number},
        checks=dict.fromkeys(range(stock.cells), _FINE), over_budget=over,
    )  # fmt: skip
    return Judged(
        kind=kind, cell=cell, truth=stock.truth(kind, cell), outcome=decide(run),
        seconds=spent_s, rounds=len(rounds),
    )  # fmt: skip


_FINE: dict[VersionName, Checked] = {
    "base": Checked(status="ok"), "candidate": Checked(status="ok"),
}  # fmt: skip


def _drawn(
    order: RoundPlan, kind: Kind, slowed: int | None, stock: Stock, chance: random.Random
) -> Drawn:
    whole = chance.choice(stock.rounds)
    logs = {cell: dict(whole[cell]) for cell in order.cells}
    if slowed in logs:
        logs[slowed] = dict(chance.choice(stock.slowed[slowed, kind.threshold]))
    if order.slowed is not None:
        control = chance.choice(stock.slowed[order.slowed, kind.threshold])
        logs.setdefault(order.slowed, {})["planted"] = control["candidate"]
    return Drawn(stage=order.stage, logs=logs)
