"""One timed observation."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A block of `calls` calls, in interleaving round `round`, at `position` within the round.

    Times are microseconds per call, or per unit of work where a call does several (per token for
    decode). `time_us` is host time on CPU and stream time on CUDA; `e2e_us` is host time from the
    block's first call until every result is there.
    """

    round: int
    position: int
    calls: int
    time_us: float
    e2e_us: float
