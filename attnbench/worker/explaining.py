"""What a row says in plain words of the FLOPs and the bytes that its probes found."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any


def predicted_miss(measured: int, predicted: int | None) -> float | None:
    """Measured / predicted - 1; 0 where both are 0, None where the ratio is to nothing."""
    if predicted is None:
        return None
    if predicted == 0:
        return 0.0 if measured == 0 else None
    return measured / predicted - 1


_SDPA_OP = re.compile(r"aten::_scaled_dot_product_(?:(\w+?)_attention|attention_(math))")


def sdpa_backend(ops: Iterable[str]) -> str | None:
    """The backends of SDPA among the ops: `flash`, `math`, `efficient`, `cudnn`; None without SDPA.

    The math path leaves no kernel of its own name, and its backward pass no op either.
    """
    found = (_SDPA_OP.match(name) for name in ops)
    return "; ".join(sorted({match[1] or match[2] for match in found if match})) or None


def flops_note(
    metrics: dict[str, Any], why: Callable[[int], list[str]], *, compiled: bool
) -> str | None:
    """Where useful, executed and counted FLOPs disagree, in plain words; None where they agree.

    `why(flops)` names the reasons for which `flops` are not the useful ones.
    """
    useful, executed = metrics.get("flops_useful"), metrics.get("flops_executed")
    counted, source = metrics.get("flops_counted"), metrics.get("flops_counted_source")
    notes = []
    if useful and executed and executed != useful:
        fact = f"executes {executed / useful:.3g} x the useful FLOPs"
        notes.append(_because(fact, why(executed)))
    if counted is None:
        notes.append("not counted: compiled code" if compiled else "torch counted no matmul")
        return "; ".join(notes)
    seen = "torch's formula for the opaque op" if source == "formula" else "the matmuls dispatched"
    if executed and counted != executed:
        fact = f"{seen}: {counted / executed:.3g} x the executed FLOPs"
        notes.append(_because(fact, why(counted)))
    if useful and executed is None and counted != useful:
        fact = f"{seen}: {counted / useful:.3g} x the useful FLOPs"
        notes.append(_because(fact, [*why(counted), "what it executes is not declared"]))
    return "; ".join(notes) or None


def _because(fact: str, reasons: list[str]) -> str:
    return f"{fact} ({', '.join(reasons)})" if reasons else fact
