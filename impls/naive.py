"""The baselines: softmax(QKᵀ·scale)V with whole score matrices, all heads at once or in a loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate

import torch

from attnbench.api import Case, attention_builder, core_flops, hidden_and_blind, output_bytes

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
MASKS = ("full", "causal", "window")


def expand_heads(x_BGSD: torch.Tensor, heads: int) -> torch.Tensor:
    """Repeat each key/value head for the query heads that share it."""
    groups = x_BGSD.shape[1]
    return x_BGSD if groups == heads else x_BGSD.repeat_interleave(heads // groups, dim=1)


class NaiveAttention:
    """One case's scale and mask."""

    def __init__(self, case: Case) -> None:
        self.scale = case.softmax_scale
        self.hidden_LS, self.blind_L1 = hidden_and_blind(case)

    def __call__(self, q_LD: torch.Tensor, k_SD: torch.Tensor, v_SV: torch.Tensor) -> torch.Tensor:
        """O over the last two axes, whatever stands before them."""
        # Scaling q and not the scores keeps large float16 logits inside float16's range.
        scores_LS = (q_LD * self.scale) @ k_SD.mT
        if self.hidden_LS is not None:
            scores_LS.masked_fill_(self.hidden_LS, float("-inf"))
        wide = torch.promote_types(scores_LS.dtype, torch.float32)
        weights_LS = torch.softmax(scores_LS, dim=-1, dtype=wide).to(v_SV.dtype)
        o_LV = weights_LS @ v_SV
        return o_LV if self.blind_L1 is None else o_LV.masked_fill_(self.blind_L1, 0)


def square_flops(case: Case) -> int:
    """FLOPs executed: the full square whatever the mask, and no scores recomputed backward."""
    return core_flops(case, case.seq_len * case.kv_len, recompute=False)


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Bytes of what one call of NaiveAttention handles, and what of it a case asks for.

    `scores` is the score matrix in the case's dtype, `wide` the one that softmax returns.
    """

    q: int
    k: int
    v: int
    o: int
    scores: int
    wide: int
    copied: bool
    graph: bool
    masked: bool
    blind: bool

    @classmethod
    def of(cls, case: Case, heads: int) -> Sizes:
        """Of `heads` query heads, each with its own key/value head."""
        element = case.batch * heads * case.element_bytes
        scores = element * case.seq_len * case.kv_len
        masked = not case.unmasked
        return cls(
            q=element * case.seq_len * case.head_dim,
            k=element * case.kv_len * case.head_dim,
            v=element * case.kv_len * case.value_dim,
            o=element * case.seq_len * case.value_dim,
            scores=scores,
            wide=scores * 2 if case.element_bytes == 2 else scores,
            copied=heads != 1 and heads != case.kv_heads,
            graph=case.needs_grad,
            masked=masked,
            blind=masked and case.seq_len > case.kv_len,
        )


Changes = Iterator[int]  # bytes allocated (positive) and freed (negative), in their order


def peak(changes: Changes) -> int:
    """The highest sum of live bytes."""
    return max(accumulate(changes))


def forward_changes(size: Sizes) -> Changes:
    """What NaiveAttention allocates; with a graph, scaled q and the weights stay."""
    half = size.wide != size.scores
    yield from (size.q, size.scores)
    if not size.graph:
        yield -size.q
    if half:
        yield size.wide  # the scores in float32
    yield size.wide
    if half:
        yield from (-size.wide, size.scores)  # the weights in the case's dtype
        if not size.graph:
            yield -size.wide
    yield from (size.o, -size.scores)
    if not size.graph:
        yield -size.scores


def backward_changes(size: Sizes, *, frees: bool, sums: bool = False) -> Changes:
    """What autograd allocates for one call; dq, dk and dv stay.

    `frees`: the graph goes as it is used. `sums`: dk and dv are added to those of another head.
    """
    half = size.wide != size.scores
    if size.blind:
        yield size.o  # do with the blind rows cleared
    yield from (size.v, size.scores)  # dv, dweights
    if size.blind:
        yield -size.o
    if (size.copied and frees) or sums:
        yield -size.v
    if half:
        yield from (-size.scores if frees else 0, size.wide, -size.scores)
    yield from (size.wide, -size.wide, -size.wide if frees else 0)  # dscores, for dweights
    if half:
        yield from (size.scores, -size.wide)
    if size.masked:
        yield from (size.scores, -size.scores)
    yield from (size.k, size.q, -size.scores, -size.q if frees else 0)
    if sums:
        yield -size.k
    yield from (size.q, -size.q)  # dq of the scaled q, then of q


def naive_changes(case: Case) -> Changes:
    """All heads at once. Heads that share a key/value head get copies of it."""
    size = Sizes.of(case, case.heads)
    if case.pass_ != "backward":
        yield size.k + size.v if size.copied else 0
        yield from forward_changes(size)
    if case.needs_grad:
        yield from backward_changes(size, frees=case.pass_ == "both")


def heads_changes(case: Case) -> Changes:
    """Head by head; with a graph, what every head saved is there when the last one has run."""
    size, heads = Sizes.of(case, 1), case.heads
    if case.pass_ != "backward":
        for _ in range(heads):
            yield from forward_changes(size)
        yield from (heads * size.o, -heads * size.o)  # stacked
    if case.needs_grad:
        for head in range(heads):
            sums = head % (heads // case.kv_heads) > 0
            yield from backward_changes(size, frees=case.pass_ == "both", sums=sums)
        for part in (heads * size.q, case.kv_heads * size.k, case.kv_heads * size.v):
            yield from (part, -part)  # stacked


@attention_builder(
    "naive",
    time="n^2 d",
    memory="n^2",
    masks=MASKS,
    flops=square_flops,
    workspace=lambda case: peak(naive_changes(case)) - output_bytes(case),
)
def build_naive(case: Case) -> Attend:
    """softmax(QKᵀ·scale)V with the whole score matrix: the baseline of every comparison."""
    attend = NaiveAttention(case)

    def naive(q_BHLD: torch.Tensor, k_BGSD: torch.Tensor, v_BGSV: torch.Tensor) -> torch.Tensor:
        k_BHSD, v_BHSV = expand_heads(k_BGSD, case.heads), expand_heads(v_BGSV, case.heads)
        return attend(q_BHLD, k_BHSD, v_BHSV)

    return naive


@attention_builder(
    "naive-heads",
    time="n^2 d",
    memory="n^2",
    masks=MASKS,
    flops=square_flops,
    workspace=lambda case: peak(heads_changes(case)) - output_bytes(case),
)
def build_naive_heads(case: Case) -> Attend:
    """The textbook loop: softmax(QKᵀ·scale)V one head after another, the results stacked."""
    attend = NaiveAttention(case)
    sharing = case.heads // case.kv_heads

    def naive_heads(
        q_BHLD: torch.Tensor, k_BGSD: torch.Tensor, v_BGSV: torch.Tensor
    ) -> torch.Tensor:
        # unbind and not an index: its gradient is one stack, where every index would make a
        # dq of all heads, zero but for one.
        k_BSDs, v_BSVs = k_BGSD.unbind(dim=1), v_BGSV.unbind(dim=1)
        o_BLVs = [
            attend(q_BLD, k_BSDs[head // sharing], v_BSVs[head // sharing])
            for head, q_BLD in enumerate(q_BHLD.unbind(dim=1))
        ]
        return torch.stack(o_BLVs, dim=1)

    return naive_heads
