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
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

from attnbench.api import (
    ALL_MASKS,
    Case,
    attention_builder,
    dense_bias,
    hidden_and_blind,
    mask_spans,
)

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


def weights_of(
    q: Tensor, k: Tensor, scale: float, hidden: Tensor | None = None, bias: Tensor | None = None
) -> Tensor:
    """Softmax weights in float32 at least; k has the heads of q."""
    scores = (q * scale) @ k.mT
    scores = scores if bias is None else scores + bias
    scores = scores if hidden is None else scores.masked_fill(hidden, -math.inf)
    return scores.softmax(-1, dtype=torch.promote_types(q.dtype, torch.float32))


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    masks: tuple[Tensor | None, Tensor | None] = (None, None),
    bias: Tensor | None = None,
) -> Tensor:
    """softmax(QKᵀ·scale + bias)V; `masks` are the pairs to hide, and the queries without keys."""
    hidden, blind = masks
    o = weights_of(q, repeated(q, k), scale, hidden, bias).to(v.dtype) @ repeated(q, v)
    return o if blind is None else o.masked_fill(blind, 0)


def places(case: Case) -> tuple[Tensor, Tensor]:
    """The place of each query, (L, 1), and of each key, (S,)."""
    place = torch.arange(case.seq_len) + case.kv_len - case.seq_len
    return place.unsqueeze(1), torch.arange(case.kv_len)


def masked_by(admitted: Tensor) -> tuple[Tensor, Tensor]:
    """A mask of one's own as `hidden_and_blind` gives it."""
    blind = ~admitted.any(-1, keepdim=True)
    return ~(admitted | blind), blind


def causal_of(case: Case) -> Tensor:
    """The mask that most kernels know, right."""
    place, key = places(case)
    return (
        key <= place
        if not case.unmasked
        else torch.ones(case.seq_len, case.kv_len, dtype=torch.bool)
    )


def blocks(length: int, size: int) -> list[slice]:
    """Slices of at most `size`."""
    return [slice(at, min(at + size, length)) for at in range(0, length, size)]


def hidden_in(hidden: Tensor | None, j: slice) -> Tensor | None:
    """The columns of a mask."""
    return None if hidden is None else hidden[..., j]


# The scale.


@wrong("own-scale", "scale")
def own_scale(case):
    """1/√D whatever `scale` says: the kernel was written before anyone passed another."""
    masks = hidden_and_blind(case)
    return lambda q, k, v: attend(q, k, v, q.shape[-1] ** -0.5, masks)


@wrong("scale-of-64", r"scale|\bD\b")
def scale_of_64(case):
    """0.125, the scale of D = 64, which all of the author's models have."""
    masks = hidden_and_blind(case)
    scale = case.scale or 0.125
    return lambda q, k, v: attend(q, k, v, scale, masks)


@wrong("exp2-unscaled", r"exp2|ln\(2\)|log2")
def exp2_unscaled(case):
    """exp2 in place of exp, without log2(e) in the scale: half of a known trick."""
    (hidden, blind), scale = hidden_and_blind(case), case.softmax_scale

    def call(q, k, v):
        scores = (q * scale).float() @ repeated(q, k).float().mT
        scores = scores if hidden is None else scores.masked_fill(hidden, -math.inf)
        p = (scores - scores.amax(-1, keepdim=True)).exp2()
        o = ((p / p.sum(-1, keepdim=True)) @ repeated(q, v).float()).to(q.dtype)
        return o if blind is None else o.masked_fill(blind, 0)

    return call


# Masks.


@wrong("causal-one-more", "one key too many")
def causal_one_more(case):
    """`key <= place + 1`: counting from 1 in one of the two."""
    place, key = places(case)
    masks = masked_by(causal_of(case) if case.unmasked else key <= place + 1)
    return lambda q, k, v: attend(q, k, v, case.softmax_scale, masks)


@wrong("causal-strict", "misses its last key|one key too few")
def causal_strict(case):
    """`key < place`, as `triu(0)` hides the diagonal, too."""
    place, key = places(case)
    masks = masked_by(causal_of(case) if case.unmasked else key < place)
    return lambda q, k, v: attend(q, k, v, case.softmax_scale, masks)


