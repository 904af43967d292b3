"""Softmax attention over tiles: some queries, and all the keys that any of them is admitted to.

A sparse pattern is a list of tiles in which every pair that it admits is admitted exactly once.
What is computed and moved is what the tiles hold, one after another.

Where only the output is asked for, a few tiles that lie alike are one call of SDPA. Where a
backward pass follows, or a query has keys in several tiles, the log-sum-exp of each query is
needed, too, which SDPA keeps to itself: then a tile is plain torch, its scores in base 2 and
float32 at least. Tiles of a query are joined by it (Milakov & Gimelshein 2018, arXiv 1805.02867),
and the backward recomputes the weights from it (Dao et al. 2022, "FlashAttention", arXiv
2205.14135).

Axes beyond the usual ones: `N` slices, one for each batch item and key/value head; `R` query heads
that share a slice; `I` queries and `J` keys of a tile; `M` = R·I, the rows of its matmul; `T` tiles
of one call.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn.functional import scaled_dot_product_attention

from attnbench.api import Case, Estimate, building_mask, by_slice, core_flops, rows_of

LOG2_E, LN_2 = math.log2(math.e), math.log(2)
# The maximum of a query that sees no key: finite, so that -inf minus it is never NaN.
LOWEST = -1e30
# Most scores at a time: on a CPU they stay in a cache.
MOST = {"cpu": 2**18, "cuda": 2**26}
# Most tiles in one call of SDPA: then its start weighs little, and its output is still small.
AT_ONCE = 16


# Whether queries at the places p_I1 are admitted to the keys j_J: boolean (I, J).
Admits = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Tile(NamedTuple):
    """Queries i and stretches of keys j, and which of their pairs are admitted (None: all)."""

    queries: range
    keys: tuple[range, ...]
    admits: Admits | None = None

    @property
    def width(self) -> int:
        """J, the number of keys."""
        return sum(map(len, self.keys))


Cover = Callable[..., Sequence[Tile]]


class _Ready(NamedTuple):
    """A tile as a call needs it; what is added to its scores is 0 or -inf."""

    queries: slice
    keys: tuple[slice, ...]
    bias_MJ: torch.Tensor | None

    def of(self, x_NSD: torch.Tensor) -> torch.Tensor:
        """(N, J, D) of k or v: a view where the keys are one stretch, else a copy."""
        parts = [x_NSD[:, keys] for keys in self.keys]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


class _Run(NamedTuple):
    """Tiles that lie alike, each some places after the one before: one call of SDPA."""

    first: int
    tiles: int = 1
    of_queries: int = 0
    of_keys: int = 0


def _runs(tiles: Sequence[Tile], masks: Sequence[Any], most: int) -> list[_Run]:
    """The tiles in order, at most so many in a run; those of several stretches of keys alone.

    Those of a run are of one size, share one mask and, where that hides a pair, lie on a diagonal.
    """
    runs: list[_Run] = []
    for number, tile in enumerate(tiles):
        if runs and runs[-1].tiles < most:
            first, count, *shifts = runs[-1]
            pairs = (tile.queries, tiles[first].queries), (tile.keys[0], tiles[first].keys[0])
            now = [a.start - b.start for a, b in pairs]
            alike = masks[number] is masks[first] and len(tile.keys) == len(tiles[first].keys) == 1
            alike &= all((len(a), a.step) == (len(b), b.step) for a, b in pairs)
            alike &= tile.admits is None or now[0] == now[1]
            steady = count == 1 or now == [count * shift for shift in shifts]
            if alike and steady and min(now) >= 0:
                runs[-1] = _Run(first, count + 1, now[0] // count, now[1] // count)
                continue
        runs.append(_Run(number))
    return runs


def _shifted(x: torch.Tensor, rows: slice, count: int, shift: int) -> torch.Tensor:
    """A view (…, count, rows, D) of x (…, S, D): the rows, the same `shift` later, and so on."""
    step = rows.step or 1
    sizes = *x.shape[:-2], count, len(range(rows.start, rows.stop, step)), x.shape[-1]
    strides = *x.stride()[:-2], shift * x.stride(-2), step * x.stride(-2), x.stride(-1)
    return x.as_strided(sizes, strides, x.storage_offset() + rows.start * x.stride(-2))


class _Plan(NamedTuple):
    tiles: tuple[_Ready, ...]
    runs: tuple[_Run, ...]
    scale: float
    scores: int  # of the largest tile, for one slice
    most: int
    joins: bool  # whether a query has keys in several tiles

    def steps(self, slices: int) -> tuple[list[slice], int]:
        """Slices at a time in plain torch, and the scores of their largest tile."""
        step = min(slices, max(1, self.most // max(1, self.scores)))
        return [slice(n, n + step) for n in range(0, slices, step)], step * self.scores


def places(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """Places p_L1 of all queries, i + S − L, and of all keys, j_S, on the case's device."""
    p_L1 = torch.arange(case.seq_len, device=case.device).unsqueeze(1)
    return p_L1 + (case.kv_len - case.seq_len), torch.arange(case.kv_len, device=case.device)


