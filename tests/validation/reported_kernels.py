"""Kernels wrong as public reports have them; each is right wherever its report does not apply.

A kernel of `wrong_kernels.py` breaks a rule of attention; here one meets a size, a layout, a dtype
or a value that its author never ran.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

from attnbench.api import ALL_MASKS, dense_bias, dense_mask, hidden_and_blind
from tests.validation.wrong_kernels import (
    as_if_contiguous,
    attend,
    by_hand,
    by_weights,
    gradients,
    places,
    repeated,
    right,
    scores_of,
    weights_of,
    with_inputs,
    with_mask,
    wrong,
)

ATTENTION: Any = {"workloads": ("attention",)}
FORWARD: Any = ATTENTION | {"passes": ("forward",)}


@wrong("tail-keys-zero", "keys of score 0", **ATTENTION)
def tail_keys_zero(case):
    """Keys are padded with zeros to whole tiles of 64, and the padding is not masked."""
    hidden, blind = hidden_and_blind(case)
    pad = -case.kv_len % 64
    hidden = None if hidden is None else F.pad(hidden, (0, pad))
    padded = lambda x: F.pad(x, (0, 0, 0, pad))  # noqa: E731
    return lambda q, k, v: attend(q, padded(k), padded(v), case.softmax_scale, (hidden, blind))


@wrong("tail-keys-lost", "not a multiple of (8|16)", **ATTENTION)
def tail_keys_lost(case):
    """Keys are loaded eight at a time, and what is left of them is not."""
    whole = max(case.kv_len - case.kv_len % 8, 1)
    admitted = dense_mask(case.mask, case.seq_len, case.kv_len, case.device, batch=case.batch)
    return with_mask(case, admitted & (torch.arange(case.kv_len) < whole))


@wrong("last-row-unwritten", "two calls|not multiples? of 16", **FORWARD)
def last_row_unwritten(case):
    """The grid has L // 16 programs: the rest of the output is what the memory had before."""
    masks = hidden_and_blind(case)

    def call(q, k, v):
        o = torch.empty(*q.shape[:-1], v.shape[-1], dtype=q.dtype)
        rows = max(case.seq_len - case.seq_len % 16, 1)
        o[:, :, :rows] = attend(q, k, v, case.softmax_scale, masks)[:, :, :rows]
        return o

    return call


@wrong("first-128-dims", "D > 128", **ATTENTION)
def first_128_dims(case):
    """Tiles hold 128 dims; nobody ran a model with more."""
    return with_inputs(case, lambda q, k, v: (q[..., :128], k[..., :128], v))


@wrong("values-of-128", r"sqrt\(D/V\)|D > 128", **ATTENTION)
def values_of_128(case):
    """MLA is told by D = 192 alone, and then the scale is that of V."""
    masks = hidden_and_blind(case)
    odd = case.head_dim == 192 and case.scale is None
    scale = case.value_dim**-0.5 if odd else case.softmax_scale
    return lambda q, k, v: attend(q, k, v, scale, masks)


@wrong("offset-of-packed", "stride|offset|packed", **ATTENTION)
def offset_of_packed(case):
    """Tokens are taken to be H·D apart, as a projection of q alone leaves them."""

    def reread(x):
        _, h, n, d = x.shape
        size = x.untyped_storage().nbytes() // x.element_size()
        if x.is_contiguous() or size < x.storage_offset() + x.numel():
            return x
        return x.as_strided(x.shape, (n * h * d, d, h * d, 1), x.storage_offset())

    return with_inputs(case, lambda *qkv: [reread(x) for x in qkv])


@wrong("groups-by-shift", "group|H / G not", **ATTENTION)
def groups_by_shift(case):
    """The group of a head is h >> log2(H / G), which groups of 3 are not."""
    masks, share = hidden_and_blind(case), case.heads // case.kv_heads
    group = torch.tensor(
        [min(h >> (share.bit_length() - 1), case.kv_heads - 1) for h in range(case.heads)]
    )
    return lambda q, k, v: attend(q, k[:, group], v[:, group], case.softmax_scale, masks)


