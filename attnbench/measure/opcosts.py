"""FLOPs and bytes of each op of a call, from the tensors that torch's dispatcher hands around."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import flop_counter
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from attnbench.measure.probes import BOOKKEEPING, OpFormula, by_op, sparing_compilers

# Ops that write the first of their tensors without reading it.
_OVERWRITES = frozenset(("aten::copy_", "aten::fill_", "aten::zero_"))


class TooManyOpsError(Exception):
    """A call with more ops than a trace can take; the message has the limit."""


@dataclass
class OpCosts:
    """By name of the op, of one call: how often, FLOPs of those with a formula, bytes.

    Bytes are read plus written, each tensor once and an expanded one only where it has memory.
    Ops that only describe or allocate memory have none.
    """

    counts: Counter[str] = field(default_factory=Counter)
    flops: Counter[str] = field(default_factory=Counter)
    bytes: Counter[str] = field(default_factory=Counter)


def op_costs(call: Callable[[], Any], formulas: Mapping[str, OpFormula], most: int) -> OpCosts:
    """Run `call` once and add up what its ops cost; `formulas` as for `probes.count_flops`.

    Raises:
        TooManyOpsError: there are more than `most` ops.
    """
    mode = _Adding(formulas, most)
    with sparing_compilers(_Adding), mode:
        call()
    return mode.found


class _Adding(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, formulas: Mapping[str, OpFormula], most: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found, self._most = OpCosts(), most
        own = {
            op: flop_counter.shape_wrapper(formula)  # type: ignore[no-untyped-call]
            for op, formula in by_op(formulas).items()
        }
        self._formulas = {**flop_counter.flop_registry, **own}

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run the op, then note what it cost."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = func._schema.name
        self.found.counts[name] += 1
        if self.found.counts.total() > self._most:
            raise TooManyOpsError(f"a call has more than {self._most:,} ops")
        formula = self._formulas.get(func._overloadpacket)
        if formula is not None:
            self.found.flops[name] += int(formula(*args, **kwargs, out_val=result))
        if not (func.is_view or name in BOOKKEEPING):
            only_written = {x.name for x in func._schema.arguments if x.is_out}
            read = [*args, *(x for key, x in kwargs.items() if key not in only_written)]
            if name in _OVERWRITES:
                read = read[1:]
            self.found.bytes[name] += _bytes(read) + _bytes([result])
        return result


def _bytes(values: Iterable[Any]) -> int:
    """Of all distinct tensors among the values, the elements that have memory of their own."""
    tensors = [x for x in tree_leaves(list(values)) if isinstance(x, torch.Tensor)]
    unique = {(x.data_ptr(), x.shape, x.stride()): x for x in tensors}
    return sum(
        math.prod(n for n, step in zip(x.shape, x.stride(), strict=True) if step or not n)
        * x.element_size()
        for x in unique.values()
    )