def tiled(
    case: Case, tiles: Sequence[Tile]
) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]:
    """The call that attends over the pairs that `tiles` admit; differentiable.

    Query i stands at place i + S − L. One that no tile admits to any key gives 0.
    """
    tiles, sharing = [tile for tile in tiles if tile.width], case.heads // case.kv_heads
    joins = _joins(case, tiles)
    # SDPA's efficient kernel on CUDA takes a mask of numbers in the dtype of q alone.
    dtype = getattr(torch, case.dtype)
    if joins or case.needs_grad:
        dtype = torch.promote_types(dtype, torch.float32)
    biases: dict[tuple[Any, ...], torch.Tensor] = {}

    def bias(tile: Tile) -> torch.Tensor | None:
        """What to add to the tile's scores; tiles that lie alike share one."""
        if tile.admits is None:
            return None
        place_I1 = torch.tensor(tile.queries).unsqueeze(1) + (case.kv_len - case.seq_len)
        admitted = tile.admits(place_I1, torch.cat([torch.tensor(keys) for keys in tile.keys]))
        if bool(admitted.all()):
            return None
        key = (*admitted.shape, admitted.numpy().tobytes())
        if key not in biases:
            hidden = torch.zeros(admitted.shape, dtype=dtype).masked_fill_(~admitted, -math.inf)
            biases[key] = hidden.repeat(sharing, 1).to(case.device)
        return biases[key]

    with building_mask:
        ready = [
            _Ready(_slice(tile.queries), tuple(map(_slice, tile.keys)), bias(tile))
            for tile in tiles
        ]
    scores = max((sharing * len(tile.queries) * tile.width for tile in tiles), default=0)
    most = AT_ONCE if case.head_dim == case.value_dim else 1  # else SDPA holds all their scores
    runs = tuple(_runs(tiles, [tile.bias_MJ for tile in ready], most))
    plan = _Plan(tuple(ready), runs, case.softmax_scale, scores, MOST[case.device], joins)
    recorded: Any = _TiledAttention.apply

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, /) -> Any:
        if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
            return recorded(q, k, v, plan)
        return _attend(plan, q, k, v)[0] if plan.joins else _attend_by_sdpa(plan, q, k, v)

    return call


def _slice(items: range) -> slice:
    return slice(items.start, items.stop, items.step)


def _joins(case: Case, tiles: Sequence[Tile]) -> bool:
    """Whether a query has keys in several tiles, none of them empty."""
    met = bytearray(case.seq_len)
    for tile in tiles:
        if any(met[_slice(tile.queries)]):
            return True
        met[_slice(tile.queries)] = b"1" * len(tile.queries)
    return False


def _attend_by_sdpa(
    plan: _Plan, q_BHLD: torch.Tensor, k_BGSD: torch.Tensor, v_BGSV: torch.Tensor
) -> torch.Tensor:
    """Output (B, H, L, V); no query has keys in several tiles."""
    k_NSD, v_NSV = k_BGSD.flatten(0, 1), v_BGSV.flatten(0, 1)
    q_NRLD = by_slice(q_BHLD, len(k_NSD))
    o_NRLV = q_NRLD.new_zeros(*q_NRLD.shape[:3], v_NSV.shape[2])

    def attend_run(run: _Run) -> None:  # T tiles
        tile = plan.tiles[run.first]
        of_queries = tile.queries, run.tiles, run.of_queries
        o_NTRIV = _shifted(o_NRLV, *of_queries).transpose(1, 2)
        q_NTMD = _shifted(q_NRLD, *of_queries).transpose(1, 2).flatten(2, 3)
        k_NTJD, v_NTJV = (
            tile.of(x).unsqueeze(1)
            if run.tiles == 1
            else _shifted(x, tile.keys[0], run.tiles, run.of_keys)
            for x in (k_NSD, v_NSV)
        )
        o_NTMV = scaled_dot_product_attention(
            q_NTMD, k_NTJD, v_NTJV, attn_mask=tile.bias_MJ, scale=plan.scale
        )
        o_NTRIV.copy_(o_NTMV.view(o_NTRIV.shape))

    for run in plan.runs:  # a call each, at whose end its memory is free
        attend_run(run)
    return o_NRLV.view(*q_BHLD.shape[:3], -1)