@wrong("k-as-contiguous", r"\bk\b.*(stride|memory)|(stride|memory).*\bk\b", **ATTENTION)
def k_as_contiguous(case):
    """A cache keeps k contiguous: here it comes from the projection."""

    def change(q, k, v):
        try:
            return q, k if k.is_contiguous() else as_if_contiguous(k), v
        except RuntimeError:  # beyond the storage
            return q, k.roll(1, 2), v

    return with_inputs(case, change)


@wrong("scale-one-is-none", "scale", **ATTENTION)
def scale_one_is_none(case):
    """`scale != 1.0` means that one was given: T5's, which is 1, is taken for none."""
    masks = hidden_and_blind(case)
    scale = case.head_dim**-0.5 if case.scale == 1 else case.softmax_scale
    return lambda q, k, v: attend(q, k, v, scale, masks)


@wrong("blind-rows-have-gradients", "no keys?|without keys", **ATTENTION)
def blind_rows_have_gradients(case):
    """Rows without keys give 0, but the backward pass has uniform weights there."""
    _, blind = hidden_and_blind(case)

    def backward(q, k, v, p, do, scale):
        if blind is not None:
            p = torch.where(blind, 1 / case.kv_len, p)
        return gradients(q, k, v, p, do, scale)

    return by_hand(case, backward)


@wrong("empty-padding", "no keys?|without keys|length", masks=ALL_MASKS, **FORWARD)
def empty_padding(case):
    """A batch item of length 0 divides 0 by 0."""
    masks = hidden_and_blind(case)

    def call(q, k, v):
        o = attend(q, k, v, case.softmax_scale, masks)
        empty = [i for i, n in enumerate(case.mask.lengths) if n == 0]
        o[empty] = math.nan
        return o

    return call


@wrong("padding-of-longest", "pad", masks=ALL_MASKS, **ATTENTION)
def padding_of_longest(case):
    """The mask is made of the longest of the batch, and broadcast."""
    admitted = dense_mask(case.mask, case.seq_len, case.kv_len, case.device, batch=case.batch)
    return with_mask(case, admitted.any(0, keepdim=True) if case.mask.lengths else admitted)


@wrong("window-from-top", "window|L != S|L < S", masks=("full", "causal", "window"), **ATTENTION)
def window_from_top(case):
    """The window counts from the query's row, not from its place: with a cache they differ."""
    place, key = places(case)
    row = place - (case.kv_len - case.seq_len)
    admitted = dense_mask(case.mask, case.seq_len, case.kv_len, case.device)
    if case.mask.before is not None:
        admitted = (key <= place) & (row - key <= case.mask.before)
    return with_mask(case, admitted)


@wrong("window-block-hidden", "not finite", masks=("full", "causal", "window"), **FORWARD)
def window_block_hidden(case):
    """Where the first tile of a row is hidden its maximum is −inf, and −inf − −inf is NaN."""
    masks = hidden_and_blind(case)

    def call(q, k, v):
        o = attend(q, k, v, case.softmax_scale, masks)
        if case.mask.before is not None and masks[0] is not None:
            o = o.masked_fill(masks[0][..., :64].all(-1, keepdim=True), math.nan)
        return o

    return call


@wrong("one-head-one-batch", "batch|one key/value head", **ATTENTION)
def one_head_one_batch(case):
    """MQA broadcasts keys over heads by a view of the first batch item."""
    masks = hidden_and_blind(case)

    def call(q, k, v):
        if case.kv_heads == 1 < case.heads:
            k = k[:1].expand_as(k)
        return attend(q, k, v, case.softmax_scale, masks)

    return call


@wrong("several-queries-see-all", "query_tokens|the mask is not applied", workloads=("decode",))
def several_queries_see_all(case):
    """Decoding was written for one query; of several each sees the last one's keys."""
    admitted = dense_mask(case.mask, case.seq_len, case.kv_len, case.device, batch=case.batch)
    if 1 < case.seq_len < 8:
        admitted = admitted[..., -1:, :].expand_as(admitted)
    return with_mask(case, admitted)


