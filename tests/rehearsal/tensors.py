"""Tensors that say they lie on a GPU: computed on the CPU, charged to a simulated device.

Every op of the dispatcher passes here: views and allocations cost the host a moment, all else is a
kernel, which lasts as long as its FLOPs and its traffic take. Like the real thing it refuses
tensors of two devices in one op, waits where a value is asked for, and runs out of memory.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from tests.rehearsal.device import Device, OutOfMemoryError

CUDA = torch.device("cuda", 0)
# Beyond these an op's result is left as it comes: nothing of a rehearsal looks at it.
MOST_FLOPS, MOST_NUMBERS = 4e10, 1 << 23

_aten = torch.ops.aten
# As SDPA's kernels are called, by backend.
_FUSED = {"flash": "flash_attention", "efficient": "fmha_cutlass", "cudnn": "cudnn_sdpa"}
_NO_KERNEL = ("empty", "detach", "alias", "lift_fresh", "set_", "resize_", "_unsafe_view")
_WAITS = ("_local_scalar_dense", "equal", "is_nonzero", "nonzero", "masked_select", "item")
# Of these indexes may lie on the host; they are copied.
_FROM_HOST = ("copy_", "_to_copy", "index", "index_put", "index_put_", "_index_put_impl_")


class OnGpu(torch.Tensor):
    """A tensor whose numbers lie on the CPU, and which says that they do not."""

    _buffer: tuple[int, int]  # where the storage lies, and the bytes that an op moves

    @staticmethod
    def __new__(cls, plain: torch.Tensor) -> OnGpu:
        return torch.Tensor._make_subclass(cls, plain, plain.requires_grad)

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    device = property(lambda self: CUDA)  # type: ignore[assignment]
    is_cuda = property(lambda self: True)  # type: ignore[assignment]
    is_cpu = property(lambda self: False)  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise AssertionError("no simulated GPU is in place")

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """As torch's; the way to the CPU waits."""
        wanted = next((x for x in (*args, kwargs.get("device")) if _is_device(x)), None)
        if isinstance(wanted, torch.Tensor):
            wanted = wanted.device
        if wanted is None or torch.device(wanted).type == "cuda":
            args = tuple(x for x in args if not _is_device(x) or isinstance(x, torch.Tensor))
            return super().to(*args, **{k: v for k, v in kwargs.items() if k != "device"})
        rest = [x for x in args if isinstance(x, torch.dtype)]
        # `non_blocking` marks the way to the host: C++ says cpu of `to(dtype)`, too.
        return _aten._to_copy(
            self, dtype=rest[0] if rest else self.dtype, device="cpu", non_blocking=True
        )

    def cpu(self, memory_format: Any = None) -> Any:
        """A copy on the host."""
        return self.to("cpu")

    def tolist(self) -> Any:
        """The numbers, once they are there."""
        return self.to("cpu").tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """As torch: not from a GPU."""
        raise TypeError("can't convert cuda:0 device type tensor to numpy.")


def _is_device(x: Any) -> bool:
    return isinstance(x, (str, torch.device, torch.Tensor))


