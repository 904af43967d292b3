"""What the cells of a series share, in words."""

from __future__ import annotations

from collections.abc import Callable

from attnbench.analysis.scaling.results import Axis
from attnbench.schema.case import Case
from attnbench.theory.traits import TRAITS

_Parts = tuple[tuple[Callable[[Case], str], tuple[Axis, ...]], ...]
# Each size that a label may give, with the axes along which it varies.
_PARTS: _Parts = (
    (lambda case: f"n={case.seq_len}", ("n",)),
    (lambda case: f"S={case.kv_len}" if case.kv_len != case.seq_len else "", ("n",)),
    (lambda case: f"B={case.batch}", ("batch",)),
    (lambda case: f"H={case.heads}", ("heads", "heads at fixed width")),
    (
        lambda case: f"G={case.kv_heads}" if case.kv_heads != case.heads else "",
        ("heads", "heads at fixed width"),
    ),
    (lambda case: f"D={case.head_dim}", ("d", "heads at fixed width")),
    (
        lambda case: f"V={case.value_dim}" if case.value_dim != case.head_dim else "",
        ("d", "heads at fixed width"),
    ),
    (lambda case: f"E={case.width}" if case.width else "", ("d", "heads")),
)
_WITHOUT_HEADS: _Parts = (*_PARTS[:3], (lambda case: f"E={case.model_width}", ("d",)))


def kind_words(case: Case) -> list[str]:
    """Mask, position encoding, projection and cache, where they do not go without saying."""
    words = [text for text in (case.mask.text, case.position.text) if text not in ("full", "none")]
    return words + [text for text in (case.projection, case.cache) if text]


def same_text(case: Case, axis: Axis) -> str:
    """As `attention forward B=1 H=2 D=64 float32`: all but what varies along the axis."""
    parts = _PARTS if TRAITS.get(case.workload).heads else _WITHOUT_HEADS
    sizes = [text(case) for text, varies in parts if axis not in varies]
    if axis == "heads at fixed width":
        sizes.append(f"H·D={case.heads * case.head_dim}")
    if axis.startswith("heads") and case.kv_heads != case.heads:
        sizes.append(f"H/G={case.heads // case.kv_heads}")
    others = kind_words(case)
    others += [f"T={case.new_tokens}"] if case.new_tokens else []
    others += [f"scale={case.scale:g}"] if case.scale is not None else []
    return " ".join(
        text for text in (case.workload, case.pass_, *sizes, case.dtype, *others) if text
    )