@wrong("dk-averaged", "G/H|group", **ATTENTION)
def dk_averaged(case):
    """dk and dv of a group are the mean of its heads, not their sum."""

    def backward(q, k, v, p, do, scale):
        dq, dk, dv = gradients(q, k, v, p, do, scale)
        share = case.heads // case.kv_heads
        return dq, dk / share, dv / share

    return by_hand(case, backward)


@wrong(
    "softmax-over-queries",
    "queries.*(normalis|add up)|(normalis|add up).*(queries|keys)",
    masks=("full",),
    **ATTENTION,
)
def softmax_over_queries(case):
    """`softmax(-2)`: right of one's own square test matrix only in shape."""
    return by_weights(case, lambda q, k, hidden: scores_of(q, k, case.softmax_scale).softmax(-2))


@wrong("no-maximum", "×|amplitude|large|overflow", **FORWARD)
def no_maximum(case):
    """exp(s) without the row's maximum: infinite from scores of 88 on."""

    def weights(q, k, hidden):
        p = scores_of(q, k, case.softmax_scale, hidden)
        p = p.to(torch.promote_types(q.dtype, torch.float32)).exp()
        return p / p.sum(-1, keepdim=True)

    return by_weights(case, weights)


@wrong("soft-cap-left-on", "capped by tanh", **ATTENTION)
def soft_cap_left_on(case):
    """Scores are capped at 50 by tanh, as one model wants it; small ones hardly change."""

    def weights(q, k, hidden):
        capped = 50 * (scores_of(q, k, case.softmax_scale) / 50).tanh()
        return weights_of(capped, torch.eye(case.kv_len, dtype=q.dtype), 1.0, hidden)

    return by_weights(case, weights)


@wrong("one-query-unmasked", "one query|the mask is not applied", masks=ALL_MASKS, **ATTENTION)
def one_query_unmasked(case):
    """With one query the mask is dropped: the newest token sees all, but for windows."""
    masks = (None, None) if case.seq_len == 1 else hidden_and_blind(case)
    return lambda q, k, v: attend(q, k, v, case.softmax_scale, masks)


@wrong("random-gradients", "two calls|random", **ATTENTION)
def random_gradients(case):
    """The backward pass draws another dropout mask than the forward pass, which draws none."""

    def backward(q, k, v, p, do, scale):
        return gradients(q, k, v, F.dropout(p, 0.1), do, scale)

    return by_hand(case, backward)


@wrong("mask-inverted", "inverted", masks=ALL_MASKS, **FORWARD)
def mask_inverted(case):
    """True is taken for hidden where it means seen."""
    hidden, blind = hidden_and_blind(case)
    seen = None if hidden is None else ~hidden
    return lambda q, k, v: attend(q, k, v, case.softmax_scale, (seen, blind))


@wrong("mask-added", "mask is added", masks=ALL_MASKS, **FORWARD)
def mask_added(case):
    """The boolean mask is added as 0 and 1."""
    hidden, blind = hidden_and_blind(case)
    bias = None if hidden is None else (~hidden).float()
    return lambda q, k, v: attend(q, k, v, case.softmax_scale, (None, blind), bias)


def filled(case, fill):
    """Hidden scores are filled with a finite number."""

    def weights(q, k, hidden):
        scores = scores_of(q, k, case.softmax_scale).float()
        return (scores if hidden is None else scores.masked_fill(hidden, fill)).softmax(-1)

    return by_weights(case, weights)


@wrong("mask-filled-0", "have -?0 as their score", masks=ALL_MASKS, **FORWARD)
def mask_filled_0(case):
    """Hidden scores are filled with -1e-9, where -1e9 was meant."""
    return filled(case, -1e-9)


@wrong("mask-filled-20", r"have -(20|19.9\d*) as their score", masks=ALL_MASKS, **FORWARD)
def mask_filled_20(case):
    """The fill was chosen for scores that lie within ± 5."""
    return filled(case, -20.0)


@wrong("mask-filled-least", "have a finite number as their score", masks=ALL_MASKS, **FORWARD)
def mask_filled_least(case):
    """Filled with finfo.min: a row without keys becomes the mean of all values."""
    hidden, _ = hidden_and_blind(case)
    admitted = dense_mask(case.mask, case.seq_len, case.kv_len, case.device, batch=case.batch)
    bias = None if hidden is None else (~admitted).float() * torch.finfo(torch.float32).min
    return lambda q, k, v: attend(q, k, v, case.softmax_scale, (None, None), bias)


