"""torch's FlexAttention, compiled: blocks that the mask empties are never computed."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch

from attnbench.api import (
    ALL_BIASES,
    ALL_MASKS,
    AttentionCall,
    Case,
    attention_builder,
    bias_flops,
    building_mask,
    compile_alone,
    mask_spans,
    position_bias,
    reason_against_flex,
    visible_blocks,
)

BLOCK = 128  # queries and keys of a block of the mask, torch's default


def block_mask(case: Case) -> Any:
    """The case's mask as FlexAttention wants it; None on a GPU where every pair is admitted.

    A sink is one more key, behind all others, that every query sees.
    """
    if case.unmasked and case.device != "cpu":
        return None
    from torch.nn.attention.flex_attention import BlockMask, create_block_mask

    queries, seen, items = case.seq_len, case.kv_len, case.batch if case.mask.lengths else None
    keys = seen + bool(case.sinks)
    with building_mask:
        if case.unmasked:  # without a mask all is one block, whose scores a CPU keeps whole
            shape = 1, 1, -(-queries // BLOCK), -(-keys // BLOCK)
            full = torch.full(shape[:-1], shape[-1], dtype=torch.int32)
            listed = torch.arange(shape[-1], dtype=torch.int32).repeat(*shape[:-1], 1)
            blocks = torch.zeros_like(full), torch.zeros_like(listed), full, listed
            return BlockMask.from_kv_blocks(*blocks, BLOCK, seq_lengths=(queries, keys))
        first_BL, end_BL = mask_spans(case.mask, queries, seen, case.device, batch=case.batch)

        def admits(b: Any, _h: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
            b = 0 if items is None else b
            inside = (key >= first_BL[b, query]) & (key < end_BL[b, query])
            return inside | (key == seen) if case.sinks else inside

        sizes: Any = {"Q_LEN": queries, "KV_LEN": keys, "BLOCK_SIZE": BLOCK}
        return create_block_mask(admits, items, None, **sizes, device=case.device)


def flops(case: Case) -> int:
    """FLOPs executed: whole blocks, 2·B·H·pairs·(D + V) forward.

    Backward (CUDA) goes over the blocks twice, once for dq and once for dk and dv, and makes
    the scores and the gradient of the weights in both: 4D + 3V a pair.
    """
    d, v = case.head_dim, case.value_dim
    width = {"forward": d + v, "backward": 4 * d + 3 * v, "both": 5 * d + 4 * v}[case.pass_]
    case = dataclasses.replace(case, kv_len=case.kv_len + bool(case.sinks))
    pairs = sum(
        len(i) * len(j)
        for item in range(case.batch)
        for i, j in visible_blocks(case, BLOCK, BLOCK, item)
    )
    return 2 * case.heads * pairs * width + bias_flops(case)


def flex_call(case: Case) -> Any:
    """flex_attention with all that the case fixes already bound, to be compiled."""
    from torch.nn.attention.flex_attention import flex_attention

    mask, scale, gqa = block_mask(case), case.softmax_scale, case.kv_heads != case.heads
    bias, softcap, keys = position_bias(case), case.softcap, case.kv_len
    attend: Callable[..., torch.Tensor] = functools.partial(
        flex_attention, block_mask=mask, scale=scale, enable_gqa=gqa
    )

    def flex(q_BHLD: torch.Tensor, k_BGSD: torch.Tensor, v_BGSV: torch.Tensor) -> torch.Tensor:
        return attend(q_BHLD, k_BGSD, v_BGSV)

    def scored(
        q_BHLD: torch.Tensor, k_BGSD: torch.Tensor, v_BGSV: torch.Tensor, *sink: torch.Tensor
    ) -> torch.Tensor:
        table = None if bias is None else bias.table_HW
        if bias is not None and table is None:
            table = bias.columns(q_BHLD * scale)

        def change(score: torch.Tensor, b: Any, h: Any, query: Any, key: Any) -> torch.Tensor:
            if softcap:
                score = softcap * (score / softcap).tanh()
            if bias is not None and table is not None:
                at = (h,) if bias.table_HW is not None else (b, h, query)
                score = score + table[(*at, bias.index(query, key.clamp(max=keys - 1)))]
            for sink_H in sink:
                score = torch.where(key == keys, sink_H[h].to(score.dtype), score)
            return score

        if sink:
            k_BGSD, v_BGSV = (torch.nn.functional.pad(x, (0, 0, 0, 1)) for x in (k_BGSD, v_BGSV))
        return attend(q_BHLD, k_BGSD, v_BGSV, score_mod=change)

    return scored if bias is not None or softcap or case.sinks else flex


@attention_builder(
    "flex",
    time="n^2 d",
    memory="O(n)",
    masks=ALL_MASKS,
    positions=ALL_BIASES,
    softcap=True,
    sinks=True,
    dtypes=("float32", "bfloat16", "float16"),
    compiles=True,
    flops=flops,
    supports=reason_against_flex,
)
def build_flex(case: Case) -> AttentionCall:
    """FlexAttention, a block mask, under torch.compile."""
    return compile_alone(flex_call(case))
