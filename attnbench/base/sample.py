"""One timed observation."""

from __future__ import annotations

from typing import Annotated, Literal, NamedTuple

import msgspec

# Above 0 in every sample that counts; a clock that stepped back gives others.
Time = Annotated[float, msgspec.Meta(gt=-(2.0**63), lt=2.0**63)]
# Other work in every batch, time taken by the hypervisor or withheld by a quota, a GPU that slowed
# itself, memory asked of its driver, a compilation, a clock that stepped back.
DiscardCode = Literal["interrupted", "stolen", "throttled", "gpu", "allocator", "compiled", "clock"]


class Discard(NamedTuple):
    """Why a sample does not count: a value for decisions, and a sentence with its figures."""

    code: DiscardCode
    reason: str


# Up to this factor of the fastest probe a core counts as running at its full speed.
FULL_SPEED = 1.1
# A batch that had its core for this share of its time was left alone.
ALONE = 0.98
# Some kernels still choose among variants in their first calls: with those of the check, 16.
SETTLED_CALLS = 12


Count = Annotated[int, msgspec.Meta(ge=0, lt=2**48)]  # sums of them fit into a table


class Batch(msgspec.Struct, frozen=True, kw_only=True, array_like=True, gc=False):
    """Calls timed by one reading of the clock; all times are microseconds per call, as means.

    `time_us` is host time on CPU and stream time on CUDA; `e2e_us` is host time from a call to its
    result, without the flush. `enqueue_us`, on CUDA alone, is the host time to issue one call,
    and `hidden_us` the part of it in which the device was still busy with what stands in front of
    the first event: the rest may be in `time_us`, where the host sets the pace. `cpu_us` is the
    processor time of the calling thread, None where it says nothing of the call: several threads
    compute, or the call waits by itself. `left_out` calls have no part in the means: the host took
    far longer to issue them than the others. A time is negative if the clock behind it stepped
    back: that is for the caller to judge.
    """

    time_us: Time
    e2e_us: Time
    enqueue_us: float | None = None
    hidden_us: float | None = None
    cpu_us: Time | None = None
    left_out: Count = 0

    @property
    def disturbed(self) -> bool:
        """Whether other work had the core for more than 2 % of the time."""
        return self.cpu_us is not None and self.cpu_us < ALONE * self.time_us

    @property
    def own_us(self) -> float:
        """The time without what other work took, in µs: at most that, where it was disturbed.

        Its processor time then; a call that spins until a clock shows some time needs longer.
        """
        return self.cpu_us if self.disturbed and self.cpu_us is not None else self.time_us


class Sample(Batch, frozen=True, kw_only=True, array_like=True, gc=False):
    """Batches of `calls` calls, in interleaving round `round`, at `position` within it.

    On CPU it is up to twenty batches, whose times are `blocks_us`. The fastest of those that other
    work left alone stands for it; where none was, that with the second least processor time. On
    CUDA it is one batch, and `blocks_us` empty. Where a call does several units of work, times are
    per unit: per token for decode.

    `probe_us` is how long a fixed loop took around the batch, on CPU: how fast the core was.
    `process` numbers the fresh processes of a cell. `discarded` says why the sample does not count,
    and `discard_code` is that as a value; None for the others. It is kept, not dropped. One that
    counts for want of better ones says in `kept_despite` what it would have been discarded for.
    `core_us` is the time of the attention alone in the same round, where a layer was timed;
    `mlp_us` and `head_us` that of a model's MLPs beside it, one a layer, and of its head.
    """

    round: Count
    position: Count
    calls: Count
    process: Count = 0
    discarded: str | None = None
    blocks_us: tuple[Time, ...] = ()
    discard_code: DiscardCode | None = None
    probe_us: float | None = None
    kept_despite: DiscardCode | None = None
    core_us: Time | None = None
    mlp_us: Time | None = None
    head_us: Time | None = None
