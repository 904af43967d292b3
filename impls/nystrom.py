"""Nyströmformer: the softmax matrix from its rows and columns at a few landmarks.

softmax(QKᵀ) ≈ softmax(Q k̃ᵀ) A⁺ softmax(q̃ Kᵀ) with A = softmax(q̃ k̃ᵀ), where the landmarks q̃
and k̃ are means over segments of equal length, and A⁺ comes from a few steps of an iteration for the
pseudo-inverse (Xiong et al. 2021, "Nyströmformer", arXiv:2102.03902, equations 11 and 13; without
its convolution beside). Here segments share a token where the length is no multiple. With as many
landmarks as tokens and enough iterations it is exact: A A⁺ A = A. With fewer the error is that of
the mean over a segment: it falls once segments are shorter than the reach over which tokens
resemble their neighbours. Means of unrelated tokens are all alike, A is nearly singular, and the
error stays near 1, or grows with the iterations. There is no causal form: means hold later tokens.

Axes beyond the usual ones: `M` landmarks.
"""

import torch
from torch.nn.functional import adaptive_avg_pool2d

from attnbench.api import AttentionCall, Case, attention_builder


def pseudo_inverse(a_MM: torch.Tensor, iterations: int) -> torch.Tensor:
    """A⁺ by the paper's iteration, which is slowest where the singular values of A are small."""
    eye = torch.eye(a_MM.shape[-1], dtype=a_MM.dtype, device=a_MM.device)
    # Not the largest norms over all heads, as in the paper's code: heads would not be independent.
    norms = a_MM.sum(-2, keepdim=True).amax(-1, keepdim=True)  # rows of a softmax sum to 1
    z_MM = a_MM.mT / norms
    for _ in range(iterations):
        az_MM = a_MM @ z_MM
        z_MM = z_MM @ (13 * eye - az_MM @ (15 * eye - az_MM @ (7 * eye - az_MM))) / 4
    return z_MM


def definition(case: Case, *, landmarks: int, iterations: int) -> AttentionCall:
    """The three softmax matrices in full, times V; landmarks by a matrix of means."""

    def means(x: torch.Tensor) -> torch.Tensor:
        count, m = x.shape[2], landmarks
        token = torch.arange(count, device=x.device)
        place = torch.arange(m, device=x.device).unsqueeze(1)
        # Segment i is from ⌊i·n/M⌋ up to ⌈(i + 1)·n/M⌉.
        inside = (token >= place * count // m) & (token < -(-(place + 1) * count // m))
        return (inside.to(x.dtype) @ x) / inside.sum(1, keepdim=True)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, /) -> torch.Tensor:
        k, v = (x.repeat_interleave(case.heads // case.kv_heads, dim=1) for x in (k, v))
        wide, q_BHMD, k_BHMD = torch.promote_types(q.dtype, torch.float32), means(q), means(k)
        rows_BHLM, middle_BHMM, columns_BHMS = (
            torch.softmax((a * case.softmax_scale) @ b.mT, -1, dtype=wide)
            for a, b in ((q, k_BHMD), (q_BHMD, k_BHMD), (q_BHMD, k))
        )
        low_rank_BHLS = rows_BHLM @ pseudo_inverse(middle_BHMM, iterations) @ columns_BHMS
        return low_rank_BHLS.to(v.dtype) @ v

    return attend


def supports(case: Case, *, landmarks: int) -> str | None:
    """Why not: a segment needs a token."""
    least = min(case.seq_len, case.kv_len)
    return None if landmarks <= least else f"{landmarks} landmarks are more than its {least} tokens"


def exact_at(case: Case) -> dict[str, int]:
    """A landmark for every token, and an iteration that has converged."""
    return {"landmarks": case.seq_len, "iterations": 40}


def flops(case: Case, *, landmarks: int, iterations: int) -> int:
    """Landmarks over keys, over landmarks, and queries over landmarks; the inverse. All useful."""
    attended = (case.seq_len + case.kv_len + landmarks) * (case.head_dim + case.value_dim)
    forward = 2 * case.batch * case.heads * landmarks * (attended + 4 * iterations * landmarks**2)
    return forward * {"forward": 1, "backward": 2, "both": 3}[case.pass_]


@attention_builder(
    "nystrom",
    family="low-rank",
    time="O(n d)",
    memory="O(n)",
    masks=("full",),
    definition=definition,
    exact_at=exact_at,
    flops=flops,
    useful=flops,
    supports=supports,
)
def build(case: Case, *, landmarks: int = 64, iterations: int = 6) -> AttentionCall:
    """Softmax from its rows and columns at landmarks."""
    dtype = getattr(torch, case.dtype)

    def nystrom(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, /) -> torch.Tensor:
        q, k, v = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in (q, k, v))
        q = q * case.softmax_scale
        q_BHMD, k_BGMD = (adaptive_avg_pool2d(x, (landmarks, x.shape[3])) for x in (q, k))
        k_BHMD = k_BGMD.repeat_interleave(case.heads // case.kv_heads, dim=1)
        inverse_BHMM = pseudo_inverse((q_BHMD @ k_BHMD.mT).softmax(-1), iterations)
        # The landmarks of heads that share keys are rows of one matmul.
        q_BGND = q_BHMD.reshape(*k.shape[:2], -1, q.shape[3])
        values_BGNV = (q_BGND @ k.mT).softmax(-1) @ v
        values_BHMV = inverse_BHMM @ values_BGNV.view(*q_BHMD.shape[:3], -1)
        return ((q @ k_BHMD.mT).softmax(-1) @ values_BHMV).to(dtype)

    return nystrom
