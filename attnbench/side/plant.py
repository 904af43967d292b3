"""A call made slower by a known share: what the gate must find to be believed."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import repeat
from typing import Any

import torch

from attnbench.measure.clock import Clock

Call = Callable[[], Any]
_TRIAL_CYCLES = 1_000_000


def slowed_block_us(call: Call, calls: int, share: float, clock: Clock) -> float:
    """Microseconds a call takes, on the mean of a block of `calls` that is slowed by `share`.

    On CPU: the calls, then idle turning for that share of what they have just taken, timed as one.
    The ratio is exact whatever the noise, and the wrapper costs once a block: around each call it
    made 0.5 % of a call of 240 µs.
    """

    def block() -> None:
        now = time.perf_counter_ns
        begin = now()
        for _ in repeat(None, calls):
            call()
        end = now()
        until = end + int((end - begin) * share)
        while now() < until:
            pass

    return clock.block(block, 1).time_us / calls


def followed_by_sleep(call: Call, share: float, clock: Clock) -> Call:
    """On CUDA: the call, and on its stream a kernel that spins for `share` of its time.

    How long that is, is measured now, once.
    """
    sleep = torch.cuda._sleep

    def spin() -> None:
        sleep(_TRIAL_CYCLES)  # type: ignore[no-untyped-call]

    spin()
    spin_us = min(clock.block(spin, 1).time_us for _ in range(5))
    own_us = min(clock.block(call, 1).time_us for _ in range(5))
    cycles = max(1, round(share * own_us * _TRIAL_CYCLES / spin_us))

    def planted() -> Any:
        result = call()
        sleep(cycles)  # type: ignore[no-untyped-call]
        return result

    return planted
