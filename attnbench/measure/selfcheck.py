"""Self-tests of the measuring side: each times something whose answer is known beforehand.

They return plain numbers; `attnbench.analysis.doctor` judges them. Times are microseconds.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from attnbench.base.stats import median, median_interval
from attnbench.measure.clock import Clock
from attnbench.measure.engine import Measurement
from attnbench.measure.sampling import WARM_SHARE, StoppingRule, Target, achieved

Call = Callable[[], Any]
Numbers = dict[str, float | int | None]

PLANTED = 1.05  # units of work of the slowed loop, per unit of the others
_UNITS = 20
_CONFIDENCE = 0.99  # of the ratios: one false alarm in a hundred runs at most
_TICK_US = 1e-4  # readings closer than this differ by rounding: no clock here is as fine


def resolution(clock: Clock, *, batches: int = 1000, delays: Sequence[Call] = ()) -> Numbers:
    """What the clock can tell apart, and what it adds: by timing a call that does nothing.

    `seen_us` is the smallest positive difference between any two readings, 0 and those of `delays`
    among them (None where nothing above 0 was read). A clock with a coarse tick reads nothing as
    the same few ticks each time: delays of many lengths show one tick. `block_us` is the time of a
    batch of one call, `call_us` what each call of a long batch is charged; `negative` counts
    readings below 0.
    """

    def nothing() -> None:
        pass

    readings = [clock.batch(nothing, 1).time_us for _ in range(batches)]
    marks = sorted({0.0, *readings, *(clock.batch(delay, 1).time_us for delay in delays)})
    gaps = [above - below for below, above in itertools.pairwise(marks)]
    return {
        "claimed_us": clock.resolution_us,
        "seen_us": min((gap for gap in gaps if gap > _TICK_US), default=None),
        "block_us": median(readings),
        "call_us": median(clock.batch(nothing, 1000).time_us for _ in range(20)),
        "negative": sum(reading < 0 for reading in readings),
    }


def cold_and_warm(cold: Clock, warm: Clock, read: Call, *, budget_s: float = 2.0) -> Numbers:
    """Time the same read from memory and from the cache, alternately.

    `ratio` is cold / warm with its 95 % interval `low`, `high`: None where a clock saw no time.
    There are 40 rounds, or as many as fit into `budget_s`, at least seven.
    """
    read()
    colds, warms, end = list[float](), list[float](), time.perf_counter() + budget_s
    while len(colds) < 40 and (time.perf_counter() < end or len(colds) < 7):
        colds.append(cold.batch(read, 1).time_us)
        warm.batch(read, 1)  # brings back what the flush has evicted
        warms.append(warm.batch(read, 1).time_us)
    ratios = [c / w for c, w in zip(colds, warms, strict=True) if c > 0 < w]
    low, high = median_interval(ratios) or (None, None)
    return {
        "cold_us": median(colds),
        "warm_us": median(warms),
        "ratio": median(ratios) if ratios else None,
        "low": low,
        "high": high,
    }


def launch(cold: Clock, warm: Clock, call: Call, flush: Call) -> Numbers:
    """How long the host takes to issue a call, and for how much of that it keeps a GPU busy.

    `flush_us` is how long the flush before a cold call lasts, which hides as much of it.
    """
    cold.batch(call, 3)
    batch = cold.batch(call, 20)
    return {
        "flush_us": warm.batch(flush, 1).time_us,
        "enqueue_us": batch.enqueue_us,
        "hidden_us": batch.hidden_us,
    }


def slowdown(clock: Clock, unit: Call, rule: StoppingRule) -> dict[str, Numbers]:
    """Measure three interleaved loops over the same work: two alike, one with 5 % more units.

    Returns for the second, `twin`, and for the third, `slowed`, the median over the rounds of the
    ratio of their time to the first loop's, with its 99 % interval: within a round other work hits
    all three alike, and they share what they work on.
    """

    def loop(count: int) -> None:
        for _ in range(count):
            unit()

    counts = {"first": _UNITS, "twin": _UNITS, "slowed": round(_UNITS * PLANTED)}
    targets = {name: Target(call=partial(loop, count)) for name, count in counts.items()}
    Measurement(targets, clock, rule).run(seed=0)
    times: dict[str, dict[int, float]] = {}
    for name, target in targets.items():
        if target.error is not None:
            raise target.error
        counted = (s for s in target.samples if s.discarded is None and s.time_us > 0)
        times[name] = {sample.round: sample.time_us for sample in counted}
    first, found = times.pop("first"), {}
    for name, us in times.items():
        ratios = [us[number] / first[number] for number in sorted(us.keys() & first.keys())]
        low, high = median_interval(ratios, _CONFIDENCE) or (None, None)
        middle = median(ratios) if ratios else None
        found[name] = {"ratio": middle, "low": low, "high": high, "rounds": len(ratios)}
    return found


def noise(clock: Clock, call: Call, *, budget_s: float = 10.0) -> Numbers:
    """How narrow the 95 % interval of the reported time becomes in 10 s of measuring.

    Warming up is part of the budget, and so are samples that were taken again. `width` is half of
    it, relative to that time; None where there is no interval.
    """
    samples_s = budget_s / (1 + WARM_SHARE)
    rule = StoppingRule(precision=0.0, min_time_s=samples_s, max_time_s=samples_s)
    target = Target(call=call)
    Measurement({"noise": target}, clock, rule).run(seed=0)
    if target.error is not None:
        raise target.error
    kept, width = target.times_us, achieved(target.fastest_us)
    return {
        "width": width if width < float("inf") else None,
        "median_us": median(kept),
        "samples": len(kept),
        "discarded": len(target.samples) - len(kept),
    }
