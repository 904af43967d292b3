"""The baselines: softmax(QKᵀ·scale)V with whole score matrices: at once, by head, and compiled."""

from typing import Any

import torch

from attnbench.api import (
    ALL_BIASES,
    ALL_MASKS,
    AttentionCall,
    Case,
    Estimate,
    attention_builder,
    bias_flops,
    compile_alone,
    core_flops,
    dense_bias,
    hidden_and_blind,
    reason_against_compiling,
)


def matrices(case: Case) -> int:
    """Score matrices of the case's dtype that are alive at the worst moment.

    Softmax works in float32 at least; what it needs to differentiate stays.
    """
    wide, half = {"forward": 2, "backward": 2, "both": 3}, {"forward": 5, "backward": 4, "both": 6}
    return (wide if case.element_bytes >= 4 else half)[case.pass_]


def flops(case: Case) -> int:
    """FLOPs executed: the full square whatever the mask, and no scores recomputed backward."""
    pairs = case.seq_len * case.kv_len
    return core_flops(case, pairs, recompute=False) + bias_flops(case, recompute=False)


def workspace(case: Case) -> int:
    """Score matrices (bytes); query heads that share keys and values copy none of them."""
    row = case.batch * case.heads * case.element_bytes
    scores = row * case.seq_len * case.kv_len
    if case.softcap or case.sinks:  # scores before the cap, scores beside the sink
        return Estimate((matrices(case) + 2) * scores)
    if case.position.name == "shaw":  # its bias is another one, in float32 at least
        return Estimate((matrices(case) + 1) * scores)
    if case.pass_ == "forward" and case.element_bytes >= 4:
        return scores + max(scores, row * case.seq_len * (case.head_dim - case.value_dim))
    return Estimate(matrices(case) * scores)


def workspace_by_head(case: Case) -> int:
    """The score matrices of one head, or the outputs to be joined (bytes)."""
    row = case.batch * case.seq_len * case.element_bytes
    scores, o = row * case.kv_len, row * case.value_dim
    if case.softcap or case.sinks:
        heads = case.heads if case.pass_ == "both" else 1
        return Estimate((matrices(case) + 2) * heads * scores + case.heads * o)
    if case.pass_ == "forward" and case.element_bytes >= 4:
        return max(case.heads * o, scores + max(scores, row * case.head_dim - o))
    count = matrices(case)
    if case.pass_ == "both":  # the weights of all heads stay until the backward pass
        count += (case.heads - 1) * (1 if case.element_bytes >= 4 else 3)
    return Estimate(count * scores)


def attend_with(case: Case, sharing: int = 1) -> AttentionCall:
    """softmax(QKᵀ·scale)V over the last two axes, whatever stands before them.

    The `sharing` query heads of a key/value head are rows of one product, M = sharing·L of them:
    no key and no value is copied or read for each head again (Shazeer 2019, arXiv:1911.02150).
    A sink is one more score of each row, whose weight meets no value.
    """
    softcap, scale, masks, bias = (
        case.softcap,
        case.softmax_scale,
        hidden_and_blind(case),
        dense_bias(case),
    )
    hidden_MS, blind_M1 = (None if x is None else x.tile(sharing, 1) for x in masks)

    def attend(
        q_LD: torch.Tensor, k_SD: torch.Tensor, v_SV: torch.Tensor, /, *sink: torch.Tensor
    ) -> torch.Tensor:
        # Scaling q and not the scores keeps large float16 logits inside float16's range.
        scores_MS = (q_LD * scale).reshape(*k_SD.shape[:-2], -1, k_SD.shape[-1]) @ k_SD.mT
        if softcap:
            scores_MS = softcap * (scores_MS / softcap).tanh()
        if bias is not None:
            scores_MS += bias(q_LD).view(-1, *scores_MS.shape[1:])
        if hidden_MS is not None:
            scores_MS.masked_fill_(hidden_MS, float("-inf"))
        for sink_H in sink:
            column_M1 = sink_H.repeat_interleave(q_LD.shape[-2]).view(*scores_MS.shape[1:-1], 1)
            scores_MS = torch.cat((scores_MS, column_M1.expand(*scores_MS.shape[:-1], 1)), -1)
        wide = torch.promote_types(scores_MS.dtype, torch.float32)
        weights_MS = torch.softmax(scores_MS, dim=-1, dtype=wide).to(v_SV.dtype)
        weights_MS = weights_MS[..., : k_SD.shape[-2]]
        o_MV = weights_MS @ v_SV
        if blind_M1 is not None:
            o_MV.masked_fill_(blind_M1, 0)
        return o_MV.view(*q_LD.shape[:-1], -1)

    return attend


ROW: Any = {
    "time": "n^2 d", "memory": "n^2", "masks": ALL_MASKS, "flops": flops, "softcap": True,
    "sinks": True,
}  # fmt: skip


@attention_builder("naive", **ROW, positions=ALL_BIASES, workspace=workspace)
def build_naive(case: Case) -> AttentionCall:
    """softmax(QKᵀ·scale)V with the whole score matrix."""
    return attend_with(case, case.heads // case.kv_heads)


@attention_builder("naive-heads", **ROW, workspace=workspace_by_head)
def build_naive_heads(case: Case) -> AttentionCall:
    """The same one head after another, the textbook loop."""
    attend, sharing = attend_with(case), case.heads // case.kv_heads

    def naive_heads(
        q_BHLD: torch.Tensor, k_BGSD: torch.Tensor, v_BGSV: torch.Tensor, /, *sink: torch.Tensor
    ) -> torch.Tensor:
        # split and not an index: its gradient is one cat, where every index would make a dq of
        # all heads, zero but for one.
        k_B1SDs, v_B1SVs = torch.split(k_BGSD, 1, dim=1), torch.split(v_BGSV, 1, dim=1)
        o_B1LVs = [
            attend(
                *(q_B1LD, k_B1SDs[head // sharing], v_B1SVs[head // sharing]),
                *(sink_H[head : head + 1] for sink_H in sink),
            )
            for head, q_B1LD in enumerate(torch.split(q_BHLD, 1, dim=1))
        ]
        return torch.cat(o_B1LVs, dim=1)

    return naive_heads


@attention_builder("naive-compiled", **ROW, compiles=True, supports=reason_against_compiling)
def build_naive_compiled(case: Case) -> AttentionCall:
    """Naive under torch.compile, afresh for every case."""
    return compile_alone(build_naive(case))
