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
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from attnbench.api import Case, attention_builder, dense_mask

LOG2_E = math.log2(math.e)
LN_2 = math.log(2)

# The maximum of a query that has seen no key yet: finite, so that -inf minus it is never NaN.
LOWEST = -1e30


class BlockSizes(NamedTuple):
    """The most slices N, queries I and keys J of one block."""

    slices: int
    queries: int
    keys: int


class KeyBlock(NamedTuple):
    """The keys `first` … `last` - 1; `hidden_IJ` where an edge of the band crosses the block."""

    first: int
    last: int
    hidden_IJ: torch.Tensor | None


class QueryBlock(NamedTuple):
    """The queries `first` … `last` - 1, and the blocks of the keys that any of them sees."""

    first: int
    last: int
    keys: tuple[KeyBlock, ...]


class KeySide(NamedTuple):
    """Keys and values of some slices, and the gradients that gather there."""

    k_NSD: torch.Tensor
    v_NSV: torch.Tensor
    dk_NSD: torch.Tensor
    dv_NSV: torch.Tensor


# An op must outweigh its launch, and its scores should still be in cache for the next one.
MOST = {"cpu": BlockSizes(2**20, 512, 512), "cuda": BlockSizes(2**20, 512, 1024)}


def block_sizes(case: Case) -> BlockSizes:
    """As many slices at once as keep a block under the device's count of scores."""
    sharing = case.heads // case.kv_heads
    scores, queries, keys = MOST[case.device]
    queries = min(case.seq_len, max(64, min(queries, 1024 // sharing)))
    keys = min(case.kv_len, keys)
    slices = max(1, scores // (sharing * queries * keys))
    return BlockSizes(min(slices, case.batch * case.kv_heads), queries, keys)


def visible_blocks(case: Case) -> Iterator[tuple[range, list[range]]]:
    """Each block of queries with the blocks of keys that at least one of its queries sees.

    Keys are cut from the last one down, so that the diagonal crosses every row of blocks in the
    same place and one mask serves them all.
    """
    _, rows, columns = block_sizes(case)
    for first in range(0, case.seq_len, rows):
        queries = range(first, min(first + rows, case.seq_len))
        lowest, _ = case.mask.span(queries[0], case.seq_len, case.kv_len)
        _, highest = case.mask.span(queries[-1], case.seq_len, case.kv_len)
        ends = range(highest, lowest, -columns)
        yield queries, [range(max(lowest, end - columns), end) for end in ends]


class EdgeMasks:
    """The masks of the blocks that an edge of the band crosses, each made once."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.made: dict[tuple[int, int, int], torch.Tensor] = {}

    def hidden_IJ(self, queries: range, keys: range) -> torch.Tensor | None:
        """What to hide of a block, or None where every query sees every key of it."""
        case = self.case
        from_first, _ = case.mask.span(queries[-1], case.seq_len, case.kv_len)
        _, to_last = case.mask.span(queries[0], case.seq_len, case.kv_len)
        if from_first <= keys.start and keys.stop <= to_last:
            return None
        # The band depends on key - query alone: blocks at the same distance share their mask.
        place = (keys.start - queries.start, len(queries), len(keys))
        if place not in self.made:
            seen_IS = dense_mask(
                case.mask,
                case.seq_len,
                case.kv_len,
                case.device,
                first_query=queries.start,
                count=len(queries),
            )
            self.made[place] = ~seen_IS[:, keys.start : keys.stop]
        return self.made[place]


@dataclass(frozen=True, kw_only=True)
class Tiling:
    """What `build` prepares: the blocks of the score matrix, their sizes and the scale."""

    blocks: tuple[QueryBlock, ...]
    most: BlockSizes
    scale: float

    @classmethod
    def of(cls, case: Case) -> "Tiling":
        """Cut the case's score matrix, and make the masks of its edge blocks."""
        masks = EdgeMasks(case)
        blocks = (
            QueryBlock(
                i.start,
                i.stop,
                tuple(KeyBlock(j.start, j.stop, masks.hidden_IJ(i, j)) for j in keys),
            )
            for i, keys in visible_blocks(case)
        )
        return cls(blocks=tuple(blocks), most=block_sizes(case), scale=case.softmax_scale)

    def slices(self, total: int) -> Iterator[slice]:
        """The ranges of slices to take together."""
        step = self.most.slices
        return (slice(n, min(n + step, total)) for n in range(0, total, step))


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of scores, statistics and sums."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def rows_of(x_NRID: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
    """A wide copy of a block times `factor`, with the rows of its R heads joined: (N, M, D)."""
    x_NRID = x_NRID.to(wide(x_NRID.dtype), copy=True, memory_format=torch.contiguous_format)
    return x_NRID.mul_(factor).flatten(1, 2)


def start_of(buffer: torch.Tensor, *sizes: int) -> torch.Tensor:
    """The first elements of a flat buffer as a tensor of these sizes."""
    return buffer[: math.prod(sizes)].view(sizes)


def attend_block(
    q_NRID: torch.Tensor,
    k_NSD: torch.Tensor,
    v_NSV: torch.Tensor,
    key_blocks: tuple[KeyBlock, ...],
    scale: float,
    scores: torch.Tensor,
    lse_NRI1: torch.Tensor | None,
) -> torch.Tensor:
    """Output (N, R, I, V) of one block of queries; `lse_NRI1` takes its base-2 log-sum-exp."""
    slices, heads, queries, _ = q_NRID.shape
    q_NMD = rows_of(q_NRID, scale * LOG2_E)
    o_NMV = q_NMD.new_zeros(slices, heads * queries, v_NSV.shape[2])
    sum_NM1 = q_NMD.new_zeros(slices, heads * queries, 1)
    max_NM1, spare_NM1 = torch.full_like(sum_NM1, LOWEST), torch.empty_like(sum_NM1)
    for first, last, hidden_IJ in key_blocks:
        p_NMJ = start_of(scores, slices, heads * queries, last - first)
        torch.bmm(q_NMD, k_NSD[:, first:last].mT, out=p_NMJ)
        if hidden_IJ is not None:
            p_NMJ.unflatten(1, (heads, queries)).masked_fill_(hidden_IJ, -math.inf)
        new_max_NM1 = torch.amax(p_NMJ, 2, keepdim=True, out=spare_NM1)
        torch.maximum(max_NM1, new_max_NM1, out=new_max_NM1)
        shrink_NM1 = max_NM1.sub_(new_max_NM1).exp2_()
        p_NMJ.sub_(new_max_NM1).exp2_()
        o_NMV.mul_(shrink_NM1).baddbmm_(p_NMJ, v_NSV[:, first:last])
        sum_NM1.mul_(shrink_NM1)
        sum_NM1.add_(torch.sum(p_NMJ, 2, keepdim=True, out=shrink_NM1))
        max_NM1, spare_NM1 = new_max_NM1, shrink_NM1
    # A query that saw no key has the sum 0: made tiny, it gives output 0 and a finite log-sum-exp.
    sum_NM1.clamp_min_(torch.finfo(sum_NM1.dtype).tiny)
    o_NMV.div_(sum_NM1)
    if lse_NRI1 is not None:
        lse_NRI1.copy_(max_NM1.add_(sum_NM1.log2_()).view(lse_NRI1.shape))
    return o_NMV.unflatten(1, (heads, queries))


def attend(
    tiling: Tiling, q_BHLD: torch.Tensor, k_BGSD: torch.Tensor, v_BGSV: torch.Tensor, *, keep: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Output (B, H, L, V) and, where a backward is to `keep` it, the log-sum-exp (N, R, L)."""
    dtype = wide(q_BHLD.dtype)
    k_NSD, v_NSV = k_BGSD.flatten(0, 1).to(dtype), v_BGSV.flatten(0, 1).to(dtype)
    q_NRLD = by_slice(q_BHLD, k_NSD)
    o_BHLV = q_BHLD.new_empty(*q_BHLD.shape[:3], v_NSV.shape[2])
    o_NRLV = by_slice(o_BHLV, k_NSD)
    lse_NRL1 = q_NRLD.new_empty(*q_NRLD.shape[:3], 1, dtype=dtype) if keep else None
    scores = score_buffers(tiling, q_NRLD, 1)
    for n in tiling.slices(len(k_NSD)):
        for first, last, key_blocks in tiling.blocks:
            here = n, slice(None), slice(first, last)
            lse_NRI1 = None if lse_NRL1 is None else lse_NRL1[here]
            o_NRLV[here] = attend_block(
                q_NRLD[here], k_NSD[n], v_NSV[n], key_blocks, tiling.scale, scores[0], lse_NRI1
            )
    return o_BHLV, lse_NRL1


def by_slice(x_BHLD: torch.Tensor, k_NSD: torch.Tensor) -> torch.Tensor:
    """(B, H, L, D) as (N, R, L, D), each query head beside those it shares keys with."""
    return x_BHLD.reshape(len(k_NSD), -1, *x_BHLD.shape[2:])


def score_buffers(tiling: Tiling, q_NRLD: torch.Tensor, count: int) -> torch.Tensor:
    """`count` flat buffers, each for the scores of the largest block: every block reuses them."""
    scores = q_NRLD.shape[1] * math.prod(tiling.most)
    return q_NRLD.new_empty(count, scores, dtype=wide(q_NRLD.dtype))


def differentiate_block(
    q_NRID: torch.Tensor,
    o_NRIV: torch.Tensor,
    do_NRIV: torch.Tensor,
    lse_NRI1: torch.Tensor,
    side: KeySide,
    key_blocks: tuple[KeyBlock, ...],
    scale: float,
    scores: torch.Tensor,
) -> torch.Tensor:
    """dq (N, R, I, D) of one block of queries; its part of dk and dv is added in place.

    Scores are held keys by queries: then one matmul of the five reads them transposed, not two.
    """
    slices, heads, queries, _ = q_NRID.shape
    q_NMD, do_NMV = rows_of(q_NRID, scale * LOG2_E), rows_of(do_NRIV)
    delta_N1M = rows_of(o_NRIV).mul_(do_NMV).sum(2).unsqueeze(1)
    dq_NMD = torch.zeros_like(q_NMD)
    for first, last, hidden_IJ in key_blocks:
        k_NJD, v_NJV = side.k_NSD[:, first:last], side.v_NSV[:, first:last]
        p_NJM, ds_NJM = (start_of(b, slices, last - first, heads * queries) for b in scores)
        torch.bmm(k_NJD, q_NMD.mT, out=p_NJM)
        p_NJRI = p_NJM.unflatten(2, (heads, queries))
        if hidden_IJ is not None:
            p_NJRI.masked_fill_(hidden_IJ.mT.unsqueeze(1), -math.inf)
        p_NJRI.sub_(lse_NRI1.squeeze(3).unsqueeze(1)).exp2_()
        torch.bmm(v_NJV, do_NMV.mT, out=ds_NJM)
        ds_NJM.sub_(delta_N1M).mul_(p_NJM)
        side.dv_NSV[:, first:last].baddbmm_(p_NJM, do_NMV)
        side.dk_NSD[:, first:last].baddbmm_(ds_NJM, q_NMD, alpha=LN_2)
        dq_NMD.baddbmm_(ds_NJM.mT, k_NJD, alpha=scale)
    return dq_NMD.unflatten(1, (heads, queries))


def differentiate(
    tiling: Tiling,
    saved: tuple[torch.Tensor, ...],
    do_BHLV: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dq, dk and dv in the shapes and the dtype of q, k and v."""
    q_BHLD, k_BGSD, v_BGSV, o_BHLV, lse_NRL1 = saved
    dtype = wide(q_BHLD.dtype)
    k_NSD, v_NSV = k_BGSD.flatten(0, 1).to(dtype), v_BGSV.flatten(0, 1).to(dtype)
    dk_BGSD, dv_BGSV = k_BGSD.new_zeros(k_BGSD.shape), v_BGSV.new_zeros(v_BGSV.shape)
    dk_NSD, dv_NSV = dk_BGSD.flatten(0, 1).to(dtype), dv_BGSV.flatten(0, 1).to(dtype)
    q_NRLD, o_NRLV, do_NRLV = (by_slice(x, k_NSD) for x in (q_BHLD, o_BHLV, do_BHLV))
    dq_BHLD = q_BHLD.new_empty(q_BHLD.shape)
    dq_NRLD = by_slice(dq_BHLD, k_NSD)
    scores = score_buffers(tiling, q_NRLD, 2)
    for n in tiling.slices(len(k_NSD)):
        side = KeySide(k_NSD[n], v_NSV[n], dk_NSD[n], dv_NSV[n])
        for first, last, key_blocks in tiling.blocks:
            here = n, slice(None), slice(first, last)
            rows = (x[here] for x in (q_NRLD, o_NRLV, do_NRLV, lse_NRL1))
            dq_NRLD[here] = differentiate_block(*rows, side, key_blocks, tiling.scale, scores)
    # In float32 and float64 these are the same memory, and nothing is copied.
    dk_BGSD.copy_(dk_NSD.view(dk_BGSD.shape))
    dv_BGSV.copy_(dv_NSV.view(dv_BGSV.shape))
    return dq_BHLD, dk_BGSD, dv_BGSV


class ChunkedAttention(torch.autograd.Function):
    """Forward and backward by blocks; q, k, v, o and the log-sum-exp live in between."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, t: Tiling) -> Any:
        """Output (B, H, L, V)."""
        o_BHLV, lse_NRL1 = attend(t, q, k, v, keep=True)
        ctx.save_for_backward(q, k, v, o_BHLV, lse_NRL1)
        ctx.tiling = t
        return o_BHLV

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do_BHLV: torch.Tensor) -> Any:
        """Gradients of q, k and v; none of the tiling."""
        return *differentiate(ctx.tiling, ctx.saved_tensors, do_BHLV), None


def executed_flops(case: Case) -> int:
    """Every block that is computed, in full: 2 matmuls forward, 5 backward (one a recompute)."""
    pairs = sum(len(i) * sum(len(j) for j in keys) for i, keys in visible_blocks(case))
    d, v = case.head_dim, case.value_dim
    forward, backward = d + v, 3 * d + 2 * v
    a_pair = {"forward": forward, "backward": backward, "both": forward + backward}[case.pass_]
    return 2 * case.batch * case.heads * pairs * a_pair


def workspace_bytes(case: Case) -> int:
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
    flops=executed_flops,
    workspace=workspace_bytes,
)
def chunked(case: Case) -> Any:
    """Blocks of queries and keys with online softmax; the backward recomputes the scores."""
    tiling = Tiling.of(case)

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, /) -> torch.Tensor:
        if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
            return ChunkedAttention.apply(q, k, v, tiling)  # type: ignore[no-any-return]
        return attend(tiling, q, k, v, keep=False)[0]

    return call
