"""Retention: linear attention without a denominator, in which older keys fade (RetNet).

o_i = Σ_{j ≤ i} γ^(i−j) (q_i·k_j)·scale v_j with γ = 1 − 2^(−5−g) for key/value head g, in chunks:
the pairs inside one by a matrix of decays, those with earlier keys through a (D, V) state that
fades from chunk to chunk (Sun et al. 2023, "Retentive Network", arXiv:2307.08621, section 2.2;
without its rotation, group norm and gate, which are outside of the core). The decay belongs to the
key/value head, so that heads that share one share its state too. It has no softmax: it is
another function than attention, and has weights of both signs.

Axes beyond the usual ones: `R` query heads that share a key/value head.
"""

import torch

from attnbench.api import (
    AttentionCall,
    Case,
    attention_builder,
    chunk_sizes,
    dense_mask,
    flops_in_chunks,
    in_chunks,
)


def decays(case: Case) -> torch.Tensor:
    """The logarithm of γ for each key/value head, (G,) in float64."""
    head = torch.arange(case.kv_heads, dtype=torch.float64, device=case.device)
    return torch.log1p(-(2 ** (-5 - head)))


def definition(case: Case) -> AttentionCall:
    """QKᵀ·scale times γ to the distance of each admitted pair, times V."""
    query = torch.arange(case.seq_len, device=case.device).unsqueeze(1)
    distance_LS = query + case.kv_len - case.seq_len - torch.arange(case.kv_len, device=case.device)
    sharing = case.heads // case.kv_heads
    fade_HLS = (decays(case).repeat_interleave(sharing)[:, None, None] * distance_LS).exp()
    admitted_LS = dense_mask(case.mask, case.seq_len, case.kv_len, case.device)
    fade_HLS = fade_HLS.masked_fill(~admitted_LS, 0)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, /) -> torch.Tensor:
        k_BHSD, v_BHSV = (x.repeat_interleave(sharing, dim=1) for x in (k, v))
        scores_BHLS = (q * case.softmax_scale) @ k_BHSD.mT
        return (scores_BHLS * fade_HLS.to(q.dtype)) @ v_BHSV

    return attend


def supports(case: Case) -> str | None:
    """Why not: its decay is along the way back from a query."""
    return None if case.mask.text == "causal" else "its decay is that of a causal mask"


@attention_builder(
    "retention",
    family="linear",
    time="O(n d^2)",
    memory="O(n)",
    masks=("causal",),
    definition=definition,
    flops=lambda case, *, chunk: flops_in_chunks(case, chunk, case.head_dim, case.value_dim),
    useful=lambda case: flops_in_chunks(case, None, case.head_dim, case.value_dim),
    supports=supports,
)
def build(case: Case, *, chunk: int = 128) -> AttentionCall:
    """Sums over keys that fade, no denominator (RetNet)."""
    wide = torch.promote_types(getattr(torch, case.dtype), torch.float32)
    log_G111 = decays(case).view(-1, 1, 1, 1)

    def fade(distance: torch.Tensor) -> torch.Tensor:
        """The decay over each of the distances (l, s), for each head: (G, 1, l, s)."""
        return (log_G111 * distance).exp().to(wide)

    tables = {}
    for queries, keys in set(chunk_sizes(case, chunk)):
        i, j = (torch.arange(n, device=case.device).unsqueeze(1) for n in (queries, keys))
        # From a query to the key before the chunk, from the chunk's end to a key, and inside.
        tables[queries, keys] = fade(i + 1), fade(keys - 1 - j), fade(i - j.mT).tril()
    across = {keys: fade(torch.tensor([[keys]], device=case.device)) for _, keys in tables}

    def retention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, /) -> torch.Tensor:
        state = k.new_zeros(len(k), case.kv_heads, 1, case.head_dim, case.value_dim, dtype=wide)
        outputs = []
        for q_BGRLD, k_BG1SD, v_BG1SV in in_chunks(case, chunk, q * case.softmax_scale, k, v):
            queries, keys = q_BGRLD.shape[3], k_BG1SD.shape[3]
            since, until, inside = tables[queries, keys]
            o = ((q_BGRLD @ k_BG1SD.mT) * inside) @ v_BG1SV
            outputs.append(o + (q_BGRLD * since) @ state)
            state = state * across[keys] + (k_BG1SD * until).mT @ v_BG1SV
        return torch.cat(outputs, dim=3).flatten(1, 2).to(v.dtype)

    return retention