@wrong("causal-top-left", "top left|L != S")
def causal_top_left(case):
    """`tril` on an oblong matrix, and SDPA's `is_causal`, begin at the first key."""
    ones = torch.ones(case.seq_len, case.kv_len, dtype=torch.bool)
    masks = masked_by(ones if case.unmasked else ones.tril())
    return lambda q, k, v: attend(q, k, v, case.softmax_scale, masks)


@wrong("causal-if-square", r"L != S|L < S|L > S|mask is not applied")
def causal_if_square(case):
    """`is_causal = L == S`: the one query of a step sees all, and so do all others."""
    masks = hidden_and_blind(case) if case.seq_len == case.kv_len else (None, None)
    return lambda q, k, v: attend(q, k, v, case.softmax_scale, masks)


@wrong("window-one-wide", "one key too wide", masks=("full", "causal", "window"))
def window_one_wide(case):
    """`place - key <= window`, where the query's own key counts as one of the window."""
    place, key = places(case)
    admitted = causal_of(case)
    if case.mask.before is not None:
        admitted = (key <= place) & (place - key <= case.mask.before + 1)
    masks = masked_by(admitted)
    return lambda q, k, v: attend(q, k, v, case.softmax_scale, masks)


@wrong("padding-of-first", "length of the first|padding", masks=ALL_MASKS)
def padding_of_first(case):
    """The mask is built for batch item 0 and broadcast."""
    masks = hidden_and_blind(case)
    if case.mask.lengths:
        hidden, blind = masks
        masks = None if hidden is None else hidden[:1], None if blind is None else blind[:1]
    return lambda q, k, v: attend(q, k, v, case.softmax_scale, masks)


