"""Samples of any callable, as a round asks for them."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import psutil
import torch
from msgspec import structs

from attnbench.gate.protocol import SampleTaken, TakeSample
from attnbench.gate.server.slowdown import (
    Call,
    cpu_ns,
    slowed_batch_us,
    slowed_by_sleep,
    turn_idly,
    waits,
)
from attnbench.measure.clock import clock_for, now_ns
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
