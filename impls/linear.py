"""Linear attention: a feature map in place of the exponential, so that keys and values add up once.

o_i = Σ_j φ(q_i)·φ(k_j) v_j / Σ_j φ(q_i)·φ(k_j) with φ(x) = elu(x) + 1 (Katharopoulos et al. 2020,
"Transformers are RNNs", arXiv:2006.16236). φ(q) stands outside of the sum: the keys seen so far
are one state, Σ_j φ(k_j) [v_j, 1], a (D, V + 1) matrix a head whose last column is the
denominator. There is no softmax, and so no scale of the scores.

Three forms of one result: `linear-parallel` multiplies every query with every key, as softmax
attention does; `linear-recurrent` goes token by token; `linear` goes by chunks, with the pairs
inside one as in the parallel form and those with earlier keys through the state. A model would
generate with that state for its cache, at the same cost for every token; as a core of `decode` it
is handed all keys at each step and makes the state anew, O(n) as with any other core.

Axes beyond the usual ones: `R` query heads that share a key/value head.
"""

from typing import Any

import torch
from torch.nn.functional import pad

from attnbench.api import (
    AttentionCall,
    Case,
    attention_builder,
    core_flops,
    flops_in_chunks,
    in_chunks,
    kernelised,
)


def feature_map(x: torch.Tensor) -> torch.Tensor:
    """elu(x) + 1, without the rounding of (exp(x) − 1) + 1 where exp(x) is small."""
    return x.clamp(max=0).exp() + x.relu()


def query_features(x: torch.Tensor) -> torch.Tensor:
    """φ of queries; one without an entry above 0 is shifted, by a factor that divides out."""
    return feature_map(x - x.detach().amax(-1, keepdim=True).clamp(max=0))


def definition(case: Case) -> AttentionCall:
    """φ(Q)φ(K)ᵀ of the admitted pairs, each row over its sum, times V.

    φ(q) is at most 1, by a factor that divides out: float16 holds no weights of large queries.
    """

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, /) -> torch.Tensor:
        phi_BHLD = query_features(q)
        phi_BHLD = phi_BHLD / phi_BHLD.detach().amax(-1, keepdim=True).clamp(min=1)
        return kernelised(case, phi_BHLD, feature_map(k), v)

    return call


def flops(case: Case, *, chunk: int | None = None) -> int:
    """Pairs inside chunks, keys into the state, queries times the state; the least without."""
    return flops_in_chunks(case, chunk, case.head_dim, case.value_dim + 1)


def flops_parallel(case: Case) -> int:
    """Every pair, masked or not."""
    return core_flops(case, case.seq_len * case.kv_len, recompute=False)


def flops_recurrent(case: Case) -> int:
    """Every key into the state, and every query times it."""
    d, v = case.head_dim, case.value_dim + 1
    forward = 2 * case.batch * (case.heads * case.seq_len + case.kv_heads * case.kv_len) * d * v
    return forward * {"forward": 1, "backward": 2, "both": 3}[case.pass_]


def empty_state(case: Case, k: torch.Tensor) -> torch.Tensor:
    """The sum over no keys: (B, G, 1, D, V + 1) in float32 at least."""
    wide = torch.promote_types(k.dtype, torch.float32)
    return k.new_zeros(len(k), case.kv_heads, 1, case.head_dim, case.value_dim + 1, dtype=wide)


def divided(o_and_total: torch.Tensor) -> torch.Tensor:
    """The sum over values by that of the weights; 0 where there is no key."""
    total = o_and_total[..., -1:]
    return o_and_total[..., :-1] / total.masked_fill(total == 0, 1)


ROW: Any = {"family": "linear", "definition": definition, "useful": lambda case: flops(case)}


@attention_builder("linear", **ROW, time="O(n d^2)", memory="O(n)", flops=flops)
def build_linear(case: Case, *, chunk: int = 128) -> AttentionCall:
    """Features elu + 1 for the exponential, by chunks."""

    def linear(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, /) -> torch.Tensor:
        state, outputs = empty_state(case, k), []
        for q_BGRLD, k_BG1SD, v_BG1SV in in_chunks(case, chunk, q, k, v):
            q_BGRLD, k_BG1SD = query_features(q_BGRLD), feature_map(k_BG1SD)
            v_and_1 = pad(v_BG1SV, (0, 1), value=1.0)
            inside = (q_BGRLD @ k_BG1SD.mT).tril() @ v_and_1
            outputs.append(divided(inside + q_BGRLD @ state))
            state = state + k_BG1SD.mT @ v_and_1
        return torch.cat(outputs, dim=3).flatten(1, 2).to(v.dtype)

    return linear


@attention_builder(
    "linear-recurrent", **ROW, time="O(n d^2)", memory="O(n d^2)", flops=flops_recurrent
)
def build_recurrent(case: Case) -> AttentionCall:
    """The same token by token."""

    def recurrent(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, /) -> torch.Tensor:
        state, outputs = empty_state(case, k), []
        for q_BGRLD, k_BG1SD, v_BG1SV in in_chunks(case, 1, q, k, v):
            state = state + feature_map(k_BG1SD).mT @ pad(v_BG1SV, (0, 1), value=1.0)
            outputs.append(divided(query_features(q_BGRLD) @ state))
        return torch.cat(outputs, dim=3).flatten(1, 2).to(v.dtype)

    return recurrent


@attention_builder("linear-parallel", **ROW, time="n^2 d", memory="n^2", flops=flops_parallel)
def build_parallel(case: Case) -> AttentionCall:
    """The same by its definition: every pair."""
    return definition(case)
