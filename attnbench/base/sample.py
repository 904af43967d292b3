"""One timed observation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple

import msgspec

# Above 0 in every sample that counts; a clock that stepped back gives others.
Time = Annotated[float, msgspec.Meta(gt=-(2.0**63), lt=2.0**63)]
# Other work in every batch, time taken by the hypervisor or withheld by a quota, a GPU that slowed
# itself, a compilation, a clock that stepped back; "other" is of old records alone.
DiscardCode = Literal["interrupted", "stolen", "throttled", "gpu", "compiled", "clock", "other"]


class Discard(NamedTuple):
    """Why a sample does not count: a value for decisions, and a sentence with its figures."""

    code: DiscardCode
    reason: str


@dataclass(frozen=True, kw_only=True)
class Sample:
    """Batches of `calls` calls, in interleaving round `round`, at `position` within it.

    On CPU it is up to twenty batches, whose times are `blocks_us`; the fastest is `time_us`,
    since other work on the machine only ever adds. On CUDA it is one batch, and `blocks_us` empty.

    Times are microseconds per call, or per unit of work where a call does several (per token for
    decode). `time_us` is host time on CPU and stream time on CUDA; `e2e_us` is host time from a
    call until its result is there; `enqueue_us`, on CUDA alone, is host time to issue a call.
    `process` numbers the fresh processes of a cell. `discarded` says why the sample does not count,
    and `discard_code` is that as a value; None for the others. It is kept, not dropped.
    """

    round: int
    position: int
    calls: int
    time_us: Time
    e2e_us: Time
    enqueue_us: float | None = None
    process: int = 0
    discarded: str | None = None
    blocks_us: tuple[Time, ...] = ()
    discard_code: DiscardCode | None = None
