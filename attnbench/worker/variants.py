"""What kernels often do instead: with other masks, scales, heads, places, layouts, parts of keys.

Each has a code, of which `report.documents.check` makes a sentence; what follows a colon tells
apart those that share it.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.nn.functional import pad

from attnbench.api import dense_mask
from attnbench.schema.case import Case, Mask
from attnbench.schema.mask import FULL
from attnbench.schema.position import NONE
from attnbench.theory.caches import cache_of
from attnbench.worker.inputs import Tensors
from attnbench.worker.positions import rotated_last
from attnbench.worker.reference import Core, plain_attention
from attnbench.worker.workloads.caches import AsRead, as_read_of

# Of each bound of a mask: one more, one less, none.
_BOUNDS = {
    "after": ("one-key-more", "one-key-less", None),
    "before": ("window-wider", "window-narrower", "window-ignored"),
    "prefix": ("prefix-longer", "prefix-shorter", "prefix-ignored"),
}
_BASES = (100.0, 1e3, 1e4, 5e5, 1e6)  # of rotary encodings
PARTS = (16, 32, 64, 128, 256, 512)  # keys of a block, or of a part of split keys
# Whose maxima the exponents of the parts' numerators and denominators are relative to; "each" part
# is divided by its own denominator.
_RELATIVE = (("part", "part"), ("running", "running"), ("all", "part"), ("all", "running"),
             ("part", "all"), ("running", "all"), ("part", "each"))  # fmt: skip
# To which powers weights of parts are that were joined by logarithms taken for others.
_POWERS = {"lse-base-2": 1 / math.log(2), "lse-base-e": math.log(2), "lse-sign": -1.0}
_CAPS = (15.0, 20.0, 30.0, 50.0)  # of scores, by tanh, in models that have one
Change = Callable[[torch.Tensor], torch.Tensor]


def variants(
    case: Case, tensors: Tensors, before: Tensors, core: Core, result: str = "o"
) -> Iterator[tuple[str, Callable[[], torch.Tensor]]]:
    """Codes, and what gives the result in place of `core`; `before` are earlier inputs, or none.

    Of a gradient some are tried twice: its weights may be exp(s − lse) with the right lse.
    """
    taken = case.inputs if result == "o" else (*case.inputs, "do")

    def of(
        names: Sequence[str] = "",
        change: Change = torch.clone,
        given: Tensors = tensors,
        /,
        **fields: Any,
    ) -> Callable[[], torch.Tensor]:
        def output() -> torch.Tensor:
            inputs = tensors | {name: change(given[name]) for name in names}
            return core(replace(case, **fields), _wide(inputs, taken)).values[result]

        return output

    saved = result != "o" and core is plain_attention and case.position.encoding.kind == "none"
    for code, mask in _masks(case):
        yield code, of(mask=mask)
        if saved:
            yield f"{code}:lse", partial(_with_lse, case, tensors, result, mask=mask)
    scale, head_dim, log2_e = case.softmax_scale, case.head_dim, math.log2(math.e)
    scales = {"missing": 1.0, "1/D": 1 / head_dim, "twice": scale**2, "sqrt(D)": head_dim**0.5,
              "log2(e)": scale * log2_e, "ln(2)": scale / log2_e, "ignored": None}  # fmt: skip
    for name, other in scales.items():
        yield f"scale-{name}", of(scale=other)
        if saved:
            yield f"scale-{name}:lse", partial(_with_lse, case, tensors, result, scale=other)
    tiled, first = [head % case.kv_heads for head in range(case.heads)], [0] * case.heads
    for code, group_H in (("heads-tiled", tiled), ("first-head", first)):
        yield code, of("kv", operator.itemgetter((slice(None), group_H)), kv_heads=case.heads)
    across = operator.methodcaller("transpose", 1, 2)
    for names in ("q", "k", "v", "kv", "qkv"):
        yield f"strides-{names}", of(names, _dense)
        yield f"strides-{names}:BLHD", of(names, lambda x: across(_dense(across(x))))
        if before:
            yield f"kept-{names}", of(names, torch.clone, before)
    if case.seq_len % case.kv_len == 0:
        sizes = {"heads": case.seq_len, "kv_heads": case.kv_len, "kv_len": case.kv_heads}
        swapped = of("qkv", across, **sizes, seq_len=case.heads, position=NONE)
        yield "layout-swapped", lambda: across(swapped())
    if case.position.encoding.kind in ("rotary", "bias"):
        yield "position-ignored", of(position=NONE)
    rotary = case.position.encoding.kind == "rotary"
    if rotary or core is not plain_attention:  # a definition may rotate by itself
        yield "rope-layout", of("qk", partial(_other_layout, case))
    if rotary:
        for base in _BASES:
            values = dict(case.position.values) | {"base": base}
            yield f"rope-base:{base:g}", of(position=replace(case.position, values=values))
        yield "rope-twice", of("qk", lambda x: rotated_last(x, case.position, case.kv_len))
    biased = case.position.encoding.kind == "bias"
    yield from _capped(case, of)
    if saved and case.softcap:
        yield "soft-cap-gradient", partial(_with_lse, case, tensors, result, sloped=False)
    if core is plain_attention and result == "o" and case.softcap and not biased:
        yield "soft-cap-after-mask", partial(_capped_hidden, case, tensors)
    yield from _sunk(case, of) if case.sinks else ()
    for code, pairs in _pairs(case) if core is plain_attention else ():
        yield code, partial(_of_pairs, case, _wide(tensors, taken), result, pairs)
    if core is plain_attention and result == "o" and not case.sinks:
        if case.position.encoding.kind == "bias" and case.seq_len != case.kv_len:
            yield "bias-from-0", partial(_bias_from_0, case, _wide(tensors))
        if case.position.encoding.kind != "bias" and case.unmasked:
            yield "softmax-over-queries", partial(_over_queries, case, tensors)
        scores = functools.cache(lambda: scores_of(case, tensors))
        parts = {str(n): n for n in PARTS} | {f"1/{n}": -(-case.kv_len // n) for n in (2, 3, 4, 8)}
        for name, size in parts.items():
            for how in _RELATIVE if size < case.kv_len else ():
                joined = partial(_joined, case, tensors, scores, size, how)
                yield f"not-rescaled:{name} {how}", joined
        for size in {*parts.values(), *(max(1, case.kv_len // n) for n in (2, 3, 4, 8))}:
            for code, power in _POWERS.items() if size < case.kv_len else ():
                yield f"{code}:{size}", partial(_weighed, case, tensors, scores, size, power)


def _capped(case: Case, of: Callable[..., Any]) -> Iterator[tuple[str, Any]]:
    if case.softcap is None:
        yield from ((f"soft-cap:{cap}", of(softcap=cap)) for cap in _CAPS)
    else:
        yield "soft-cap-missing", of(softcap=None)
        yield "soft-cap-before-scale", of(softcap=case.softcap * case.softmax_scale)


def _sunk(case: Case, of: Callable[..., Any]) -> Iterator[tuple[str, Any]]:
    """With sinks left out, of other heads, or changed as scores are."""
    heads, sharing = torch.arange(case.heads), case.heads // case.kv_heads
    yield "sink-missing", of(sinks=None)
    others = heads + 1, heads - 1, heads * 0, heads // sharing, heads % case.kv_heads
    for other in others:
        index_H = (other % case.heads).to(case.device)
        yield "sink-head", of(("sink",), operator.itemgetter(index_H))
    for factor in (case.softmax_scale, math.log2(math.e), math.log(2)):
        yield "sink-scaled", of(("sink",), partial(torch.mul, other=factor))
    if cap := case.softcap:
        yield "sink-capped", of(("sink",), lambda sink_H: cap * (sink_H / cap).tanh())


def _wide(tensors: Tensors, names: Sequence[str] = "qkv") -> Tensors:
    return {name: tensors[name].detach().double() for name in names}


def _pairs(case: Case) -> Iterator[tuple[str, torch.Tensor]]:
    """Pairs that are admitted instead, where no mask says so."""
    if case.unmasked:
        return
    sizes: Any = {"queries": case.seq_len, "keys": case.kv_len, "device": case.device}
    yield "mask-inverted", ~dense_mask(case.mask, **sizes, batch=case.batch)
    if case.mask.lengths:
        first = dense_mask(Mask(lengths=case.mask.lengths), **sizes, batch=case.batch)
        yield "padding-side", first.flip(-1) & dense_mask(replace(case.mask, lengths=()), **sizes)


def _of_pairs(case: Case, wide: Tensors, result: str, pairs: torch.Tensor) -> torch.Tensor:
    """With these pairs; NaN in rows of o that have none, for which kernels give anything."""
    found = plain_attention(case, wide, admitted=pairs).values[result]
    return found.masked_fill(~pairs.any(-1, keepdim=True), math.nan) if result == "o" else found


def _with_lse(
    case: Case, tensors: Tensors, result: str, *, sloped: bool = True, **fields: Any
) -> torch.Tensor:
    """A gradient of weights exp(s − lse): s of a case with other fields, lse and o are right.

    Unless `sloped`, the gradient of the cap is left out.
    """
    changed, right = replace(case, **fields), seen_scores(case, tensors)
    do_BHLV, v_BHSV = tensors["do"].detach().double(), values_of(case, tensors)
    lse, s = right.logsumexp(-1, keepdim=True), seen_scores(changed, tensors)
    if case.sinks:
        lse = lse.logaddexp(tensors["sink"].detach().double().view(-1, 1, 1))
    p = (s - lse).exp().nan_to_num(0)
    o_BHLV = (right - lse).exp().nan_to_num(0) @ v_BHSV
    ds = p * (do_BHLV @ v_BHSV.mT - (do_BHLV * o_BHLV).sum(-1, keepdim=True))
    if changed.softcap and sloped:
        ds = ds * (1 - (s.nan_to_num(neginf=0) / changed.softcap).square())
    ds = ds * changed.softmax_scale
    if result == "dq":
        return ds @ values_of(case, tensors, "k")
    each = ds.mT @ tensors["q"].detach().double() if result == "dk" else p.mT @ do_BHLV
    return each.view(case.batch, case.kv_heads, -1, *each.shape[2:]).sum(2)


def _bias_from_0(case: Case, wide: Tensors) -> torch.Tensor:
    """o_BHLV where the place of a query is its number: the bias begins at the top left."""
    size = max(case.seq_len, case.kv_len)
    square = {name: pad(x, (0, 0, 0, size - x.shape[2])) for name, x in wide.items()}
    admitted = dense_mask(case.mask, case.seq_len, case.kv_len, case.device, batch=case.batch)
    pairs = pad(admitted, (0, size - case.kv_len, 0, size - case.seq_len))
    found = plain_attention(replace(case, seq_len=size, kv_len=size), square, admitted=pairs)
    return found.values["o"][:, :, : case.seq_len]


def _masks(case: Case) -> Iterator[tuple[str, Mask]]:
    mask, shift, lengths = case.mask, case.seq_len - case.kv_len, case.mask.lengths
    yield ("always-causal", Mask(after=0)) if case.unmasked else ("mask-ignored", FULL)
    for name, (more, less, ignored) in _BOUNDS.items():
        bound = getattr(mask, name)
        if bound is not None and (bound or name == "after"):
            yield more, replace(mask, **{name: bound + 1})
            yield less, replace(mask, **{name: bound - 1})
        if name == "before" and bound:
            yield "window-from-top", replace(mask, before=bound - shift)
            yield "window-both-sides", replace(mask, after=bound)
            yield (
                "window-both-sides",
                replace(mask, before=(bound + 1) // 2, after=(bound + 1) // 2),
            )
        if bound and ignored:
            yield ignored, replace(mask, **{name: getattr(FULL, name)})
    if mask.after is not None and shift and not mask.documents:
        left = None if mask.before is None else mask.before - shift
        yield "top-left", replace(mask, before=left, after=mask.after + shift)
    if mask.documents:
        yield "documents-ignored", replace(mask, documents=())
    if lengths:
        yield "one-key-more", replace(mask, lengths=tuple(x + 1 for x in lengths))
        yield "one-key-less", replace(mask, lengths=tuple(x - 1 for x in lengths))
        yield "first-length", replace(mask, lengths=lengths[:1])


def _dense(x: torch.Tensor) -> torch.Tensor:
    """What lies in memory where a dense tensor would, which begins at no offset."""
    first = 0 if x.is_contiguous() else x.storage_offset()
    fits = first + x.numel() <= x.untyped_storage().nbytes() // x.element_size()
    strides = torch.empty(x.shape, device="meta").stride()
    return x.as_strided(x.shape, strides, first) if fits else x


def _other_layout(case: Case, x: torch.Tensor) -> torch.Tensor:
    """With dimensions where the other layout of rotary pairs, halves or neighbours, has them."""
    encoding = case.position.encoding
    turned = encoding.frequencies(case.position.values, case.head_dim, case.kv_len)
    pairs = len(turned) or case.head_dim // 2
    sides = (2, pairs) if encoding.layout == "neighbours" else (pairs, 2)
    dims = torch.arange(case.head_dim, device=x.device)
    return x[..., torch.cat((dims[: 2 * pairs].view(sides).mT.flatten(), dims[2 * pairs :]))]


def seen_scores(case: Case, tensors: Tensors) -> torch.Tensor:
    """Scaled and capped scores (B, H, L, S) without a bias, −inf where hidden."""
    q_BHLD, k_BGSD = (
        rotated_last(tensors[name].detach().double(), case.position, case.kv_len) for name in "qk"
    )
    k_BHSD = k_BGSD.repeat_interleave(case.heads // case.kv_heads, 1)
    scores = case.softmax_scale * (q_BHLD @ k_BHSD.mT)
    scores = case.softcap * (scores / case.softcap).tanh() if case.softcap else scores
    admitted = dense_mask(case.mask, case.seq_len, case.kv_len, case.device, batch=case.batch)
    return scores.masked_fill(~admitted, -math.inf)


def values_of(case: Case, tensors: Tensors, name: str = "v") -> torch.Tensor:
    """v_BHSV, or k_BHSD, once for each query head."""
    return tensors[name].detach().double().repeat_interleave(case.heads // case.kv_heads, 1)


def _over_queries(case: Case, tensors: Tensors) -> torch.Tensor:
    """o_BHLV of scores whose softmax is along the wrong axis."""
    return seen_scores(case, tensors).softmax(-2) @ values_of(case, tensors)


def _capped_hidden(case: Case, tensors: Tensors) -> torch.Tensor:
    """o_BHLV of scores that are capped last: −inf becomes −c."""
    assert case.softcap is not None
    scores = seen_scores(case, tensors).clamp_min(-case.softcap)
    if case.sinks:
        sink_H11 = tensors["sink"].detach().double().view(-1, 1, 1)
        scores = torch.cat((scores, sink_H11.expand(*scores.shape[:-1], 1)), -1)
    return scores.softmax(-1)[..., : case.kv_len] @ values_of(case, tensors)


def scores_of(case: Case, tensors: Tensors) -> torch.Tensor:
    """Scores (B, H, L, S) of all pairs, hidden ones, too, but for a number in each row."""
    eye_SS = torch.eye(case.kv_len, dtype=torch.float64, device=case.device)
    values = {"v": eye_SS.expand(case.batch, case.kv_heads, -1, -1)}
    every = replace(case, mask=FULL, value_dim=case.kv_len)
    return plain_attention(every, _wide(tensors | values)).values["o"].log()


def _joined(
    case: Case, tensors: Tensors, every: Callable[[], torch.Tensor], size: int, how: Sequence[str]
) -> torch.Tensor:
    """o_BHLV of parts of `size` keys, added up as they are; `how` is one of `_RELATIVE`."""
    admitted = dense_mask(case.mask, case.seq_len, case.kv_len, case.device, batch=case.batch)
    scores = torch.split(every().masked_fill(~admitted, -math.inf), size, 3)
    v_BHSV = values_of(case, tensors)
    own = torch.stack([part.amax(-1, keepdim=True) for part in scores])
    tops = {"part": own, "running": own.cummax(0).values, "all": own.amax(0, keepdim=True)}
    weights = [
        [(part - most).exp().nan_to_num(0) for part, most in zip(scores, top, strict=True)]
        for top in (tops.get(name, own).expand_as(own) for name in how)
    ]
    values = zip(weights[0], torch.split(v_BHSV, size, 2), strict=True)
    above = torch.stack([weight @ part for weight, part in values])
    below = torch.stack([weight.sum(-1, keepdim=True) for weight in weights[1]])
    if how[1] == "each":
        return (above / below).nan_to_num(0).mean(0)
    return (above.sum(0) / below.sum(0)).nan_to_num(0)


def _weighed(
    case: Case, tensors: Tensors, every: Callable[[], torch.Tensor], size: int, power: float
) -> torch.Tensor:
    """o_BHLV of parts of `size` keys, joined by their sums of exponentials to a power."""
    admitted = dense_mask(case.mask, case.seq_len, case.kv_len, case.device, batch=case.batch)
    scores = torch.split(every().masked_fill(~admitted, -math.inf), size, 3)
    values = zip(scores, torch.split(values_of(case, tensors), size, 2), strict=True)
    o_PBHLV = torch.stack([part.softmax(-1).nan_to_num(0) @ v for part, v in values])
    lse = torch.stack([part.logsumexp(-1, keepdim=True) for part in scores])
    shares = (power * lse).masked_fill(lse == -math.inf, -math.inf).softmax(0)
    return (shares.nan_to_num(0) * o_PBHLV).sum(0)


def reads(case: Case) -> Iterator[tuple[str, AsRead]]:
    """What the caches of decoding may give back instead of the keys and values of the tokens."""
    total = case.total_len
    page = cache_of(case)[1].get("page", total)

    def instead(other: Change, at: slice | None = None) -> AsRead:
        def as_read(x_BGSD: torch.Tensor, context: int) -> torch.Tensor:
            read_BGSD, rows = x_BGSD.clone(), at or slice(context, None)
            read_BGSD[:, :, rows] = other(x_BGSD)[:, :, rows]
            return read_BGSD

        return as_read

    yield "new-tokens-lost", instead(torch.zeros_like)
    yield "new-tokens-early", instead(lambda x: x.roll(-1, 2))
    yield "new-tokens-late", instead(lambda x: x.roll(1, 2))
    for later in (-1, 1):
        if as_read := as_read_of(case, later):
            yield "int8-other-token", as_read
    pages = [slice(first, first + page) for first in range(0, total, page)]
    for at in [slice(0, total), *pages] if page < total else ():
        yield "page-stale", instead(torch.zeros_like, at)
        yield "page-foreign", instead(lambda x: x.roll(1, 0), at)
        for other in pages:
            by = at.start - other.start
            yield "page-foreign", instead(partial(torch.roll, shifts=by, dims=2), at)