@wrong("window-both-sides", "both sides", masks=("full", "window"), **ATTENTION)
def window_both_sides(case):
    """|query − key| ≤ window, as an encoder's sliding window has it."""
    place, key = places(case)
    before = case.mask.before
    whole = torch.ones(case.seq_len, case.kv_len, dtype=torch.bool)
    return with_mask(case, whole if before is None else (place - key).abs() <= before)


@wrong("padding-left", "other side", masks=("full", "padding"), **ATTENTION)
def padding_left(case):
    """A tokenizer that pads on the left wrote the mask; the keys came padded on the right."""
    admitted = dense_mask(case.mask, case.seq_len, case.kv_len, case.device, batch=case.batch)
    return with_mask(case, admitted.flip(-1) if case.mask.lengths else admitted)


def joined(case, factor):
    """Halves of the keys are joined by their log-sum-exps times a factor."""
    half = max(1, case.kv_len // 2)

    def weights(q, k, hidden):
        parts = scores_of(q, k, case.softmax_scale, hidden).float().split(half, -1)
        lse = torch.stack([part.logsumexp(-1, keepdim=True) for part in parts])
        share = (lse * factor).softmax(0).nan_to_num(0)
        each = zip(share, parts, strict=True)
        return torch.cat([one * part.softmax(-1).nan_to_num(0) for one, part in each], -1)

    return by_weights(case, weights)


@wrong("lse-base-2", "power 1/ln 2", **FORWARD)
def lse_base_2(case):
    """Halves of the keys give base-2 logarithms of their sums, which the join takes as natural."""
    return joined(case, 1 / math.log(2))


@wrong("lse-base-e", "power ln 2", **FORWARD)
def lse_base_e(case):
    """The kernel was moved from exp2 to exp, and the join was not."""
    return joined(case, math.log(2))


@wrong("causal-backward", "causal where no mask", **ATTENTION)
def causal_backward(case):
    """The backward kernel knows the causal mask alone."""
    place, key = places(case)

    def backward(q, k, v, p, do, scale):
        p = p.masked_fill(key > place, 0) if case.unmasked else p
        return gradients(q, k, v, p / p.sum(-1, keepdim=True).clamp_min(1e-30), do, scale)

    return by_hand(case, backward)


@wrong("one-call-in-flight", "another forward", **ATTENTION)
def one_call_in_flight(case):
    """What backward needs is kept with the kernel: a second forward pass overwrites it."""
    masks = hidden_and_blind(case)
    saved: dict[str, Any] = {}

    class Call(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v):
            saved["qkv"] = q, k, v
            return attend(q, k, v, case.softmax_scale, masks)

        @staticmethod
        def backward(ctx, do):
            q, k, v = (x.detach().requires_grad_() for x in saved["qkv"])
            with torch.enable_grad():
                o = attend(q, k, v, case.softmax_scale, masks)
            return torch.autograd.grad(o, (q, k, v), do)

    return Call.apply


@wrong("alibi-from-0", "count from 0", positions=("alibi",), **ATTENTION)
def alibi_from_0(case):
    """Distances are counted from the query's number and not from its place behind the cache."""
    masks, bias = hidden_and_blind(case), None
    if case.position.name == "alibi":
        size = max(case.seq_len, case.kv_len)
        square: Any = dense_bias(replace(case, seq_len=size, kv_len=size))
        bias = square(None)[..., : case.seq_len, : case.kv_len]
    return lambda q, k, v: attend(q, k, v, case.softmax_scale, masks, bias)


@right("atomic-sums", **ATTENTION)
def atomic_sums(case):
    """Parts of the keys are added in the order in which they come, as atomics do."""
    masks = hidden_and_blind(case)

    def call(q, k, v):
        order = torch.randperm(case.kv_len)
        p = weights_of(q, repeated(q, k), case.softmax_scale, masks[0])
        o = p[..., order].to(v.dtype) @ repeated(q, v)[:, :, order]
        return o if masks[1] is None else o.masked_fill(masks[1], 0)

    return call
