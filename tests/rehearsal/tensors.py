"""Tensors that say they lie on a GPU: computed on the CPU, charged to a simulated device.

Every op of the dispatcher passes here: views and allocations cost the host a moment, all else is a
kernel, which lasts as long as its FLOPs and its traffic take. Like the real thing it refuses
tensors of two devices in one op, and waits where a value is asked for.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from tests.rehearsal.device import FLOPS_PER_US, KERNEL_US, Buffers, Device

CUDA = torch.device("cuda", 0)
# Beyond these an op's result is left as it comes: nothing of a rehearsal looks at it.
MOST_FLOPS, MOST_NUMBERS = 4e10, 1 << 23

_aten = torch.ops.aten
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
        return self.to("cpu")

    def tolist(self) -> Any:
        return self.to("cpu").tolist()


def _is_device(x: Any) -> bool:
    return isinstance(x, (str, torch.device, torch.Tensor))


class Dispatch(TorchDispatchMode):
    """Every op of the process, charged to the device where a tensor of it lies there."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self.device = device

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
        elsewhere = [x for x in given if not isinstance(x, OnGpu) and x.dim() > 0]
        if elsewhere and len(elsewhere) < len(given) and name not in _FROM_HOST:
            raise RuntimeError(f"Expected all tensors to be on the same device ({name})")
        flops = 0.0 if views else _flops(name, given)
        result = self._computed(func, args, kwargs, given, flops)
        if kind is not None and kind != "cuda":  # a copy to the host
            self.device.launch(reads=_buffers(given))
            self.device.wait()
            return result
        result = tree_map_only(torch.Tensor, lambda x: self._placed(x, given), result)
        self._charge(name, views, given, result, flops)
        return result

    def _computed(self, func: Any, args: Any, kwargs: Any, given: Any, flops: float) -> Any:
        """The op on the CPU; of one that would take long the shapes alone."""
        with no_dispatch():
            large = flops > MOST_FLOPS or any(x.numel() > MOST_NUMBERS for x in given)
            # Large squares belong to no case, and of a flush nobody reads the sums.
            large |= flops > 1e8 and all(set(x.shape) == {max(x.shape)} for x in given)
            large |= _named(func)[0] == "sum" and given[0].shape[-1:] == (1 << 16,)
            if not large or func.is_view:
                return func(*args, **kwargs)
            if written := _written(func, args, kwargs):
                return written[0] if len(written) == 1 else tuple(written)
            if "device" in kwargs:
                kwargs["device"] = "meta"
            found = func(*_like(args, "meta"), **kwargs)
            return _like(found, "cpu")

    def _placed(self, x: torch.Tensor, given: list[torch.Tensor]) -> torch.Tensor:
        if isinstance(x, OnGpu) or any(x is y for y in given):
            return x
        storage = x.untyped_storage()
        if not hasattr(storage, "_address"):
            storage._address, give_back = self.device.allocate(storage.nbytes())  # type: ignore
            weakref.finalize(storage, give_back)
        with no_dispatch():
            placed = OnGpu(x)
            nbytes = x.numel() * x.element_size()
            placed._buffer = storage._address, nbytes  # type: ignore[attr-defined]
            return placed

    def _charge(self, name: str, views: bool, given: Any, result: Any, flops: float) -> None:
        if name in _WAITS:
            self.device.launch()
            self.device.wait()
            return
        if views:
            self.device.host_us += 0.5
            return
        outputs = list(_tensors(result if isinstance(result, (tuple, list)) else (result,)))
        dtype = str((outputs or given)[0].dtype).removeprefix("torch.")
        self.device.launch(
            max(KERNEL_US, flops / FLOPS_PER_US.get(dtype, FLOPS_PER_US["float32"])),
            reads=_buffers(given),
            writes=_buffers(outputs),
            loads=given[0].shape[0] if name == "cumsum" else 0,
        )


def _buffers(tensors: list[torch.Tensor]) -> Buffers:
    return [x._buffer for x in tensors if type(x) is OnGpu]


# As attnbench's own modes: else torch's compilers would stand around every op.
_plain = getattr(Dispatch.__torch_dispatch__, "__wrapped__", None)
if _plain is not None:
    _plain.__dynamo_disable = _plain


def _like(values: Any, device: str) -> Any:
    """Tensors of the same shapes without their numbers."""

    def like(x: torch.Tensor) -> torch.Tensor:
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)

    return tree_map_only(torch.Tensor, like, values)


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


def _written(func: Any, args: Any, kwargs: Any) -> list[Any]:
    """The arguments that an op writes to."""
    found = []
    for place, argument in enumerate(func._schema.arguments):
        given = args[place] if place < len(args) else kwargs.get(argument.name)
        if given is not None and argument.alias_info is not None and argument.alias_info.is_write:
            found.append(given)
    return found


def _flops(name: str, given: list[torch.Tensor]) -> float:
    """Of products and of attention; other ops are bound by their traffic."""
    shapes = [tuple(x.shape) for x in given]
    if name.startswith("_scaled_dot_product"):
        at = 1 if "backward" in name else 0
        (*batch, queries, width), keys = shapes[at], shapes[at + 1][-2]
        return (10 if at else 4) * math.prod(batch) * queries * keys * width
    if name in ("mm", "addmm", "bmm", "baddbmm", "baddbmm_", "addmm_", "_scaled_mm"):
        a, b = shapes[-2:] if name in ("addmm", "baddbmm", "baddbmm_", "addmm_") else shapes[:2]
        return 2 * math.prod(a) * b[-1]
    return 0.0
