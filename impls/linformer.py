"""Linformer: keys and values projected from S places to a few, then softmax attention over those.

o = softmax(q (E k)ᵀ·scale) F v with E and F (rank, S) (Wang et al. 2020, "Linformer:
Self-Attention with Linear Complexity", arXiv:2006.04768). In a model E and F are learned. Here
they are drawn, with the variance 1/S of a linear layer that reads S places, so that projected keys
are of the size of keys: its cost is shown, not its accuracy. Each projected key is a mixture of all
keys, so that the output has nothing in common with that of exact attention, and a mean square of
1/rank where that has 1/S: on normal inputs the relative error is √(1 + S/rank), which falls as
1/√rank at first and to √2 at rank S. No rank makes it exact: softmax does not commute with a
mixture. For the same reason there is no causal form: a projected key holds later ones, too.

Axes beyond the usual ones: `R` projected keys.
"""

import math

import torch
from torch.nn.functional import scaled_dot_product_attention

from attnbench.api import AttentionCall, Case, attention_builder, core_flops


def projections(case: Case, rank: int, seed: int) -> torch.Tensor:
    """E and F: (2, rank, S) in float64."""
    generator, sizes = torch.Generator().manual_seed(seed), (2, rank, case.kv_len)
    drawn_2RS = torch.randn(sizes, generator=generator, dtype=torch.float64)
    return drawn_2RS.div_(math.sqrt(case.kv_len)).to(case.device)


def definition(case: Case, *, rank: int, seed: int) -> AttentionCall:
    """softmax(Q(EK)ᵀ·scale) FV."""
    drawn_2RS = projections(case, rank, seed)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, /) -> torch.Tensor:
        sharing, (e_RS, f_RS) = q.shape[1] // k.shape[1], drawn_2RS.to(q.dtype).unbind()
        k_BHRD, v_BHRV = (x.repeat_interleave(sharing, dim=1) for x in (e_RS @ k, f_RS @ v))
        wide = torch.promote_types(q.dtype, torch.float32)
        weights_BHLR = torch.softmax((q * case.softmax_scale) @ k_BHRD.mT, -1, dtype=wide)
        return weights_BHLR.to(v.dtype) @ v_BHRV

    return attend


def supports(case: Case, *, rank: int) -> str | None:
    """Why not: a rank above the keys projects nothing."""
    return None if rank <= case.kv_len else f"rank {rank} is above its {case.kv_len} keys"


def flops(case: Case, *, rank: int, least: bool = False) -> int:
    """Keys and values projected, and their gradients back; attention over the projected ones.

    SDPA's kernels make the scores again, which is not the `least`: not math's, which D ≠ V takes.
    """
    fused = case.device == "cuda" or case.head_dim == case.value_dim
    projected = case.batch * case.kv_heads * case.kv_len * (case.head_dim + case.value_dim) * rank
    attended = core_flops(case, case.seq_len * rank, recompute=fused and not least)
    return attended + projected * (4 if case.pass_ == "both" else 2)


@attention_builder(
    "linformer",
    family="low-rank",
    time="O(n d)",
    memory="O(n)",
    masks=("full",),
    definition=definition,
    flops=flops,
    useful=lambda case, *, rank: flops(case, rank=rank, least=True),
    supports=supports,
)
def build(case: Case, *, rank: int = 128, seed: int = 0) -> AttentionCall:
    """Softmax over `rank` random mixtures of all keys."""
    e_RS, f_RS = projections(case, rank, seed).to(getattr(torch, case.dtype)).unbind()

    def linformer(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, /) -> torch.Tensor:
        return scaled_dot_product_attention(
            q, e_RS @ k, f_RS @ v, scale=case.softmax_scale, enable_gqa=case.heads != case.kv_heads
        )

    return linformer
