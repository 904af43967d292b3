"""Exact attention over blocks of queries and keys, in plain torch: O(n) memory, same result.

One block of scores exists at a time. Each query carries the running maximum and the running sum
of its exponentials (Milakov & Gimelshein 2018, "Online normalizer calculation for softmax"), so
that the unnormalised output is corrected whenever a later block raises the maximum (Rabe & Staats
2021, "Self-attention does not need O(n²) memory"). The backward keeps q, k, v, o and the
log-sum-exp of each query, and recomputes the probabilities from them block by block (Dao et al.
2022, "FlashAttention"). Blocks that the mask hides are never computed; only those which the edge
of its band crosses are masked.

Scores are held in base 2, with log2(e) folded into their scale: exp2 takes a third of the time
of exp on CPU. Half precision is computed in float32 throughout.

Axes beyond the usual ones: `N` slices, one for each batch item and key/value head; `R` query
heads that share a slice; `I` queries and `J` keys of a block; `M` = R·I, the rows of its matmul.
"""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from attnbench.api import (
    AttentionCall,
    Case,
    attention_builder,
    dense_mask,
    run_file,
    visible_blocks,
)

LOG2_E, LN_2 = math.log2(math.e), math.log(2)
# The maximum of a query that has seen no key yet: finite, so that -inf minus it is never NaN.
LOWEST = -1e30
# Most scores of a block, queries and keys: an op must outweigh its launch, its operands stay in
# the last cache, and more queries would waste more on the diagonal.
MOST = {"cpu": (2**20, 512, 512), "cuda": (2**20, 512, 1024)}

# Some keys, and what to hide of the block where an edge of the band crosses it (I, J).
KeyBlock = tuple[slice, torch.Tensor | None]


class Tiling(NamedTuple):
    """What `build` prepares: blocks of queries, each with the blocks of keys that it sees."""

    blocks: list[tuple[slice, list[KeyBlock]]]
    most: tuple[int, int, int]
    scale: float


