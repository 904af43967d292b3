"""One callable while it is measured: its warm-up, its samples, and when they are enough."""

from __future__ import annotations

import contextlib
import math
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

from msgspec.structs import replace

from attnbench.base.sample import Discard, DiscardCode, Sample
from attnbench.base.stats import (
    fastest_of_windows,
    median,
    median_interval,
    processes_interval,
    robust_least,
)
from attnbench.measure.clock import Clock

# A sample on CPU lasts this long at most, a few slices of a scheduler, so that some of its batches
# are likely to be left alone; where little time is asked for, as long as leaves the fewest samples.
SAMPLE_US = 20_000.0
MOST_BATCHES = 20


class Calls(NamedTuple):
    """All calls of a sample: its round, their processor time and number, and the core's speed."""

    round: int
    cpu_us: float
    calls: int
    loop_us: float  # 0 where it was not probed


@dataclass(kw_only=True)
class Target:
    """A callable that is measured: how it is called, and what was observed of it.

    `last_call_s` is how long a call took that has just been made elsewhere, 0 if none was.
    `each_us` is the time of a call and `wall_us` that of all that goes with it (flushing, say),
    both from warming up: they decide on samples, never what was timed since. A sample lasts about
    `sample_us` on CPU; `window` is the number of samples of which the fastest counts. `spent_s` and
    `cpu_s` are the wall and the processor time of all samples; `interrupted` counts switches to
    other work in them, `page_faults` pages touched first, `at_work` the threads that computed in
    the second half of each; `readings` are the GPU's state beside them, `probes_us` the core's
    speed, `slowed_by` how much longer the probe takes right after a call than when the core is
    calm, and `at_speeds` the probe's time and the batch's, where it was the same before and after.
    `all_calls` has those of each sample, slow batches and what re-warms the caches included, where
    it is known what other work took.
    `allocates`: a sample of it had to ask the driver for memory, which others have taken since.
    `decided` says how it left a `race`: who is faster, and how many times, or itself and 1.
    One that is `part_of` another is timed in the same rounds, as often, and for as long.
    """

    call: Callable[[], Any]
    grad: bool = False
    units: int = 1
    last_call_s: float = 0.0
    part_of: Target | None = None
    calls: int = 1
    each_us: float = 0.0
    wall_us: float = 0.0
    sample_us: float = 0.0
    window: int = 1
    samples: list[Sample] = field(default_factory=list)
    interrupted: int = 0
    kept_disturbed: int = 0
    page_faults: int = 0
    at_work: list[int] = field(default_factory=list)
    readings: list[Any] = field(default_factory=list)
    probes_us: list[float] = field(default_factory=list)
    slowed_by: list[float] = field(default_factory=list)
    at_speeds: list[tuple[float, float]] = field(default_factory=list)
    all_calls: list[Calls] = field(default_factory=list)
    allocates: bool = False
    decided: tuple[str, float] | None = None
    warm_s: float = 0.0
    compile_s: float = 0.0
    spent_s: float = 0.0
    cpu_s: float = 0.0
    error: Exception | None = None

    @property
    def times_us(self) -> list[float]:
        """Microseconds per unit of the samples that count, in the order of the rounds.

        Without what other work took, where that is known.
        """
        return [sample.own_us for sample in self.samples if sample.discarded is None]

    @property
    def knows_cpu(self) -> bool:
        """Whether the processor time of the last sample is known."""
        return bool(self.samples) and self.samples[-1].cpu_us is not None

    @property
    def planned_us(self) -> float:
        """How long a batch should take with all that goes with it."""
        return self.calls * self.wall_us

    @property
    def batches(self) -> int:
        """Batches in a sample: other work only ever adds to a host's times, unlike to a GPU's."""
        if self.part_of is not None:
            return self.part_of.batches
        if not self.wall_us:
            return 1
        return max(1, min(MOST_BATCHES, round(self.sample_us / self.planned_us)))

    @property
    def fastest_us(self) -> list[float]:
        """What the reported time is the median of: the fastest sample of each window."""
        return fastest_of_windows(self.times_us, self.window)

    def mean_over_low(self, rounds: Container[int]) -> float:
        """Mean of all calls in these rounds (of all rounds, if of none there) / their low end."""
        within = [of for of in self.all_calls if of.round in rounds] or self.all_calls
        mean_us = sum(of.cpu_us for of in within) / sum(of.calls for of in within)
        return mean_us / float(robust_least(self.times_us))

    def discard(self, first: int, why: Discard) -> None:
        """Mark the samples from number `first` on; those marked already keep their reason."""
        for index in range(first, len(self.samples)):
            if self.samples[index].discarded is None:
                self.samples[index] = replace(
                    self.samples[index], discarded=why.reason, discard_code=why.code
                )

    def readmit(self, code: DiscardCode) -> None:
        """Let the samples count that were discarded for this; they say so."""
        for index, sample in enumerate(self.samples):
            if sample.discard_code == code:
                self.samples[index] = replace(
                    sample, discarded=None, discard_code=None, kept_despite=code
                )


