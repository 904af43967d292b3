"""Exact attention over blocks of queries and keys, in plain torch: O(n) memory, same result.

One block of scores exists at a time. Each query carries the running maximum and the running sum
of its exponentials (Milakov & Gimelshein 2018, "Online normalizer calculation for softmax"), so
that the unnormalised output is corrected whenever a later block raises the maximum (Rabe & Staats
2021, "Self-attention does not need O(n²) memory"). The backward keeps q, k, v, o and the
log-sum-exp of each query, and recomputes the probabilities from them block by block (Dao et al.
2022, "FlashAttention"). Blocks that the mask hides are never computed; only those which an edge
of it crosses are masked. Padding is cut off for each batch item. A position bias is made block by
block, too.

Scores are held in base 2, with log2(e) folded into their scale: exp2 takes a third of the time
of exp on CPU. Half precision is computed in float32 throughout; on CUDA its products alone are of
half precision, summed in float32, as in fused kernels: float32 has a tenth of that rate there.

Axes beyond the usual ones: `N` slices, one for each batch item and key/value head; `R` query
heads that share a slice; `I` queries and `J` keys of a block; `M` = R·I, the rows of its matmul.
"""

import contextlib
import functools
import math
from typing import Any, NamedTuple

import torch

from attnbench.api import (
    ALL_BIASES,
    ALL_MASKS,
    AttentionCall,
    Case,
    Estimate,
    PositionBias,
    attention_builder,
    bias_flops,
    building_mask,
    by_slice,
    mask_spans,
    position_bias,
    rows_of,
    visible_blocks,
)

LOG2_E, LN_2 = math.log2(math.e), math.log(2)
# The maximum of a query that has seen no key yet: finite, so that -inf minus it is never NaN.
LOWEST = -1e30
# Most scores of a block, queries and keys. An op must outweigh its launch (a dozen a block, each of
# some µs on a GPU), on a CPU its operands stay in the last cache, and more queries would waste more
# on the diagonal. Of 2**26 scores an op takes 60 to 130 µs on an H200.
MOST = {"cpu": (2**20, 512, 512), "cuda": (2**26, 2048, 2048)}

# Some keys, and what to hide of the block where an edge of the mask crosses it (I, J).
KeyBlock = tuple[slice, torch.Tensor | None]


class Tiling(NamedTuple):
    """What `build` prepares: every few slices with each block of queries, and the keys it sees."""

    places: list[tuple[slice, slice, list[KeyBlock]]]
    most: tuple[int, int, int]
    scale: float
    bias: PositionBias | None
    cap: float | None  # of scores in base 2