@wrong("documents-across", "across the ends of documents", masks=("full", "causal", "document"))
def documents_across(case):
    """Packed sequences under a plain causal mask: nobody passed `cu_seqlens`."""
    place, key = places(case)
    masks = masked_by(key <= place) if not case.unmasked else (None, None)
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
    masks = hidden_and_blind(case)

    def call(q, k, v):
        k, v = (x.repeat(1, q.shape[1] // x.shape[1], 1, 1) for x in (k, v))
        return attend(q, k, v, case.softmax_scale, masks)

    return call


# Position biases.


def slopes_of(heads: int) -> list[float]:
    """ALiBi's slopes, right."""
    lower = 1 << (heads.bit_length() - 1)
    found = [2 ** (-8 * h / lower) for h in range(1, lower + 1)]
    return found + [2 ** (-4 * h / lower) for h in range(1, 2 * lower, 2)][: heads - lower]


def with_alibi(case: Case, slopes: list[float], distance: Tensor | None = None) -> Any:
    """Attention with a bias of slope × distance; −|j − i| unless given."""
    masks, (place, key) = hidden_and_blind(case), places(case)
    if case.position.name != "alibi":
        return lambda q, k, v: attend(q, k, v, case.softmax_scale, masks)
    distance = -(key - place).abs() if distance is None else distance
    bias = torch.tensor(slopes, dtype=torch.float64).view(-1, 1, 1) * distance
    return lambda q, k, v: attend(q, k, v, case.softmax_scale, masks, bias.to(q.dtype))


@wrong("alibi-by-count", r"power of two|powers of two", positions=("alibi",))
def alibi_by_count(case):
    """2^(−8h/H) for every H: the paper's formula, which is meant for powers of two."""
    return with_alibi(case, [2 ** (-8 * h / case.heads) for h in range(1, case.heads + 1)])


@wrong("alibi-sign", "alibi|slope|sign", positions=("alibi",))
def alibi_sign(case):
    """What is far gets more: the minus stands in the paper's figure alone."""
    place, key = places(case)
    return with_alibi(case, slopes_of(case.heads), (key - place).abs())


# Rotary encodings inside the kernel: its definition says which one it is.


def turned(x: Tensor, place: Tensor, base: float = 10000.0, *, neighbours: bool = False) -> Tensor:
    """RoPE at `place`, halves paired as in Llama, unless `neighbours`."""
    pairs = x.shape[-1] // 2
    wide = torch.promote_types(x.dtype, torch.float32)
    theta = base ** (-torch.arange(pairs, dtype=torch.float64) / pairs)
    angle = place.double().unsqueeze(-1) * theta
    cos, sin = angle.cos().to(wide), angle.sin().to(wide)
    kept = x[..., 2 * pairs :]
    x = x.to(wide)
    if neighbours:
        a, b = x[..., 0 : 2 * pairs : 2], x[..., 1 : 2 * pairs : 2]
        both = torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)
    else:
        a, b = x[..., :pairs], x[..., pairs : 2 * pairs]
        both = torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
    return torch.cat((both.to(kept.dtype), kept), -1)


def rope_definition(case):
    """Attention whose q and k are turned as Llama's, whatever else is done around it."""
    masks, (place, key) = hidden_and_blind(case), places(case)

    def call(q, k, v):
        return attend(turned(q, place[:, 0]), turned(k, key), v, case.softmax_scale, masks)

    return call


ROPE: dict[str, Any] = {"definition": rope_definition, "family": "exact"}


@wrong("rope-neighbours", "rotar|rope|layout|neighbour|halves|pair", **ROPE)
def rope_neighbours(case):
    """Neighbouring dimensions are paired, where the weights were trained on halves."""
    masks, (place, key) = hidden_and_blind(case), places(case)

    def call(q, k, v):
        q, k = turned(q, place[:, 0], neighbours=True), turned(k, key, neighbours=True)
        return attend(q, k, v, case.softmax_scale, masks)

    return call


@wrong("rope-again", "rotar|rope")
def rope_again(case):
    """A kernel that fuses RoPE turns q and k that came turned already."""
    masks, (place, key) = hidden_and_blind(case), places(case)

    def call(q, k, v):
        if case.position.name == "rope":
            q, k = turned(q, place[:, 0]), turned(k, key)
        return attend(q, k, v, case.softmax_scale, masks)

    return call


# Sizes.


@wrong("dims-of-16", r"D (is )?(not|no) a? ?multiple|\bD\b")
def dims_of_16(case):
    """Tiles of 16 dimensions; what is left of D is never loaded. Models have 64 and 128."""
    masks, whole = hidden_and_blind(case), max(16, case.head_dim // 16 * 16)
    return lambda q, k, v: attend(q[..., :whole], k[..., :whole], v, case.softmax_scale, masks)


@wrong("values-as-wide", "V != D|shape")
def values_as_wide(case):
    """The output is made like q, and filled as far as values reach: V is taken to be D."""
    masks = hidden_and_blind(case)

    def call(q, k, v):
        o = attend(q, k, v, case.softmax_scale, masks)
        return (
            o[..., : q.shape[-1]]
            if o.shape[-1] > q.shape[-1]
            else F.pad(o, (0, q.shape[-1] - o.shape[-1]))
        )

    return call


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
    masks = hidden_and_blind(case)
    return lambda q, k, v: attend(
        q, k[:1].expand_as(k), v[:1].expand_as(v), case.softmax_scale, masks
    )


# Softmax by parts.


def online(case: Case, size: int, *, rescale: bool = True) -> Any:
    """Blocks of keys with a running maximum and sum, as flash-attention has them."""
    (hidden, blind), scale = hidden_and_blind(case), case.softmax_scale

    def call(q, k, v):
        k, v = repeated(q, k).float(), repeated(q, v).float()
        q_wide = (q * scale).float()
        top = torch.full((*q.shape[:-1], 1), -1e30)
        total, o = torch.zeros_like(top), torch.zeros(*q.shape[:-1], v.shape[-1])
        for j in blocks(k.shape[2], size):
            scores = q_wide @ k[:, :, j].mT
            shown = hidden_in(hidden, j)
            scores = scores if shown is None else scores.masked_fill(shown, -math.inf)
            higher = torch.maximum(top, scores.detach().amax(-1, keepdim=True))
            p, shrink = (scores - higher).exp(), (top - higher).exp()
            total = total * shrink + p.sum(-1, keepdim=True)
            o = (o * shrink if rescale else o) + p @ v[:, :, j]
            top = higher
        o = (o / total).to(q.dtype)
        return o if blind is None else o.masked_fill(blind, 0)

    return call


HALF: Any = {"dtypes": ("float32", "bfloat16", "float16")}


def by_splits(case: Case, count: int, *, rescale: bool = True) -> Any:
    """Keys in splits of their own maximum, joined by their log-sum-exps."""
    (hidden, blind), scale = hidden_and_blind(case), case.softmax_scale

    def call(q, k, v):
        k, v, parts = repeated(q, k), repeated(q, v), []
        for j in blocks(k.shape[2], -(-k.shape[2] // count)):
            scores = ((q * scale) @ k[:, :, j].mT).float()
            shown = hidden_in(hidden, j)
            scores = scores if shown is None else scores.masked_fill(shown, -math.inf)
            top = scores.detach().amax(-1, keepdim=True).clamp(min=-1e30)
            p = (scores - top).exp()
            parts.append((p @ v[:, :, j].float(), p.sum(-1, keepdim=True), top))
        outputs, sums, tops = (torch.stack(x) for x in zip(*parts, strict=True))
        share = (tops - tops.amax(0)).exp() if rescale else torch.ones_like(tops)
        o = ((share * outputs).sum(0) / (share * sums).sum(0)).to(q.dtype)
        return o if blind is None else o.masked_fill(blind, 0)

    return call


@wrong("split-not-rescaled", "rescal|split|maximum|parts", **HALF)
def split_not_rescaled(case):
    """Split-KV: splits are added as they are, each relative to its own maximum."""
    return by_splits(case, 4, rescale=False)


@wrong("not-normalised", "normalis|sum of (the )?(weights|exponentials)|divided", **HALF)
def not_normalised(case):
    """exp(s − max)·V without the division by the sum: the epilogue was never written."""
    (hidden, blind), scale = hidden_and_blind(case), case.softmax_scale

    def call(q, k, v):
        scores = ((q * scale) @ repeated(q, k).mT).float()
        scores = scores if hidden is None else scores.masked_fill(hidden, -math.inf)
        p = (scores - scores.amax(-1, keepdim=True)).exp()
        o = (p.to(v.dtype) @ repeated(q, v)).to(q.dtype)
        return o if blind is None else o.masked_fill(blind, 0)

    return call


# Precision.


@wrong("half-scores-unscaled", "float16|large logits|overflow|finite")
def half_scores_unscaled(case):
    """The product is scaled after it was stored in float16, which large logits overflow."""
    hidden, blind = hidden_and_blind(case)

    def call(q, k, v):
        scores = (q @ repeated(q, k).mT) * case.softmax_scale
        scores = scores if hidden is None else scores.masked_fill(hidden, -math.inf)
        wide = torch.promote_types(q.dtype, torch.float32)
        o = scores.softmax(-1, dtype=wide).to(v.dtype) @ repeated(q, v)
        return o if blind is None else o.masked_fill(blind, 0)

    return call


@wrong("weights-in-bfloat16", "bfloat16", dtypes=("float32",))
def weights_in_bfloat16(case):
    """Weights are rounded to bfloat16 for the second product, in float32, too."""
    hidden, blind = hidden_and_blind(case)

    def call(q, k, v):
        p = weights_of(q, repeated(q, k), case.softmax_scale, hidden).bfloat16().to(v.dtype)
        o = p @ repeated(q, v)
        return o if blind is None else o.masked_fill(blind, 0)

    return call


# Memory.


def as_if_contiguous(x: Tensor) -> Tensor:
    """What a pointer to the first element shows of a tensor that is taken to be contiguous."""
    strides = torch.empty(x.shape, device="meta").stride()
    return torch.as_strided(x, x.shape, strides, x.storage_offset())


@wrong("strides-ignored", "strided|contiguous")
def strides_ignored(case):
    """Addresses are computed from sizes: what a projection leaves, (B, L, H, D), is read askew."""
    masks = hidden_and_blind(case)

    def call(q, k, v):
        try:
            q, k, v = map(as_if_contiguous, (q, k, v))
        except RuntimeError:  # beyond the storage, where a pointer would read on
            q, k, v = (x.roll(1, 2) for x in (q, k, v))
        return attend(q, k, v, case.softmax_scale, masks)

    return call


@wrong("offset-ignored", "offset|view|storage|decod|strided")
def offset_ignored(case):
    """The base address of the storage and the strides of the view: `x[1:]` is read from 0 on."""
    masks = hidden_and_blind(case)

    def call(q, k, v):
        q, k, v = (torch.as_strided(x, x.shape, x.stride(), 0) for x in (q, k, v))
        return attend(q, k, v, case.softmax_scale, masks)

    return call


@wrong("same-buffer", "same memory|buffer|kept", passes=("forward",))
def same_buffer(case):
    """The output is allocated once, in `build`: the result of the call before changes under it."""
    masks, dtype = hidden_and_blind(case), getattr(torch, case.dtype)
    o = torch.empty(case.batch, case.heads, case.seq_len, case.value_dim, dtype=dtype)
    return lambda q, k, v: o.copy_(attend(q, k, v, case.softmax_scale, masks))


@wrong("result-by-address", "kept|earlier call", passes=("forward",))
def result_by_address(case):
    """Results are cached by the addresses of the inputs, which an allocator hands out again."""
    masks, kept = hidden_and_blind(case), dict[Any, Tensor]()

    def call(q, k, v):
        key = q.data_ptr(), k.data_ptr(), v.data_ptr()
        if key not in kept:
            kept[key] = attend(q, k, v, case.softmax_scale, masks)
        return kept[key].clone()

    return call


@wrong("query-scaled-in-place", "changes its input", passes=("forward",))
def query_scaled_in_place(case):
    """`q *= scale` to spare a buffer: the caller's q."""
    masks, scale = hidden_and_blind(case), case.softmax_scale
    return lambda q, k, v: attend(q.mul_(scale), k, v, 1.0, masks)


# Decoding.


@wrong("few-queries-see-all", r"L < S|L != S|quer|mask is not applied")
def few_queries_see_all(case):
    """The decoding path is taken for up to 8 queries, so drafted tokens see the future."""
    masks = (None, None) if 1 < case.seq_len <= 8 else hidden_and_blind(case)
    return lambda q, k, v: attend(q, k, v, case.softmax_scale, masks)


# Chance.


@wrong("dropout-left-on", "random|two calls|same inputs|differ")
def dropout_left_on(case):
    """`dropout_p=0.1` stands there since training; `eval()` does not reach a function."""
    hidden, blind = hidden_and_blind(case)

    def call(q, k, v):
        p = F.dropout(weights_of(q, repeated(q, k), case.softmax_scale, hidden), 0.1)
        o = p.to(v.dtype) @ repeated(q, v)
        return o if blind is None else o.masked_fill(blind, 0)

    return call


@wrong("race", "random|two calls|same inputs|differ")
def race(case):
    """Two blocks write one row without waiting: now and then a row is off by a percent."""
    masks = hidden_and_blind(case)

    def call(q, k, v):
        o = attend(q, k, v, case.softmax_scale, masks)
        lost = (torch.rand(o.shape[:-1]) < 0.02).unsqueeze(-1)
        return torch.where(lost, o * 0.99, o)

    return call


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


def dscores_of(q: Tensor, v: Tensor, p: Tensor, do: Tensor) -> Tensor:
    """The gradient of the scaled scores, right."""
    dp = do.to(p.dtype) @ repeated(q, v).to(p.dtype).mT
    return p * (dp - (p * dp).sum(-1, keepdim=True))


def summed(x: Tensor, groups: int) -> Tensor:
    """The sum over the query heads of each group."""
    found: Tensor = x.unflatten(1, (groups, -1)).sum(2)
    return found


def gradients(q, k, v, p, do, scale):
    """dq, dk, dv, right."""
    ds, wide, groups = dscores_of(q, v, p, do), p.dtype, k.shape[1]
    dq = ds @ repeated(q, k).to(wide) * scale
    dk = summed(ds.mT @ q.to(wide) * scale, groups)
    return dq, dk, summed(p.mT @ do.to(wide), groups)


@wrong("dk-of-first-in-group", "group")
def dk_of_first_in_group(case):
    """Each query head writes dk and dv of its group, and the last to write wins."""

    def backward(q, k, v, p, do, scale):
        ds, groups = dscores_of(q, v, p, do), k.shape[1]
        dk, dv = ds.mT @ q.to(p.dtype) * scale, p.mT @ do.to(p.dtype)
        last = (x.unflatten(1, (groups, -1))[:, :, -1] for x in (dk, dv))
        return ds @ repeated(q, k).to(p.dtype) * scale, *last

    return by_hand(case, backward)


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


@wrong("delta-missing", "gradient|dq|dk")
def delta_missing(case):
    """ds = p·dp, without the row's mean of dp: the softmax is taken for an exponential."""

    def backward(q, k, v, p, do, scale):
        ds = p * (do.to(p.dtype) @ repeated(q, v).to(p.dtype).mT)
        _, _, dv = gradients(q, k, v, p, do, scale)
        dk = summed(ds.mT @ q.to(p.dtype) * scale, k.shape[1])
        return ds @ repeated(q, k).to(p.dtype) * scale, dk, dv

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


@wrong("backward-of-first-call", "earlier call|kept|gradient|second")
def backward_of_first_call(case):
    """Weights for the backward pass are kept in `build`'s cache: those of the first call."""
    masks, scale, kept = hidden_and_blind(case), case.softmax_scale, dict[str, Tensor]()

    def backward(q, k, v, p, do, scale):
        return gradients(q, k, v, kept["p"], do, scale)

    def call(q, k, v):
        p = weights_of(q, repeated(q, k), scale, masks[0]).detach()
        kept.setdefault("p", p if masks[1] is None else p.masked_fill(masks[1], 0))
        return WithBackward.apply(q, k, v, scale, masks, backward)

    return call


# Right, in unusual ways.


@right("right-exp2", **HALF)
def right_exp2(case):
    """log2(e) is folded into the scale, and the base is 2."""
    (hidden, blind), scale = hidden_and_blind(case), case.softmax_scale * math.log2(math.e)

    def call(q, k, v):
        scores = (q.float() * scale) @ repeated(q, k).float().mT
        scores = scores if hidden is None else scores.masked_fill(hidden, -math.inf)
        p = (scores - scores.amax(-1, keepdim=True)).exp2()
        o = (p @ repeated(q, v).float() / p.sum(-1, keepdim=True)).to(q.dtype)
        return o if blind is None else o.masked_fill(blind, 0)

    return call


@right("right-blocks-of-48", **HALF)
def right_blocks(case):
    """Online softmax in blocks of 48 keys."""
    return online(case, 48)


@right("right-in-float64", masks=ALL_MASKS)
def right_in_float64(case):
    """All in float64, rounded once."""
    masks = hidden_and_blind(case)
    return lambda q, k, v: attend(q.double(), k.double(), v.double(), case.softmax_scale, masks).to(
        q.dtype
    )


@right("right-as-view")
def right_as_view(case):
    """The output is the first V columns of a wider buffer, with a strange offset."""
    masks = hidden_and_blind(case)

    def call(q, k, v):
        o = attend(q, k, F.pad(v, (3, 5)), case.softmax_scale, masks)
        return o[..., 3:-5]

    return call


@right("right-in-place", passes=("forward",))
def right_in_place(case):
    """Everything in place, on copies of its own."""
    (hidden, blind), scale = hidden_and_blind(case), case.softmax_scale

    def call(q, k, v):
        scores = q.clone().mul_(scale) @ repeated(q, k).mT
        if hidden is not None:
            scores.masked_fill_(hidden, -math.inf)
        wide = torch.promote_types(q.dtype, torch.float32)
        scores = scores.to(wide, copy=True).sub_(scores.amax(-1, keepdim=True)).exp_()
        o = scores.div_(scores.sum(-1, keepdim=True)).to(v.dtype) @ repeated(q, v)
        return o if blind is None else o.masked_fill_(blind, 0)

    return call


@right("right-by-hand", masks=ALL_MASKS)
def right_by_hand(case):
    """A backward pass of its own, which leaves out what nobody needs."""

    def backward(q, k, v, p, do, scale):
        return gradients(q, k, v, p, do.contiguous(), scale)

    return by_hand(case, backward)


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
    masks, added = hidden_and_blind(case), dense_bias(case)
    span = mask_spans(case.mask, case.seq_len, case.kv_len, case.device, batch=case.batch)
    blind = None if masks[1] is None else (span[0] >= span[1]).view(*masks[1].shape)

    def call(q, k, v):
        wide = torch.promote_types(q.dtype, torch.float32)
        scores = ((q * case.softmax_scale) @ repeated(q, k).mT).to(wide)
        scores = scores if added is None else scores + added(q)
        scores = scores if masks[0] is None else scores.masked_fill(masks[0], -math.inf)
        p = (scores - scores.logsumexp(-1, keepdim=True)).exp()
        o = p.to(v.dtype) @ repeated(q, v)
        return o if blind is None else o.masked_fill(blind, 0)

    return call