def block_sizes(case: Case) -> tuple[int, int, int]:
    """The most slices N, queries I and keys J of one block: N as the count of scores allows."""
    sharing = case.heads // case.kv_heads
    scores, queries, keys = MOST[case.device]
    queries = min(case.seq_len, queries, max(64, 1024 // sharing))
    keys = min(case.kv_len, keys)
    slices = max(1, scores // (sharing * queries * keys))
    return min(slices, case.batch * case.kv_heads), queries, keys


def hidden_part(case: Case, queries: range, keys: range) -> torch.Tensor | None:
    """What to hide of a block, or None where every query sees every key of it."""
    latest_start, _ = case.mask.span(queries[-1], case.seq_len, case.kv_len)
    _, earliest_end = case.mask.span(queries[0], case.seq_len, case.kv_len)
    if latest_start <= keys.start and keys.stop <= earliest_end:
        return None
    sizes = case.seq_len, case.kv_len, case.device
    seen_IS = dense_mask(case.mask, *sizes, first_query=queries.start, count=len(queries))
    return ~seen_IS[:, keys.start : keys.stop]


def cut(case: Case) -> Tiling:
    """The case's blocks; those that lie alike beside the diagonal share one mask.

    Keys are cut from the last one down, so that the diagonal crosses every row of blocks in the
    same place.
    """
    most = _, rows, columns = block_sizes(case)
    masks: dict[tuple[int, int, int], torch.Tensor | None] = {}
    blocks: list[tuple[slice, list[KeyBlock]]] = []
    for queries, seen in visible_blocks(case, rows):
        key_blocks: list[KeyBlock] = []
        for end in range(seen.stop, seen.start, -columns):
            keys = range(max(seen.start, end - columns), end)
            place = (keys.start - queries.start, len(queries), len(keys))
            if place not in masks:
                masks[place] = hidden_part(case, queries, keys)
            key_blocks.append((slice(keys.start, keys.stop), masks[place]))
        blocks.append((slice(queries.start, queries.stop), key_blocks))
    return Tiling(blocks, most, case.softmax_scale)


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of scores, statistics and sums."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def rows_of(x_NRID: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
    """A wide copy of a block times `factor`, with the rows of its R heads joined: (N, M, D)."""
    x_NRID = x_NRID.to(wide(x_NRID.dtype), copy=True, memory_format=torch.contiguous_format)
    return x_NRID.mul_(factor).flatten(1, 2)


def by_slice(x_BHLD: torch.Tensor, slices: int) -> torch.Tensor:
    """(B, H, L, D) as (N, R, L, D): each query head beside those it shares keys with."""
    return x_BHLD.reshape(slices, -1, *x_BHLD.shape[2:])


def places(tiling: Tiling, total: int) -> Iterator[tuple[slice, slice, list[KeyBlock]]]:
    """Every few slices with every block of queries, and its blocks of keys."""
    step, _, _ = tiling.most
    for first in range(0, total, step):
        for queries, key_blocks in tiling.blocks:
            yield slice(first, min(first + step, total)), queries, key_blocks


def attend_block(
    q_NRID: torch.Tensor,
    k_NSD: torch.Tensor,
    v_NSV: torch.Tensor,
    key_blocks: list[KeyBlock],
    scale: float,
    buffer: torch.Tensor,
    lse_NRI: torch.Tensor | None,
) -> torch.Tensor:
    """Output (N, R, I, V) of one block of queries; `lse_NRI` takes its base-2 log-sum-exp."""
    slices, heads, queries, _ = q_NRID.shape
    q_NMD = rows_of(q_NRID, scale * LOG2_E)
    o_NMV = q_NMD.new_zeros(slices, heads * queries, v_NSV.shape[2])
    sum_NM1 = q_NMD.new_zeros(slices, heads * queries, 1)
    max_NM1, spare_NM1 = torch.full_like(sum_NM1, LOWEST), torch.empty_like(sum_NM1)
    for keys, hidden_IJ in key_blocks:
        k_NJD, v_NJV = k_NSD[:, keys], v_NSV[:, keys]
        sizes = slices, heads * queries, k_NJD.shape[1]
        p_NMJ = buffer[: math.prod(sizes)].view(sizes)
        torch.bmm(q_NMD, k_NJD.mT, out=p_NMJ)
        if hidden_IJ is not None:
            p_NMJ.view(slices, heads, queries, -1).masked_fill_(hidden_IJ, -math.inf)
        new_max_NM1 = torch.amax(p_NMJ, 2, keepdim=True, out=spare_NM1)
        torch.maximum(max_NM1, new_max_NM1, out=new_max_NM1)
        shrink_NM1 = max_NM1.sub_(new_max_NM1).exp2_()
        p_NMJ.sub_(new_max_NM1).exp2_()
        o_NMV.mul_(shrink_NM1).baddbmm_(p_NMJ, v_NJV)
        sum_NM1.mul_(shrink_NM1)
        sum_NM1.add_(torch.sum(p_NMJ, 2, keepdim=True, out=shrink_NM1))
        max_NM1, spare_NM1 = new_max_NM1, shrink_NM1
    # A query that saw no key has the sum 0: made tiny, it gives output 0 and a finite log-sum-exp.
    sum_NM1.clamp_min_(torch.finfo(sum_NM1.dtype).tiny)
    o_NMV.div_(sum_NM1)
    if lse_NRI is not None:
        lse_NRI.copy_(max_NM1.add_(sum_NM1.log2_()).view(lse_NRI.shape))
    return o_NMV.view(slices, heads, queries, -1)


def attend(
    tiling: Tiling, q_BHLD: torch.Tensor, k_BGSD: torch.Tensor, v_BGSV: torch.Tensor, *, keep: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Output (B, H, L, V) and, where a backward is to `keep` it, the log-sum-exp (N, R, L)."""
    dtype = wide(q_BHLD.dtype)
    k_NSD, v_NSV = k_BGSD.flatten(0, 1).to(dtype), v_BGSV.flatten(0, 1).to(dtype)
    q_NRLD = by_slice(q_BHLD, len(k_NSD))
    o_BHLV = q_BHLD.new_empty(*q_BHLD.shape[:3], v_NSV.shape[2])
    o_NRLV = by_slice(o_BHLV, len(k_NSD))
    lse_NRL = q_NRLD.new_empty(q_NRLD.shape[:3], dtype=dtype) if keep else None
    # Every block uses it again: fresh memory for each would cost its page faults.
    buffer = q_NRLD.new_empty(q_NRLD.shape[1] * math.prod(tiling.most), dtype=dtype)
    for n, i, key_blocks in places(tiling, len(k_NSD)):
        lse_NRI = None if lse_NRL is None else lse_NRL[n, :, i]
        o_NRLV[n, :, i] = attend_block(
            q_NRLD[n, :, i], k_NSD[n], v_NSV[n], key_blocks, tiling.scale, buffer, lse_NRI
        )
    return o_BHLV, lse_NRL


def differentiate_block(
    rows: list[torch.Tensor],
    columns: list[torch.Tensor],
    key_blocks: list[KeyBlock],
    scale: float,
    buffers: torch.Tensor,
) -> torch.Tensor:
    """Dq (N, R, I, D) of one block of queries; its part of dk and dv is added in place.

    `rows` are q, o, do and the log-sum-exp of these queries; `columns` k, v, dk, dv of all keys.
    Scores are held keys by queries: then one matmul of the five reads them transposed, not two.
    """
    q_NRID, o_NRIV, do_NRIV, lse_NRI = rows
    slices, heads, queries, _ = q_NRID.shape
    q_NMD, do_NMV = rows_of(q_NRID, scale * LOG2_E), rows_of(do_NRIV)
    delta_N1M = rows_of(o_NRIV).mul_(do_NMV).sum(2).unsqueeze(1)
    dq_NMD = torch.zeros_like(q_NMD)
    for keys, hidden_IJ in key_blocks:
        k_NJD, v_NJV, dk_NJD, dv_NJV = (x_NSD[:, keys] for x_NSD in columns)
        sizes = slices, k_NJD.shape[1], heads * queries
        p_NJM, ds_NJM = (buffer[: math.prod(sizes)].view(sizes) for buffer in buffers)
        torch.bmm(k_NJD, q_NMD.mT, out=p_NJM)
        p_NJRI = p_NJM.view(slices, -1, heads, queries)
        if hidden_IJ is not None:
            p_NJRI.masked_fill_(hidden_IJ.mT.unsqueeze(1), -math.inf)
        p_NJRI.sub_(lse_NRI.unsqueeze(1)).exp2_()
        torch.bmm(v_NJV, do_NMV.mT, out=ds_NJM)
        ds_NJM.sub_(delta_N1M).mul_(p_NJM)
        dv_NJV.baddbmm_(p_NJM, do_NMV)
        dk_NJD.baddbmm_(ds_NJM, q_NMD, alpha=LN_2)  # q holds scale · log2(e) already
        dq_NMD.baddbmm_(ds_NJM.mT, k_NJD, alpha=scale)
    return dq_NMD.view(slices, heads, queries, -1)


def differentiate(
    tiling: Tiling, saved: tuple[torch.Tensor, ...], do_BHLV: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dq, dk and dv in the shapes and the dtype of q, k and v."""
    q_BHLD, k_BGSD, v_BGSV, o_BHLV, lse_NRL = saved
    dq_BHLD, dk_BGSD, dv_BGSV = (x.new_zeros(x.shape) for x in (q_BHLD, k_BGSD, v_BGSV))
    # Where the dtype is wide already, the last two are the memory of the gradients returned.
    key_side = (k_BGSD, v_BGSV, dk_BGSD, dv_BGSV)
    columns = [x.flatten(0, 1).to(lse_NRL.dtype) for x in key_side]
    total = len(columns[0])
    rows = [by_slice(x, total) for x in (q_BHLD, o_BHLV, do_BHLV)] + [lse_NRL]
    dq_NRLD = by_slice(dq_BHLD, total)
    buffers = lse_NRL.new_empty(2, lse_NRL.shape[1] * math.prod(tiling.most))
    for n, i, key_blocks in places(tiling, total):
        some_rows, some_columns = [x[n, :, i] for x in rows], [x[n] for x in columns]
        dq_NRLD[n, :, i] = differentiate_block(
            some_rows, some_columns, key_blocks, tiling.scale, buffers
        )
    for dx_BGSD, dx_NSD in zip((dk_BGSD, dv_BGSV), columns[2:], strict=True):
        dx_BGSD.copy_(dx_NSD.view(dx_BGSD.shape))
    return dq_BHLD, dk_BGSD, dv_BGSV


class ChunkedAttention(torch.autograd.Function):
    """Forward and backward by blocks; q, k, v, o and the log-sum-exp live in between."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, t: Tiling) -> Any:
        """Output (B, H, L, V)."""
        o_BHLV, lse_NRL = attend(t, q, k, v, keep=True)
        ctx.save_for_backward(q, k, v, o_BHLV, lse_NRL)
        ctx.tiling = t
        return o_BHLV

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, do_BHLV: torch.Tensor) -> Any:
        """Gradients of q, k and v; none of the tiling."""
        return *differentiate(ctx.tiling, ctx.saved_tensors, do_BHLV), None


def flops(case: Case) -> int:
    """Every block that is computed, in full: 2 matmuls forward, 5 backward (one a recompute)."""
    pairs = sum(len(i) * len(j) for i, j in visible_blocks(case, block_sizes(case)[1]))
    d, v = case.head_dim, case.value_dim
    width = {"forward": d + v, "backward": 3 * d + 2 * v, "both": 4 * d + 3 * v}[case.pass_]
    return 2 * case.batch * case.heads * pairs * width


def workspace(case: Case) -> int:
    """Buffers of the largest block, log-sum-exp, and wide copies where the dtype is half."""
    slices, queries, keys = block_sizes(case)
    d, v = case.head_dim, case.value_dim
    rows = slices * queries * (case.heads // case.kv_heads)
    copies = case.batch * case.kv_heads * case.kv_len * (d + v) if case.element_bytes < 4 else 0
    if case.needs_grad:
        # Two blocks of scores, q, do, delta, and dq where the product of o and do was before.
        elements = rows * (2 * keys + d + v + 1 + max(d, v)) + 2 * copies
    else:
        # One block of scores, q, o, and the sum, the maximum and a spare one.
        elements = rows * (keys + d + v + 3) + copies
    kept = case.batch * case.heads * case.seq_len if case.pass_ == "both" else 0
    return (elements + kept) * max(4, case.element_bytes)


@attention_builder(
    "chunked",
    time="n^2 d",
    memory="O(n)",
    masks=("full", "causal", "window"),
    flops=flops,
    workspace=workspace,
)
def chunked(case: Case) -> AttentionCall:
    """Blocks of queries and keys with online softmax; the backward recomputes the scores."""
    tiling = cut(case)
    recorded: Any = ChunkedAttention.apply

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, /) -> Any:
        if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
            return recorded(q, k, v, tiling)
        return attend(tiling, q, k, v, keep=False)[0]

    return call


if __name__ == "__main__":
    run_file(__file__)
