"""The kernel behind SmClock; importing this needs triton, which comes with torch for CUDA."""

import torch
import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]

_SPIN_NS = 20_000
_GIVE_UP_CYCLES = 20_000_000  # about 10 ms: a timer that stands still must not hang the device


@triton.jit  # type: ignore[untyped-decorator, misc, unused-ignore]
def _cycles():  # type: ignore[no-untyped-def]
    return tl.inline_asm_elementwise(
        "mov.u64 $0, %clock64;", "=l", [], dtype=tl.int64, is_pure=False, pack=1
    )


@triton.jit  # type: ignore[untyped-decorator, misc, unused-ignore]
def _nanoseconds():  # type: ignore[no-untyped-def]
    return tl.inline_asm_elementwise(
        "mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1
    )


@triton.jit  # type: ignore[untyped-decorator, misc, unused-ignore]
def _spin(  # type: ignore[no-untyped-def]
    counters, SPIN_NS: tl.constexpr, GIVE_UP_CYCLES: tl.constexpr
):
    # The global timer moves in steps of up to a microsecond: begin and end on such a step.
    entered_cycles = _cycles()
    entered_ns = _nanoseconds()
    begin_ns = entered_ns
    begin_cycles = entered_cycles
    while (begin_ns == entered_ns) & (begin_cycles - entered_cycles < GIVE_UP_CYCLES):
        begin_ns = _nanoseconds()
        begin_cycles = _cycles()
    end_ns = begin_ns
    end_cycles = begin_cycles
    while (end_ns - begin_ns < SPIN_NS) & (end_cycles - begin_cycles < GIVE_UP_CYCLES):
        end_ns = _nanoseconds()
        end_cycles = _cycles()
    tl.store(counters, end_cycles - begin_cycles)
    tl.store(counters + 1, end_ns - begin_ns)


def launch(counters: torch.Tensor) -> None:
    """Enqueue a spin of 20 us that writes its (cycles, nanoseconds) to `counters`, int64 [2]."""
    _spin[(1,)](counters, SPIN_NS=_SPIN_NS, GIVE_UP_CYCLES=_GIVE_UP_CYCLES, num_warps=1)
