"""A race: of targets that are timed together, those leave whose comparison is decided."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from attnbench.base.stats import CLOSE, PROCESS_MARGIN, median, sequence_rank
from attnbench.measure.sampling import Target

KNOWN = 1.05  # half the width, as a ratio, down to which one that is kept is timed on


@dataclass(kw_only=True)
class Race:
    """Which targets to time no further: their ratio to the fastest is decided.

    An interval for a fixed number of rounds, looked at after every round, would err in a third of
    all long races; so it is one of `sequence_rank`. What two processes of the same code differ by
    is added to it. Names have two words: targets with the same first word are compared with each
    other, and one without a rival stays as long as others do. Those whose second word is in `kept`
    leave only once their ratio is known well. No round begins that would end later than `timing_s`
    after `began`, unless too few were timed for an interval; none that would end after `limit_s`.
    """

    timing_s: float
    limit_s: float
    kept: Collection[str] = ()
    call_limit_s: float = math.inf  # after which a call that has not returned is hopeless
    began: float = field(default_factory=time.perf_counter)

    @property
    def elapsed_s(self) -> float:
        """Seconds since it began."""
        return time.perf_counter() - self.began

    @property
    def left_s(self) -> float:
        """Seconds until all is over, at least 0."""
        return max(0.0, self.limit_s - self.elapsed_s)

    def leaving(self, running: Mapping[str, Target], least: int) -> dict[str, tuple[str, float]]:
        """Those to time no further: who is faster, and how many times; themselves and 1 if level.

        `least` is how many samples an interval takes.
        """
        after_next_s = (
            self.elapsed_s + sum(x.wall_us * x.calls * x.batches for x in running.values()) / 1e6
        )
        rivals: dict[str, list[str]] = {}
        for name in running:
            rivals.setdefault(name.partition(" ")[0], []).append(name)
        found: dict[str, tuple[str, float]] = {}
        for names in rivals.values():
            leader = min(names, key=lambda name: median(running[name].times_us or [float("inf")]))
            for name in set(names) - {leader}:
                if ratio := self._decided(name, running[name], running[leader]):
                    found[name] = (leader, ratio) if ratio > 1 else (name, 1.0)
        rest = [name for name in running if name not in found]
        if after_next_s > self.timing_s or all(
            len([n for n in names if n in rest]) < 2 for names in rivals.values()
        ):
            fewest = 1 if after_next_s > self.limit_s else least
            found |= {n: (n, 1.0) for n in rest if len(running[n].times_us) >= fewest}
        return found

    def _decided(self, name: str, target: Target, leader: Target) -> float:
        """How many times the leader's time it takes; 1 if they are level, 0 while that is open."""
        mine, theirs = (
            {sample.round: sample.own_us for sample in each.samples if sample.discarded is None}
            for each in (target, leader)
        )
        ratios = sorted(us / theirs[place] for place, us in mine.items() if place in theirs)
        if (rank := sequence_rank(len(ratios))) is None:
            return 0.0
        low, high = ratios[rank - 1] / PROCESS_MARGIN, ratios[-rank] * PROCESS_MARGIN
        if low > 1:
            wide = name.partition(" ")[2] in self.kept and high / low > KNOWN**2 * PROCESS_MARGIN**2
            return 0.0 if wide else median(ratios)
        return float(high < CLOSE and low > 1 / CLOSE)
