"""A call made slower by a known share: what the gate must find to be believed."""

from __future__ import annotations

from collections.abc import Callable
from itertools import repeat
from typing import Any

import torch

from attnbench.measure.clock import Clock, now_ns

Call = Callable[[], Any]
_TRIAL_CYCLES, _TRIALS = 1_000_000, 5


def slowed_block_us(call: Call, calls: int, share: float, clock: Clock) -> float:
    """Microseconds a call takes, on the mean of a block of `calls` that is slowed by `share`.

    On CPU: the calls, then idle turning for that share of what they have just taken, timed as one.
    The ratio is exact whatever the noise, and the wrapper costs once a block: around each call it
    made 0.5 % of a call of 240 µs.
    """
    together = 1 if clock.l2 == "cold" else calls  # cold calls are timed one by one

    def block() -> None:
        begin = now_ns()
        for _ in repeat(None, together):
            call()
        end = now_ns()
        until = end + int((end - begin) * share)
        while now_ns() < until:
            pass

    return clock.block(block, calls // together).time_us / together


def followed_by_sleep(call: Call, share: float, clock: Clock) -> Call:
    """On CUDA: the call, and on its stream a kernel that spins for `share` of its time.

    How long that is, is measured now, once, and the cost of a kernel more is taken off; where that
    alone is more than the share, the least there is follows.
    """
    sleep = torch.cuda._sleep

    def asleep(cycles: int) -> Call:
        def call_and_sleep() -> Any:
            result = call()
            sleep(cycles)  # type: ignore[no-untyped-call]
            return result

        return call_and_sleep

    own_us, least_us, long_us = (
        min(clock.block(each, 1).time_us for _ in range(_TRIALS))
        for each in (call, asleep(1), asleep(_TRIAL_CYCLES))
    )
    cycles_per_us = _TRIAL_CYCLES / max(long_us - least_us, 1e-3)
    return asleep(max(1, round((share * own_us - (least_us - own_us)) * cycles_per_us)))
