"""Interleaved timing: every implementation of a case takes a turn in each round, in random order.

Drift of the machine then falls on all of them alike, and none is always first. A turn that other
work disturbed from beginning to end is taken again; a round in which the machine itself was slowed
counts for nobody. Counters of the system decide that, never the times.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from attnbench.base.sample import Discard, Sample
from attnbench.measure.clock import Block, Clock
from attnbench.measure.sampling import (
    FEWEST,
    TURN_US,
    Contender,
    StoppingRule,
    UnmeasurableError,
    compile_activity,
    warm_up,
)
from attnbench.measure.watch import Watch, collector_off

# Between two turns the others have used the caches. One untimed call brings back what a block
# finds there from its second call on; a call longer than this refills any cache by itself.
REWARM_BELOW_US = 20_000.0
MOST_IN_VAIN = 10
STEPPED_BACK = Discard("clock", "the clock stepped back or stood still")
COMPILED = Discard("compiled", "something was compiled in it")


def race(
    contenders: dict[str, Contender],
    clock: Clock,
    rule: StoppingRule,
    seed: int,
    *,
    watch: Watch | None = None,
    before_turn: Callable[[str, str], None] = lambda name, stage: None,
    after_turn: Callable[[str], None] = lambda name: None,
    finished: Callable[[str], None] = lambda name: None,
) -> None:
    """Warm all contenders up, then time them round by round until the rule ends each.

    A contender that raises keeps its exception in `error` and leaves; the others go on.
    `before_turn(name, stage)` is told whose turn it is, `after_turn(name)` whose it was, both
    outside of what is timed; what the latter raises ends the contender, too.
    `finished(name)` is called when one has left, between two rounds.
    """
    _Race(contenders, clock, rule, watch or Watch(), before_turn, after_turn, finished).run(seed)


@dataclass
class _Race:
    contenders: dict[str, Contender]
    clock: Clock
    rule: StoppingRule
    watch: Watch
    before_turn: Callable[[str, str], None]
    after_turn: Callable[[str], None]
    finished: Callable[[str], None]

    def run(self, seed: int) -> None:
        order = random.Random(seed)
        self.racing = dict(self.contenders)
        for name in list(self.racing):
            self._attempt(name, "warm-up", partial(warm_up, clock=self.clock, rule=self.rule))
        for contender in self.racing.values():
            self._divide(contender)
        for number in itertools.count():
            names = list(self.racing)
            if not names:
                return
            order.shuffle(names)
            with collector_off():
                self._round(number, names)
            for name in [name for name in names if name in self.racing]:
                if self._done(self.racing[name]):
                    self._leave(name)

    def _round(self, number: int, names: list[str]) -> None:
        """One turn for each; then once more for those whose turn was disturbed."""
        before, again = self.watch.mark(), []
        begin = {name: len(self.racing[name].samples) for name in names}
        readings: list[Any] = []
        for position, name in enumerate(names):
            self._take_turn(name, (number, position), readings)
            if name in self.racing and self.racing[name].samples[-1].discarded:
                again.append(name)
        for position, name in enumerate(again, start=len(names)):
            if name in self.racing:
                self._take_turn(name, (number, position), readings)
        planned_us = sum(self._turn_us(self.contenders[name]) for name in names)
        reason, always = self.watch.lost_by_round(before, planned_us, readings)
        if reason is None:
            return
        redo = always or all(self._may_redo(self.contenders[name]) for name in names)
        for name in names:
            if redo:
                self.contenders[name].discard(begin[name], reason)
            else:
                self.contenders[name].conditions.kept_disturbed += 1

    def _divide(self, contender: Contender) -> None:
        """Divide the least time asked for into windows of turns of blocks, on a host.

        The longer, the likelier that other work's bursts leave one alone. What is asked for and
        what warming up found decide it, and nothing that is timed.
        """
        window_us = self.rule.min_time_s * 1e6 / self.rule.min_samples
        contender.turn_us = min(TURN_US, window_us)
        turn_us = self._turn_us(contender)
        if self.clock.timer == "host" and turn_us:
            contender.window = max(1, round(window_us / turn_us))

    def _may_redo(self, contender: Contender) -> bool:
        """Within the budget alone: a slow call has no time for another turn."""
        return contender.may_redo() and contender.spent_s < self.rule.max_time_s

    def _turn_us(self, contender: Contender) -> float:
        return contender.planned_us * self._blocks(contender)

    def _blocks(self, contender: Contender) -> int:
        """Other work only ever adds to a host's times; a GPU's own clock moves them both ways."""
        return contender.blocks if self.clock.timer == "host" else 1

    def _take_turn(self, name: str, place: tuple[int, int], readings: list[Any]) -> None:
        self._attempt(name, "samples", partial(self._turn, place=place))
        reading = self.watch.read()
        if reading is not None:
            readings.append(reading)
            self.contenders[name].conditions.readings.append(reading)

    def _attempt(self, name: str, stage: str, turn: Callable[[Contender], None]) -> None:
        self.before_turn(name, stage)
        contender = self.racing[name]
        try:
            try:
                with torch.set_grad_enabled(contender.grad):
                    turn(contender)
            finally:
                self.after_turn(name)
        except Exception as err:  # whatever it raises costs this cell alone
            # Without its traceback, whose frames would keep the failed call's buffers alive.
            contender.error = err.with_traceback(None)
            err.__context__ = None
            self._leave(name)

    def _turn(self, contender: Contender, *, place: tuple[int, int]) -> None:
        begin, cpu, compiled = time.perf_counter(), time.process_time(), compile_activity()
        if self.clock.l2 == "warm" and contender.each_us < REWARM_BELOW_US:
            contender.call()
        blocks, disturbed = [], []
        for _ in range(self._blocks(contender)):
            switches = self.watch.interruptions()
            blocks.append(self.clock.block(contender.call, contender.calls))
            disturbed.append(self.watch.interruptions() - switches)
        contender.spent_s += time.perf_counter() - begin
        contender.cpu_s += time.process_time() - cpu
        contender.conditions.interrupted += sum(disturbed)
        reason = self._lost(contender, disturbed)
        if compile_activity() != compiled:
            reason = COMPILED
        if min(block.time_us for block in blocks) <= 0:
            reason = STEPPED_BACK
        contender.samples.append(_sample(contender, blocks, place, reason))
        if reason == STEPPED_BACK:
            _refuse_backward(contender)

    def _lost(self, contender: Contender, disturbed: list[int]) -> Discard | None:
        """Why a turn is to be taken again: not one of its blocks was left alone."""
        if self.clock.timer != "host":
            return None  # what interrupts the host is no delay of the device's stream
        reasons = [self.watch.lost_to_others(n, contender.planned_us) for n in disturbed]
        if None in reasons:
            return None
        if self._may_redo(contender):
            return reasons[0]
        contender.conditions.kept_disturbed += 1
        return None

    def _done(self, contender: Contender) -> bool:
        """The rule decides; but nobody waits for ever for samples that count."""
        times, why = contender.times_us, [s.discarded for s in contender.samples if s.discarded]
        in_vain = len(times) < FEWEST and len(why) >= MOST_IN_VAIN
        if in_vain and self.rule.out_of_patience(contender.spent_s):
            count = f"{len(times)} of {len(contender.samples)} samples"
            contender.error = UnmeasurableError(
                f"{count} count in all the time there was: {why[-1]}"
            )
            return True
        return self.rule.done(contender.fastest_us, contender.spent_s)

    def _leave(self, name: str) -> None:
        contender = self.racing.pop(name)
        self.clock.release(contender.call)
        contender.call = _gone  # and what the callable holds on to is free for the others
        self.finished(name)


def _sample(
    contender: Contender, blocks: list[Block], place: tuple[int, int], discard: Discard | None
) -> Sample:
    """The turn's fastest block stands for it; the others' times stay with it."""
    units, block = contender.units, min(blocks, key=lambda block: block.time_us)
    return Sample(
        round=place[0],
        position=place[1],
        calls=contender.calls,
        time_us=block.time_us / units,
        e2e_us=block.e2e_us / units,
        enqueue_us=None if block.enqueue_us is None else block.enqueue_us / units,
        sm_mhz=block.sm_mhz,
        discarded=discard and discard.reason,
        discard_code=discard and discard.code,
        blocks_us=tuple(b.time_us / units for b in blocks) if len(blocks) > 1 else (),
    )


def _refuse_backward(contender: Contender) -> None:
    backward = sum(sample.discard_code == STEPPED_BACK.code for sample in contender.samples)
    if backward >= MOST_IN_VAIN and 2 * backward > len(contender.samples):
        raise UnmeasurableError(
            f"{STEPPED_BACK.reason} in {backward} of {len(contender.samples)} turns"
        )


def _gone() -> None:
    """Stand in for a callable that has left."""
