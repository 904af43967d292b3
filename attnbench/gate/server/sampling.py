"""Samples of any callable, as a round asks for them, and the injected slowdown."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from itertools import cycle, repeat

import psutil
import torch

from attnbench.base.sample import Batch
from attnbench.base.stats import median
from attnbench.gate.protocol import SampleTaken, TakeSample
from attnbench.measure.clock import Call, Clock, clock_for, cpu_ns, now_ns
from attnbench.measure.watch import collector_off

_WARM_CALLS, _WARM_S = 3, 0.02
_RENEWED_NS = 20_000_000  # for a batch of calls that are renewed, with what renews them
# A GPU's sleep is calibrated by batches of so many, of about a tenth of a millisecond.
_TRIALS, _SLEEPS, _SLEEP_CYCLES = 5, 100, 200_000


def warm_up(call: Call, device: str) -> None:
    """Call it until it is warm: at least once."""
    begin = time.perf_counter()
    for _ in range(_WARM_CALLS):
        call()
        if device == "cuda":
            torch.cuda.synchronize()  # nothing of it may run while another is timed
        if time.perf_counter() - begin >= _WARM_S:
            break


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
        """Take a sample of `call`; of what `renew` returns, if given, again before each call.

        Calls that are renewed are timed one by one, and a batch is their mean.
        """
        with collector_off():
            if request.untimed:
                call()
            batches = [self._batch_ns(request, call, renew) for _ in range(request.batches)]
        ns, cpu = (tuple(map(round, each)) for each in zip(*batches, strict=True))
        held_bytes = psutil.Process().memory_info().rss + torch.cuda.memory_allocated()
        return SampleTaken(ns, held_bytes, cpu if self._counted else ())

    def _batch_ns(
        self, request: TakeSample, call: Call, renew: Callable[[], Call] | None
    ) -> tuple[float, float]:
        """Nanoseconds a call of a batch, and their CPU time: the same where that is not known.

        Fewer calls than asked for where what renews them takes long. On a CPU a slowed batch is
        followed by a busy-wait for a share of what its calls have just taken: the ratio is exact
        whatever the noise. That is of their CPU time, where it is known, since other work may have
        taken any part of the rest.
        """
        calls, share = request.calls, request.slowdown
        if share and self._device == "cuda":
            key = request.cell, calls, share
            if key not in self._slowed:  # made once, since that takes measuring
                self._slowed[key] = slowed_by_sleep(call, calls, share, self.clock)
            return (1000 * self._slowed[key](),) * 2
        if renew is None:
            each = [self.clock.batch(call, calls)]
        else:
            begin, each = now_ns(), [self.clock.batch(renew(), 1)]
            while len(each) < calls and begin <= now_ns() < begin + _RENEWED_NS:
                each.append(self.clock.batch(renew(), 1))
            calls = len(each)
        sums_us = [sum(us) * calls / len(each) for us in zip(*map(_times_us, each), strict=True)]
        if share:
            read_ns = now_ns if any(batch.cpu_us is None for batch in each) else cpu_ns
            turn = partial(busy_wait, 1000 * share * min(sums_us), read_ns)
            each.append(self.clock.batch(turn, 1))
            sums_us = [us + more for us, more in zip(sums_us, _times_us(each[-1]), strict=True)]
        if sums_us[0] <= 0 or (share and each[-1].time_us <= 0):
            return 0.0, 0.0  # a clock stood still or stepped back, which asks for another sample
        time_ns, used_ns = (1000 * us / calls for us in sums_us)
        return time_ns, used_ns


def _times_us(batch: Batch) -> tuple[float, float]:
    return batch.time_us, batch.time_us if batch.cpu_us is None else batch.cpu_us


def busy_wait(ns: float, read_ns: Callable[[], int]) -> None:
    """Keep the processor busy for so long, by this clock."""
    begin = read_ns()
    while begin <= read_ns() < begin + ns:  # one that steps back ends it
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