def block_sizes(case: Case) -> tuple[int, int, int]:
    """The most slices N, queries I and keys J of one block: N as the count of scores allows."""
    sharing = case.heads // case.kv_heads
    scores, queries, keys = MOST[case.device]
    queries = min(case.seq_len, queries, max(64, 2 * queries // sharing))
    keys = min(case.kv_len, keys)
    slices = max(1, scores // (sharing * queries * keys))
    return min(slices, max(len(some) for _, some in slices_by_mask(case))), queries, keys


def slices_by_mask(case: Case) -> list[tuple[int, range]]:
    """A batch item with the slices that are masked as it is: all, or its own."""
    groups = case.kv_heads
    if not case.mask.lengths:
        return [(0, range(case.batch * groups))]
    return [(item, range(item * groups, (item + 1) * groups)) for item in range(case.batch)]


def cut(case: Case) -> Tiling:
    """The case's blocks; those that the mask cuts alike share one tensor of what is hidden.

    Keys are cut from the last one down, so that the diagonal crosses every row of blocks in the
    same place.
    """
    most = step, rows, columns = block_sizes(case)

    @functools.cache
    def hidden(firsts: tuple[int, ...], ends: tuple[int, ...], keys: int) -> torch.Tensor:
        """All but the range of the block's keys that each of its queries sees."""
        first_I, end_I, key_J = (
            torch.tensor(x, dtype=torch.int32) for x in (firsts, ends, range(keys))
        )
        hidden_IJ = (key_J < first_I.unsqueeze(1)) | (key_J >= end_I.unsqueeze(1))
        return hidden_IJ.to(case.device)

    places = []
    spans = mask_spans(case.mask, case.seq_len, case.kv_len, "cpu", batch=case.batch)
    for item, some in slices_by_mask(case):
        blocks: list[tuple[slice, list[KeyBlock]]] = []
        for queries, seen in visible_blocks(case, rows, item=item):
            i, key_blocks = slice(queries.start, queries.stop), []
            first_I, end_I = (x[item, i] for x in spans)
            last_first, first_end = int(first_I[-1]), int(end_I[0])  # neither ever falls
            for stop in range(seen.stop, seen.start, -columns):
                start, hidden_IJ = max(seen.start, stop - columns), None
                if last_first > start or first_end < stop:
                    inside = [(x - start).clamp(0, stop - start) for x in (first_I, end_I)]
                    hidden_IJ = hidden(*(tuple(x.tolist()) for x in inside), stop - start)
                key_blocks.append((slice(start, stop), hidden_IJ))
            blocks.append((i, key_blocks))
        slices = [slice(n, min(n + step, some.stop)) for n in some[::step]]
        places += [(n, *block) for n in slices for block in blocks]
    cap = case.softcap and case.softcap * LOG2_E
    return Tiling(places, most, case.softmax_scale, position_bias(case, unit=LOG2_E), cap)


def product_dtype(x: torch.Tensor, tiling: Tiling) -> torch.dtype:
    """What is multiplied: with a position bias, and on a CPU, at least float32."""
    if x.is_cuda and tiling.bias is None:
        return x.dtype
    return torch.promote_types(x.dtype, torch.float32)


def multiply(a_NMD: torch.Tensor, b_NDJ: torch.Tensor, out: torch.Tensor) -> None:
    """Overwrite `out` by a·b in its dtype; of half precision torch has that on CUDA alone (2.8)."""
    wider: Any = {} if a_NMD.dtype == out.dtype else {"out_dtype": out.dtype}
    torch.bmm(a_NMD, b_NDJ, **wider, out=out)


def accumulate(
    total: torch.Tensor, a_NMJ: torch.Tensor, b_NJV: torch.Tensor, alpha: float = 1
) -> None:
    """Add alpha·a·b to a total that may be wider."""
    if a_NMJ.dtype == total.dtype:
        total.baddbmm_(a_NMJ, b_NJV, alpha=alpha)
    else:
        multiply(a_NMJ, b_NJV, product := torch.empty_like(total))
        total.add_(product, alpha=alpha)


def sinks_by_slice(sink_H: torch.Tensor, k_BGSD: torch.Tensor) -> torch.Tensor:
    """(N, R): the sinks of the query heads of each slice."""
    return sink_H.view(k_BGSD.shape[1], -1).repeat(len(k_BGSD), 1)


def attend(
    tiling: Tiling,
    q_BHLD: torch.Tensor,
    k_BGSD: torch.Tensor,
    v_BGSV: torch.Tensor,
    sink_H: torch.Tensor | None,
    *,
    keep: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Output (B, H, L, V) and, where a backward is to `keep` it, base-2 log-sum-exp (N, R, L)."""
    wide, own = torch.promote_types(q_BHLD.dtype, torch.float32), product_dtype(q_BHLD, tiling)
    k_NSD, v_NSV = k_BGSD.flatten(0, 1).to(own), v_BGSV.flatten(0, 1).to(own)
    q_NRLD = by_slice(q_BHLD, len(k_NSD))
    heads = q_NRLD.shape[1]
    o_BHLV = q_BHLD.new_empty(*q_BHLD.shape[:3], v_NSV.shape[2])
    o_NRLV = by_slice(o_BHLV, len(k_NSD))
    lse_NRL = q_NRLD.new_empty(q_NRLD.shape[:3], dtype=wide) if keep else None
    # Every block uses it again: fresh memory for each would cost its page faults.
    buffer, bias = q_NRLD.new_empty(heads * math.prod(tiling.most), dtype=wide), tiling.bias
    weights = buffer if own == wide else torch.empty_like(buffer, dtype=own)

    def attend_block(n: slice, i: slice, key_blocks: list[KeyBlock]) -> None:
        q_NMD = rows_of(q_NRLD[n, :, i], wide, tiling.scale * LOG2_E)
        o_NMV = q_NMD.new_zeros(*q_NMD.shape[:2], v_NSV.shape[2])
        sum_NM1, q_NMD = q_NMD.new_zeros(*q_NMD.shape[:2], 1), q_NMD.to(own)
        max_NM1, spare_NM1 = torch.full_like(sum_NM1, LOWEST), torch.empty_like(sum_NM1)
        if sink_H is not None:  # as if seen first, with a value of 0
            sinks_NR1 = sinks_by_slice(sink_H, k_BGSD)[n].to(wide).unsqueeze(2) * LOG2_E
            max_NM1.view(*sinks_NR1.shape[:2], -1).copy_(sinks_NR1)
            sum_NM1.fill_(1)
        q_NRID = q_NMD.view(len(q_NMD), heads, -1, q_NMD.shape[2])
        columns = q_NRID if bias is None else bias.columns(q_NRID, n.start)
        for j, hidden_IJ in key_blocks:
            sizes = *q_NMD.shape[:2], j.stop - j.start
            p_NMJ, weights_NMJ = (x[: math.prod(sizes)].view(sizes) for x in (buffer, weights))
            multiply(q_NMD, k_NSD[n, j].mT, p_NMJ)
            p_NRIJ = p_NMJ.view(len(p_NMJ), heads, -1, sizes[2])
            if tiling.cap:
                p_NMJ.div_(tiling.cap).tanh_().mul_(tiling.cap)
            if bias is not None:
                p_NRIJ.add_(bias.block(columns, i, j))
            if hidden_IJ is not None:
                p_NRIJ.masked_fill_(hidden_IJ, -math.inf)
            new_max_NM1 = torch.amax(p_NMJ, 2, keepdim=True, out=spare_NM1)
            torch.maximum(max_NM1, new_max_NM1, out=new_max_NM1)
            shrink_NM1 = max_NM1.sub_(new_max_NM1).exp2_()
            torch.exp2(p_NMJ.sub_(new_max_NM1), out=weights_NMJ)
            accumulate(o_NMV.mul_(shrink_NM1), weights_NMJ, v_NSV[n, j])
            sum_NM1.mul_(shrink_NM1)
            torch.sum(weights_NMJ, 2, keepdim=True, dtype=wide, out=shrink_NM1)
            sum_NM1.add_(shrink_NM1)
            max_NM1, spare_NM1 = new_max_NM1, shrink_NM1
        # A query that saw no key has the sum 0: made tiny, it gives output 0 and a finite lse.
        sum_NM1.clamp_min_(torch.finfo(wide).tiny)
        o_NRLV[n, :, i] = o_NMV.div_(sum_NM1).view_as(o_NRLV[n, :, i])
        if lse_NRL is not None:
            lse_NRL[n, :, i] = max_NM1.add_(sum_NM1.log2_()).view_as(lse_NRL[n, :, i])

    for place in tiling.places:  # a call each, at whose end its memory is free
        attend_block(*place)
    return o_BHLV, lse_NRL


def differentiate(
    tiling: Tiling, saved: tuple[Any, ...], do_BHLV: torch.Tensor
) -> tuple[torch.Tensor | None, ...]:
    """dq, dk, dv and dsink, where there are sinks, in the shapes and the dtypes of these.

    Scores are held keys by queries: then one matmul of the five reads them transposed, not two.
    """
    q_BHLD, k_BGSD, v_BGSV, sink_H, o_BHLV, lse_NRL = saved
    wide, heads = lse_NRL.dtype, lse_NRL.shape[1]
    dq_BHLD, dk_BGSD, dv_BGSV = (x.new_zeros(x.shape) for x in (q_BHLD, k_BGSD, v_BGSV))
    # Where the dtype is wide already, the last two are the memory of the gradients returned.
    own = product_dtype(q_BHLD, tiling)
    k_NSD, v_NSV = (x.flatten(0, 1).to(own) for x in (k_BGSD, v_BGSV))
    dk_NSD, dv_NSV = (x.flatten(0, 1).to(wide) for x in (dk_BGSD, dv_BGSV))
    query_side = (q_BHLD, o_BHLV, do_BHLV, dq_BHLD)
    q_NRLD, o_NRLV, do_NRLV, dq_NRLD = (by_slice(x, len(k_NSD)) for x in query_side)
    dsink_NR = lse_NRL.new_zeros(lse_NRL.shape[:2])
    count, bias = heads * math.prod(tiling.most), tiling.bias
    buffers = lse_NRL.new_empty(1 + (own == wide), count)
    factors = buffers if own == wide else lse_NRL.new_empty(2, count, dtype=own)

    def differentiate_block(n: slice, i: slice, key_blocks: list[KeyBlock]) -> None:
        q_NMD = rows_of(q_NRLD[n, :, i], wide, tiling.scale * LOG2_E)
        do_NMV = rows_of(do_NRLV[n, :, i], wide)
        delta_N1M = rows_of(o_NRLV[n, :, i], wide).mul_(do_NMV).sum(2).unsqueeze(1)
        if sink_H is not None:
            sinks_NR1 = sinks_by_slice(sink_H, k_BGSD)[n].to(wide).unsqueeze(2) * LOG2_E
            weights_NRI = torch.exp2(sinks_NR1 - lse_NRL[n, :, i])
            dsink_NR[n] -= (weights_NRI * delta_N1M.view_as(weights_NRI)).sum(2)
        dq_NMD = torch.zeros_like(q_NMD)
        q_NMD, do_NMV = q_NMD.to(own), do_NMV.to(own)
        if bias is not None:
            columns = bias.columns(q_NMD.view(len(q_NMD), heads, -1, q_NMD.shape[2]), n.start)
            dcolumns = torch.zeros_like(columns.mT)
        for j, hidden_IJ in key_blocks:
            sizes = len(q_NMD), j.stop - j.start, q_NMD.shape[1]
            p_NJM, ds_NJM, weights_NJM, dscores_NJM = (
                buffer[: math.prod(sizes)].view(sizes)
                for buffer in (buffers[0], buffers[-1], *factors)  # p is read before ds is written
            )
            multiply(k_NSD[n, j], q_NMD.mT, p_NJM)
            p_NJRI = p_NJM.view(*sizes[:2], heads, -1)
            if tiling.cap:
                slope_NJM = 1 - p_NJM.div_(tiling.cap).tanh_().square()
                p_NJM.mul_(tiling.cap)
            if bias is not None:
                p_NJRI.add_(bias.block(columns, i, j, keys_first=True).transpose(1, 2))
            if hidden_IJ is not None:
                p_NJRI.masked_fill_(hidden_IJ.mT.unsqueeze(1), -math.inf)
            p_NJRI.sub_(lse_NRL[n, :, i].unsqueeze(1))
            torch.exp2(p_NJM, out=weights_NJM)
            multiply(v_NSV[n, j], do_NMV.mT, ds_NJM)
            torch.mul(ds_NJM.sub_(delta_N1M), weights_NJM, out=dscores_NJM)
            accumulate(dv_NSV[n, j], weights_NJM, do_NMV)
            if bias is not None and bias.vectors_CD is not None:
                bias.collect(dcolumns, ds_NJM.view_as(p_NJRI).transpose(1, 2), i, j)
            if tiling.cap:
                dscores_NJM.mul_(slope_NJM)
            accumulate(dk_NSD[n, j], dscores_NJM, q_NMD, LN_2)  # q holds scale · log2(e) already
            accumulate(dq_NMD, dscores_NJM.mT, k_NSD[n, j], tiling.scale)
        if bias is not None and bias.vectors_CD is not None:
            dq_NMD.add_((dcolumns.mT @ bias.vectors_CD).view_as(dq_NMD), alpha=tiling.scale)
        dq_NRLD[n, :, i] = dq_NMD.view_as(dq_NRLD[n, :, i])

    for place in tiling.places:
        differentiate_block(*place)
    dk_BGSD.copy_(dk_NSD.view(dk_BGSD.shape))
    dv_BGSV.copy_(dv_NSV.view(dv_BGSV.shape))
    dsink_H = None
    if sink_H is not None:
        dsink_H = dsink_NR.view(len(k_BGSD), -1).sum(0).to(sink_H.dtype)
    return dq_BHLD, dk_BGSD, dv_BGSV, dsink_H


class ChunkedAttention(torch.autograd.Function):
    """Forward and backward by blocks; what goes in, o and the log-sum-exp live in between."""

    @staticmethod
    def forward(ctx: Any, t: Tiling, *inputs: Any) -> Any:
        """Output (B, H, L, V)."""
        o_BHLV, lse_NRL = attend(t, *inputs, keep=True)
        ctx.save_for_backward(*inputs, o_BHLV, lse_NRL)
        ctx.tiling = t
        return o_BHLV

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, do_BHLV: torch.Tensor) -> Any:
        """Gradients of q, k, v and sinks; none of the tiling."""
        return None, *differentiate(ctx.tiling, ctx.saved_tensors, do_BHLV)


def flops(case: Case) -> int:
    """Every block that is computed, in full: 2 matmuls forward, 5 backward (one a recompute)."""
    pairs, d, v = 0, case.head_dim, case.value_dim
    for item, some in slices_by_mask(case):
        blocks = visible_blocks(case, block_sizes(case)[1], item=item)
        pairs += len(some) * sum(len(i) * len(j) for i, j in blocks)
    width = {"forward": d + v, "backward": 3 * d + 2 * v, "both": 4 * d + 3 * v}[case.pass_]
    return 2 * (case.heads // case.kv_heads) * pairs * width + bias_flops(case)


def workspace(case: Case) -> int:
    """Bytes of a block of scores with its rows of q and o and three sums, of k and v made wide.

    Exact forward on a CPU; a backward pass has about twice as much, a bias or a cap a block more or
    two. On
    CUDA half precision has its weights a second time, and copies of gradients alone.
    """
    slices, queries, keys = block_sizes(case)
    width, biased = case.head_dim + case.value_dim, case.position.encoding.kind == "bias"
    half, passes = case.element_bytes < 4, 1 + case.needs_grad
    narrow = half and case.device == "cuda" and not biased
    held = max(passes, 1.5) if narrow else passes * (1 + 2 * biased)
    held += 2 * bool(case.softcap and case.needs_grad)
    rows = slices * queries * (case.heads // case.kv_heads)
    block = int(rows * (keys * held + passes * (width * (1 + 0.5 * narrow) + 3)))
    copies = case.batch * case.kv_heads * case.kv_len * width * half * (passes - narrow)
    lse = case.batch * case.heads * case.seq_len * (case.pass_ == "both")
    found = (block + copies + lse) * max(4, case.element_bytes)
    return (
        Estimate(found)
        if case.needs_grad or biased or case.sinks or case.device != "cpu"
        else found
    )


@attention_builder(
    "chunked",
    time="n^2 d",
    memory="O(n)",
    masks=ALL_MASKS,
    positions=ALL_BIASES,
    softcap=True,
    sinks=True,
    flops=flops,
    workspace=workspace,
)
def chunked(case: Case) -> AttentionCall:
    """Online softmax over blocks, in plain torch."""
    with contextlib.nullcontext() if case.unmasked else building_mask:
        tiling = cut(case)
    recorded: Any = ChunkedAttention.apply

    def call(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sink: torch.Tensor | None = None, /
    ) -> Any:
        inputs = q, k, v, sink
        if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs):
            return recorded(tiling, *inputs)
        return attend(tiling, *inputs, keep=False)[0]

    return call
