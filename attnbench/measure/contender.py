"""Who takes part in a race: a callable, and what was observed of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from attnbench.base.sample import Sample
from attnbench.base.stats import fastest_of_windows
from attnbench.measure.watch import Conditions

# A turn on CPU lasts this long at most, a few slices of a scheduler, so that some of its blocks are
# likely to be left alone; where little time is asked for, as long as leaves the fewest samples.
TURN_US = 20_000.0
MOST_BLOCKS = 20
# Turns and rounds that do not count: at most this share of those that do, and a few more. What is
# disturbed beyond that is kept, and said.
REDO_SHARE = 0.5
REDO_MORE = 2


@dataclass(kw_only=True)
class Contender:
    """A callable in the race: what it does, how it is called, and what was observed of it.

    `last_call_s` is how long a call took that has just been made elsewhere, 0 if none was.
    `each_us` is the time of a call and `wall_us` that of all that goes with it (flushing, say),
    both from warming up: what they say decides about turns, never what was timed since. A turn
    lasts about `turn_us`; `window` is the number of turns of which the fastest counts. `spent_s`
    and `cpu_s` are the wall and the processor time of all turns.
    """

    call: Callable[[], Any]
    grad: bool = False
    units: int = 1
    last_call_s: float = 0.0
    calls: int = 1
    each_us: float = 0.0
    wall_us: float = 0.0
    turn_us: float = TURN_US
    window: int = 1
    samples: list[Sample] = field(default_factory=list)
    conditions: Conditions = field(default_factory=Conditions)
    warm_s: float = 0.0
    compile_s: float = 0.0
    spent_s: float = 0.0
    cpu_s: float = 0.0
    error: Exception | None = None

    @property
    def times_us(self) -> list[float]:
        """Microseconds per unit of the samples that count, in the order of the rounds."""
        return [sample.time_us for sample in self.samples if sample.discarded is None]

    @property
    def planned_us(self) -> float:
        """How long a block should take with all that goes with it."""
        return self.calls * self.wall_us

    @property
    def blocks(self) -> int:
        """Blocks in a turn on CPU."""
        if not self.wall_us:
            return 1
        return max(1, min(MOST_BLOCKS, round(self.turn_us / self.planned_us)))

    @property
    def fastest_us(self) -> list[float]:
        """What the reported time is the median of: the fastest turn of each window."""
        return fastest_of_windows(self.times_us, self.window)

    def may_redo(self) -> bool:
        """False once too many samples were discarded: the next ones are kept whatever happens."""
        kept = len(self.times_us)
        return len(self.samples) - kept < REDO_SHARE * kept + REDO_MORE

    def discard(self, first: int, reason: str) -> None:
        """Mark the samples from number `first` on; those marked already keep their reason."""
        for index in range(first, len(self.samples)):
            if self.samples[index].discarded is None:
                self.samples[index] = replace(self.samples[index], discarded=reason)
