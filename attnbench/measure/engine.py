"""Interleaved timing: every implementation of a case takes a turn in each round, in random order.

Drift of the machine then falls on all of them alike, and none is always first.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import math
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

try:
    import resource
except ImportError:  # not on this system: nothing is counted
    resource = None  # type: ignore[assignment]

from attnbench.measure.clock import Clock
from attnbench.measure.stopping import StoppingRule
from attnbench.sample import Sample

# A block lasts at least this long, and this many times what the clock can tell.
MIN_BLOCK_US = 1000.0
MIN_TICKS = 1000
_AGREE = 0.05
_WARM_SHARE = 0.25


@dataclass(kw_only=True)
class Contender:
    """A callable in the race: what it does, how it is called, and what was observed of it.

    `last_call_s` is how long a call took that has just been made elsewhere, 0 if none was;
    `interrupted` counts how often other work took a core from this process in its samples.
    """

    call: Callable[[], Any]
    grad: bool = False
    units: int = 1
    last_call_s: float = 0.0
    calls: int = 1
    samples: list[Sample] = field(default_factory=list)
    warm_s: float = 0.0
    spent_s: float = 0.0
    interrupted: int = 0
    error: Exception | None = None

    @property
    def times_us(self) -> list[float]:
        """Microseconds per unit, in the order of the rounds."""
        return [sample.time_us for sample in self.samples]


def warm_up(contender: Contender, *, clock: Clock, rule: StoppingRule) -> bool:
    """Call until two windows in a row agree, or a quarter of the budget is spent.

    Sets the number of calls that makes a block long enough for the clock. Returns False: nobody
    leaves the race by warming up.
    """
    if contender.last_call_s >= _WARM_SHARE * rule.max_time_s:
        return False  # it has just run, and one more call would spend the whole budget
    floor_us = max(MIN_BLOCK_US, MIN_TICKS * clock.resolution_us)
    begin, previous_us, calls = time.perf_counter(), math.inf, 1
    while True:
        block_us, _ = clock.block(contender.call, calls)
        each_us = max(block_us / calls, 1e-3)
        contender.warm_s = time.perf_counter() - begin
        settled = abs(each_us - previous_us) <= _AGREE * each_us and calls * each_us >= floor_us
        if settled or contender.warm_s >= _WARM_SHARE * rule.max_time_s:
            break
        previous_us, calls = each_us, max(1, math.ceil(floor_us / each_us))
    contender.calls = max(1, math.ceil(floor_us / each_us))
    return False


def race(
    contenders: dict[str, Contender],
    clock: Clock,
    rule: StoppingRule,
    seed: int,
    *,
    before_turn: Callable[[str, str], None] = lambda name, stage: None,
    finished: Callable[[str], None] = lambda name: None,
) -> None:
    """Warm all contenders up, then time them round by round until the rule ends each.

    A contender that raises keeps its exception in `error` and leaves; the others go on.
    `before_turn(name, stage)` is told whose turn it is, outside the timed block;
    `finished(name)` is called as soon as one has left.
    """
    order = random.Random(seed)
    racing = dict(contenders)

    def attempt(name: str, stage: str, turn: Callable[[Contender], bool]) -> None:
        before_turn(name, stage)
        contender = racing[name]
        try:
            with torch.set_grad_enabled(contender.grad):
                leaves = turn(contender)
        except Exception as err:  # whatever it raises costs this cell alone
            # Without its traceback, whose frames would keep the failed call's buffers alive.
            contender.error, leaves = err.with_traceback(None), True
        if leaves:
            del racing[name]
            contender.call = _gone  # and what the callable holds on to is free for the others
            finished(name)

    for name in list(racing):
        attempt(name, "warm-up", partial(warm_up, clock=clock, rule=rule))
    for round_number in itertools.count():
        names = list(racing)
        if not names:
            return
        order.shuffle(names)
        with _collector_off():
            for position, name in enumerate(names):
                turn = partial(_turn, clock=clock, rule=rule, place=(round_number, position))
                attempt(name, "samples", turn)


def _turn(
    contender: Contender, *, clock: Clock, rule: StoppingRule, place: tuple[int, int]
) -> bool:
    begin, switches = time.perf_counter(), interruptions()
    block_us, e2e_us = clock.block(contender.call, contender.calls)
    contender.spent_s += time.perf_counter() - begin
    contender.interrupted += interruptions() - switches
    work = contender.calls * contender.units
    contender.samples.append(
        Sample(
            round=place[0],
            position=place[1],
            calls=contender.calls,
            time_us=block_us / work,
            e2e_us=e2e_us / work,
        )
    )
    return rule.done(contender.times_us, contender.spent_s)


def interruptions() -> int:
    """Involuntary context switches of this process so far, all threads; 0 where not counted."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw if resource else 0


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