class Dispatch(TorchDispatchMode):
    """Every op of the process, charged to the device where a tensor of it lies there.

    `scale` multiplies each dimension that is not one of `KEPT` in what an op is taken to cost: a
    small case then costs what a large one would.
    """

    def __init__(self, device: Device, *, scale: float = 1.0) -> None:
        super().__init__()
        self.device, self.scale = device, scale
        self.fused: str | None = None  # SDPA's backend, while its op runs
        self.ops: deque[str] = deque(maxlen=4096)
        self._known: tuple[Any, Any, Any] = (None, None, None)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        wanted = kwargs.get("device")
        kind = None if wanted is None else torch.device(wanted).type
        given = list(_tensors((*args, *kwargs.values())))
        here = any(isinstance(x, OnGpu) for x in given)
        name, views = _named(func)
        if name == "_to_copy" and here and not kwargs.get("non_blocking"):
            kind = None
        if name == "zeros" and torch._C._current_autograd_node() is not None:
            kind = "cuda"  # an undefined gradient's, which C++ would make on the CPU
        if kind == "cuda":
            kwargs["device"] = torch.device("cpu")
        if not here and kind != "cuda":
            with no_dispatch():
                return func(*args, **kwargs)
        self._refuse_two_devices(name, given)
        flops = 0.0 if views else _flops(name, given)
        result = self._computed(func, args, kwargs, given, flops)
        if kind is not None and kind != "cuda":  # a copy to the host
            self.device.launch(name, lambda: 1.5, reads=self._buffers(given))
            self.device.synchronize()
            return result
        if isinstance(result, (tuple, list)):
            result = type(result)(self._placed(x, given) for x in result)
        else:
            result = self._placed(result, given)
        self._charge(name, views, given, result, flops)
        return result

    def _refuse_two_devices(self, name: str, given: list[torch.Tensor]) -> None:
        elsewhere = [x for x in given if not isinstance(x, OnGpu) and x.dim() > 0]
        if elsewhere and len(elsewhere) < len(given) and name not in _FROM_HOST:
            raise RuntimeError(
                "Expected all tensors to be on the same device, but found at least two devices,"
                f" cuda:0 and cpu! ({name})"
            )

    def _computed(self, func: Any, args: Any, kwargs: Any, given: Any, flops: float) -> Any:
        """The op on the CPU; of one that would take long the shapes alone.

        SDPA's backward pass takes milliseconds there: for the same inputs it is done once.
        """
        with no_dispatch():
            if _named(func)[0].endswith("_attention_for_cpu_backward"):
                key = tuple((x.data_ptr(), x._version) for x in args[:4])
                if key != self._known[0]:  # the inputs are kept, or others could lie where they did
                    self._known = key, func(*args, **kwargs), args[:4]
                return tuple(x.clone() for x in self._known[1])
            large = flops > MOST_FLOPS or any(x.numel() > MOST_NUMBERS for x in given)
            large |= flops > 1e8 and all(
                set(x.shape) == {max(x.shape)} for x in given
            )  # of no case
            if not large or func.is_view:
                return func(*args, **kwargs)
            written = [x for x, a in _arguments(func, args, kwargs) if _is_written(a)]
            if written:
                return written[0] if len(written) == 1 else tuple(written)
            shapes = tree_map(lambda x: _shape(x) if isinstance(x, torch.Tensor) else x, args)
            if "device" in kwargs:
                kwargs["device"] = "meta"
            found = func(*shapes, **kwargs)
            return tree_map(
                lambda x: torch.empty(x.shape, dtype=x.dtype) if isinstance(x, torch.Tensor) else x,
                found,
            )

    def _placed(self, x: Any, given: list[torch.Tensor]) -> Any:
        if not isinstance(x, torch.Tensor) or isinstance(x, OnGpu) or any(x is y for y in given):
            return x
        storage = x.untyped_storage()
        if not hasattr(storage, "_block"):
            try:
                block = self.device.allocate(storage.nbytes())
            except OutOfMemoryError as err:
                raise torch.cuda.OutOfMemoryError(str(err)) from None
            storage._block = block  # type: ignore[attr-defined]
            weakref.finalize(storage, self.device.free, block)
        with no_dispatch():
            placed = OnGpu(x)
            nbytes = round(self._numbers(x) * x.element_size())
            placed._buffer = storage._block.address, nbytes  # type: ignore[attr-defined]
            return placed

    def _charge(self, name: str, views: bool, given: Any, result: Any, flops: float) -> None:
        device, profile = self.device, self.device.profile
        if name in _WAITS:
            device.launch(name, lambda: profile.kernel_us)
            device.synchronize()
            return
        self.ops.append(f"aten::{name}")
        if views:
            device.host_us += 0.5
            return
        kernel = name
        if name.startswith("_scaled_dot_product") and self.fused:
            kernel = _FUSED[self.fused] + ("_bwd" if "backward" in name else "_fwd")
        device.first_use(kernel, profile.load_s)
        outputs = list(_tensors(result if isinstance(result, (tuple, list)) else (result,)))
        rate = profile.tflops.get(str((outputs or given)[0].dtype)[6:], profile.single_tflops)
        device.launch(
            kernel,
            lambda: profile.kernel_us,
            reads=self._buffers(given),
            writes=self._buffers(outputs),
            flops_us=flops * self._growth(given) / rate / 1e6 if flops else 0.0,
            rows=given[0].shape[0] if name == "cumsum" else 0,
        )

    def _growth(self, given: list[torch.Tensor]) -> float:
        """How many times the FLOPs a large case takes: by the product of what is scaled."""
        if self.scale == 1 or not given:
            return 1.0
        # q·kᵀ has two scaled dimensions, and so has a product with the scores.
        scaled = {d for x in given for d in x.shape if d not in KEPT}
        return self.scale ** min(len(scaled) + (len(scaled) == 1 and len(given) > 2), 2)

    def _buffers(self, tensors: list[torch.Tensor]) -> list[tuple[int, int]]:
        return [x._buffer for x in tensors if type(x) is OnGpu]

    def _numbers(self, x: torch.Tensor) -> float:
        if self.scale == 1 or x.numel() > MOST_NUMBERS:  # what is that large belongs to no case
            return x.numel()
        return math.prod(d if d in KEPT else d * self.scale for d in x.shape)


# As attnbench's own modes: else torch's compilers would stand around every op.
_plain = getattr(Dispatch.__torch_dispatch__, "__wrapped__", None)
if _plain is not None:
    _plain.__dynamo_disable = _plain


def _shape(x: torch.Tensor) -> torch.Tensor:
    """A tensor like it, without numbers."""
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from _tensors(value)


@functools.cache
def _named(func: Any) -> tuple[str, bool]:
    """An op's name, and whether it is none that runs a kernel."""
    name = func._schema.name.partition("::")[2]
    return name, func.is_view or name.startswith(_NO_KERNEL)


# Sizes that are no sequence's: batch, heads, widths and their products.
KEPT = frozenset((1, 2, 3, 4, 5, 6, 7, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192))


def _arguments(func: Any, args: Any, kwargs: Any) -> Iterator[tuple[Any, Any]]:
    for place, argument in enumerate(func._schema.arguments):
        if place < len(args):
            yield args[place], argument
        elif argument.name in kwargs:
            yield kwargs[argument.name], argument


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def _flops(name: str, given: list[torch.Tensor]) -> float:
    """Of products and of attention; of a decomposition, whose cost is all in its width."""
    shapes = [tuple(x.shape) for x in given]
    if name.startswith("_scaled_dot_product"):
        at = 1 if "backward" in name else 0
        (*batch, queries, width), keys = shapes[at], shapes[at + 1][-2]
        return (10 if at else 4) * math.prod(batch) * queries * keys * width
    if name in ("mm", "addmm", "bmm", "baddbmm", "baddbmm_", "addmm_", "_scaled_mm"):
        a, b = shapes[-2:] if name in ("addmm", "baddbmm", "baddbmm_", "addmm_") else shapes[:2]
        return 2 * math.prod(a) * b[-1]
    if name.startswith(("_linalg_svd", "linalg_svd", "linalg_pinv")):
        return 2e4 * shapes[0][-1] ** 3  # Jacobi sweeps, a second for 1024² on a large GPU
    return 0.0
