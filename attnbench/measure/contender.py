"""Who takes part in a race: a callable, and what was observed of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from attnbench.measure.watch import Conditions
from attnbench.sample import Sample

# Turns and rounds that do not count: at most this share of those that do, and a few more. What is
# disturbed beyond that is kept, and said.
REDO_SHARE = 0.5
REDO_MORE = 2


@dataclass(kw_only=True)
class Contender:
    """A callable in the race: what it does, how it is called, and what was observed of it.

    `last_call_s` is how long a call took that has just been made elsewhere, 0 if none was.
    """

    call: Callable[[], Any]
    grad: bool = False
    units: int = 1
    last_call_s: float = 0.0
    calls: int = 1
    each_us: float = 0.0
    samples: list[Sample] = field(default_factory=list)
    conditions: Conditions = field(default_factory=Conditions)
    warm_s: float = 0.0
    compile_s: float = 0.0
    spent_s: float = 0.0
    error: Exception | None = None

    @property
    def times_us(self) -> list[float]:
        """Microseconds per unit of the samples that count, in the order of the rounds."""
        return [sample.time_us for sample in self.samples if sample.discarded is None]

    @property
    def planned_us(self) -> float:
        """How long a block should take, known from warming up."""
        return self.calls * self.each_us

    def may_redo(self) -> bool:
        """False once too many samples were discarded: the next ones are kept whatever happens."""
        kept = len(self.times_us)
        return len(self.samples) - kept < REDO_SHARE * kept + REDO_MORE
