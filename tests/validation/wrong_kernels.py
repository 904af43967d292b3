"""Kernels that are wrong as people's are, and some that are right in an unusual way.

Written before the battery of `attnbench check` was made to find them, from how such mistakes come
about: code for one shape, one layout, one mask; a step of a known algorithm left out; a path that
the author's own test never took. Each says what is wrong, and how one comes to write it. `SAYS`
holds for each wrong one what a good `check` says of it, as alternatives of a regular expression;
`RIGHT` names the others. `make validate PART=wrong` runs `attnbench check` over all.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

from attnbench.api import ALL_MASKS, Case, attention_builder, dense_bias, hidden_and_blind

Tensor = torch.Tensor
SAYS: dict[str, str] = {}
RIGHT: list[str] = []


def wrong(name: str, says: str, **declared: Any) -> Callable[[Any], Any]:
    """Register a wrong kernel; `says` is what should be in the words of `check`."""
    SAYS[name] = says
    return attention_builder(name, **declared)


def right(name: str, **declared: Any) -> Callable[[Any], Any]:
    """Register one that must stay right."""
    RIGHT.append(name)
    return attention_builder(name, **declared)


# Right parts, from which most are made.


def repeated(q: Tensor, x: Tensor) -> Tensor:
    """Keys or values once for each query head."""
    return x.repeat_interleave(q.shape[1] // x.shape[1], dim=1)


def scores_of(
    q: Tensor, k: Tensor, scale: float, hidden: Tensor | None = None, bias: Tensor | None = None
) -> Tensor:
    """The scores, where hidden −inf; k has the heads of q."""
    scores = (q * scale) @ k.mT
    scores = scores if bias is None else scores + bias
    return scores if hidden is None else scores.masked_fill(hidden, -math.inf)


def weights_of(*scored: Any) -> Tensor:
    """Softmax weights in float32 at least."""
    scores = scores_of(*scored)
    return scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32))


def attend(
    q: Tensor, k: Tensor, v: Tensor, scale: float,
    masks: tuple[Tensor | None, Tensor | None] = (None, None), bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """softmax(QKᵀ·scale + bias)V; `masks` are the pairs to hide, and the queries without keys."""
    hidden, blind = masks
    o = weights_of(q, repeated(q, k), scale, hidden, bias).to(v.dtype) @ repeated(q, v)
    return o if blind is None else o.masked_fill(blind, 0)


def by_weights(case: Case, weights: Callable[[Tensor, Tensor, Tensor | None], Tensor]) -> Any:
    """Attention with weights of one's own, from q, repeated k and the pairs to hide."""
    hidden, blind = hidden_and_blind(case)

    def call(q, k, v):
        o = weights(q, repeated(q, k), hidden).to(v.dtype) @ repeated(q, v)
        return o if blind is None else o.masked_fill(blind, 0)

    return call


def places(case: Case) -> tuple[Tensor, Tensor]:
    """The place of each query, (L, 1), and of each key, (S,)."""
    place = torch.arange(case.seq_len) + case.kv_len - case.seq_len
    return place.unsqueeze(1), torch.arange(case.kv_len)


def causal_of(case: Case, ahead: int = 0) -> Tensor:
    """The mask that most kernels know, right unless keys `ahead` are admitted."""
    place, key = places(case)
    whole = torch.ones(case.seq_len, case.kv_len, dtype=torch.bool)
    return whole if case.unmasked else key <= place + ahead


def with_mask(case: Case, admitted: Tensor) -> Any:
    """Attention under a mask of one's own."""
    blind = ~admitted.any(-1, keepdim=True)
    masks = ~(admitted | blind), blind
    return lambda q, k, v: attend(q, k, v, case.softmax_scale, masks)


def with_inputs(case: Case, change: Callable[..., Any]) -> Any:
    """Attention to q, k and v that were changed."""
    masks = hidden_and_blind(case)

    def call(*qkv):
        q, k, v = change(*qkv)
        return attend(q, k, v, case.softmax_scale, masks)

    return call


# The scale.


@wrong("own-scale", "scale")
def own_scale(case):
    """1/√D whatever `scale` says: the kernel was written before anyone passed another."""
    masks = hidden_and_blind(case)
    return lambda q, k, v: attend(q, k, v, q.shape[-1] ** -0.5, masks)


# Masks.


@wrong("causal-one-more", "one key too many")
def causal_one_more(case):
    """`key <= place + 1`: counting from 1 in one of the two."""
    return with_mask(case, causal_of(case, ahead=1))


@wrong("causal-top-left", "top left|L != S")
def causal_top_left(case):
    """`tril` on an oblong matrix, and SDPA's `is_causal`, begin at the first key."""
    ones = torch.ones(case.seq_len, case.kv_len, dtype=torch.bool)
    return with_mask(case, ones if case.unmasked else ones.tril())


