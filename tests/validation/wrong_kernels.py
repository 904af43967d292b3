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
    dense_mask,
    hidden_and_blind,
    mask_spans,
    position_bias,
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


@wrong("scale-twice", "twice|squared")
def scale_twice(case):
    """q is scaled when it is loaded, and the scores once more: two people fixed one overflow."""
    masks, scale = hidden_and_blind(case), case.softmax_scale
    return lambda q, k, v: attend(q * scale, k, v, scale, masks)


@wrong("scale-by-width", "1/D")
def scale_by_width(case):
    """1/D in place of 1/√D: muP's rule read into a kernel for ordinary models."""
    masks = hidden_and_blind(case)
    scale = case.scale or 1 / case.head_dim
    return lambda q, k, v: attend(q, k, v, scale, masks)


@wrong("scale-of-64", r"scale|\bD\b")
def scale_of_64(case):
    """0.125, the scale of D = 64, which all of the author's models have."""
    masks = hidden_and_blind(case)
    scale = case.scale or 0.125
    return lambda q, k, v: attend(q, k, v, scale, masks)


@wrong("scale-of-values", r"scale|V != D")
def scale_of_values(case):
    """1/√V: the width is read off the last tensor that came by."""
    masks = hidden_and_blind(case)
    return lambda q, k, v: attend(q, k, v, case.scale or v.shape[-1] ** -0.5, masks)


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


@wrong("scale-folded-once", "scale")
def scale_folded_once(case):
    """The scale is compared with its default and left to SDPA: another one is passed as √scale."""
    masks = hidden_and_blind(case)
    scale = case.softmax_scale if case.scale is None else math.sqrt(abs(case.scale))
    return lambda q, k, v: attend(q, k, v, scale, masks)


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


@wrong("window-one-narrow", "one key too narrow", masks=("full", "causal", "window"))
def window_one_narrow(case):
    """`key > place - window + 1`: exclusive where the other end is inclusive."""
    place, key = places(case)
    admitted = causal_of(case)
    if case.mask.before is not None:
        admitted = (key <= place) & (key > place - case.mask.before)
    masks = masked_by(admitted)
    return lambda q, k, v: attend(q, k, v, case.softmax_scale, masks)


@wrong("window-from-left", "window|top left|L != S", masks=("full", "causal", "window"))
def window_from_left(case):
    """The window's near end is bottom-right, its far end is counted from the query's own number."""
    place, key = places(case)
    admitted = causal_of(case)
    if case.mask.before is not None:
        row = torch.arange(case.seq_len).unsqueeze(1)
        admitted = (key <= place) & (key >= row - case.mask.before)
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


