"""Theory: useful FLOPs, least bytes, and formulas for opaque ops."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

from attnbench.schema.case import Case
from attnbench.schema.mask import parse_mask
from attnbench.theory import caches
from attnbench.theory.caches import as_seen, cache_of, context_lengths, keys_of_layers
from attnbench.theory.masks import unread_tokens, useful_pairs
from attnbench.theory.projections import sets_of_weights, weights_of


def core_flops(case: Case, pairs: int, *, recompute: bool = True) -> int:
    """FLOPs of the attention core over `pairs` (query, key) pairs a head, for the case's pass.

    flash-attention's convention (its `benchmarks/benchmark_flash_attention.py`): forward
    2·B·H·P·(D + V); backward 2·B·H·P·(3D + 2V), the recomputed scores included, or
    2·B·H·P·(2D + 2V) without `recompute`. Softmax, scaling and position encoding are left out.
    """
    return case.batch * pairs * _flops_of_pair(case, recompute=recompute)


def _flops_of_pair(case: Case, *, recompute: bool = True) -> int:
    d, v = case.head_dim, case.value_dim
    forward = d + v
    backward = (3 if recompute else 2) * d + 2 * v
    per_pair = {"forward": forward, "backward": backward, "both": forward + backward}[case.pass_]
    return 2 * case.heads * per_pair


def bias_flops(case: Case, *, recompute: bool = True) -> int:
    """FLOPs of the position bias in the core, for the case's pass: of `shaw` alone it multiplies.

    2·B·H·L·C·D for q times the C = 2·clip + 1 relative vectors, as much again for dq, and for the
    scores that the backward pass may `recompute`.
    """
    if "clip" not in case.position.values:
        return 0
    vectors: int = 2 * case.position.values["clip"] + 1
    products = {"forward": 1, "backward": 1 + recompute, "both": 2 + recompute}[case.pass_]
    return 2 * case.batch * case.heads * case.seq_len * vectors * case.head_dim * products


def rotation_flops(case: Case, queries: int, keys: int) -> int:
    """FLOPs of turning q and k of so many tokens by matrices, and their gradients back."""
    rows = case.heads * queries + case.kv_heads * keys
    products = {"forward": 1, "backward": 1, "both": 2}[case.pass_]
    return 2 * case.batch * rows * case.head_dim**2 * products * case.position.encoding.matrix


def why_core_flops(case: Case, flops: int) -> list[str]:
    """In plain words, how `flops` of the attention core come to differ from the useful ones.

    Found from the number alone, where it fits: the pairs multiplied are those of the mask, or the
    full square, or something between, and the backward pass makes the scores again or not. Empty
    where `flops` is the useful number, or fits none of these.
    """
    useful, square = useful_pairs(case), case.batch * case.seq_len * case.kv_len
    every = f"the full square of pairs, of which {100 * useful / square:.3g} % are useful"
    kept = "no scores recomputed in the backward pass"
    relative = ["products with relative vectors"] if bias_flops(case) else []
    for pairs, recompute in itertools.product((useful, square), (True, False)):
        bias = bias_flops(case, recompute=recompute)
        if flops == pairs * _flops_of_pair(case, recompute=recompute) + bias:
            return [every] * (pairs != useful) + [kept] * (not recompute) + relative
    pairs, rest = divmod(flops - bias_flops(case), _flops_of_pair(case))
    if rest or not useful < pairs < square:
        return []
    whole = f"whole blocks where the mask cuts through: {pairs / useful:.3g} x the useful pairs"
    return [whole, *relative]


def attention_flops_useful(case: Case) -> int:
    """`flops_useful` of the attention workload: exactly the pairs admitted of real tokens."""
    return useful_pairs(case) * _flops_of_pair(case)


def projection_flops(case: Case, queries: int, keys: int) -> int:
    """Forward FLOPs of a layer's projections: 2·B·(L·E·H·D + S·E·G·(D + V) + L·H·V·E).

    q and the output are projected for `queries` tokens (L), k and v for `keys` tokens (S). Where a
    cache keeps latents of rank R: 2·B·(L·H·(E + R)·(D + V) + S·E·R).
    """
    e, d, v, seen = case.model_width, case.head_dim, case.value_dim, as_seen(case)
    rank = seen.head_dim if seen != case else 0
    query_side = queries * case.heads * (e + rank) * (d + v)
    key_side = keys * e * (rank or case.kv_heads * (d + v))
    return 2 * case.batch * (query_side + key_side)


def decode_flops_useful(case: Case, core: int | None = None) -> int:
    """`flops_useful` per token of cached decoding, averaged over the new tokens.

    One query over every key so far, unless the `core` of a layer needs another number for all new
    tokens; and the projections of the new token.
    """
    tokens, keys_of = case.new_tokens or 1, set(keys_of_layers(case))
    core = _decode_keys(case, 1) * _flops_of_pair(as_seen(case)) if core is None else core
    projections = projection_flops(case, case.layers * tokens, len(keys_of) * tokens)
    return (case.layers * core + projections) // tokens


def attention_bytes_given(case: Case) -> int:
    """Inputs and outputs in bytes: q, k, v, o and sinks, with the gradient of each besides."""
    query_rows = case.batch * case.heads * case.seq_len
    key_rows = case.batch * case.kv_heads * case.kv_len
    numbers = (query_rows + key_rows) * (case.head_dim + case.value_dim)
    numbers += case.heads * (case.sinks is not None)
    return (1 if case.pass_ == "forward" else 2) * numbers * case.element_bytes


def attention_bytes_min(case: Case) -> int:
    """Least traffic in bytes: what a result depends on is read once, every output written once.

    Forward reads q, k, v and writes o. Backward reads q, k, v, o, do and writes dq, dk, dv. Keys
    that no query sees are not read, with their values, nor q, o and do of queries that see no key;
    what is written for these is 0. A query of padding sees the keys of its item, and is read.
    """
    blind, unseen = unread_tokens(case)
    read_as_o = {"forward": 0, "backward": 2, "both": 1}[case.pass_]  # o and do, as wide as o
    unread = case.heads * blind * (case.head_dim + read_as_o * case.value_dim)
    unread += case.kv_heads * unseen * (case.head_dim + case.value_dim)
    return attention_bytes_given(case) - unread * case.element_bytes


def _decode_keys(case: Case, together: int) -> int:
    """Keys that all steps of a generation see, in all batch items, `together` tokens a step.

    The last token of a step sees what the mask admits of all that there are by then.
    """
    mask, found = parse_mask("causal") if case.mask.lengths else case.mask, 0
    for context in context_lengths(case):
        for end in range(context + together, context + (case.new_tokens or 1) + 1, together):
            found += end - mask.span(0, together, end)[0]
    return found


def decode_bytes_min(case: Case) -> int:
    """Least traffic in bytes per token: the weights and the cache are read once a step.

    A cache that holds fewer bits is read as it is held, and one that layers share once. Without a
    cache the hidden states of the tokens that a query sees are read in its place: keys and values
    are made from them anew, and need not leave the chip. Written are the outputs alone.
    """
    (kind, _), own, tokens = cache_of(case), len(set(keys_of_layers(case))), case.new_tokens or 1
    numbers, width = 0, case.model_width * case.element_bytes
    for name, shape in caches.weights_of(case).items():
        numbers += (case.layers if name in ("wq", "wo", "sink") else own) * math.prod(shape)
    weights = numbers * case.element_bytes // case.query_tokens
    key = width if kind.all_keys else as_seen(case).kv_heads * kind.key_bytes(case)
    read = own * key * _decode_keys(case, case.query_tokens) // tokens
    # The states of new tokens are among those that keys are made from.
    return weights + read + (2 - kind.all_keys) * case.layers * case.batch * width


def decode_bytes_given(case: Case) -> int:
    """Inputs and outputs of a generation in bytes: all hidden states, every weight, new outputs."""
    tokens = case.batch * (case.seq_len + 2 * (case.new_tokens or 1))
    weights = sum(map(math.prod, caches.weights_of(case).values()))
    return case.layers * (tokens * case.model_width + weights) * case.element_bytes


# Of a product y = x·w: y; then dx = dy·w and dw = dyᵀ·x, each as many FLOPs again.
PRODUCTS = {"forward": 1, "backward": 2, "both": 3}


def layer_projection_flops(case: Case) -> int:
    """FLOPs of all layers' projections for the case's pass: backward twice the forward ones.

    Every token meets each number of a weight once; what is no factor of a product counts nothing.
    """
    products = [rows * e for name, (rows, e) in weights_of(case).items() if name.startswith("w")]
    return PRODUCTS[case.pass_] * 2 * case.batch * case.seq_len * case.layers * sum(products)


def flops_crossing(case: Case) -> float | None:
    """The n from which on attention takes more useful FLOPs than a layer's projections.

    Where H·D = E and D = V: n = E·(1 + G/H) forward under the mask full, n + 1 = twice that under
    causal; backward × 4/5, both × 6/7. None for other masks, whose pairs grow otherwise.
    """
    if case.mask.text not in ("full", "causal") or case.seq_len != case.kv_len:
        return None
    hidden = case.mask.text == "causal"
    core = case.layers * attention_flops_useful(case)
    return (case.seq_len + hidden) * layer_projection_flops(case) / core - hidden


def layer_bytes_min(case: Case) -> int:
    """Least traffic of layers in bytes: every input read once, every output written once.

    Forward reads x and the weights, E·(H + G)·(D + V) elements if fused, and writes o. Backward
    reads them and do, and writes a gradient of each; both writes o besides. What lies between (q,
    k, v, the scores) counts nothing: it could be made again on the chip.
    """
    e, tokens = case.model_width, case.batch * case.seq_len
    weights = sets_of_weights(case) * sum(map(math.prod, weights_of(case).values()))
    return _bytes_through(case, inputs=tokens * e + weights, output=tokens * e)


def recurrent_flops_useful(case: Case) -> int:
    """FLOPs of a GRU without biases: forward 12·B·n·E², two products of (3E, E) a token.

    Backward is twice that, less the gradient of the state before the first token, 6·B·E².
    """
    product = 6 * case.batch * case.model_width**2
    return (PRODUCTS[case.pass_] * 2 * case.seq_len - (case.pass_ != "forward")) * product


def recurrent_bytes_min(case: Case) -> int:
    """Least traffic of a GRU in bytes: x, do, o, the weights (6E² elements), their gradients.

    One that keeps no weights on the chip reads half of them again for every token.
    """
    e, tokens = case.model_width, case.batch * case.seq_len
    return _bytes_through(case, inputs=tokens * e + 6 * e * e, output=tokens * e)


def _bytes_through(case: Case, *, inputs: int, output: int) -> int:
    """Bytes of a pass that reads its inputs (and do) and writes o (and the inputs' gradients)."""
    elements = {
        "forward": inputs + output,
        "backward": 2 * inputs + output,
        "both": 2 * inputs + 2 * output,
    }[case.pass_]
    return elements * case.element_bytes


def _fused(per_d: int, per_v: int, first: int) -> Callable[..., int]:
    """FLOPs of a fused op from its arguments' shapes, q the `first`: all pairs of an `attn_mask`.

    torch's own convention (`utils/flop_counter.py`), whose backward makes the scores again; but of
    `is_causal`, which is top-left where L ≠ S, the pairs that are seen, since the rest is skipped.
    """

    def flops(*shapes: Any, is_causal: bool = False, **_: Any) -> int:
        q, k, v = shapes[first : first + 3]
        batch, heads, queries, d = q
        pairs, square = queries * k[2], min(queries, k[2])
        if is_causal:
            pairs = square * (square + 1) // 2 + (queries - square) * square
        return int(2 * batch * heads * pairs * (per_d * d + per_v * v[3]))

    return flops


# SDPA's CPU flash op counts 0 in torch 2.13 (pytorch #195460). The others have formulas in torch,
# which before 2.12 refused fewer key/value heads than query heads (pytorch #177188).
_SDPA_OPS = [
    f"_scaled_dot_product_{name}"
    for name in ("flash_attention_for_cpu", "flash_attention", "efficient_attention",
                 "cudnn_attention")
]  # fmt: skip
OPAQUE_FORMULAS: dict[str, Callable[..., int]] = {
    **{op: _fused(1, 1, first=0) for op in _SDPA_OPS},
    **{f"{op}_backward": _fused(3, 2, first=1) for op in _SDPA_OPS},
}
