"""Samples of any callable, as a round asks for them, and the injected slowdown."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from functools import partial
from itertools import cycle, repeat
from typing import Any

import psutil
import torch
from msgspec import structs

from attnbench.base.stats import median
from attnbench.gate.protocol import SampleTaken, TakeSample
from attnbench.measure.clock import Clock, clock_for, now_ns
from attnbench.measure.watch import collector_off

_WARM_CALLS, _WARM_S = 3, 0.02
_RENEWED_NS = 20_000_000  # for a batch of calls that are renewed, with what renews them


def warm_up(call: Call, device: str) -> None:
    """Call it until it is warm: at least once."""
    begin, calls = time.perf_counter(), 0
    while calls < _WARM_CALLS and (calls == 0 or time.perf_counter() - begin < _WARM_S):
        call()
        if device == "cuda":
            torch.cuda.synchronize()  # nothing of it may run while another is timed
        calls += 1


class Sampler:
    """Takes samples on a device. CPU times are known on a CPU, in one thread."""

    def __init__(self, device: str, threads: int | None) -> None:
        self.clock = clock_for(device)
        self._device = device
        self._counted = device == "cpu" and threads == 1
        self._slowed: dict[tuple[int, int, float], Callable[[], float]] = {}

    def take(
        self, request: TakeSample, call: Call, renew: Callable[[], Call] | None = None
    ) -> SampleTaken:
        """Take a sample of `call`; of what `renew` returns, if given, anew before each call.

        Calls that are renewed are timed one by one, and a batch is their mean.
        """
        with collector_off():
            if request.untimed:
                call()
            batches = [
                self._batch_ns(request, call, request.calls)
                if renew is None
                else self._renewed_ns(request, renew)
                for _ in range(request.batches)
            ]
        ns, cpu = (tuple(map(round, each)) for each in zip(*batches, strict=True))
        held_bytes = psutil.Process().memory_info().rss + torch.cuda.memory_allocated()
        return SampleTaken(ns, held_bytes, cpu if self._counted else ())

    def _renewed_ns(self, request: TakeSample, renew: Callable[[], Call]) -> tuple[float, float]:
        """As `_batch_ns`; fewer calls than asked for where what renews them takes long."""
        plain = structs.replace(request, slowdown=None)
        until, each = now_ns() + _RENEWED_NS, [self._batch_ns(plain, renew(), 1)]
        while len(each) < request.calls and until - _RENEWED_NS <= now_ns() < until:
            each.append(self._batch_ns(plain, renew(), 1))
        calls = len(each)
        if request.slowdown:  # once, as in any batch
            share_ns = request.slowdown * sum(map(min, each))
            each.append(self._batch_ns(plain, partial(turn_idly, share_ns), 1))
        time_ns, used_ns = map(sum, zip(*each, strict=True))
        return time_ns / calls, used_ns / calls

    def _batch_ns(self, request: TakeSample, call: Call, calls: int) -> tuple[float, float]:
        """Nanoseconds a call of a batch, and their CPU time.

        That is read around the clock, so that what strikes between two readings makes it no
        shorter; a batch that waited by itself has its time instead.
        """
        batch_us = self._timed(request, call, calls)
        before, begin = waits(), cpu_ns()
        time_us = batch_us()
        used_ns, waited = cpu_ns() - begin, waits() > before
        return 1000 * time_us, 1000 * time_us if waited else used_ns / calls

    def _timed(self, request: TakeSample, call: Call, calls: int) -> Callable[[], float]:
        """What takes a batch and returns its time, in µs a call."""
        share = request.slowdown
        if not share:
            return lambda: self.clock.batch(call, calls).time_us
        if self._device == "cpu":
            return lambda: slowed_batch_us(call, calls, share, self.clock)
        key = request.cell, calls, share
        if key not in self._slowed:  # made once, since that takes measuring
            self._slowed[key] = slowed_by_sleep(call, calls, share, self.clock)
        return self._slowed[key]


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
