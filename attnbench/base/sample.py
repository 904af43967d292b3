"""One timed observation."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A turn: blocks of `calls` calls, in interleaving round `round`, at `position` within it.

    A turn on CPU has up to twenty blocks, whose times are `blocks_us`; the fastest is `time_us`,
    since other work on the machine only ever adds. On CUDA it is one block, and `blocks_us` empty.

    Times are microseconds per call, or per unit of work where a call does several (per token for
    decode). `time_us` is host time on CPU and stream time on CUDA; `e2e_us` is host time from a
    call until its result is there; `enqueue_us`, on CUDA alone, is host time to issue a call.
    `sm_mhz` is the GPU's clock right after the block. `process` numbers the fresh processes of
    a cell. `discarded` says why the sample does not count, None for the others: it is kept, not
    dropped.
    """

    round: int
    position: int
    calls: int
    time_us: float
    e2e_us: float
    enqueue_us: float | None = None
    sm_mhz: float | None = None
    process: int = 0
    discarded: str | None = None
    blocks_us: tuple[float, ...] = ()