# By how much more than others' a mean lies above its low end, as the lower end of an interval: at
# most 1.17 in 300 cells of ordinary kernels, at least 1.61 of one with twice the mean cost.
UNEVEN = 1.4


def uneven(target: Target, together: Iterable[Target]) -> str | None:
    """How far the mean of all calls lies above their low end, where further than of others.

    Those timed `together` met the same machine: against the lower median of them in each third of
    the rounds (where they had left, with the core's own speed), with Student's interval over the
    thirds. One slow call, or some at the beginning, widen it. None where it is not so, or where
    nothing was beside it.
    """
    others = [of for of in together if of is not target and of.all_calls and of.times_us]
    rounds = [of.round for of in target.all_calls]
    if not others or len(rounds) < FEWEST:
        return None
    own, beside = [], []
    for part in range(3):
        first, end = len(rounds) * part // 3, len(rounds) * (part + 1) // 3
        third = range(rounds[first], rounds[end - 1] + 1)
        own.append(target.mean_over_low(third))
        met = [of for of in others if any(each.round in third for each in of.all_calls)]
        slower = 1.0  # than at best, the core once the others have left
        if not met and (loops_us := [of.loop_us for of in target.all_calls if of.loop_us]):
            there = [of.loop_us for of in target.all_calls if of.round in third and of.loop_us]
            slower = statistics.fmean(there or loops_us) / robust_least(loops_us)
        beside.append(
            slower * statistics.median_low(of.mean_over_low(third) for of in met or others)
        )
    more = processes_interval([a / b for a, b in zip(own, beside, strict=True)])
    within = processes_interval(own)
    if more is None or within is None or more[0] <= UNEVEN:
        return None
    mean, (low, high) = target.mean_over_low(rounds), within
    others_mean = statistics.fmean(beside)
    return f"{mean:.2g} times the time ({low:.2g}–{high:.2g}), of those beside it {others_mean:.3g}"


WARM_SHARE = 0.25
FEWEST = 3  # samples of a call that is too slow for more


@dataclass(frozen=True, kw_only=True)
class StoppingRule:
    """Stop when the interval of the median is narrow enough, or when the budget is spent.

    `precision` is the half-width of the 95 % interval relative to the median; `min_time_s` and
    `max_time_s` bound the time in samples. A slow call still gets `min_samples`, the fewest that
    give intervals of the median (6) and of a ratio of two (7), unless that takes more than
    `patience` times the budget: then three.
    """

    precision: float = 0.02
    min_time_s: float = 0.1
    max_time_s: float = 1.0
    min_samples: int = 7
    patience: float = 20.0
    warm_s: float | None = None  # for warming up at most [a quarter of `max_time_s`]

    @property
    def warming_s(self) -> float:
        """The most seconds of warming up, where nothing compiles."""
        return WARM_SHARE * self.max_time_s if self.warm_s is None else self.warm_s

    def done(self, times_us: list[float], spent_s: float) -> bool:
        """Decide from the samples that count so far and the seconds spent on all."""
        if self.out_of_patience(spent_s) and len(times_us) >= FEWEST:
            return True
        if len(times_us) < self.min_samples or spent_s < self.min_time_s:
            return False
        return spent_s >= self.max_time_s or achieved(times_us) <= self.precision

    def out_of_patience(self, spent_s: float) -> bool:
        """True when so much time was spent that nothing more is waited for."""
        return spent_s >= self.max_time_s * self.patience


def achieved(times_us: list[float]) -> float:
    """Half-width of the interval relative to the median; infinite where there is none."""
    interval = median_interval(times_us)
    middle = median(times_us)
    if interval is None or middle <= 0:
        return float("inf")
    return (interval[1] - interval[0]) / 2 / middle


_triton_compilations = 0


def _count_triton(*_: Any, **__: Any) -> None:
    global _triton_compilations
    _triton_compilations += 1


