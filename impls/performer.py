"""Performer: softmax attention by random features, whose error falls as features grow (FAVOR+).

exp(q·k) is the mean over directions ω ~ N(0, I) of φ(q)·φ(k) with φ(x) = exp(ω·x − |x|²/2), which
is positive; the directions are orthogonal in blocks of D, which lowers the variance and leaves the
mean (Choromanski et al. 2021, "Rethinking Attention with Performers", arXiv:2009.14794). From
there on it is linear attention. The estimate of a weight is off by √((exp(|q + k|²) − 1)/features)
of itself, q and k times √scale: the error falls as 1/√features once these outnumber exp(|q + k|²).
Normal inputs of width D have |q + k|² = 2√D, at D = 64 already 16: more than any features are
enough for. It wants small or normalised queries and keys.

The exponents are shifted to stay finite, in ways that leave the ratio as it is: those of a query by
their maximum, those of a feature by its maximum over the keys so far, which goes to the queries.
The key that matters most to a query then weighs 1, whatever the inputs; a chunk whose earlier
queries see keys that vanish beside its later ones is cut in half, in a second run over all chunks.

Axes beyond the usual ones: `F` features; `R` query heads that share a key/value head.
"""

import itertools
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch.nn.functional import pad

from attnbench.api import (
    AttentionCall,
    Case,
    attention_builder,
    chunk_sizes,
    flops_in_chunks,
    in_chunks,
    kernelised,
)

LOWEST = -1e30  # the maximum over no keys: finite, so that nothing becomes NaN
LEAST = 1e-20  # sums of weights below may have lost some to underflow


class Seen(NamedTuple):
    """Of the keys so far: each feature's largest exponent, and the sum of φ(k)[v, 1] below it."""

    top_BG11F: torch.Tensor
    sum_BG1FV: torch.Tensor


