"""The projections of a layer: what is timed, and the canonical matrix that its weights stand for.

That is wqkv, (H·D + G·D + G·V, E): the rows of the query heads, then of the key heads, then of the
value heads. Most ways cut it into weights of their own: the same numbers then give the same layer,
and gradients of the parts, laid one under the other, that of wqkv. Others make it from fewer.
R is the rank of a latent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import linear, pad

from attnbench.base.parameters import base_name
from attnbench.schema.case import Case
from attnbench.theory.projections import parts_of

Heads = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # q_BHLD, k_BGLD, v_BGLV
Project = Callable[[torch.Tensor, Sequence[torch.Tensor]], Heads]


@dataclass(frozen=True, kw_only=True)
class Projection:
    """One way to project: what is timed. Its weights are in `theory/projections.py`.

    `heads(case)` returns the projection of x_BLE with those weights; the heads are those that are
    computed. `whole(case, *weights)`, where they are not rows of wqkv, gives the wqkv and the wo
    that they stand for.
    """

    heads: Callable[[Case], Project]
    whole: Callable[..., tuple[torch.Tensor, torch.Tensor]] | None = None


def by_head(x_BLF: torch.Tensor, dims: int) -> torch.Tensor:
    """(B, L, heads·dims) seen as (B, heads, L, dims)."""
    return x_BLF.view(*x_BLF.shape[:2], -1, dims).transpose(1, 2)


def _fused(case: Case) -> Project:
    parts = list(parts_of(case).values())
    widths = [heads * dims for heads, dims in parts]

    def project(x_BLE: torch.Tensor, weights: Sequence[torch.Tensor]) -> Heads:
        chunks = torch.split(linear(x_BLE, weights[0]), widths, dim=-1)
        q, k, v = (by_head(x, dims) for x, (_, dims) in zip(chunks, parts, strict=True))
        return q, k, v

    return project


def _separate(case: Case) -> Project:
    widths = [dims for _, dims in parts_of(case).values()]

    def project(x_BLE: torch.Tensor, weights: Sequence[torch.Tensor]) -> Heads:
        q, k, v = (by_head(linear(x_BLE, w), d) for w, d in zip(weights, widths, strict=True))
        return q, k, v

    return project


def _per_head(case: Case) -> Project:
    counts = [heads for heads, _ in parts_of(case).values()]

    def project(x_BLE: torch.Tensor, weights: Sequence[torch.Tensor]) -> Heads:
        left = iter(weights)
        q, k, v = (
            torch.stack([linear(x_BLE, next(left)) for _ in range(count)], dim=1)
            for count in counts
        )
        return q, k, v

    return project


def _latent(case: Case) -> Project:
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434) without its rotary part."""
    d, v = case.head_dim, case.value_dim

    def project(x_BLE: torch.Tensor, weights: Sequence[torch.Tensor]) -> Heads:
        wq, wdown, wupk, wupv = weights
        latent_BLR = linear(x_BLE, wdown)
        k, v_ = by_head(linear(latent_BLR, wupk), d), by_head(linear(latent_BLR, wupv), v)
        return by_head(linear(x_BLE, wq), d), k, v_

    return project


def _whole_latent(
    _: Case, wq: torch.Tensor, wdown: torch.Tensor, wupk: torch.Tensor, wupv: torch.Tensor,
    wo: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    return torch.cat((wq, wupk @ wdown, wupv @ wdown)), wo


def _whole_pruned(case: Case, *weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The full layer (Michel et al. 2019, arXiv:1905.10650): pruned heads reach no output."""
    missing = [h * d - len(w) for w, (h, d) in zip(weights, parts_of(case).values(), strict=False)]
    rows = [pad(w, (0, 0, 0, count)) for w, count in zip(weights, missing, strict=False)]
    wo = weights[-1]
    return torch.cat(rows), pad(wo, (0, case.heads * case.value_dim - wo.shape[1]))


def _tied(case: Case) -> Project:
    """Collaborative attention (Cordonnier et al. 2020, arXiv:2006.16362); values shared, too."""

    def project(x_BLE: torch.Tensor, weights: Sequence[torch.Tensor]) -> Heads:
        wq, wk, wv, mixing_HD = weights
        q_BHLD = linear(x_BLE, wq).unsqueeze(1) * mixing_HD.unsqueeze(1)
        return q_BHLD, linear(x_BLE, wk).unsqueeze(1), linear(x_BLE, wv).unsqueeze(1)

    return project


def _whole_tied(
    _: Case, wq: torch.Tensor, wk: torch.Tensor, wv: torch.Tensor, mixing_HD: torch.Tensor,
    wo: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    return torch.cat(((mixing_HD.unsqueeze(2) * wq).flatten(0, 1), wk, wv)), wo


WAYS: dict[str, Projection] = {
    "fused": Projection(heads=_fused),
    "separate": Projection(heads=_separate),
    "per-head": Projection(heads=_per_head),
    "mla": Projection(heads=_latent, whole=_whole_latent),
    "pruned": Projection(heads=_separate, whole=_whole_pruned),
    "tied": Projection(heads=_tied, whole=_whole_tied),
    "tied-layers": Projection(heads=_fused),
}


def projection_of(case: Case) -> Projection:
    """The case's projection; `fused` where it names none."""
    return WAYS[base_name(case.projection or "fused")]
