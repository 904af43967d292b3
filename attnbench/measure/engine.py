"""Interleaved timing: every implementation of a case takes a turn in each round, in random order.

Drift of the machine then falls on all of them alike, and none is always first. A turn that other
work took a core from is taken again; a round in which the machine itself was slowed counts for
nobody. Counters of the system decide that, never the times.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from attnbench.measure.clock import Block, Clock
from attnbench.measure.contender import Contender
from attnbench.measure.stopping import StoppingRule
from attnbench.measure.warming import UnmeasurableError, warm_up
from attnbench.measure.watch import Watch
from attnbench.sample import Sample

# Between two turns the others have used the caches. One untimed call brings back what a block
# finds there from its second call on; a call longer than this refills any cache by itself.
REWARM_BELOW_US = 20_000.0
MOST_BACKWARD = 10
STEPPED_BACK = "the clock stepped back or stood still"


def race(
    contenders: dict[str, Contender],
    clock: Clock,
    rule: StoppingRule,
    seed: int,
    *,
    watch: Watch | None = None,
    before_turn: Callable[[str, str], None] = lambda name, stage: None,
    finished: Callable[[str], None] = lambda name: None,
) -> None:
    """Warm all contenders up, then time them round by round until the rule ends each.

    A contender that raises keeps its exception in `error` and leaves; the others go on.
    `before_turn(name, stage)` is told whose turn it is, outside the timed block;
    `finished(name)` is called when one has left, between two rounds.
    """
    _Race(contenders, clock, rule, watch or Watch(), before_turn, finished).run(seed)


@dataclass
class _Race:
    contenders: dict[str, Contender]
    clock: Clock
    rule: StoppingRule
    watch: Watch
    before_turn: Callable[[str, str], None]
    finished: Callable[[str], None]

    def run(self, seed: int) -> None:
        order = random.Random(seed)
        self.racing = dict(self.contenders)
        for name in list(self.racing):
            self._attempt(name, "warm-up", partial(warm_up, clock=self.clock, rule=self.rule))
        for number in itertools.count():
            names = list(self.racing)
            if not names:
                return
            order.shuffle(names)
            with _collector_off():
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
        planned_us = sum(self.contenders[name].planned_us for name in names)
        reason, always = self.watch.lost_by_round(before, planned_us, readings)
        if reason and (always or all(self.contenders[name].may_redo() for name in names)):
            for name in names:
                _discard(self.contenders[name], begin[name], reason)

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
            with torch.set_grad_enabled(contender.grad):
                turn(contender)
        except Exception as err:  # whatever it raises costs this cell alone
            # Without its traceback, whose frames would keep the failed call's buffers alive.
            contender.error = err.with_traceback(None)
            self._leave(name)

    def _turn(self, contender: Contender, *, place: tuple[int, int]) -> None:
        begin = time.perf_counter()
        if self.clock.l2 == "warm" and contender.each_us < REWARM_BELOW_US:
            contender.call()
        switches = self.watch.interruptions()
        block = self.clock.block(contender.call, contender.calls)
        switches = self.watch.interruptions() - switches
        contender.spent_s += time.perf_counter() - begin
        contender.conditions.interrupted += switches
        reason = self.watch.lost_to_others(switches, contender.planned_us)
        if reason and not contender.may_redo():
            contender.conditions.kept_disturbed += 1
            reason = None
        if block.time_us <= 0:
            reason = STEPPED_BACK
        contender.samples.append(_sample(contender, block, place, reason))
        if reason == STEPPED_BACK:
            _refuse_backward(contender)

    def _done(self, contender: Contender) -> bool:
        times = contender.times_us
        if times or contender.spent_s < self.rule.max_time_s * self.rule.patience:
            return self.rule.done(times, contender.spent_s)
        why = contender.samples[-1].discarded
        contender.error = UnmeasurableError(f"no sample counts in all the time there was: {why}")
        return True

    def _leave(self, name: str) -> None:
        contender = self.racing.pop(name)
        self.clock.release(contender.call)
        contender.call = _gone  # and what the callable holds on to is free for the others
        self.finished(name)


def _sample(
    contender: Contender, block: Block, place: tuple[int, int], discarded: str | None
) -> Sample:
    units = contender.units
    return Sample(
        round=place[0],
        position=place[1],
        calls=contender.calls,
        time_us=block.time_us / units,
        e2e_us=block.e2e_us / units,
        enqueue_us=None if block.enqueue_us is None else block.enqueue_us / units,
        sm_mhz=block.sm_mhz,
        discarded=discarded,
    )


def _discard(contender: Contender, first: int, reason: str) -> None:
    """Mark the samples from number `first` on; those marked already keep their reason."""
    for index in range(first, len(contender.samples)):
        sample = contender.samples[index]
        if sample.discarded is None:
            contender.samples[index] = replace(sample, discarded=reason)


def _refuse_backward(contender: Contender) -> None:
    backward = sum(sample.discarded == STEPPED_BACK for sample in contender.samples)
    if backward >= MOST_BACKWARD and 2 * backward > len(contender.samples):
        raise UnmeasurableError(f"{STEPPED_BACK} in {backward} of {len(contender.samples)} blocks")


def _gone() -> None:
    """Stand in for a callable that has left."""


@contextlib.contextmanager
def _collector_off() -> Iterator[None]:
    """Collect between rounds, never inside a timed block."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
