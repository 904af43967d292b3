"""Interleaved timing: each round takes one sample of every target, in random order.

Drift of the machine then falls on all of them alike, and none is always first. A sample that other
work disturbed from beginning to end is taken again; a round in which the machine itself was slowed
counts for no target, unless all are. Counters of the system decide that, never the times.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from msgspec import structs

from attnbench.base.sample import FULL_SPEED, SETTLED_CALLS, Batch, Discard, DiscardCode, Sample
from attnbench.base.stats import robust_least
from attnbench.measure.clock import Clock
from attnbench.measure.race import Race
from attnbench.measure.sampling import (
    FEWEST,
    SAMPLE_US,
    Calls,
    StoppingRule,
    Target,
    UnmeasurableError,
    compile_activity,
    warm_up,
)
from attnbench.measure.watch import Watch, at_work, collector_off, page_faults

# Between two samples of a target the others have used the caches. One untimed call brings back
# what a batch finds there from its second call on; a longer call refills any cache by itself.
REWARM_BELOW_US = 20_000.0
MOST_IN_VAIN = 10
# Where one sample in 24 takes twice the least, some calls may do more work: six of those, two in
# each third of the rounds, show how often.
TWICE, SLOW_SAMPLES, SELDOM = 2.0, 6, 24
# Samples that are discarded: at most this share of those that count, and a few more. What is
# disturbed beyond that is kept, and counted.
RETAKE_SHARE = 0.5
RETAKE_MORE = 2
STEPPED_BACK = Discard("clock", "the clock stepped back or stood still")
COMPILED = Discard("compiled", "something was compiled in it")
ALLOCATED = Discard("allocator", "it asked the GPU's driver for memory")
# What may last, as with a power brake or full memory. Once the budget is spent, and as many samples
# are lost to it as would do, they count, and say so: the times of such a GPU are worth a row.
LASTING: tuple[DiscardCode, ...] = ("gpu", ALLOCATED.code)


@dataclass
class Measurement:
    """Targets that are warmed up, then timed round by round until the rule ends each.

    A target that raises keeps its exception in `error` and leaves; the others go on.
    `before_sample(name, stage)` and `after_sample(name)` are called around each warm-up and sample,
    outside of what is timed; what the latter raises ends the target, too. `finished(name)` is
    called when a target has left, between two rounds. In a `race` it decides in place of the rule.
    """

    targets: dict[str, Target]
    clock: Clock
    rule: StoppingRule
    watch: Watch = field(default_factory=Watch)
    before_sample: Callable[[str, str], None] = lambda name, stage: None
    after_sample: Callable[[str], None] = lambda name: None
    finished: Callable[[str], None] = lambda name: None
    race: Race | None = None

    def run(self, seed: int) -> None:
        """Measure; the seed is that of the order within the rounds."""
        order = random.Random(seed)
        self.running = dict(self.targets)
        for name in self.targets:
            self._attempt(name, "warm-up", partial(warm_up, clock=self.clock, rule=self.rule))
        # The least time asked for is divided into windows of samples, on a host: the longer, the
        # likelier that bursts of other work leave one alone. What is asked for and what warming
        # up found decide it, and nothing that is timed.
        window_us = self.rule.min_time_s * 1e6 / self.rule.min_samples
        for target in self.running.values() if self.clock.timer == "host" else ():
            target.sample_us = min(SAMPLE_US, window_us)
            if target.planned_us:
                target.window = max(1, round(window_us / (target.planned_us * target.batches)))
        for number in itertools.count():
            names = list(self.running)
            if not names:
                return
            order.shuffle(names)
            with collector_off():
                self._round(number, names)
            whole = {name: of for name, of in self.running.items() if of.part_of is None}
            decided = self.race.leaving(whole, self.rule.min_samples) if self.race else {}
            for name in whole:
                self.running[name].decided = decided.get(name)
                if name in decided or self._done(self.running[name]):
                    self._leave(name)

    def _round(self, number: int, names: list[str]) -> None:
        """One sample of each; then one more of those whose sample was disturbed."""
        before, again = self.watch.mark(), []
        begin = {name: len(self.running[name].samples) for name in names}
        readings: list[Any] = []
        for position, name in enumerate(names):
            self._take_sample(name, (number, position), readings)
            if name in self.running and self.running[name].samples[-1].discarded:
                again.append(name)
        for position, name in enumerate(again, start=len(names)):
            if name in self.running:
                self._take_sample(name, (number, position), readings)
        targets = [self.targets[name] for name in names]
        planned_us = sum(target.planned_us * target.batches for target in targets)
        why = self.watch.lost_by_round(before, planned_us, readings)
        if why is None:
            return
        # A GPU that slowed itself for heat slows what follows, too: it may cool within the budget.
        if why.code != "gpu":  # what processor time is known of has none of it
            names = [name for name in names if not self.targets[name].knows_cpu]
        retake = why.code == "gpu" or all(self._may_retake(self.targets[name]) for name in names)
        for name in names:
            if retake:
                self.targets[name].discard(begin[name], why)
            else:
                self.targets[name].kept_disturbed += 1

    def _may_retake(self, target: Target) -> bool:
        """Not once too many were, and within the budget: a slow call has no time for another."""
        kept = len(target.times_us)
        few = len(target.samples) - kept < RETAKE_SHARE * kept + RETAKE_MORE
        return few and target.spent_s < self.rule.max_time_s

    def _take_sample(self, name: str, place: tuple[int, int], readings: list[Any]) -> None:
        self._attempt(name, "samples", partial(self._sample, place=place))
        if reading := self.watch.read():
            readings.append(reading)
            self.targets[name].readings.append(reading)

    def _attempt(self, name: str, stage: str, step: Callable[[Target], None]) -> None:
        if name not in self.running:  # the whole, and so its part, has left in this round
            return
        self.before_sample(name, stage)
        target = self.running[name]
        try:
            try:
                with torch.set_grad_enabled(target.grad):
                    step(target)
            finally:
                self.after_sample(name)
        except Exception as err:  # whatever it raises costs this target alone
            # Without its traceback, whose frames would keep the failed call's buffers alive.
            target.error = err.with_traceback(None)
            err.__context__ = None
            self._leave(name)

    def _sample(self, target: Target, *, place: tuple[int, int]) -> None:
        """Time some batches; the fastest stands for the sample, the others' times stay with it."""
        begin, cpu, compiled = time.perf_counter(), time.process_time(), compile_activity()
        all_us, all_calls = 0.0, 0
        # Nor is an allocation timed of what has been given back to the driver meanwhile.
        if target.allocates or (self.clock.l2 == "warm" and target.each_us < REWARM_BELOW_US):
            target.call()
            # It counts among all calls alone: periodic work must not hide in it.
            rewarm_s = min(time.perf_counter() - begin, time.process_time() - cpu)
            all_us, all_calls = max(0.0, 1e6 * rewarm_s), int(rewarm_s > 0)
        allocated = self._driver_allocations()
        batches: list[Batch] = []
        disturbed, probes, faults = [], [self._probe()], page_faults()
        for number in range(target.batches):
            if number == target.batches // 2:  # by now the pools of other targets wait asleep
                worked_ns = self.watch.worked_ns()
            switches = self.watch.interruptions()
            batches.append(self.clock.batch(target.call, target.calls))
            disturbed.append(self.watch.interruptions() - switches)
            probes.append(self._probe())
        target.page_faults += page_faults() - faults
        target.at_work.append(at_work(worked_ns, self.watch.worked_ns()))
        target.probes_us += [us for us in probes if us]
        target.spent_s += max(0.0, time.perf_counter() - begin)
        target.cpu_s += time.process_time() - cpu
        target.interrupted += sum(disturbed)
        if probes[-1] and (calm_us := self.watch.calm_probe()):
            target.slowed_by.append(probes[-1] / calm_us)
        # Processor time tells what others took from each batch: none has to be taken again.
        known = any(batch.cpu_us is not None for batch in batches)
        why = None if known else self._lost(target, disturbed)
        if self._driver_allocations() != allocated:
            why, target.allocates = ALLOCATED, True
        if compile_activity() != compiled:
            why = COMPILED
        best, units = fastest(batches), target.units
        around = [us for us in probes[batches.index(best) :][:2] if us]
        for batch, ends in zip(batches, pairwise(probes), strict=True):
            low_us, high_us = sorted(us or 0.0 for us in ends)
            one_speed = 0 < high_us <= FULL_SPEED * low_us
            if one_speed and batch.time_us > 0 and not batch.disturbed:
                target.at_speeds.append(((low_us + high_us) / 2, batch.time_us))
        timed: dict[str, Any] = {
            name: value / units if value and name.endswith("_us") else value
            for name, value in structs.asdict(best).items()
        }
        if best.time_us <= 0:
            why = STEPPED_BACK
        target.samples.append(
            Sample(
                round=place[0],
                position=place[1],
                calls=target.calls,
                **timed,
                discarded=why and why.reason,
                discard_code=why and why.code,
                blocks_us=tuple(b.time_us / units for b in batches if b.time_us > 0)
                if len(batches) > 1
                else (),
                probe_us=sum(around) / len(around) if around else None,
            )
        )
        # Of processor time others take nothing: what is uneven in it is the call's own.
        if why is None and all(b.cpu_us is not None and b.time_us > 0 for b in batches):
            all_us += target.calls * sum(batch.own_us for batch in batches)
            all_calls += target.calls * len(batches)
            known_us = [us for us in probes if us]
            loop_us = sum(known_us) / len(known_us) if known_us else 0.0
            target.all_calls.append(Calls(place[0], all_us / units, all_calls, loop_us))
        if why == STEPPED_BACK:
            codes = [sample.discard_code for sample in target.samples]
            if (backward := codes.count(why.code)) >= MOST_IN_VAIN and 2 * backward > len(codes):
                raise UnmeasurableError(f"{why.reason} in {backward} of {len(codes)} samples")

    def _probe(self) -> float | None:
        return self.watch.probe() if self.clock.timer == "host" else None

    def _driver_allocations(self) -> int:
        # What a graph works in was allocated when it was captured.
        return self.watch.driver_allocations() if self.clock.timer == "events" else 0

    def _lost(self, target: Target, disturbed: list[int]) -> Discard | None:
        """Why a sample is to be taken again: not one of its batches was left alone."""
        if self.clock.timer != "host":
            return None  # a CudaClock leaves out the calls in question; see there
        reasons = [self.watch.lost_to_others(n, target.planned_us) for n in disturbed]
        if None in reasons:
            return None
        if self._may_retake(target):
            return reasons[0]
        target.kept_disturbed += 1
        return None

    def _done(self, target: Target) -> bool:
        """The rule decides; but nothing waits for ever for samples that count."""
        if self.rule.done(target.fastest_us, target.spent_s):
            calls = target.calls * target.batches * len(target.samples)
            each_us = [of.cpu_us / of.calls for of in target.all_calls]
            slow = sum(us > TWICE * min(each_us) for us in each_us)
            seldom = slow * SELDOM < len(each_us) or not slow
            enough = calls >= SETTLED_CALLS and (seldom or slow >= SLOW_SAMPLES)
            return enough or self.rule.out_of_patience(target.spent_s)
        if target.spent_s < self.rule.max_time_s:
            return False
        codes = [sample.discard_code for sample in target.samples]
        if (last := codes[-1]) in LASTING:
            enough = codes.count(last) >= self.rule.min_samples
            if enough or self.rule.out_of_patience(target.spent_s):
                target.readmit(last)
        times, why = target.times_us, [s.discarded for s in target.samples if s.discarded]
        in_vain = len(times) < FEWEST and len(why) >= MOST_IN_VAIN
        if in_vain and self.rule.out_of_patience(target.spent_s):
            count = f"{len(times)} of {len(target.samples)} samples"
            target.error = UnmeasurableError(f"{count} count in all the time there was: {why[-1]}")
            return True
        return self.rule.done(target.fastest_us, target.spent_s)

    def _leave(self, name: str) -> None:
        target = self.running.pop(name)
        self.clock.release(target.call)
        target.call = lambda: None  # what the callable holds on to is free for the others
        for part in [part for part, of in self.running.items() if of.part_of is target]:
            self._leave(part)
        self.finished(name)


def fastest(batches: list[Batch]) -> Batch:
    """The batch that stands for its sample: the fastest of those that were left alone.

    Where other work took part of each, the least processor time that does not stand alone: a clock
    that stood still for part of a batch looks just so. One without a time comes last.
    """
    timed = [batch for batch in batches if batch.time_us > 0] or batches
    alone = [batch for batch in timed if batch.cpu_us is not None and not batch.disturbed]
    if alone or all(batch.cpu_us is None for batch in timed):
        return min(alone or timed, key=lambda batch: batch.time_us)
    return robust_least(timed, key=lambda batch: batch.own_us)
