"""Split-KV attention ("flash-decoding"): the keys in splits that are worked on side by side.

One query against a long cache leaves a kernel that is parallel over queries and heads nothing to
share out. Here the keys are cut into P splits, a further batch axis: each gives its own maximum,
sum of exponentials and unnormalised output, and a second step rescales these to the common maximum
and adds them (Dao, Haziza, Massa, Sizov 2023, "Flash-Decoding for long-context inference"). Query
heads that share a key/value head are rows of one product, so that each key is read once.

Axes beyond the usual ones: `N` slices, one for each batch item and key/value head; `P` splits of
`J` keys; `M` = R·L rows, the queries of the R heads of a slice.
"""

import torch

from attnbench.api import (
    ALL_MASKS,
    AttentionCall,
    Case,
    Estimate,
    attention_builder,
    core_flops,
    hidden_and_blind,
)

# In place of the maximum of a split that shows a query no key: -inf minus it is no NaN.
LOWEST = -1e30


def product(a_NPMD: torch.Tensor, b_NPDJ: torch.Tensor) -> torch.Tensor:
    """The matmuls of all slices and splits, (N, P, M, J), without a copy of b.

    torch makes one where the batch axes cannot be joined, as in a view of a longer buffer.
    """
    if len(b_NPDJ) == 1 or b_NPDJ.stride(0) == len(b_NPDJ[0]) * b_NPDJ.stride(1):
        return a_NPMD @ b_NPDJ
    return torch.stack([a @ b for a, b in zip(a_NPMD, b_NPDJ, strict=True)])


def attend(
    q_NMD: torch.Tensor,
    k_NPJD: torch.Tensor,
    v_NPJV: torch.Tensor,
    hidden: torch.Tensor | None,
    softcap: float | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of each split the unnormalised output (N, P, M, V), the sum and the maximum (N, P, M, 1).

    Statistics are float32 at least. `hidden` broadcasts to the scores, (N, P, M, J).
    """
    shape = len(q_NMD), k_NPJD.shape[1], *q_NMD.shape[1:]
    scores = product(q_NMD.unsqueeze(1).expand(shape), k_NPJD.mT)
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if softcap:
        scores = softcap * (scores / softcap).tanh()
    if hidden is not None:
        scores = scores.masked_fill(hidden, float("-inf"))
    highest = scores.detach().amax(-1, keepdim=True).clamp_min(LOWEST)
    weights = (scores - highest).exp()
    o_NPMV = product(weights.to(v_NPJV.dtype), v_NPJV)
    return o_NPMV.to(weights.dtype), weights.sum(-1, keepdim=True), highest


def flops(case: Case) -> int:
    """FLOPs executed: the full square whatever the mask, and no scores recomputed backward."""
    return core_flops(case, case.seq_len * case.kv_len, recompute=False)


def workspace(case: Case, *, splits: int) -> int:
    """The scores, less their maximum, and exponentials; the splits' outputs, thrice (bytes)."""
    row = (
        (3 + 2 * bool(case.softcap)) * case.kv_len
        + 3 * (splits + 1) * (case.value_dim + 2)
        + case.head_dim
    )
    return Estimate(row * case.batch * case.heads * case.seq_len * max(4, case.element_bytes))


@attention_builder(
    "split-kv",
    time="n^2 d",
    memory="n^2",
    masks=ALL_MASKS,
    softcap=True,
    sinks=True,
    flops=flops,
    workspace=workspace,
)
def build_split_kv(case: Case, *, splits: int = 8) -> AttentionCall:
    """Flash-decoding: keys in splits, for few queries."""
    count = min(splits, case.kv_len)
    even = case.kv_len // count * count  # the keys left over are a split of their own
    sharing, scale = case.heads // case.kv_heads, case.softmax_scale
    hidden, blind = hidden_and_blind(case)

    def split_mask(keys: slice, parts: int) -> torch.Tensor | None:
        """What to hide of some of the keys, cut into parts: (N, P, M, J)."""
        if hidden is None:
            return None
        shape = case.batch, case.kv_heads, sharing, case.seq_len, case.kv_len
        # (B, G, R, L, P, J) as (B, G, P, R, L, J)
        cut = hidden.unsqueeze(-3).expand(shape)[..., keys].reshape(*shape[:-1], parts, -1)
        return cut.movedim(-2, 2).flatten(3, 4).flatten(0, 1)

    parts = [(slice(0, even), count), (slice(even, None), 1)][: 1 + (even < case.kv_len)]
    masks = [split_mask(*part) for part in parts]

    def split_kv(
        q_BHLD: torch.Tensor, k_BGSD: torch.Tensor, v_BGSV: torch.Tensor, /, *sink: torch.Tensor
    ) -> torch.Tensor:
        k_NSD, v_NSV = k_BGSD.flatten(0, 1), v_BGSV.flatten(0, 1)
        q_NMD = (q_BHLD * scale).reshape(len(k_NSD), -1, q_BHLD.shape[-1])
        found = []
        for (keys, number), mask in zip(parts, masks, strict=True):
            k_NPJD, v_NPJV = (
                x[:, keys].view(len(x), number, -1, x.shape[-1]) for x in (k_NSD, v_NSV)
            )
            found.append(attend(q_NMD, k_NPJD, v_NPJV, mask, case.softcap))
        for sink_H in sink:  # a split of its own, with a value of 0
            sink_M = sink_H.repeat_interleave(case.seq_len).to(found[0][1].dtype)
            sink_N1M1 = sink_M.view(1, case.kv_heads, 1, -1, 1).expand(case.batch, -1, -1, -1, 1)
            sink_N1M1, zero = sink_N1M1.flatten(0, 1), torch.zeros_like(found[0][0][:, :1])
            highest = sink_N1M1.detach()
            found.append((zero, (sink_N1M1 - highest).exp(), highest))
        o_NPMV, sums, highest = (torch.cat(x, dim=1) for x in zip(*found, strict=True))
        shares = (highest - highest.amax(1, keepdim=True)).exp()
        o_NMV = (shares * o_NPMV).sum(1) / (shares * sums).sum(1)
        o_BHLV = o_NMV.to(q_BHLD.dtype).view(*q_BHLD.shape[:-1], -1)
        return o_BHLV if blind is None else o_BHLV.masked_fill(blind, 0)

    return split_kv