@wrong("padding-rounded", "padding", masks=("full", "causal", "padding"))
def padding_rounded(case):
    """Lengths are rounded up to what a vector load takes, 8, and the rest is not hidden again."""
    masks = hidden_and_blind(case)
    if case.mask.lengths:
        lengths = [-(-case.mask.length(case.kv_len, item) // 8) * 8 for item in range(case.batch)]
        admitted = torch.arange(case.kv_len) < torch.tensor(lengths).view(-1, 1, 1, 1)
        masks = masked_by(admitted.expand(-1, -1, case.seq_len, -1))
    return lambda q, k, v: attend(q, k, v, case.softmax_scale, masks)


@wrong("document-one-early", "document|key", masks=("full", "causal", "document"))
def document_one_early(case):
    """Cumulative lengths searched from the wrong side: a document's first token is the last's."""
    masks = hidden_and_blind(case)
    if case.mask.documents:
        place, key = places(case)
        starts = torch.tensor(case.mask.document_starts)
        number = [
            torch.searchsorted(starts, x.clamp(min=0) % starts[-1])
            + x.clamp(min=0) // starts[-1] * len(starts)
            for x in (place, key)
        ]
        masks = masked_by((number[0] == number[1]) & (key <= place))
    return lambda q, k, v: attend(q, k, v, case.softmax_scale, masks)


@wrong("documents-across", "across the ends of documents", masks=("full", "causal", "document"))
def documents_across(case):
    """Packed sequences under a plain causal mask: nobody passed `cu_seqlens`."""
    place, key = places(case)
    masks = masked_by(key <= place) if not case.unmasked else (None, None)
    return lambda q, k, v: attend(q, k, v, case.softmax_scale, masks)


@wrong("prefix-inclusive", "prefix is one key too long", masks=("full", "causal", "prefix"))
def prefix_inclusive(case):
    """`key <= prefix`, though key numbers begin at 0."""
    place, key = places(case)
    admitted = causal_of(case)
    if case.mask.prefix:
        admitted = (key <= place) | (key <= case.mask.prefix)
    masks = masked_by(admitted)
    return lambda q, k, v: attend(q, k, v, case.softmax_scale, masks)


@wrong("nan-without-keys", "no key")
def nan_without_keys(case):
    """-inf in a whole row: softmax is NaN there. Only where L > S, which no training has."""
    hidden = ~causal_of(case)
    return lambda q, k, v: attend(q, k, v, case.softmax_scale, (hidden, None))


@wrong("mean-without-keys", "no key")
def mean_without_keys(case):
    """A large negative number in place of -inf: a row without keys gets the mean of v."""
    bias = (~causal_of(case)) * -1e4
    return lambda q, k, v: attend(q, k, v, case.softmax_scale, bias=bias.to(q.dtype))


# Grouped heads.


@wrong("heads-modulo", "h mod G")
def heads_modulo(case):
    """Query head h takes key/value head h mod G: `repeat` in place of `repeat_interleave`."""
    masks = hidden_and_blind(case)

    def call(q, k, v):
        k, v = (x.repeat(1, q.shape[1] // x.shape[1], 1, 1) for x in (k, v))
        return attend(q, k, v, case.softmax_scale, masks)

    return call


@wrong("groups-by-shift", r"group|H ?/ ?G|heads")
def groups_by_shift(case):
    """h >> log2(H/G): right for 1, 2 and 4 heads a group, and off the end of the groups for 3."""
    masks, shift = hidden_and_blind(case), (case.heads // case.kv_heads).bit_length() - 1
    group = (torch.arange(case.heads) >> shift).clamp(max=case.kv_heads - 1)
    return lambda q, k, v: attend(q, k[:, group], v[:, group], case.softmax_scale, masks)


@wrong("groups-in-pairs", r"group|H ?/ ?G|heads")
def groups_in_pairs(case):
    """Two query heads of a group at a time; an odd one at the end is left as the one before it."""
    masks, sharing = hidden_and_blind(case), case.heads // case.kv_heads

    def call(q, k, v):
        o = attend(q, k, v, case.softmax_scale, masks)
        if sharing > 1 and sharing % 2:
            kept = [h - (h % sharing == sharing - 1) for h in range(case.heads)]
            return o[:, kept]
        return o

    return call


@wrong("one-group-or-all", "key/value head 0|group", gqa=True)
def one_group_or_all(case):
    """Multi-head and multi-query alone were thought of: fewer groups than heads means one."""
    masks = hidden_and_blind(case)

    def call(q, k, v):
        if k.shape[1] != q.shape[1]:
            k, v = k[:, :1], v[:, :1]
        return attend(q, k, v, case.softmax_scale, masks)

    return call


@wrong("heads-packed", r"heads|\bH\b")
def heads_packed(case):
    """Heads are packed by powers of two; those beyond the last full pack get its last's o."""
    masks, packed = hidden_and_blind(case), 1 << (case.heads.bit_length() - 1)

    def call(q, k, v):
        o = attend(q, k, v, case.softmax_scale, masks)
        return o[:, torch.arange(case.heads).clamp(max=packed - 1)]

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


@wrong("alibi-from-0", "alibi|slope", positions=("alibi",))
def alibi_from_0(case):
    """Slopes counted from h = 0: each head has its neighbour's, the first one 1."""
    return with_alibi(case, [1.0, *slopes_of(case.heads)][: case.heads])


@wrong("alibi-reversed", "alibi|slope", positions=("alibi",))
def alibi_reversed(case):
    """The list of slopes the other way round, as one sorted it."""
    return with_alibi(case, slopes_of(case.heads)[::-1])


@wrong("alibi-sign", "alibi|slope|sign", positions=("alibi",))
def alibi_sign(case):
    """What is far gets more: the minus stands in the paper's figure alone."""
    place, key = places(case)
    return with_alibi(case, slopes_of(case.heads), (key - place).abs())


@wrong(
    "alibi-signed",
    "alibi.*(full|mask|unmasked|causal)|(full|unmasked).*alibi",
    positions=("alibi",),
)
def alibi_signed(case):
    """slope·(j − i): the same under a causal mask, and a premium on later keys without one."""
    place, key = places(case)
    return with_alibi(case, slopes_of(case.heads), key - place)


@wrong("alibi-without-offset", r"alibi.*L|L.*alibi", positions=("alibi",))
def alibi_without_offset(case):
    """Distances from the query's own number: right where L = S, or softmax forgives it."""
    _, key = places(case)
    row = torch.arange(case.seq_len).unsqueeze(1)
    return with_alibi(case, slopes_of(case.heads), -(key - row).abs())


@wrong("bias-before-scale", "alibi|t5|bias", positions=("alibi", "t5"))
def bias_before_scale(case):
    """scale·(qk + bias) where qk·scale + bias is meant: BERT's order of operations."""
    masks, added = hidden_and_blind(case), dense_bias(case)

    def call(q, k, v):
        bias = None if added is None else added(q) * case.softmax_scale
        return attend(q, k, v, case.softmax_scale, masks, bias)

    return call


@wrong("bias-of-first-head", "alibi|t5|head", positions=("alibi", "t5"))
def bias_of_first_head(case):
    """The bias of head 0 is broadcast: a stride of 0 is passed for the head axis."""
    masks, added = hidden_and_blind(case), dense_bias(case)

    def call(q, k, v):
        bias = None if added is None else added(q)[:, :1]
        return attend(q, k, v, case.softmax_scale, masks, bias)

    return call


@wrong("shaw-unscaled", "shaw", positions=("shaw",))
def shaw_unscaled(case):
    """q·r is added to the scaled scores without the scale: r is thought of as a bias."""
    masks, bias = hidden_and_blind(case), position_bias(case)
    whole = slice(0, case.seq_len), slice(0, case.kv_len)

    def call(q, k, v):
        if bias is None:
            return attend(q, k, v, case.softmax_scale, masks)
        added = bias.block(bias.columns(q), *whole)
        return attend(q, k, v, case.softmax_scale, masks, added.to(q.dtype))

    return call


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


@wrong("rope-base", "rotar|rope|θ|base|frequenc", **ROPE)
def rope_base(case):
    """θ from a base of 500,000, Llama 3's, for a model of the older one."""
    masks, (place, key) = hidden_and_blind(case), places(case)

    def call(q, k, v):
        q, k = turned(q, place[:, 0], 5e5), turned(k, key, 5e5)
        return attend(q, k, v, case.softmax_scale, masks)

    return call


@wrong("rope-one-on", "rotar|rope|place|position", **ROPE)
def rope_one_on(case):
    """The query stands one place further on: the cache's length was raised too early."""
    masks, (place, key) = hidden_and_blind(case), places(case)

    def call(q, k, v):
        return attend(turned(q, place[:, 0] + 1), turned(k, key), v, case.softmax_scale, masks)

    return call


@wrong("rope-no-offset", r"L != S|L < S|L > S", **ROPE)
def rope_no_offset(case):
    """Queries are turned from place 0 on, though keys were there before them."""
    masks, (_, key) = hidden_and_blind(case), places(case)

    def call(q, k, v):
        row = torch.arange(q.shape[2])
        return attend(turned(q, row), turned(k, key), v, case.softmax_scale, masks)

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


@wrong("dims-in-pairs", r"D (is )?(odd|not|no)|\bD\b")
def dims_in_pairs(case):
    """Two half-precision numbers a load: the last dimension of an odd D is lost."""
    masks, whole = hidden_and_blind(case), max(1, case.head_dim // 2 * 2)
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


@wrong("values-of-8", r"\bV\b")
def values_of_8(case):
    """Values are added up in vectors of 8; the columns beyond the last full one stay 0."""
    masks = hidden_and_blind(case)

    def call(q, k, v):
        o = attend(q, k, v, case.softmax_scale, masks)
        return torch.where(torch.arange(o.shape[-1]) < max(8, o.shape[-1] // 8 * 8), o, 0)

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


@wrong("block-starts-twice", "twice|double|counted|key")
def block_starts_twice(case):
    """Blocks overlap by one key, as `range(0, S, 63)` with slices of 64 has them."""
    hidden, blind = hidden_and_blind(case)
    taken = [j for at in range(0, case.kv_len, 31) for j in range(at, min(at + 32, case.kv_len))]

    def call(q, k, v):
        shown = None if hidden is None else hidden[..., taken]
        return attend(q, k[:, :, taken], v[:, :, taken], case.softmax_scale, (shown, blind))

    return call


@wrong("batch-of-first", "batch")
def batch_of_first(case):
    """The batch index is left out of the address of keys and values."""
    masks = hidden_and_blind(case)
    return lambda q, k, v: attend(
        q, k[:1].expand_as(k), v[:1].expand_as(v), case.softmax_scale, masks
    )


@wrong("batch-of-two", "batch")
def batch_of_two(case):
    """A grid of two along the batch, from the author's own test: the third item is the first's."""
    masks = hidden_and_blind(case)

    def call(q, k, v):
        item = torch.arange(q.shape[0]) % 2
        return attend(q, k[item], v[item], case.softmax_scale, masks)

    return call


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


@wrong("online-not-rescaled", "rescal|maximum|split|parts|block", **HALF)
def online_not_rescaled(case):
    """The sum is rescaled when the maximum rises, the output so far is not."""
    return online(case, 32, rescale=False)


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


@wrong("split-averaged", "rescal|split|parts|weigh", **HALF)
def split_averaged(case):
    """The outputs of two halves of the keys are averaged: right where both weigh the same."""
    hidden, blind = hidden_and_blind(case)

    def call(q, k, v):
        if k.shape[2] < 2 or hidden is not None:
            return attend(q, k, v, case.softmax_scale, (hidden, blind))
        halves = blocks(k.shape[2], -(-k.shape[2] // 2))
        found = [attend(q, k[:, :, j], v[:, :, j], case.softmax_scale) for j in halves]
        return torch.stack(found).mean(0)

    return call


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


@wrong("sum-over-heads", "head", **HALF)
def sum_over_heads(case):
    """The buffer of row sums is cleared once a batch item, not once a head: sums pile up."""
    (hidden, blind), scale = hidden_and_blind(case), case.softmax_scale

    def call(q, k, v):
        scores = ((q * scale) @ repeated(q, k).mT).float()
        scores = scores if hidden is None else scores.masked_fill(hidden, -math.inf)
        p = (scores - scores.amax(-1, keepdim=True)).exp()
        o = (p @ repeated(q, v).float() / p.sum(-1, keepdim=True).cumsum(1)).to(q.dtype)
        return o if blind is None else o.masked_fill(blind, 0)

    return call


@wrong("maximum-over-heads", "large logits|head|finite", **HALF)
def maximum_over_heads(case):
    """The running maximum is kept from head to head; too large a one lets a whole row vanish."""
    (hidden, blind), scale = hidden_and_blind(case), case.softmax_scale

    def call(q, k, v):
        scores = ((q * scale) @ repeated(q, k).mT).float()
        scores = scores if hidden is None else scores.masked_fill(hidden, -math.inf)
        top = scores.detach().amax(-1, keepdim=True).cummax(1).values
        p = (scores - top).exp()
        o = (p @ repeated(q, v).float() / p.sum(-1, keepdim=True)).to(q.dtype)
        return o if blind is None else o.masked_fill(blind, 0)

    return call


@wrong("no-maximum", "large logits|overflow", **HALF)
def no_maximum(case):
    """exp(s) as it is: random inputs never overflow it."""
    (hidden, blind), scale = hidden_and_blind(case), case.softmax_scale

    def call(q, k, v):
        scores = ((q * scale) @ repeated(q, k).mT).float()
        scores = scores if hidden is None else scores.masked_fill(hidden, -math.inf)
        p = scores.exp()
        o = (p @ repeated(q, v).float() / p.sum(-1, keepdim=True)).to(q.dtype)
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


@wrong("half-sums", "error is|precision|half|bfloat16|float16")
def half_sums(case):
    """Outputs and sums are kept in half precision, key after key: each addition rounds."""
    masks, scale = hidden_and_blind(case), case.softmax_scale

    def call(q, k, v):
        if case.element_bytes > 2:
            return attend(q, k, v, scale, masks)
        p, v = weights_of(q, repeated(q, k), scale, masks[0]).to(q.dtype), repeated(q, v)
        o = torch.zeros(*q.shape[:-1], v.shape[-1], dtype=q.dtype)
        for j in range(v.shape[2]):
            o = o + p[..., j : j + 1] * v[:, :, j : j + 1]
        return o if masks[1] is None else o.masked_fill(masks[1], 0)

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


@wrong("scores-in-bfloat16", "bfloat16", dtypes=("float32",))
def scores_in_bfloat16(case):
    """q and k go through the tensor cores' narrow type; only sums are float32."""
    masks = hidden_and_blind(case)
    return lambda q, k, v: attend(
        q.bfloat16().float(), k.bfloat16().float(), v, case.softmax_scale, masks
    )


@wrong("float64-in-float32", "float32|float64")
def float64_in_float32(case):
    """`.float()` where the accumulator is chosen: float64 becomes narrower by it."""
    masks = hidden_and_blind(case)

    def call(q, k, v):
        return attend(q.float(), k.float(), v.float(), case.softmax_scale, masks).to(q.dtype)

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


@wrong("row-stride-of-q", "strided|stride")
def row_stride_of_q(case):
    """One stride of rows is passed, that of q, and used for keys and values, too."""
    masks = hidden_and_blind(case)

    def call(q, k, v):
        step = q.stride(2)
        if k.shape[2] > 1 and step != k.stride(2) and step <= k.stride(2):
            k = torch.as_strided(
                k, k.shape, (*k.stride()[:2], step, k.stride(3)), k.storage_offset()
            )
        elif k.shape[2] > 1 and step > k.stride(2):
            k = k.roll(1, 2)
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


@wrong("keys-by-address", "k of an earlier call|kept", passes=("forward",))
def keys_by_address(case):
    """Keys are packed once and found again by address, though a cache is written in place."""
    masks, kept = hidden_and_blind(case), dict[Any, Tensor]()

    def call(q, k, v):
        packed = kept.setdefault((k.data_ptr(), k.shape), k.clone())
        return attend(q, packed, v, case.softmax_scale, masks)

    return call


@wrong("query-scaled-in-place", "changes its input", passes=("forward",))
def query_scaled_in_place(case):
    """`q *= scale` to spare a buffer: the caller's q."""
    masks, scale = hidden_and_blind(case), case.softmax_scale
    return lambda q, k, v: attend(q.mul_(scale), k, v, 1.0, masks)


@wrong("output-not-transposed", "transpose|laid out")
def output_not_transposed(case):
    """Computed as (B, L, H, V), and given the asked-for shape by `view`."""
    masks = hidden_and_blind(case)

    def call(q, k, v):
        o = attend(q, k, v, case.softmax_scale, masks)
        return o.transpose(1, 2).reshape(o.shape)

    return call


# Decoding.


@wrong("one-query-short", "one query|decod|last key")
def one_query_short(case):
    """The path for a single query has the cache's length before the new token was written."""
    masks = hidden_and_blind(case)

    def call(q, k, v):
        if q.shape[2] == 1 and k.shape[2] > 1:
            return attend(q, k[:, :, :-1], v[:, :, :-1], case.softmax_scale)
        return attend(q, k, v, case.softmax_scale, masks)

    return call


@wrong("few-queries-see-all", r"L < S|L != S|quer|mask is not applied")
def few_queries_see_all(case):
    """The decoding path is taken for up to 8 queries, so drafted tokens see the future."""
    masks = (None, None) if 1 < case.seq_len <= 8 else hidden_and_blind(case)
    return lambda q, k, v: attend(q, k, v, case.softmax_scale, masks)


@wrong("own-copy-of-keys", "earlier call|kept|decod", passes=("forward",))
def own_copy_of_keys(case):
    """For one query the kernel keeps keys of its own and appends the last one, whoever asks."""
    masks, own = hidden_and_blind(case), dict[Any, Tensor]()

    def call(q, k, v):
        if q.shape[2] > 1 or k.shape[2] < 2:
            return attend(q, k, v, case.softmax_scale, masks)
        kept = own.setdefault(k.shape, k[:, :, :-1].clone())
        return attend(q, torch.cat((kept, k[:, :, -1:]), 2), v, case.softmax_scale)

    return call


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


@wrong("dk-averaged", "G/H|group")
def dk_averaged(case):
    """dk and dv are averaged over the group, as expanded tensors' gradients are by some."""

    def backward(q, k, v, p, do, scale):
        dq, dk, dv = gradients(q, k, v, p, do, scale)
        share = k.shape[1] / q.shape[1]
        return dq, dk * share, dv * share

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


@wrong("values-detached", "dv|gradient|grad")
def values_detached(case):
    """`v.detach()` was meant for the saved copy, and stands in the product."""
    masks = hidden_and_blind(case)
    return lambda q, k, v: attend(q, k, v.detach() + 0 * v, case.softmax_scale, masks)


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


@right("right-seven-splits", **HALF)
def right_splits(case):
    """Split-KV in seven splits, joined by their maxima."""
    return by_splits(case, 7)


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


@right("right-transposed")
def right_transposed(case):
    """The output is stored as (B, L, H, V), as the next projection likes it."""
    masks = hidden_and_blind(case)

    def call(q, k, v):
        o = attend(q, k, v, case.softmax_scale, masks)
        return o.transpose(1, 2).contiguous().transpose(1, 2)

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


@right("right-padded")
def right_padded(case):
    """D is filled up to a multiple of 16, and S to one of 64, whose keys are hidden."""
    hidden, blind = hidden_and_blind(case)
    more = -case.kv_len % 64
    if hidden is None:
        hidden = torch.zeros(case.seq_len, case.kv_len, dtype=torch.bool)
    hidden = F.pad(hidden, (0, more), value=True)

    def call(q, k, v):
        q, k = (F.pad(x, (0, -x.shape[-1] % 16)) for x in (q, k))
        k, v = (F.pad(x, (0, 0, 0, more)) for x in (k, v))
        return attend(q, k, v, case.softmax_scale, (hidden, blind))

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


@right("right-query-by-query", passes=("forward",))
def right_query_by_query(case):
    """Each query by itself, with as many keys as it sees and no mask at all."""
    admitted = dense_mask(case.mask, case.seq_len, case.kv_len, case.device)

    def call(q, k, v):
        o = torch.zeros(*q.shape[:-1], v.shape[-1], dtype=q.dtype)
        for i in range(q.shape[2]):
            keys = admitted[i].nonzero().flatten()
            if len(keys):
                row = q[:, :, i : i + 1], k[:, :, keys], v[:, :, keys]
                o[:, :, i : i + 1] = attend(*row, case.softmax_scale)
        return o

    return call