@wrong("window-one-wide", "one key too wide", masks=("full", "causal", "window"))
def window_one_wide(case):
    """`place - key <= window`, where the query's own key counts as one of the window."""
    place, key = places(case)
    admitted = causal_of(case)
    if case.mask.before is not None:
        admitted = (key <= place) & (place - key <= case.mask.before + 1)
    return with_mask(case, admitted)


@wrong("padding-of-first", "length of the first|padding", masks=ALL_MASKS)
def padding_of_first(case):
    """The mask is built for batch item 0 and broadcast."""
    masks = hidden_and_blind(case)
    if case.mask.lengths:
        hidden, blind = masks
        masks = None if hidden is None else hidden[:1], None if blind is None else blind[:1]
    return lambda q, k, v: attend(q, k, v, case.softmax_scale, masks)


@wrong("nan-without-keys", "no key")
def nan_without_keys(case):
    """-inf in a whole row: softmax is NaN there. Only where L > S, which no training has."""
    hidden = ~causal_of(case)
    return lambda q, k, v: attend(q, k, v, case.softmax_scale, (hidden, None))


# Grouped heads.


@wrong("heads-modulo", "h mod G")
def heads_modulo(case):
    """Query head h takes key/value head h mod G: `repeat` in place of `repeat_interleave`."""
    share = case.heads // case.kv_heads
    return with_inputs(case, lambda q, *kv: (q, *(x.repeat(1, share, 1, 1) for x in kv)))


# Positions.


@wrong("alibi-by-count", r"power of two|powers of two", positions=("alibi",))
def alibi_by_count(case):
    """2^(−8h/H) for every H: the paper's formula, which is meant for powers of two."""
    masks, (place, key) = hidden_and_blind(case), places(case)
    slopes = 2.0 ** (-8 * torch.arange(1, case.heads + 1).double() / case.heads)
    bias = -slopes.view(-1, 1, 1) * (key - place).abs() * (case.position.name == "alibi")
    return lambda q, k, v: attend(q, k, v, case.softmax_scale, masks, bias.to(q.dtype))


# Sizes.


def with_first_keys(case: Case, count: int) -> Any:
    """Attention to the first keys alone; what sees none of them gives 0."""
    hidden, blind = hidden_and_blind(case)
    if hidden is not None:
        dark = hidden[..., :count].all(-1, keepdim=True)
        hidden, blind = hidden[..., :count] & ~dark, dark if blind is None else blind | dark

    def call(q, k, v):
        return attend(q, k[:, :, :count], v[:, :, :count], case.softmax_scale, (hidden, blind))

    return call


@wrong("keys-up-to-512", r"S >|512")
def keys_up_to_512(case):
    """A buffer of 512 scores: later keys are left out, which no short test shows."""
    return with_first_keys(case, 512)


