"""FLOPs as torch's FlopCounterMode sees them, and whether they were real matmuls."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
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