def compile_activity() -> int:
    """A number that grows whenever torch.compile or Triton compiles or tunes in this process.

    Torch's counters grow with every graph captured and every Inductor pass, Triton's listener is
    called for every kernel. Looks only at what is loaded: who compiles nothing pays nothing.
    """
    with contextlib.suppress(Exception):
        knobs = cast(Any, sys.modules["triton.knobs"]).compilation
        knobs.listener = knobs.listener or _count_triton
    counted = _triton_compilations
    with contextlib.suppress(Exception):  # private tables: absent or changed, they say nothing
        for table in cast(Any, sys.modules["torch._dynamo.utils"]).counters.values():
            counted += sum(table.values())
    return counted


def graphs_compiled() -> int:
    """How many graphs dynamo has compiled in this process so far."""
    with contextlib.suppress(Exception):
        stats = cast(Any, sys.modules["torch._dynamo.utils"]).counters["stats"]
        return int(stats["unique_graphs"])
    return 0


def forget_compiled() -> None:
    """Begin as in a fresh process, if dynamo is loaded.

    After 8 shapes of a function it runs the source, and from the second shape on code for any: what
    ran would depend on what was timed before.
    """
    with contextlib.suppress(Exception):
        cast(Any, sys.modules["torch._dynamo"]).reset()


# A batch lasts at least this long, and this many times what the clock can tell.
MIN_BATCH_US = 1000.0
MIN_TICKS = 1000
# More calls than these are not tried to make a batch long enough.
MOST_CALLS = 1 << 20
_AGREE = 0.05
_WINDOWS = 3


class UnmeasurableError(Exception):
    """A call that cannot be timed: too fast for the clock, or never left alone long enough."""


def warm_up(target: Target, *, clock: Clock, rule: StoppingRule) -> None:
    """Call until three windows in a row agree and no compiler has been at work in them.

    At most for a quarter of the budget; while something compiles, for all of it. Sets the calls of
    a batch, the length of a call, and the time of windows that compiled. A call that has just been
    made and would take a quarter of the budget is not made again, but on a GPU: what it took may
    have been memory asked of the driver, or a kernel chosen, and no sample is to be the first.

    Raises:
        UnmeasurableError: the clock sees no time pass in 2^20 calls.
    """
    if whole := target.part_of:  # which has warmed all that the part runs
        target.call()
        # A processor clock that stood still would ask for a million calls; the wall's did not.
        seen_us = [clock.batch(target.call, 1).time_us for _ in range(2)]
        target.each_us = target.wall_us = max(*seen_us, 0.001)
        # As many calls as of the whole cost no more than the part's share of its time.
        least = math.ceil(MIN_BATCH_US / whole.batches / target.each_us)
        target.calls = max(whole.calls, min(least, MOST_CALLS))
        return
    least_us = MIN_TICKS * clock.resolution_us
    if clock.l2 == "warm":  # cold calls are timed one by one, each behind a flush of milliseconds
        least_us = max(MIN_BATCH_US, least_us)
    long_us = max(rule.warming_s * 1e6, least_us)
    if clock.timer == "host" and target.last_call_s * 1e6 >= long_us:
        target.each_us = target.wall_us = target.last_call_s * 1e6
        return
    calls, activity = 1, compile_activity()
    windows: deque[tuple[float, float]] = deque(maxlen=_WINDOWS)
    while True:
        started = time.perf_counter()
        batch = clock.batch(target.call, calls)
        each_us = batch.own_us
        now, seen = time.perf_counter(), compile_activity()
        if seen != activity:
            target.compile_s += now - started
            activity = seen
            windows.clear()
        long_enough = calls * each_us >= least_us
        if long_enough:
            windows.append((each_us, max(each_us, (now - started) * 1e6 / calls)))
        elif calls >= MOST_CALLS:
            raise UnmeasurableError(f"faster than the clock can see: {calls} calls take no time")
        target.warm_s += max(0.0, now - started)
        limit_s = rule.warming_s if target.compile_s == 0 else rule.max_time_s
        times = [each_us for each_us, _ in windows]
        agree = len(times) == _WINDOWS and max(times) <= (1 + _AGREE) * min(times)
        if agree or (target.warm_s >= limit_s and windows):
            break
        if not long_enough:
            # As many calls as make the next window long enough, by the wall time just seen: the
            # processor's may lag. Where the clocks saw nothing, stepped back or contradict each
            # other, only twice as many: a slow call made a million times would take the rest of the
            # day.
            wanted = math.ceil(least_us / batch.time_us) if batch.time_us > 0 else 0
            calls = min(MOST_CALLS, max(2 * calls, wanted))
    # A fast window: in a slow one others were at work, and batches would come out too short.
    target.each_us, target.wall_us = sorted(windows)[len(windows) > 2]
    target.calls = max(1, math.ceil(least_us / target.each_us))
