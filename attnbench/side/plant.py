"""A call made slower by a known share: what the gate must find to be believed."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from attnbench.measure.clock import Clock

Call = Callable[[], Any]
_TRIAL_CYCLES = 1_000_000


def slowed(call: Call, share: float, device: str, clock: Clock) -> Call:
    """A call that takes 1 + `share` times as long as `call`, on the device's own clock.

    On CPU each call is followed by idle turning for that share of what it has just taken: the
    ratio is exact whatever the noise. On CUDA a kernel that spins for that share of the
    call's stream time, as measured now, follows it on the stream.
    """
    return _spinning(call, share) if device == "cpu" else _sleeping(call, share, clock)


def _spinning(call: Call, share: float) -> Call:
    now = time.perf_counter_ns

    def planted() -> Any:
        begin = now()
        result = call()
        end = now()
        until = end + int((end - begin) * share)
        while now() < until:
            pass
        return result

    return planted


def _sleeping(call: Call, share: float, clock: Clock) -> Call:
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
