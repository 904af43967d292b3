"""The baselines: softmax(QKᵀ·scale)V with whole score matrices: at once, by head, and compiled."""

from types import FunctionType

import torch

from attnbench.api import (
    AttentionCall,
    Case,
    Estimate,
    attention_builder,
    compile_alone,
    core_flops,
    hidden_and_blind,
    reason_against_compiling,
    run_file,
)

MASKS = ("full", "causal", "window")
# Score matrices of the case's dtype that are alive at the worst moment, in half precision and else.
# Softmax works in float32 at least; what it needs to differentiate stays.
MATRICES = {"forward": (5, 2), "backward": (4, 2), "both": (6, 3)}


def flops(case: Case) -> int:
    """FLOPs executed: the full square whatever the mask, and no scores recomputed backward."""
    return core_flops(case, case.seq_len * case.kv_len, recompute=False)


def workspace(case: Case) -> int:
    """Score matrices, and copies of keys and values for the query heads that share them (bytes)."""
    row = case.batch * case.heads * case.element_bytes
    scores, shared = row * case.seq_len * case.kv_len, case.heads != case.kv_heads
    copies = row * case.kv_len * (case.head_dim + case.value_dim) * shared
    if case.pass_ == "forward" and case.element_bytes >= 4:
        return copies + scores + max(scores, row * case.seq_len * (case.head_dim - case.value_dim))
    return Estimate(copies + MATRICES[case.pass_][case.element_bytes >= 4] * scores)


def workspace_by_head(case: Case) -> int:
    """The score matrices of one head, or the outputs to be stacked (bytes)."""
    row = case.batch * case.seq_len * case.element_bytes
    scores, o = row * case.kv_len, row * case.value_dim
    if case.pass_ == "forward" and case.element_bytes >= 4:
        return max(case.heads * o, scores + max(scores, row * case.head_dim - o))
    matrices = MATRICES[case.pass_][case.element_bytes >= 4]
    if case.pass_ == "both":  # the weights of all heads stay until the backward pass
        matrices += (case.heads - 1) * (1 if case.element_bytes >= 4 else 3)
    return Estimate(matrices * scores)


class NaiveAttention:
    """One case's scale and mask."""

    def __init__(self, case: Case) -> None:
        self.scale = case.softmax_scale
        self.hidden_LS, self.blind_L1 = hidden_and_blind(case)

    def __call__(self, q_LD: torch.Tensor, k_SD: torch.Tensor, v_SV: torch.Tensor) -> torch.Tensor:
        """O over the last two axes, whatever stands before them."""
        # Scaling q and not the scores keeps large float16 logits inside float16's range.
        scores_LS = (q_LD * self.scale) @ k_SD.mT
        if self.hidden_LS is not None:
            scores_LS.masked_fill_(self.hidden_LS, float("-inf"))
        wide = torch.promote_types(scores_LS.dtype, torch.float32)
        weights_LS = torch.softmax(scores_LS, dim=-1, dtype=wide).to(v_SV.dtype)
        o_LV = weights_LS @ v_SV
        return o_LV if self.blind_L1 is None else o_LV.masked_fill_(self.blind_L1, 0)


@attention_builder(
    "naive", time="n^2 d", memory="n^2", masks=MASKS, flops=flops, workspace=workspace
)
def build_naive(case: Case) -> AttentionCall:
    """softmax(QKᵀ·scale)V with the whole score matrix: the baseline of every comparison."""
    attend, sharing = NaiveAttention(case), case.heads // case.kv_heads

    def naive(q_BHLD: torch.Tensor, k_BGSD: torch.Tensor, v_BGSV: torch.Tensor, /) -> torch.Tensor:
        k_BHSD, v_BHSV = (
            x if sharing == 1 else x.repeat_interleave(sharing, dim=1) for x in (k_BGSD, v_BGSV)
        )
        return attend(q_BHLD, k_BHSD, v_BHSV)

    return naive


@attention_builder(
    "naive-heads",
    time="n^2 d",
    memory="n^2",
    masks=MASKS,
    flops=flops,
    workspace=workspace_by_head,
)
def build_naive_heads(case: Case) -> AttentionCall:
    """The textbook loop: softmax(QKᵀ·scale)V one head after another, the results stacked."""
    attend, sharing = NaiveAttention(case), case.heads // case.kv_heads

    def naive_heads(
        q_BHLD: torch.Tensor, k_BGSD: torch.Tensor, v_BGSV: torch.Tensor, /
    ) -> torch.Tensor:
        # unbind and not an index: its gradient is one stack, where every index would make a
        # dq of all heads, zero but for one.
        k_BSDs, v_BSVs = k_BGSD.unbind(dim=1), v_BGSV.unbind(dim=1)
        o_BLVs = [
            attend(q_BLD, k_BSDs[head // sharing], v_BSVs[head // sharing])
            for head, q_BLD in enumerate(q_BHLD.unbind(dim=1))
        ]
        return torch.stack(o_BLVs, dim=1)

    return naive_heads


def plain_attention(case: Case) -> FunctionType:
    """softmax(QKᵀ·scale)V over one case's mask, as one would write it to be compiled."""
    scale, sharing = case.softmax_scale, case.heads // case.kv_heads
    wide = torch.promote_types(getattr(torch, case.dtype), torch.float32)
    hidden_LS, blind_L1 = hidden_and_blind(case)

    def naive(q_BHLD: torch.Tensor, k_BGSD: torch.Tensor, v_BGSV: torch.Tensor) -> torch.Tensor:
        k_BHSD = k_BGSD.repeat_interleave(sharing, dim=1) if sharing > 1 else k_BGSD
        v_BHSV = v_BGSV.repeat_interleave(sharing, dim=1) if sharing > 1 else v_BGSV
        scores_BHLS = (q_BHLD * scale) @ k_BHSD.mT
        if hidden_LS is not None:
            scores_BHLS = scores_BHLS.masked_fill(hidden_LS, float("-inf"))
        weights_BHLS = torch.softmax(scores_BHLS, dim=-1, dtype=wide).to(v_BHSV.dtype)
        o_BHLV = weights_BHLS @ v_BHSV
        return o_BHLV if blind_L1 is None else o_BHLV.masked_fill(blind_L1, 0)

    return naive  # type: ignore[return-value]


@attention_builder(
    "naive-compiled",
    time="n^2 d",
    memory="n^2",
    masks=MASKS,
    compiles=True,
    flops=flops,
    supports=reason_against_compiling,
)
def build_naive_compiled(case: Case) -> AttentionCall:
    """torch.compile of softmax(QKᵀ·scale)V, compiled afresh for every case."""
    return compile_alone(plain_attention(case))


if __name__ == "__main__":
    run_file(__file__)
