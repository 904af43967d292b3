"""torch.compile of the plain softmax(QKᵀ·scale)V."""

from types import FunctionType

import torch

from attnbench.api import (
    AttentionCall,
    Case,
    attention_builder,
    compile_alone,
    core_flops,
    hidden_and_blind,
    reason_against_compiling,
    run_file,
)


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
    masks=("full", "causal", "window"),
    compiles=True,
    flops=lambda case: core_flops(case, case.seq_len * case.kv_len, recompute=False),
    supports=reason_against_compiling,
)
def build_naive_compiled(case: Case) -> AttentionCall:
    """torch.compile of softmax(QKᵀ·scale)V, compiled afresh for every case."""
    return compile_alone(plain_attention(case))


if __name__ == "__main__":
    run_file(__file__)