def directions(case: Case, features: int, seed: int) -> torch.Tensor:
    """ω_DF in float64 times √scale: orthogonal in blocks of D, each of a normal vector's length."""
    generator, d = torch.Generator().manual_seed(seed), case.head_dim
    drawn = torch.randn(2, -(-features // d), d, d, generator=generator, dtype=torch.float64)
    q, r = torch.linalg.qr(drawn[0])
    q = q * r.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)  # else it is not uniform
    rows = (q.mT * drawn[1].norm(dim=-1, keepdim=True)).flatten(0, 1)[:features]
    omega_DF: torch.Tensor = rows.mT * case.softmax_scale**0.5
    return omega_DF.contiguous().to(case.device)


def definition(case: Case, *, features: int, seed: int) -> AttentionCall:
    """φ(Q)φ(K)ᵀ of the admitted pairs, each row over its sum, times V."""
    omega_DF = directions(case, features, seed)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, /) -> torch.Tensor:
        # In float64 whatever the dtype: keys far apart would vanish beside each other.
        size_BGS1 = k.double().square().sum(-1, keepdim=True) * case.softmax_scale / 2
        all_BGSF, later, outputs = k.double() @ omega_DF - size_BGS1, case.kv_len - case.seq_len, []
        tops_BGSF, ends = all_BGSF.detach().cummax(2).values, [case.seq_len]
        # Too far apart for float64, too: each query by itself, beside those that see no key.
        if not case.unmasked and (tops_BGSF[:, :, -1] - tops_BGSF[:, :, max(0, later)]).max() > 600:
            ends = list(range(max(1, 1 - later), case.seq_len + 1))
        for first, end in itertools.pairwise([0, *ends]):
            part = replace(case, seq_len=end - first, kv_len=end + later)
            key_BGSF, top_BG1F = all_BGSF[:, :, : end + later], tops_BGSF[:, :, [end + later - 1]]
            top_BH1F = top_BG1F.repeat_interleave(case.heads // case.kv_heads, dim=1)
            query_BHLF = q[:, :, first:end].double() @ omega_DF + top_BH1F
            query_BHLF = query_BHLF - query_BHLF.detach().amax(3, keepdim=True)
            weights = query_BHLF.exp(), (key_BGSF - top_BG1F).exp()
            outputs.append(kernelised(part, *weights, v[:, :, : end + later]))
        return torch.cat(outputs, dim=2)

    return attend


def flops(case: Case, *, features: int, chunk: int | None = None) -> int:
    """Features of q and k, pairs inside chunks, keys into the state, queries times the state."""
    return flops_in_chunks(
        case, chunk, features, case.value_dim + 1, of_token=features * case.head_dim
    )


@attention_builder(
    "performer",
    family="linear",
    time="O(n d)",
    memory="O(n)",
    definition=definition,
    flops=flops,
    useful=lambda case, *, features: flops(case, features=features),
)
def build(case: Case, *, features: int = 256, chunk: int = 128, seed: int = 0) -> AttentionCall:
    """Random features for the exponential (FAVOR+)."""
    wide = torch.promote_types(getattr(torch, case.dtype), torch.float32)
    omega_DF, half = directions(case, features, seed).to(wide), case.softmax_scale / 2
    may_lose = any(min(sizes) > 1 for sizes in chunk_sizes(case, chunk))

    def step(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: Seen, lost: torch.Tensor | None
    ) -> tuple[Any, Seen]:
        """Output of the queries of a chunk, and what was seen after its keys.

        `lost` is made true where a query has lost some; without it the chunk is then cut.
        """
        k_BG1SF = k @ omega_DF - half * k.square().sum(-1, keepdim=True)
        top_BG11F = torch.cat((seen.top_BG11F, k_BG1SF.detach()), 3).amax(3, keepdim=True)
        k_BG1SF = (k_BG1SF - top_BG11F).exp()
        q_BGRLF = q @ omega_DF + top_BG11F
        q_BGRLF = (q_BGRLF - q_BGRLF.detach().amax(4, keepdim=True)).exp()
        v_and_1 = pad(v, (0, 1), value=1.0)
        state = seen.sum_BG1FV * (seen.top_BG11F - top_BG11F).exp().mT
        o = (q_BGRLF @ k_BG1SF.mT).tril() @ v_and_1 + q_BGRLF @ state
        total, tokens = o[..., -1:], min(q.shape[3], k.shape[3])
        if tokens > 1 and lost is not None:  # beside later keys of the chunk
            lost |= (total < LEAST).any()
        elif tokens > 1 and bool((total < LEAST).any()):
            cut = tokens // 2
            first, seen = step(q[..., :cut, :], k[..., :cut, :], v[..., :cut, :], seen, None)
            last, seen = step(q[..., cut:, :], k[..., cut:, :], v[..., cut:, :], seen, None)
            return torch.cat((first, last), 3), seen
        o = o[..., :-1] / total.masked_fill(total == 0, 1)  # 0 without keys
        return o, Seen(top_BG11F, state + k_BG1SF.mT @ v_and_1)

    def attend(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lost: torch.Tensor | None
    ) -> torch.Tensor:
        sizes = len(k), case.kv_heads, 1
        nothing = k.new_zeros(*sizes, features, case.value_dim + 1, dtype=wide)
        seen = Seen(k.new_full((*sizes, 1, features), LOWEST, dtype=wide), nothing)
        outputs = []
        for q_BGRLD, k_BG1SD, v_BG1SV in in_chunks(case, chunk, q, k, v):
            o_BGRLV, seen = step(q_BGRLD, k_BG1SD, v_BG1SV, seen, lost)
            outputs.append(o_BGRLV)
        return torch.cat(outputs, dim=3).flatten(1, 2).to(v.dtype)

    def performer(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, /) -> torch.Tensor:
        lost = k.new_zeros((), dtype=torch.bool) if may_lose else None
        o = attend(q, k, v, lost)
        # Asked once for all chunks: a GPU's host waits here until what it has issued is done.
        if lost is None or not bool(lost):
            return o
        del o
        return attend(q, k, v, None)

    return performer
