"""Claims on what attention costs that need no run: products and exponentials, counted."""

from __future__ import annotations

import math

import numpy as np

from attnbench.claims.claim import CHAPTER, Answer, identity
from attnbench.claims.exact import draws, said
from attnbench.claims.formulas import Tally, multi_head
from attnbench.schema.case import Case
from attnbench.theory.costs import core_flops, projection_flops

_HEADS = (1, 2, 4, 8)


def tallied(n: int, width: int, heads: int) -> Tally:
    """What multi-head attention of these sizes multiplies, without the output projection."""
    tally, rng = Tally(), draws(60, n)
    multi_head(rng.normal(size=(n, width)), rng.normal(size=(3, width, width)), heads, tally)
    return tally


@identity(
    "head-projections",
    CHAPTER,
    "2. Multi-Head Attention, A. Linear Projections",
    "projecting into H heads of d/H costs n·d² whatever H is",
)
def projections_do_not_depend_on_heads() -> Answer:
    """A head at a time, products counted, for 1 to 8 heads."""
    n, width = 24, 32
    counts = []
    for heads in _HEADS:
        tally, x = Tally(), np.ones((n, width))
        for _ in range(3 * heads):
            tally.product(x, np.ones((width, width // heads)))
        counts.append(tally.flops)
    reason = f"three projections: {counts[0]} FLOPs with 1 head, {counts[-1]} with {_HEADS[-1]}"
    return said(set(counts) == {3 * 2 * n * width**2}, reason, flops=counts[0])


@identity(
    "repeated-work",
    CHAPTER,
    "Putting It All Together: Multiple Heads Add Overhead",
    "more heads mean that projections and matrix products are repeated, h times the work",
    wrong="each is 1/h as large, so projections and products cost the same FLOPs for any h; h-fold"
    " are the softmaxes, of n² each, and the stored scores",
    reading="h times by more than the softmaxes, at a fixed total width",
)
def work_is_not_repeated() -> Answer:
    """Products and exponentials of multi-head attention, counted, for 1 to 8 heads."""
    counts = {heads: tallied(24, 32, heads) for heads in _HEADS}
    one, most = counts[1], counts[_HEADS[-1]]
    flops, powers = most.flops / one.flops, most.exponentials / one.exponentials
    reason = f"8 heads against 1: {flops:.3g} × the FLOPs, {powers:.3g} × the exponentials"
    figures = {"flops_ratio": flops, "exponentials_ratio": powers}
    if powers != _HEADS[-1]:
        return Answer(verdict="inconclusive", reason=reason, figures=figures)
    return said(flops > 1, reason, **figures)


@identity(
    "softmax-scale",
    CHAPTER,
    "2. Multi-Head Attention, C. Softmax and Weighted Sum",
    "the softmaxes of H heads combine to a similar scale as that of a single head",
    wrong="H·n² exponentials against n²: H times as many, which time shows although FLOPs do not",
)
def softmaxes_add_up() -> Answer:
    """Exponentials counted for 1 to 8 heads."""
    counts = {heads: tallied(24, 32, heads).exponentials for heads in _HEADS}
    if counts[1] != 24**2:
        return Answer(verdict="inconclusive", reason=f"one head takes {counts[1]} exponentials")
    most = counts[_HEADS[-1]] / counts[1]
    reason = f"{counts[_HEADS[-1]]} exponentials with 8 heads, {counts[1]} with 1: {most:g} times"
    return said(most < 2, reason, ratio=most, heads=_HEADS[-1])


@identity(
    "scores-cause",
    CHAPTER,
    "Comparison and Key Points",
    "the n² cost is due primarily to the products of queries and keys",
    wrong="to half: the weighted sum over the values takes as many FLOPs where d_v = d_k, and the"
    " softmax between them is quadratic, too",
    reading="primarily: by more than half of the quadratic FLOPs",
)
def half_of_the_square() -> Answer:
    """FLOPs of QKᵀ and of weights · V, counted."""
    scores, values = Tally(), Tally()
    q, k, v = draws(61).normal(size=(3, 96, 16))
    weights = scores.softmax(scores.product(q, k.T))
    values.product(weights, v)
    share = scores.flops / (scores.flops + values.flops)
    reason = f"QKᵀ takes {100 * share:g} % of the quadratic FLOPs"
    return said(share > 0.5, reason, share=share)


@identity(
    "long-sequences",
    CHAPTER,
    "1. Self-Attention, D. Total Cost",
    "for long sequences the n²d term is the larger one",
    reading="of a layer with its output projection: long means n > 2d, where both are equal",
)
def square_dominates() -> Answer:
    """Where the FLOPs of core and projections cross, and what share is quadratic far beyond."""
    shares = {}
    for factor in (1, 2, 64):
        case = Case(workload="layer", heads=4, head_dim=64, width=256, seq_len=256 * factor)
        core = core_flops(case, case.seq_len**2)
        whole = core + projection_flops(case, case.seq_len, case.seq_len)
        shares[factor] = core / whole
    reason = (
        f"quadratic share of the FLOPs: {100 * shares[1]:.0f} % at n = d, {100 * shares[2]:.0f} %"
        f" at n = 2d, {100 * shares[64]:.0f} % at n = 64d"
    )
    crosses = math.isclose(shares[2], 0.5) and shares[1] < 0.5
    return said(
        crosses and shares[64] > 0.95, reason, share_at_2d=shares[2], share_at_64d=shares[64]
    )


@identity(
    "scores-12-million",
    CHAPTER,
    "How the Inefficiency Grows",
    "n = 1000 with 12 heads makes 12 million scores in one layer, a million a head",
    reading="one sequence (B = 1); 48 MB in float32, and none of it need exist at once",
)
def twelve_million() -> Answer:
    """Elements of the score matrices, from an array of that shape."""
    scores_HLS = np.broadcast_to(np.float32(0), (12, 1000, 1000))
    megabytes = scores_HLS.size * scores_HLS.itemsize / 1e6
    reason = f"{scores_HLS.size:,} scores, {megabytes:.0f} MB in float32"
    return said(scores_HLS.size == 12_000_000, reason, scores=scores_HLS.size, megabytes=megabytes)