@wrong("last-block-dropped", r"misses|multiple of|last")
def last_block_dropped(case):
    """`for block in range(S // 32)`: right for all lengths that are multiples of the block."""
    return with_first_keys(case, max(case.kv_len // 32 * 32, min(32, case.kv_len)))


@wrong("batch-of-first", "batch")
def batch_of_first(case):
    """The batch index is left out of the address of keys and values."""
    return with_inputs(case, lambda q, *kv: (q, *(x[:1].expand_as(x) for x in kv)))


# Softmax by parts.

HALF: Any = {"dtypes": ("float32", "bfloat16", "float16")}


def online(case: Case, size: int, *, rescale: bool = True) -> Any:
    """Blocks of keys with a running maximum and sum, as flash-attention has them."""
    (hidden, blind), scale = hidden_and_blind(case), case.softmax_scale

    def call(q, k, v):
        k, v = repeated(q, k).float(), repeated(q, v).float()
        top = torch.full((*q.shape[:-1], 1), -1e30)
        total, o = torch.zeros_like(top), torch.zeros(*q.shape[:-1], v.shape[-1])
        for first in range(0, k.shape[2], size):
            j = slice(first, first + size)
            shown = None if hidden is None else hidden[..., j]
            scores = scores_of(q.float(), k[:, :, j], scale, shown)
            higher = torch.maximum(top, scores.detach().amax(-1, keepdim=True))
            p, shrink = (scores - higher).exp(), (top - higher).exp()
            total = total * shrink + p.sum(-1, keepdim=True)
            o = (o * shrink if rescale else o) + p @ v[:, :, j]
            top = higher
        o = (o / total).to(q.dtype)
        return o if blind is None else o.masked_fill(blind, 0)

    return call


@wrong("online-not-rescaled", "rescal|split|maximum|parts", **HALF)
def online_not_rescaled(case):
    """Outputs of earlier blocks are not rescaled when the maximum rises; their sum is."""
    return online(case, 16, rescale=False)


@wrong("not-normalised", "add up to 1", **HALF)
def not_normalised(case):
    """exp(s − max)·V without the division by the sum: the epilogue was never written."""

    def weights(q, k, hidden):
        scores = scores_of(q, k, case.softmax_scale, hidden).float()
        return (scores - scores.amax(-1, keepdim=True)).exp()

    return by_weights(case, weights)


# Precision.


@wrong("half-scores-unscaled", "float16|large logits|overflow|finite")
def half_scores_unscaled(case):
    """The product is scaled after it was stored in float16, which large logits overflow."""

    def weights(q, k, hidden):
        scores = scores_of(q, k, 1.0, hidden) * case.softmax_scale
        return scores.softmax(-1, dtype=torch.promote_types(q.dtype, torch.float32))

    return by_weights(case, weights)


@wrong("weights-in-bfloat16", "bfloat16", dtypes=("float32",))
def weights_in_bfloat16(case):
    """Weights are rounded to bfloat16 for the second product, in float32, too."""
    scale = case.softmax_scale
    return by_weights(case, lambda q, k, hidden: weights_of(q, k, scale, hidden).bfloat16())


# Memory.


def as_if_contiguous(x: Tensor) -> Tensor:
    """What a pointer to the first element shows of a tensor that is taken to be contiguous."""
    strides = torch.empty(x.shape, device="meta").stride()
    return torch.as_strided(x, x.shape, strides, x.storage_offset())


@wrong("strides-ignored", "as if dense")
def strides_ignored(case):
    """Addresses are computed from sizes: what a projection leaves, (B, L, H, D), is read askew."""

    def askew(*qkv):
        try:
            return [as_if_contiguous(x) for x in qkv]
        except RuntimeError:  # beyond the storage, where a pointer would read on
            return [x.roll(1, 2) for x in qkv]

    return with_inputs(case, askew)


@wrong("offset-ignored", "offset|view|storage|decod|strided")
def offset_ignored(case):
    """The base address of the storage and the strides of the view: `x[1:]` is read from 0 on."""
    return with_inputs(case, lambda *qkv: [x.as_strided(x.shape, x.stride(), 0) for x in qkv])


@wrong("same-buffer", "same memory|buffer|kept", passes=("forward",))
def same_buffer(case):
    """The output is allocated once, in `build`: the result of the call before changes under it."""
    masks, dtype = hidden_and_blind(case), getattr(torch, case.dtype)
    o = torch.empty(case.batch, case.heads, case.seq_len, case.value_dim, dtype=dtype)
    return lambda q, k, v: o.copy_(attend(q, k, v, case.softmax_scale, masks))


@wrong("query-scaled-in-place", "changes its input", passes=("forward",))
def query_scaled_in_place(case):
    """`q *= scale` to spare a buffer: the caller's q."""
    masks, scale = hidden_and_blind(case), case.softmax_scale
    return lambda q, k, v: attend(q.mul_(scale), k, v, 1.0, masks)


# Chance.


@wrong("dropout-left-on", "random|two calls|same inputs|differ")
def dropout_left_on(case):
    """`dropout_p=0.1` stands there since training; `eval()` does not reach a function."""
    scale = case.softmax_scale
    return by_weights(case, lambda q, k, hidden: F.dropout(weights_of(q, k, scale, hidden), 0.1))


# Gradients.


class WithBackward(torch.autograd.Function):
    """Attention whose backward pass is a function of q, k, v, the weights and do."""

    @staticmethod
    def forward(ctx, q, k, v, scale, masks, backward):  # type: ignore[override]
        p = weights_of(q, repeated(q, k), scale, masks[0])
        p = p if masks[1] is None else p.masked_fill(masks[1], 0)
        ctx.save_for_backward(q, k, v, p)
        ctx.scale, ctx.own = scale, backward
        return p.to(v.dtype) @ repeated(q, v)

    @staticmethod
    def backward(ctx, do):  # type: ignore[override]
        q, k, v, p = ctx.saved_tensors
        found = ctx.own(q, k, v, p, do, ctx.scale)
        return *(g if g is None else g.to(q.dtype) for g in found), None, None, None


def by_hand(case: Case, backward: Callable[..., Any]) -> Any:
    """A call with a backward pass of its own."""
    masks, scale = hidden_and_blind(case), case.softmax_scale
    apply: Any = WithBackward.apply
    return lambda q, k, v: apply(q, k, v, scale, masks, backward)


def gradients(q, k, v, p, do, scale, *, since: int = 0):
    """dq, dk, dv, right where all query heads of a group count, not those `since` one alone."""
    wide = p.dtype
    dp = do.to(wide) @ repeated(q, v).to(wide).mT
    ds = p * (dp - (p * dp).sum(-1, keepdim=True))
    of_heads = ds.mT @ q.to(wide) * scale, p.mT @ do.to(wide)
    dk, dv = (x.unflatten(1, (k.shape[1], -1))[:, :, since:].sum(2) for x in of_heads)
    return ds @ repeated(q, k).to(wide) * scale, dk, dv


@wrong("dk-of-first-in-group", "group")
def dk_of_first_in_group(case):
    """Each query head writes dk and dv of its group, and the last to write wins."""
    return by_hand(case, partial(gradients, since=-1))


@wrong("dq-unscaled", r"scale|sqrt\(D\)|√D")
def dq_unscaled(case):
    """q was scaled when it was loaded, so dq still lacks the factor, and dk has it."""

    def backward(q, k, v, p, do, scale):
        dq, dk, dv = gradients(q, k, v, p, do, scale)
        return dq / scale, dk, dv

    return by_hand(case, backward)


@wrong("backward-unmasked", "causal|mask")
def backward_unmasked(case):
    """The backward pass computes the weights again, and forgets the mask."""

    def backward(q, k, v, p, do, scale):
        again = weights_of(q, repeated(q, k), scale).to(p.dtype)
        return gradients(q, k, v, again, do, scale)

    return by_hand(case, backward)


@wrong("do-as-contiguous", "contiguous|expanded|stride")
def do_as_contiguous(case):
    """do is read by its sizes: `o.sum().backward()` gives one number with strides of 0."""

    def backward(q, k, v, p, do, scale):
        if not do.is_contiguous():
            try:
                do = as_if_contiguous(do)
            except RuntimeError:  # beyond the storage
                do = F.pad(do.flatten()[:1], (0, do.numel() - 1)).view(do.shape)
        return gradients(q, k, v, p, do, scale)

    return by_hand(case, backward)


@wrong("all-need-gradients", "requires|need|gradient")
def all_need_gradients(case):
    """The backward pass asks every input for its `.grad` buffer: frozen keys have none."""

    def call(q, k, v):
        if torch.is_grad_enabled() and not (q.requires_grad == k.requires_grad == v.requires_grad):
            raise RuntimeError("element 1 of tensors does not require grad")
        return by_hand(case, gradients)(q, k, v)

    return call


# Right, in unusual ways.


@right("right-blocks-of-48", **HALF)
def right_blocks(case):
    """Online softmax in blocks of 48 keys."""
    return online(case, 48)


@right("right-in-float64", masks=ALL_MASKS)
def right_in_float64(case):
    """All in float64, rounded once."""
    masks, scale = hidden_and_blind(case), case.softmax_scale
    return lambda q, k, v: attend(q.double(), k.double(), v.double(), scale, masks).to(q.dtype)


@right("right-as-view")
def right_as_view(case):
    """The output is the first V columns of a wider buffer, with a strange offset."""
    masks = hidden_and_blind(case)

    def call(q, k, v):
        o = attend(q, k, F.pad(v, (3, 5)), case.softmax_scale, masks)
        return o[..., 3:-5]

    return call


@right("right-by-hand", masks=ALL_MASKS)
def right_by_hand(case):
    """A backward pass of its own."""
    return by_hand(case, gradients)


@right("right-grouped-einsum")
def right_grouped_einsum(case):
    """Heads of a group as an axis of their own, by einsum, keys back to front."""
    hidden, blind = hidden_and_blind(case)
    hidden = None if hidden is None else hidden.flip(-1)

    def call(q, k, v):
        q5 = (q * case.softmax_scale).unflatten(1, (k.shape[1], -1))
        scores = torch.einsum("bgrld,bgsd->bgrls", q5, k.flip(2))
        scores = scores if hidden is None else scores.masked_fill(hidden, -math.inf)
        p = scores.softmax(-1, dtype=torch.promote_types(q.dtype, torch.float32))
        o = torch.einsum("bgrls,bgsv->bgrlv", p.to(v.dtype), v.flip(2)).flatten(1, 2)
        return o if blind is None else o.masked_fill(blind, 0)

    return call


@right("right-by-log-sum-exp", masks=ALL_MASKS, positions=("alibi", "t5", "shaw"))
def right_by_log_sum_exp(case):
    """exp(s − lse): the normaliser goes into the exponent, biases included."""
    added = dense_bias(case)

    def weights(q, k, hidden):
        bias = None if added is None else added(q)
        scores = scores_of(q, k, case.softmax_scale, hidden, bias)
        scores = scores.to(torch.promote_types(q.dtype, torch.float32))
        return (scores - scores.logsumexp(-1, keepdim=True)).exp()

    return by_weights(case, weights)
