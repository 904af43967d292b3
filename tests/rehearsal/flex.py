"""FlexAttention on a simulated GPU: dense, and charged as one kernel."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import torch

KERNEL = "triton_tem_fused_flex_attention"


def replace_flex(flex: Any) -> None:
    """Put what is below in the place of torch's, whose own needs compiled code or functorch."""
    flex.create_block_mask = create_block_mask
    flex.flex_attention = flex_attention
    flex.BlockMask = SimpleNamespace(from_kv_blocks=lambda *blocks, mask_mod, **sizes: mask_mod)


def create_block_mask(
    mask_mod: Any,
    B: Any,
    H: Any,
    Q_LEN: int,
    KV_LEN: int,
    device: Any = None,
    BLOCK_SIZE: Any = 128,
    _compile: bool = False,
) -> Any:
    """What decides on pairs is kept as it is."""
    return mask_mod


def flex_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: Any = None,
    block_mask: Any = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: Any = None,
) -> torch.Tensor:
    """softmax over the admitted pairs, in float32."""
    sharing = query.shape[1] // key.shape[1]
    k, v = (x.repeat_interleave(sharing, 1) if sharing > 1 else x for x in (key, value))
    scores = (query @ k.mT).float() * (query.shape[-1] ** -0.5 if scale is None else scale)
    sizes = (*query.shape[:3], k.shape[2])
    place = [
        torch.arange(size, device=query.device).view([-1 if i == at else 1 for i in range(4)])
        for at, size in enumerate(sizes)
    ]
    if score_mod is not None:
        scores = score_mod(scores, *place)
    if block_mask is not None:
        admitted = block_mask(*place).expand(sizes)
        blind = ~admitted.any(-1, keepdim=True)
        scores = scores.masked_fill(~(admitted | blind), -math.inf)
        return (scores.softmax(-1).masked_fill(blind, 0).to(v.dtype)) @ v
    return scores.softmax(-1).to(v.dtype) @ v
