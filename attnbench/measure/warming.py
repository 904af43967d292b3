"""Warming up: until the last windows agree, and nothing is being compiled any more."""

from __future__ import annotations

import math
import time
from collections import deque

from attnbench.measure.clock import Clock
from attnbench.measure.compilation import compile_activity, listen_to_triton
from attnbench.measure.contender import Contender
from attnbench.measure.stopping import StoppingRule

# A block lasts at least this long, and this many times what the clock can tell.
MIN_BLOCK_US = 1000.0
MIN_TICKS = 1000
# More calls than these are not tried to make a block long enough.
MOST_CALLS = 1 << 20
WARM_SHARE = 0.25
_AGREE = 0.05
_WINDOWS = 3


class UnmeasurableError(Exception):
    """A call that cannot be timed: too fast for the clock, or never left alone long enough."""


def warm_up(contender: Contender, *, clock: Clock, rule: StoppingRule) -> None:
    """Call until three windows in a row agree and no compiler has been at work in them.

    Without compilation that takes a quarter of the budget at most; while something compiles, all
    of it. Sets the calls of a block, the length of a call, and the time of windows that compiled.
    A call that has just been made and would take a quarter of the budget is not made again.

    Raises:
        UnmeasurableError: the clock sees no time pass in 2^20 calls.
    """
    floor_us = MIN_TICKS * clock.resolution_us
    if clock.l2 == "warm":  # cold calls are timed one by one, each behind a flush of milliseconds
        floor_us = max(MIN_BLOCK_US, floor_us)
    if contender.last_call_s * 1e6 >= max(WARM_SHARE * rule.max_time_s * 1e6, floor_us):
        contender.each_us = contender.wall_us = contender.last_call_s * 1e6
        return
    listen_to_triton()
    begin, calls, activity = time.perf_counter(), 1, compile_activity()
    windows: deque[tuple[float, float]] = deque(maxlen=_WINDOWS)
    while True:
        started = time.perf_counter()
        each_us = clock.block(contender.call, calls).time_us
        now, seen = time.perf_counter(), compile_activity()
        if seen != activity:
            contender.compile_s += now - started
            activity = seen
            windows.clear()
        long_enough = calls * each_us >= floor_us
        if long_enough:
            windows.append((each_us, max(each_us, (now - started) * 1e6 / calls)))
        elif calls >= MOST_CALLS:
            raise UnmeasurableError(f"faster than the clock can see: {calls} calls take no time")
        contender.warm_s = now - begin
        share = WARM_SHARE if contender.compile_s == 0 else 1.0
        if _agree(windows) or (contender.warm_s >= share * rule.max_time_s and windows):
            break
        if not long_enough:
            calls = _more(calls, floor_us, each_us)
    # The fastest window: in a slow one others were at work, and blocks would come out too short.
    contender.each_us, contender.wall_us = min(windows)
    contender.calls = max(1, math.ceil(floor_us / contender.each_us))


def _more(calls: int, floor_us: float, each_us: float) -> int:
    """More calls for the next window: as many as make it long enough, by what was just seen.

    Where the clock saw nothing, or stepped back, twice as many: a slow call made a million times
    would take the rest of the day.
    """
    wanted = math.ceil(floor_us / each_us) if each_us > 0 else 0
    return min(MOST_CALLS, max(2 * calls, wanted))


def _agree(windows: deque[tuple[float, float]]) -> bool:
    times = [each_us for each_us, _ in windows]
    return len(times) == _WINDOWS and max(times) <= (1 + _AGREE) * min(times)
