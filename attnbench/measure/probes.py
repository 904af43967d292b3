"""What one call does besides taking time: memory, kernels, FLOPs, tensors saved for backward."""

from __future__ import annotations

import contextlib
import gc
import re
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.autograd.profiler import profile, record_function  # torch.profiler loads compilers
from torch.utils import flop_counter
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import FlopCounterMode

from attnbench.measure.watch import collector_off

# Ops that move no data: they allocate, or describe the same memory with other strides.
BOOKKEEPING = frozenset(
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
    """What the profiler saw of one call.

    `peak_bytes` is the highest sum of live allocations above the state before the call, as
    requested (None on CUDA: `call_at_peak`; and where torch allocated nothing and ran no kernel:
    its memory is elsewhere), `kept_bytes` the sum at its end. `kernels` are the distinct kernels
    (CUDA) or innermost ops (CPU) that ran, `kernel_count` how many of them with repetitions; where
    the profiler lost some of the kernels both are None. `ops` are all distinct ops by name, the
    composite ones around them too. `device_waits` is how often the host waited for the device (None
    on CPU).
    """

    result: Any
    peak_bytes: int | None = None
    kept_bytes: int | None = 0
    kernels: tuple[str, ...] | None = None
    kernel_count: int | None = None
    ops: tuple[str, ...] = ()
    device_waits: int | None = None


CALL = "attnbench-call"  # the range around each call, in every profiler
# CUPTI from CUDA 12.6 Update 2 to before 13.1 spoils the times of the first kernels of all but the
# first session in a process, more of them in each, and kineto drops those (pytorch #192021).
KERNELS_AHEAD = 512
# As kineto calls what starts kernels (CuptiActivity.cpp, CuptiCbidRegistry.cpp).
_LAUNCHES = ("cudaLaunchKernel", "cudaLaunchCooperativeKernel", "cudaGraphLaunch",
             "cuLaunchKernel", "cuLaunchCooperativeKernel", "cuGraphLaunch")  # fmt: skip
# Waits of the host; torch's blocking copies (`.item()`, `.cpu()`) end in that for the stream.
_WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")


def profile_call(call: Callable[[], Any], device: str) -> Profiled:
    """Run `call` once under the profiler and report its kernels; on CPU its memory, too.

    On CPU the profiler's memory events cover every allocation torch makes, those inside an op too.
    On CUDA nothing should be timed in this process any more: the profiler's library stays attached
    to it, and slows every launch (pytorch #144455).
    """
    if device != "cpu":
        return _profile_on_gpu(call, device)
    with collector_off(), profile(use_kineto=True, profile_memory=True) as session:
        result = call()
    tree = tree_of(session)
    # Of more than a composition of others an overload is registered for CPU itself.
    registered = torch._C._dispatch_get_registrations_for_dispatch_key("CPU")
    own = {name.partition(".")[0] for name in registered}  # aten::mul.Tensor; events say aten::mul
    kernels = [name for root in tree for name in _cpu_kernels(root, own)]
    peak_bytes, kept_bytes = _cpu_bytes(tree)
    return Profiled(
        result=result,
        peak_bytes=peak_bytes if peak_bytes or kernels else None,
        kept_bytes=kept_bytes,
        kernels=tuple(dict.fromkeys(kernels)),
        kernel_count=len(kernels),
        ops=_ops(tree),
    )


def _profile_on_gpu(call: Callable[[], Any], device: str) -> Profiled:
    with collector_off(), profile(use_kineto=True, use_device=device) as session:
        for _ in range(KERNELS_AHEAD):
            torch.cuda._sleep(1)  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
        with record_function(CALL):
            result = call()
        torch.cuda.synchronize()  # behind the mark: it is not the call that waits
    [seen] = gpu_marks(session.kineto_results.events())  # type: ignore[union-attr]
    kernels = None
    if seen.ran is not None:  # copies and fills are no kernels, not even those of a graph
        names = [event.name() for event in seen.ran]
        kernels = [name for name in names if not name.startswith(("Memset", "Memcpy"))]
    return Profiled(
        result=result,
        peak_bytes=None,
        kernels=None if kernels is None else tuple(dict.fromkeys(kernels)),
        kernel_count=None if kernels is None else len(kernels),
        ops=_ops(tree_of(session)),
        device_waits=sum(event.name().startswith(_WAITS) for event in seen.asked.values()),
    )


def call_at_peak(call: Callable[[], Any]) -> tuple[Any, int | None]:
    """Run `call` once on CUDA; return its result, and how many bytes it had allocated at once.

    As requested, before the caching allocator rounds them: its own statistics say so. None where
    an allocator keeps none (cudaMallocAsync, or no caching).
    """
    return _on_cuda(call, "peak")


def _on_cuda(call: Callable[[], Any], of: str) -> tuple[Any, int | None]:
    """The result of a call, and the `peak` or `current` bytes it has allocated."""
    make_matmul_workspaces()
    with collector_off():
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = _cuda_requested("current")
        result = call()
        torch.cuda.synchronize()
        after = _cuda_requested(of)  # 0 while inputs are alive: nobody counts
        return result, after - before if after else None


def call_kept(call: Callable[[], Any], device: str) -> Profiled:
    """As `profile_call`, on CUDA without kernels, with the bytes that are still live afterwards.

    For a first call, which may leave behind what no later one allocates. What only dead cycles
    hold is not kept: the youngest objects are collected before the bytes are read.
    """
    gc.collect(0)  # cycles from before must not be taken off this call's bytes

    def call_and_collect() -> Any:
        result = call()
        gc.collect(0)
        return result

    if device == "cuda":
        result, kept_bytes = _on_cuda(call_and_collect, "current")
        return Profiled(result=result, kept_bytes=kept_bytes)
    return profile_call(call_and_collect, device)


def make_matmul_workspaces(device: str = "cuda") -> None:
    """Multiply something small in every way, so that the libraries' workspaces exist.

    cuBLAS and cuBLASLt take theirs (32 MiB on recent GPUs) from the caching allocator when a
    thread first multiplies on a stream, and keep them: whoever came first would be charged. The
    backward pass multiplies in a thread of its own, hence the gradients; `addmm` goes to cuBLASLt.
    """
    for dtype in (torch.float32, torch.float16):
        with torch.enable_grad():
            a = torch.ones(16, 16, device=device, dtype=dtype, requires_grad=True)
            batch, bias = a.expand(2, 16, 16), torch.ones(16, device=device, dtype=dtype)
            product = torch.addmm(bias, a @ a, a) + torch.bmm(batch, batch).sum(0)
            torch.autograd.grad(product.sum(), a)


def _cuda_requested(which: str) -> int:
    return int(torch.cuda.memory_stats().get(f"requested_bytes.all.{which}", 0))


def tree_of(session: profile) -> list[Any]:
    """The events of a closed session that no other encloses; the others are their children."""
    tree: list[Any] = session.kineto_results.experimental_event_tree()  # type: ignore[union-attr]
    return tree


def walk(events: list[Any]) -> Iterator[Any]:
    """Every event of a tree, in no order."""
    stack = list(events)
    while stack:
        event = stack.pop()
        yield event
        stack.extend(event.children)


def own_changes(seen: Iterable[tuple[Any, str | None]]) -> Iterator[tuple[int, int, str | None]]:
    """Allocations and, with bytes below 0, frees in order of time: its ns, the bytes, the op.

    From events of memory, each with its op. What was there before may be freed in a session; torch
    then reports the size of whatever it last saw at that address, in a session long past. Such a
    report is passed over.
    """
    live: dict[int, int] = {}
    for event, op in sorted(seen, key=lambda found: found[0].start_time_ns):
        at_ns, address, size = event.start_time_ns, event.typed[1].ptr, event.typed[1].alloc_size
        if size > 0:
            live[address] = size
            yield at_ns, size, op
        elif address in live:
            yield at_ns, -live.pop(address), op


def is_op(event: Any) -> bool:
    """Of the events that torch records as ops, those of the dispatcher: `aten::bmm`."""
    named = event.tag.name == "TorchOp" and "::" in event.name
    return named and not event.name.startswith("autograd::")


def on_gpu(event: Any) -> bool:
    """Whether an event of kineto is of the device, not of the host."""
    return bool(event.device_type() == torch.autograd.DeviceType.CUDA)  # type: ignore[attr-defined]


class GpuMark(NamedTuple):
    """Of a marked call what the host asked of CUDA, by correlation id, and what of that ran.

    `ran` is in the order of the launches: the time that the device gives may be wrong. None where
    nothing was launched, or the profiler lost a kernel.
    """

    asked: dict[int, Any]
    ran: list[Any] | None


def gpu_marks(events: list[Any]) -> Iterator[GpuMark]:
    """The marked calls of a session on CUDA in order, from kineto's events.

    What runs has the correlation id of its launch, which lies in the mark of its call.
    """
    host = [event for event in events if not on_gpu(event)]
    # The ids of annotations are torch's own.
    device = [event for event in events if on_gpu(event) and not event.is_user_annotation()]
    for mark in sorted((e for e in host if e.name() == CALL), key=lambda e: e.start_ns()):
        begin, end = mark.start_ns(), mark.end_ns()
        inside = (e for e in host if e.name().startswith("cu") and begin <= e.start_ns() <= end)
        asked = {event.correlation_id(): event for event in inside}
        launched = {i for i, event in asked.items() if event.name().startswith(_LAUNCHES)}
        ran = [event for event in device if event.correlation_id() in asked]
        ran.sort(key=lambda e: (asked[e.correlation_id()].start_ns(), e.start_ns()))
        lost = launched - {event.correlation_id() for event in ran}
        yield GpuMark(asked, ran if launched and not lost else None)


def _cpu_bytes(tree: list[Any]) -> tuple[int, int]:
    """Highest and last sum of what was allocated in the session and is not freed yet."""
    live = peak = 0
    for _, size, _ in own_changes((x, None) for x in walk(tree) if x.tag.name == "Allocation"):
        live += size
        peak = max(peak, live)
    return peak, live


def sdpa_shapes(call: Callable[[], Any]) -> str | None:
    """Run `call` once; the shapes that each backend of SDPA was called with, None without one.

    In a profile of its own: the profiler then holds tensors, which would change their memory.
    """
    with collector_off(), profile(use_kineto=True, record_shapes=True) as session:
        call()
    shapes = [
        [getattr(each, "sizes", None) for each in event.typed[1].inputs]
        for event in walk(tree_of(session))
        if event.name.startswith("aten::_scaled_dot_product_")
    ]
    return str(shapes) if shapes else None


def _ops(tree: list[Any]) -> tuple[str, ...]:
    return tuple(sorted({event.name for event in walk(tree) if is_op(event)}))


def _cpu_kernels(event: Any, own: set[str]) -> list[str]:
    """Names of the ops that do work, in the order in which they began.

    These are the innermost ones, and around those the ops with a kernel of their `own`: a fused
    backward pass, say, that begins by clearing its gradients with another op.
    """
    inner = [name for child in event.children for name in _cpu_kernels(child, own)]
    if not is_op(event) or event.name in BOOKKEEPING:
        return inner
    if not set(inner) - _CONVERSION:
        return [event.name]  # a copy inside, of a Python number say, is part of the op
    # An op may call another overload of itself: that is one op.
    return [event.name, *inner] if event.name in own - set(inner) else inner


@contextlib.contextmanager
def sparing_compilers(mode: Any) -> Iterator[None]:
    """Let a dispatch mode work without torch's compilers, unless somebody has loaded them.

    Torch imports them when a mode is first called, 1.7 s, to exclude its code from compilation.
    """
    function = getattr(mode.__torch_dispatch__, "__wrapped__", None)
    if function is None or "torch._dynamo" in sys.modules:
        yield
        return
    function.__dynamo_disable = function  # torch's own name for what it has found out
    try:
        yield
    finally:
        del function.__dynamo_disable


FlopsSource = Literal["dispatched", "formula"]
OpFormula = Callable[..., int]

_MATMULS = frozenset(("mm", "addmm", "bmm", "baddbmm", "baddbmm_", "addmm_", "_scaled_mm"))


def count_flops(
    call: Callable[[], Any], formulas: Mapping[str, OpFormula]
) -> tuple[int | None, FlopsSource | None]:
    """Run `call` once and return (FLOPs, source); (None, None) where nothing was seen.

    `formulas` prices opaque aten ops by name from the shapes of their arguments: torch counts 0
    for ops it has no formula for. The source is `dispatched` where only matmuls were counted
    and `formula` as soon as one opaque op was priced.
    """
    counter = FlopCounterMode(display=False, custom_mapping=by_op(formulas))
    with sparing_compilers(getattr(flop_counter, "_FlopCounterMode", FlopCounterMode)), counter:
        call()
    counts = {
        str(op): flops for op, flops in counter.get_flop_counts().get("Global", {}).items() if flops
    }
    if not counts:
        return None, None
    dispatched = all(name.removeprefix("aten.") in _MATMULS for name in counts)
    return sum(counts.values()), "dispatched" if dispatched else "formula"


def by_op(formulas: Mapping[str, OpFormula]) -> dict[Any, OpFormula]:
    """Formulas by aten op, of those that this torch has; with ours of ops in place."""
    return {
        getattr(torch.ops.aten, name): _knowing_causal(getattr(torch.ops.aten, name), formula)
        for name, formula in (IN_PLACE | dict(formulas)).items()
        if hasattr(torch.ops.aten, name)
    }


def _knowing_causal(op: Any, formula: OpFormula) -> OpFormula:
    """The formula with `is_causal` by keyword, which each op has in another position."""
    names = [argument.name for argument in op.default._schema.arguments]

    def flops(*shapes: Any, **given: Any) -> int:
        causal = (dict(zip(names, shapes, strict=False)) | given).get("is_causal") is True
        return formula(*shapes, **given | {"is_causal": causal})

    return flops


def _in_place(self_shape: Any, a_shape: Any, b_shape: Any, **_: Any) -> int:
    """Multiply-adds of self += a @ b, where torch only knows the out-of-place op."""
    batch = a_shape[0] if len(a_shape) == 3 else 1
    return int(2 * batch * a_shape[-2] * a_shape[-1] * b_shape[-1])


IN_PLACE: dict[str, OpFormula] = {"baddbmm_": _in_place, "addmm_": _in_place}


class _Dispatched(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ops: list[str] = []
        self.written: set[int] = set()  # where the results of ops are that computed something

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.is_view:
            self.ops.append(f"{func} {tree_map(_argument, (args, kwargs))}")
        if not func.is_view and not re.search(r"empty|new_|_like", str(func)):
            self.written |= {address(x) for x in tree_leaves(result) if isinstance(x, torch.Tensor)}
        return result


def _argument(x: Any) -> Any:
    return (*x.shape, *x.stride(), x.dtype) if isinstance(x, torch.Tensor) else x


def dispatched_ops(call: Callable[[], Any]) -> tuple[str, ...]:
    """Run `call` once; the ops it dispatches, in order, each with its arguments.

    Of tensors shape, strides and dtype. Views are left out: they move no data. Nothing where a
    result was computed by no op, but by a kernel that torch does not see.
    """
    with sparing_compilers(_Dispatched), _Dispatched() as mode:
        result = call()
    results = {address(x) for x in tree_leaves(result) if isinstance(x, torch.Tensor)}
    return tuple(mode.ops) if results <= mode.written else ()


class Saved(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Bytes of distinct storages that autograd saved between a forward and its backward pass.

    Counted when the backward pass first asks for one of them, or at the end. Only storages made
    while watching count: inputs and what was prepared are alive anyway. What a function keeps by
    other means than `save_for_backward` is not seen.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes: int | None = None
        self._made: set[int] = set()  # addresses; one of a storage that lived before is never here
        self._packed: list[weakref.ref[torch.Tensor]] = []

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Take note of the storages that an op has made: those that it was not given."""
        result = func(*args, **(kwargs or {}))
        given, now = (
            {address(x) for x in tree_leaves(tree) if isinstance(x, torch.Tensor)}
            for tree in ((args, kwargs), result)
        )
        self._made |= now - given
        return result

    def pack(self, x: torch.Tensor) -> torch.Tensor:
        """Autograd saves `x`; what a backward pass saves for itself no longer counts."""
        held = x.detach()  # an output itself would hold the graph that holds it
        if self.bytes is None:
            # Weak: a graph that is dropped on the way forward saves nothing in the end.
            self._packed.append(weakref.ref(held))
        return held

    def unpack(self, x: torch.Tensor) -> torch.Tensor:
        """Autograd asks for `x`: the backward pass has begun."""
        self.count()
        return x

    def count(self) -> None:
        """Fix the number of bytes, unless it is fixed already."""
        if self.bytes is not None:
            return
        alive = [x for x in (packed() for packed in self._packed) if x is not None]
        sizes = {address(x): x.untyped_storage().nbytes() for x in alive}
        self.bytes = sum(size for at, size in sizes.items() if at in self._made)


@contextlib.contextmanager
def watch_saved() -> Iterator[Saved]:
    """Watch one forward pass, and its backward pass where that follows; `bytes` is set at exit.

    A graph made while watching goes on calling back into Python: make another to be timed.
    """
    saved = Saved()
    with sparing_compilers(Saved), saved_tensors_hooks(saved.pack, saved.unpack), saved:
        yield saved
        saved.count()


def address(x: torch.Tensor) -> int:
    """Where the storage of a tensor lies: the same for all views of it."""
    return x.untyped_storage().data_ptr()
