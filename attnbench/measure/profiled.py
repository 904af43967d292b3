"""One profiled call: the peak of the memory it allocates, what it keeps, and the ops that ran."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

# Ops that move no data: they allocate, or describe the same memory with other strides.
_BOOKKEEPING = frozenset(
    "aten::" + name
    for name in """
    empty empty_like empty_strided new_empty new_empty_strided as_strided view _reshape_alias
    reshape transpose t expand expand_as permute unsqueeze squeeze slice select narrow detach
    alias _unsafe_view resolve_conj resolve_neg unflatten flatten chunk split unbind contiguous
    to lift_fresh set_ resize_ result_type view_as movedim is_nonzero item _local_scalar_dense
    mT promote_types matmul linear softmax broadcast_tensors
    """.split()
)
_CONVERSION = {"aten::copy_", "aten::_to_copy"}


@dataclass(frozen=True, kw_only=True)
class Profiled:
    """What one call did. Bytes are as requested, before the allocator rounds them.

    `peak_bytes` is the highest sum of live allocations above the state before the call;
    `kept_bytes` is what is still live when the result has been returned.
    """

    result: Any
    peak_bytes: int
    kept_bytes: int
    kernels: tuple[str, ...]
    kernel_count: int


def profile_call(call: Callable[[], Any], device: str) -> Profiled:
    """Run `call` once under the profiler and report its memory and its kernels.

    On CPU the profiler's memory events cover every allocation torch makes, those inside an op
    too, and repeat exactly. On CUDA the caching allocator's own statistics give the bytes.
    """
    activities = [ProfilerActivity.CPU]
    if device == "cuda":
        activities.append(ProfilerActivity.CUDA)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = _cuda_requested("current")
    with profile(activities=activities, profile_memory=device == "cpu") as session:
        result = call()
        if device == "cuda":
            torch.cuda.synchronize()
    if device == "cuda":
        peak, kept = _cuda_requested("peak") - before, _cuda_requested("current") - before
        kernels = _cuda_kernels(session)
    else:
        tree = session.profiler.kineto_results.experimental_event_tree()  # type: ignore[union-attr]
        peak, kept = _cpu_bytes(tree)
        kernels = [name for root in tree for name in _cpu_kernels(root)]
    return Profiled(
        result=result,
        peak_bytes=peak,
        kept_bytes=kept,
        kernels=tuple(dict.fromkeys(kernels)),
        kernel_count=len(kernels),
    )


def _cuda_requested(which: str) -> int:
    return int(torch.cuda.memory_stats().get(f"requested_bytes.all.{which}", 0))


def _cuda_kernels(session: profile) -> list[str]:
    cuda = torch.autograd.DeviceType.CUDA  # type: ignore[attr-defined]
    events = session.profiler.kineto_results.events()  # type: ignore[union-attr]
    ran = sorted(
        (e.start_ns(), e.name())
        for e in events
        if e.device_type() == cuda and not e.is_user_annotation()
    )
    return [name for _, name in ran if not name.startswith(("Memset", "Memcpy", "Context Sync"))]


def _walk(events: list[Any]) -> Iterator[Any]:
    stack = list(events)
    while stack:
        event = stack.pop()
        yield event
        stack.extend(event.children)


def _cpu_bytes(tree: list[Any]) -> tuple[int, int]:
    changes = sorted(
        (event.start_time_ns, order, event.typed[1].alloc_size)
        for order, event in enumerate(_walk(tree))
        if event.tag.name == "Allocation"
    )
    live = peak = 0
    for _, _, size in changes:
        live += size
        peak = max(peak, live)
    return peak, live


def _cpu_kernels(event: Any) -> list[str]:
    """Names of the innermost ops that do work, in the order in which they ran."""
    inner = [name for child in event.children for name in _cpu_kernels(child)]
    is_op = event.tag.name == "TorchOp" and "::" in event.name
    is_op = is_op and not event.name.startswith("autograd::")
    if not is_op or event.name in _BOOKKEEPING or set(inner) - _CONVERSION:
        return inner
    return [event.name]  # a copy inside, of a Python number say, is part of the op
