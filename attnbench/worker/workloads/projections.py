"""How a layer's queries, keys and values are projected: one matrix, three, or one a head.

All are ways to cut the rows of one canonical matrix wqkv, (H·D + G·D + G·V, E), into weights of
their own: those of the query heads, then of the key heads, then of the value heads. Hence the same
numbers give the same layer, and gradients of the parts, laid one under the other, that of wqkv.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import linear

from attnbench.base.registry import Registry
from attnbench.schema.case import Case

Heads = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # q_BHLD, k_BGLD, v_BGLV
Project = Callable[[torch.Tensor, Sequence[torch.Tensor]], Heads]


def parts_of(case: Case) -> tuple[tuple[int, int], ...]:
    """(heads, dims a head) of the queries, the keys and the values."""
    return (
        (case.heads, case.head_dim),
        (case.kv_heads, case.head_dim),
        (case.kv_heads, case.value_dim),
    )


@dataclass(frozen=True, kw_only=True)
class Projection:
    """One way to project: the names and heights of its weights, and what is timed.

    `rows(case)` are in the order of wqkv's rows. `heads(case)` returns the projection of x_BLE
    with those weights. `one_matrix`: q, k and v are views of one tensor. `strided`: they are views
    whose heads lie side by side in every token, and not tensors (B, heads, L, dims) of their own.
    """

    doc: str
    rows: Callable[[Case], dict[str, int]]
    heads: Callable[[Case], Project]
    one_matrix: bool = False
    strided: bool = True


def by_head(x_BLF: torch.Tensor, dims: int) -> torch.Tensor:
    """(B, L, heads·dims) seen as (B, heads, L, dims)."""
    return x_BLF.view(*x_BLF.shape[:2], -1, dims).transpose(1, 2)


def _fused(case: Case) -> Project:
    parts = parts_of(case)
    widths = [heads * dims for heads, dims in parts]

    def project(x_BLE: torch.Tensor, weights: Sequence[torch.Tensor]) -> Heads:
        chunks = torch.split(linear(x_BLE, weights[0]), widths, dim=-1)
        q, k, v = (by_head(x, dims) for x, (_, dims) in zip(chunks, parts, strict=True))
        return q, k, v

    return project


def _separate(case: Case) -> Project:
    parts = parts_of(case)

    def project(x_BLE: torch.Tensor, weights: Sequence[torch.Tensor]) -> Heads:
        q, k, v = (
            by_head(linear(x_BLE, weight), dims)
            for weight, (_, dims) in zip(weights, parts, strict=True)
        )
        return q, k, v

    return project


def _per_head(case: Case) -> Project:
    counts = [heads for heads, _ in parts_of(case)]

    def project(x_BLE: torch.Tensor, weights: Sequence[torch.Tensor]) -> Heads:
        left = iter(weights)
        q, k, v = (
            torch.stack([linear(x_BLE, next(left)) for _ in range(count)], dim=1)
            for count in counts
        )
        return q, k, v

    return project


PROJECTIONS: Registry[Projection] = Registry("projection", "--projections")
PROJECTIONS.add(
    "fused",
    Projection(
        doc="one matrix for q, k and v, its result cut in three",
        rows=lambda case: {"wqkv": sum(heads * dims for heads, dims in parts_of(case))},
        heads=_fused,
        one_matrix=True,
    ),
)
PROJECTIONS.add(
    "separate",
    Projection(
        doc="wq, wk and wv, as in Llama",
        rows=lambda case: {
            f"w{name}": heads * dims
            for name, (heads, dims) in zip("qkv", parts_of(case), strict=True)
        },
        heads=_separate,
    ),
)
PROJECTIONS.add(
    "per-head",
    Projection(
        doc="a matrix for each head, the formula to the letter; heads are stacked",
        rows=lambda case: {
            f"w{name}{head}": dims
            for name, (heads, dims) in zip("qkv", parts_of(case), strict=True)
            for head in range(heads)
        },
        heads=_per_head,
        strided=False,
    ),
)
