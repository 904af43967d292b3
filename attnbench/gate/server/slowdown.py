"""How the positive control is slowed: after its calls, by a share of what they take."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from functools import partial
from itertools import cycle, repeat
from typing import Any

import torch

from attnbench.base.stats import median
from attnbench.measure.clock import Clock, now_ns

Call = Callable[[], Any]
# Bound here, as `now_ns` is: before any implementation is loaded. Of all threads of the process.
cpu_ns = time.process_time_ns
_THIS_THREAD = getattr(resource, "RUSAGE_THREAD", resource.RUSAGE_SELF)  # which Linux alone has
# A GPU's sleep is calibrated by batches of so many, of about a tenth of a millisecond.
_TRIALS, _SLEEPS, _SLEEP_CYCLES = 5, 100, 200_000


def waits() -> int:
    """How often this thread has given its CPU up by itself: to sleep, or to wait for another."""
    return resource.getrusage(_THIS_THREAD).ru_nvcsw


def slowed_batch_us(call: Call, calls: int, share: float, clock: Clock) -> float:
    """On a CPU: microseconds a call takes, on the mean of a batch that is slowed by `share`.

    That is `calls` calls, then idle turning for that share of what they have just taken, timed as
    one: of their CPU time, unless several threads computed or one waited, since other work may have
    taken any part of the rest. The ratio is exact whatever the noise, and the wrapper costs once a
    batch: around each call it made 0.5 % of a call of 240 µs.
    """

    def batch() -> None:
        before, clocks = waits(), (now_ns, cpu_ns)
        begins = [read_ns() for read_ns in clocks]
        for _ in repeat(None, calls):
            call()
        alone = torch.get_num_threads() == 1 and waits() == before
        read_ns, begin = clocks[alone], begins[alone]
        end = read_ns()
        until = end + int((end - begin) * share)
        while end <= read_ns() < until:  # one that steps back ends it
            pass

    return clock.batch(batch, 1).time_us / calls


def turn_idly(ns: float) -> None:
    """Keep the processor busy for so much of its time."""
    begin = cpu_ns()
    while begin <= cpu_ns() < begin + ns:  # one that steps back ends it
        pass


def slowed_by_sleep(call: Call, calls: int, share: float, clock: Clock) -> Callable[[], float]:
    """On a GPU: what takes a batch of `calls` calls that is slowed by `share`, in µs a call.

    A kernel that spins follows one call of each batch, for `share` of the time of all: one after
    each call would cost 1.5 to 2.5 µs by its launch alone, more than the share of a short call.
    The calls are timed one by one, with a cold cache, so that it stands in nobody's way.

    How long that is, is measured once; what starting a kernel costs is taken off. Where that
    alone is more than the share, the least there is follows.
    """
    sleep = torch.cuda._sleep

    def each_us(call: Call, times: int) -> float:
        return median(clock.batch(call, times).time_us for _ in range(_TRIALS))

    own_us = each_us(call, calls) * calls
    least_us, long_us = (each_us(partial(sleep, each), _SLEEPS) for each in (1, _SLEEP_CYCLES))
    cycles_per_us = _SLEEP_CYCLES / max(long_us - least_us, 1e-3)
    cycles = max(1, round((share * own_us - least_us) * cycles_per_us))
    turns = cycle((*repeat(0, calls - 1), cycles))

    def slowed() -> None:
        call()
        if spin := next(turns):
            sleep(spin)  # type: ignore[no-untyped-call]

    return lambda: clock.batch(slowed, calls).time_us