def _product(a_NMD: torch.Tensor, b_NJD: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """a·bᵀ, (N, M, J), in the memory of `out`."""
    sizes = *a_NMD.shape[:2], b_NJD.shape[1]
    return torch.bmm(a_NMD, b_NJD.mT, out=out[: math.prod(sizes)].view(sizes))


def _attend(
    plan: _Plan, q_BHLD: torch.Tensor, k_BGSD: torch.Tensor, v_BGSV: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output (B, H, L, V) and base-2 log-sum-exp (N, R, L)."""
    wide = torch.promote_types(q_BHLD.dtype, torch.float32)
    k_NSD, v_NSV = k_BGSD.flatten(0, 1).to(wide), v_BGSV.flatten(0, 1).to(wide)
    q_NRLD = by_slice(q_BHLD, len(k_NSD))
    o_dtype = wide if plan.joins else q_BHLD.dtype
    o_NRLV = q_NRLD.new_zeros(*q_NRLD.shape[:3], v_NSV.shape[2], dtype=o_dtype)
    lse_NRL = q_NRLD.new_full(q_NRLD.shape[:3], LOWEST, dtype=wide)
    steps, scores = plan.steps(len(k_NSD))
    buffer = q_NRLD.new_empty(scores, dtype=wide)

    def attend_tile(n: slice, tile: _Ready) -> None:
        place = (n, slice(None), tile.queries)
        q_NMD = rows_of(q_NRLD[place], wide, plan.scale * LOG2_E)
        p_NMJ = _product(q_NMD, tile.of(k_NSD[n]), buffer)
        if tile.bias_MJ is not None:  # adding takes a fifth of the time of masked_fill_
            p_NMJ.add_(tile.bias_MJ)
        max_NM1 = p_NMJ.amax(2, keepdim=True).clamp_min_(LOWEST)
        p_NMJ.sub_(max_NM1).exp2_()
        # A query that sees no key has the sum 0: made tiny, it gives output 0 and a finite lse.
        sum_NM1 = p_NMJ.sum(2, keepdim=True).clamp_min_(torch.finfo(wide).tiny)
        o_NMV = torch.bmm(p_NMJ, tile.of(v_NSV[n])).div_(sum_NM1)
        o_NRIV, lse_NRI = o_NRLV[place], lse_NRL[place]
        own_NRI, own_NRIV = max_NM1.add_(sum_NM1.log2_()).view_as(lse_NRI), o_NMV.view_as(o_NRIV)
        if plan.joins:
            joint_NRI = torch.logaddexp2(lse_NRI, own_NRI)
            own_NRIV.mul_((own_NRI - joint_NRI).exp2_().unsqueeze(3))
            own_NRIV.addcmul_(o_NRIV, (lse_NRI - joint_NRI).exp2_().unsqueeze(3))
            own_NRI = joint_NRI
        o_NRIV.copy_(own_NRIV)
        lse_NRI.copy_(own_NRI)

    for n in steps:
        for tile in plan.tiles:
            attend_tile(n, tile)
    return o_NRLV.to(q_BHLD.dtype).view(*q_BHLD.shape[:3], -1), lse_NRL


def _differentiate(
    plan: _Plan, saved: tuple[torch.Tensor, ...], do_BHLV: torch.Tensor
) -> list[torch.Tensor]:
    """dq, dk and dv: the sums over the tiles, wide until they are complete."""
    q_BHLD, k_BGSD, v_BGSV, o_BHLV, lse_NRL = saved
    wide = lse_NRL.dtype
    k_NSD, v_NSV = k_BGSD.flatten(0, 1).to(wide), v_BGSV.flatten(0, 1).to(wide)
    q_NRLD, o_NRLV, do_NRLV = (by_slice(x, len(k_NSD)) for x in (q_BHLD, o_BHLV, do_BHLV))
    dq_NRLD, dk_NSD, dv_NSV = (x.new_zeros(x.shape, dtype=wide) for x in (q_NRLD, k_NSD, v_NSV))
    steps, scores = plan.steps(len(k_NSD))
    buffers = lse_NRL.new_empty(2, scores)

    def differentiate_tile(n: slice, tile: _Ready) -> None:
        place = (n, slice(None), tile.queries)
        q_NMD = rows_of(q_NRLD[place], wide, plan.scale * LOG2_E)
        do_NMV = rows_of(do_NRLV[place], wide)
        delta_NM1 = rows_of(o_NRLV[place], wide).mul_(do_NMV).sum(2, keepdim=True)
        k_NJD = tile.of(k_NSD[n])
        p_NMJ = _product(q_NMD, k_NJD, buffers[0])
        if tile.bias_MJ is not None:
            p_NMJ.add_(tile.bias_MJ)
        p_NMJ.sub_(lse_NRL[place].flatten(1, 2).unsqueeze(2)).exp2_()
        ds_NMJ = _product(do_NMV, tile.of(v_NSV[n]), buffers[1]).sub_(delta_NM1).mul_(p_NMJ)
        dq_NRLD[place] += torch.bmm(ds_NMJ, k_NJD).mul_(plan.scale).view_as(q_NRLD[place])
        first = 0
        for keys in tile.keys:
            some = slice(first, first := first + len(range(keys.start, keys.stop, keys.step)))
            dv_NSV[n, keys].baddbmm_(p_NMJ[:, :, some].mT, do_NMV)
            # q holds scale · log2(e) already.
            dk_NSD[n, keys].baddbmm_(ds_NMJ[:, :, some].mT, q_NMD, alpha=LN_2)

    for n in steps:
        for tile in plan.tiles:
            differentiate_tile(n, tile)
    pairs = (dq_NRLD, q_BHLD), (dk_NSD, k_BGSD), (dv_NSV, v_BGSV)
    return [gradient.to(x.dtype).view(x.shape) for gradient, x in pairs]


class _TiledAttention(torch.autograd.Function):
    """Forward and backward by tiles; q, k, v, o and the log-sum-exp live in between."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: _Plan) -> Any:
        o_BHLV, lse_NRL = _attend(plan, q, k, v)
        ctx.save_for_backward(q, k, v, o_BHLV, lse_NRL)
        ctx.plan = plan
        return o_BHLV

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, do_BHLV: torch.Tensor) -> Any:
        return *_differentiate(ctx.plan, ctx.saved_tensors, do_BHLV), None


def tiled_flops(cover: Cover, *, useful: bool = False) -> Callable[..., int]:
    """The FLOPs of all pairs in tiles of `cover(case, …)` or, `useful`, of those they admit."""

    @functools.wraps(cover)
    def flops(case: Case, **values: Any) -> int:
        first = case.kv_len - case.seq_len if useful else None
        return core_flops(case, sum(_pairs(tile, first) for tile in cover(case, **values)))

    return flops


def _pairs(tile: Tile, first: int | None) -> int:
    """All pairs of a tile, or the admitted ones, where the first query stands at place `first`."""
    if first is None or tile.admits is None or not tile.width:
        return len(tile.queries) * tile.width
    place_I1 = torch.tensor(tile.queries, dtype=torch.int32).unsqueeze(1) + first
    key_J = torch.cat([torch.tensor(keys, dtype=torch.int32) for keys in tile.keys])
    rows = torch.split(place_I1, max(1, 2**20 // tile.width))  # all may not fit into memory
    return sum(int(tile.admits(some_I1, key_J).count_nonzero()) for some_I1 in rows)


def tiled_workspace(cover: Cover) -> Callable[..., Estimate]:
    """Estimate the bytes beyond the outputs for `cover(case, …) -> tiles`, with its parameters.

    Scores of the largest tiles at once, and copies of their queries, outputs and keys of several
    stretches; in plain torch also the log-sum-exp of all queries and what half precision has wide.
    """

    @functools.wraps(cover)
    def workspace(case: Case, **values: Any) -> Estimate:
        tiles = [tile for tile in cover(case, **values) if tile.width]
        slices, sharing = case.batch * case.kv_heads, case.heads // case.kv_heads
        v, width, wide = case.value_dim, case.head_dim + case.value_dim, max(4, case.element_bytes)
        by_sdpa, passes = not (case.needs_grad or _joins(case, tiles)), 1 + case.needs_grad
        most = copied = 0  # scores and copies of a tile, or a run of them, for one slice
        for run in _runs(tiles, [tile.admits for tile in tiles], AT_ONCE if by_sdpa else 1):
            tile, rows = tiles[run.first], sharing * len(tiles[run.first].queries)
            most = max(most, rows * tile.width)
            of_queries = run.tiles * rows * (v if by_sdpa and sharing == 1 else width)
            copied = max(copied, of_queries + tile.width * width * (len(tile.keys) > 1))
        if by_sdpa:  # where D = V, a thread has a block of about 64 × 512 scores, else all exist
            threads = torch.get_num_threads() if case.device == "cpu" else 0
            scores = threads * min(most, 64 * 512) if width == 2 * v else 3 * slices * most
            return Estimate((slices * copied + scores) * wide)
        rows = slices * sharing * case.seq_len
        widened = rows * v + passes * slices * case.kv_len * width
        kept = rows + widened * (case.element_bytes < wide)
        step = min(slices, max(1, MOST[case.device] // max(1, most)))
        return Estimate((kept + passes * step * (copied + most)) * wide)

    return workspace
