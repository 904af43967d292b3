"""What one call does besides taking time: FLOPs as torch counts them, and tensors it saves."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

Source = Literal["dispatched", "formula"]
OpFormula = Callable[..., int]

_MATMULS = frozenset(("mm", "addmm", "bmm", "baddbmm", "baddbmm_", "addmm_", "_scaled_mm"))


def count_flops(
    call: Callable[[], Any], formulas: Mapping[str, OpFormula]
) -> tuple[int | None, Source | None]:
    """Run `call` once and return (FLOPs, source); (None, None) where nothing was seen.

    `formulas` prices opaque aten ops by name from the shapes of their arguments: torch counts 0
    for ops it has no formula for. The source is `dispatched` where only matmuls were counted
    and `formula` as soon as one opaque op was priced.
    """
    mapping = {
        getattr(torch.ops.aten, name): formula
        for name, formula in (_IN_PLACE | dict(formulas)).items()
        if hasattr(torch.ops.aten, name)
    }
    counter = FlopCounterMode(display=False, custom_mapping=mapping)
    with counter:
        call()
    counts = {
        str(op): flops for op, flops in counter.get_flop_counts().get("Global", {}).items() if flops
    }
    if not counts:
        return None, None
    dispatched = all(name.removeprefix("aten.") in _MATMULS for name in counts)
    return sum(counts.values()), "dispatched" if dispatched else "formula"


def _in_place(self_shape: Any, a_shape: Any, b_shape: Any, **_: Any) -> int:
    """Multiply-adds of self += a @ b, where torch only knows the out-of-place op."""
    batch = a_shape[0] if len(a_shape) == 3 else 1
    return int(2 * batch * a_shape[-2] * a_shape[-1] * b_shape[-1])


_IN_PLACE: dict[str, OpFormula] = {"baddbmm_": _in_place, "addmm_": _in_place}


class Saved:
    """Bytes of distinct storages that autograd saved between a forward and its backward pass.

    Counted when the backward pass first asks for one of them, or at the end. Only storages that
    were made while watching count: inputs, and masks or tables that were prepared, are alive
    anyway. An output counts where it is saved (a fused kernel saves its o). What a function keeps
    by other means than `save_for_backward` is not seen.
    """

    def __init__(self) -> None:
        self.bytes: int | None = None
        self._made: set[int] = set()  # addresses; one of a storage that lived before is never here
        self._packed: list[weakref.ref[torch.Tensor]] = []

    def made(self, arguments: Any, result: Any) -> None:
        """Take note of the storages that an op has made: those that it was not given."""
        given = {_address(x) for x in tree_leaves(arguments) if isinstance(x, torch.Tensor)}
        for x in tree_leaves(result):
            if isinstance(x, torch.Tensor) and _address(x) not in given:
                self._made.add(_address(x))

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
        sizes = {_address(x): x.untyped_storage().nbytes() for x in alive}
        self.bytes = sum(size for address, size in sizes.items() if address in self._made)


class _Makers(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Tells `saved` of every op."""

    def __init__(self, saved: Saved) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._saved = saved

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self._saved.made((args, kwargs), result)
        return result


@contextlib.contextmanager
def watch_saved() -> Iterator[Saved]:
    """Watch one forward pass, and its backward pass where that follows; `bytes` is set at exit.

    Not for compiled code: a dispatch mode makes torch.compile fall back. A graph made while
    watching goes on calling back into Python: make another before it is timed.
    """
    saved = Saved()
    with saved_tensors_hooks(saved.pack, saved.unpack), _Makers(saved):
        yield saved
        saved.count()


def _address(x: torch.Tensor) -> int:
    return x.untyped_storage().data_ptr()
