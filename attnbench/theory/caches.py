"""How decoding keeps keys and values: what planning and analysis must know of each cache.

What a cache does is a row by the same name in `worker/workloads/caches.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from attnbench.base.parameters import Parameter, read_name
from attnbench.base.registry import Registry
from attnbench.schema.case import Case
from attnbench.schema.mask import Mask, parse_mask
from attnbench.theory import projections

DEFAULT = "static"
Seen = tuple[int, Mask]  # how many keys a core is given, and which of them a query sees
_CAUSAL = parse_mask("causal")


def context_lengths(case: Case) -> list[int]:
    """Tokens of context of each batch item: n, or what the mask `padding` gives it."""
    return [case.mask.length(case.seq_len, item) for item in range(case.batch)]


def _first_keys(case: Case, values: Mapping[str, Any], end: int) -> Seen:
    """The keys that each batch item has once the longest has `end`, of a whole buffer or alone."""
    capacity = values.get("capacity")
    if not (capacity or case.mask.lengths):
        return end, case.mask
    new, lengths = end - case.seq_len, context_lengths(case)[: case.mask.items]
    return capacity or end, parse_mask("padding:" + "+".join(str(n + new) for n in lengths))


def _window(case: Case) -> int:
    return (case.mask.before or 0) + 1


def _places(case: Case, values: Mapping[str, Any]) -> int:
    return case.batch * (values.get("capacity") or case.seq_len + (case.new_tokens or 1))


def pages_of_items(case: Case, page: int) -> list[int]:
    """How many pages of so many tokens each batch item fills by its last new token."""
    return [-(-(n + (case.new_tokens or 1)) // page) for n in context_lengths(case)]


def _eight_bits(case: Case) -> int:
    return case.head_dim + case.value_dim


def _refuse_latent(case: Case, values: Mapping[str, Any]) -> str | None:
    if values["rank"] > case.model_width:
        return f"keeps latents wider than the model, E = {case.model_width}"
    if case.position.encoding.kind not in ("none", "additive"):
        return f"keeps latents, into which no {case.position.name} can be absorbed"
    return None


def _refuse_capacity(case: Case, values: Mapping[str, Any]) -> str | None:
    capacity, total = values["capacity"], case.seq_len + (case.new_tokens or 1)
    if capacity and capacity < total:
        return f"holds {capacity} tokens, not the {total} of context and generation"
    if capacity and (case.query_tokens > 1 or case.mask.before is not None):
        return "hides what is empty by a mask that is for one query and no window"
    return None


def _refuse_ring(case: Case, values: Mapping[str, Any]) -> str | None:
    if case.mask.before is None:
        return (
            f"keeps the last keys of a window, which mask {case.mask.text} has not"
            " (--masks window:256)"
        )
    if case.query_tokens > 1:
        return "overwrites what the first of several queries still sees (--query-tokens 1)"
    return None


@dataclass(frozen=True, kw_only=True)
class CacheTraits:
    """One cache as planning and analysis see it; functions take the case and the parameters.

    `all_queries`: a step runs the layer for every token, not for the new ones alone; `all_keys`: it
    projects the keys and values of every token; `grows`: it makes them anew, longer, beside the old
    ones; `moves`: it writes every key and value for the core to read. `ragged`: batch items may
    differ in length; `lossy`: what is read is not what was written;
    `keeps_window`: it forgets what is outside a window.
    `seen` says what the core is given once there are so many tokens, `places` how many tokens of
    all batch items there is room for, `key_bytes` what one key and its value take in a head, and
    `beside_bytes` what there is beside these. `reason` is why it cannot take a case, or None.
    """

    doc: str
    parameters: Mapping[str, Parameter] = field(default_factory=dict)
    all_queries: bool = False
    all_keys: bool = False
    grows: bool = False
    moves: bool = False
    ragged: bool = False
    lossy: bool = False
    keeps_window: bool = False
    seen: Callable[[Case, Mapping[str, Any], int], Seen] = _first_keys
    places: Callable[[Case, Mapping[str, Any]], int] = _places
    key_bytes: Callable[[Case], int] = lambda case: (
        (case.head_dim + case.value_dim) * case.element_bytes
    )
    beside_bytes: Callable[[Case, Mapping[str, Any]], int] = lambda case, values: 0
    reason: Callable[[Case, Mapping[str, Any]], str | None] = lambda case, values: None


_CACHES = {
    "rerun": CacheTraits(
        doc="no cache: the whole layer over all tokens at each step",
        all_queries=True,
        all_keys=True,
        places=lambda case, values: 0,
    ),
    "none": CacheTraits(
        doc="no cache: keys and values recomputed, one query",
        all_keys=True,
        places=lambda case, values: 0,
    ),
    "concat": CacheTraits(doc="grown by torch.cat", grows=True, moves=True),
    "static": CacheTraits(
        doc="preallocated, written in place; static:capacity=4096 preallocates 4096 tokens, and"
        " attention gets all of them and a mask",
        parameters={"capacity": Parameter(default=0, least=0)},
        ragged=True,
        reason=_refuse_capacity,
    ),
    "shared": CacheTraits(
        doc="static, and every 2 of the --layers (shared:layers=4) read the keys and values of the"
        " first (cross-layer attention)",
        parameters={"layers": Parameter(default=2, least=2)},
        ragged=True,
        reason=lambda case, values: (
            f"shares among {values['layers']} layers, which --layers {case.layers} does not fill"
            if case.layers % values["layers"]
            else None
        ),
    ),
    "sliding": CacheTraits(
        doc="a ring of the last W tokens, for sliding window:W masks: keys are out of order",
        keeps_window=True,
        places=lambda case, values: min(_places(case, values), case.batch * _window(case)),
        # In whatever order: one query sees all of them.
        seen=lambda case, values, end: (min(end, _window(case)), _CAUSAL),
        reason=_refuse_ring,
    ),
    "paged": CacheTraits(
        doc="pages of 16 tokens (paged:page=16) anywhere in memory, gathered at each step",
        parameters={"page": Parameter(default=16)},
        ragged=True,
        moves=True,
        places=lambda case, values: values["page"] * sum(pages_of_items(case, values["page"])),
        beside_bytes=lambda case, values: (  # an int32 for each page
            4 * case.batch * -(-(case.seq_len + (case.new_tokens or 1)) // values["page"])
        ),
    ),
    "int8": CacheTraits(
        doc="8 bits an element and a scale per token and head, dequantized at each step",
        ragged=True,
        moves=True,
        lossy=True,
        key_bytes=lambda case: _eight_bits(case) + 2 * case.element_bytes,
    ),
    "int8-head": CacheTraits(
        doc="8 bits an element and a scale per head, fixed by the context",
        ragged=True,
        moves=True,
        lossy=True,
        key_bytes=_eight_bits,
        beside_bytes=lambda case, values: 2 * case.batch * case.kv_heads * case.element_bytes,
    ),
    "latent": CacheTraits(
        doc="a latent of rank=128 in place of k and v, absorbed by q and o (MLA, DeepSeek-V2)",
        parameters={"rank": Parameter(default=128)},
        ragged=True,
        key_bytes=lambda case: as_seen(case).head_dim * case.element_bytes,
        reason=_refuse_latent,
    ),
}
CACHES: Registry[CacheTraits] = Registry("cache", "--caches", _CACHES)


def cache_of(case: Case) -> tuple[CacheTraits, Mapping[str, Any]]:
    """The case's cache and its parameters; `static` where it names none."""
    return read_name(case.cache or DEFAULT, CACHES)[1:]


def keys_of_layers(case: Case) -> list[int]:
    """For each layer the number of that whose keys and values it reads: its own, but for sharing.

    Cross-layer attention: Brandon et al. 2024, arXiv:2405.12981.
    """
    sharing = cache_of(case)[1].get("layers", 1)
    return [layer - layer % sharing for layer in range(case.layers)]


def as_seen(case: Case) -> Case:
    """The case with the heads and dims of a core: those of latents, where the cache keeps them."""
    rank = cache_of(case)[1].get("rank")
    if rank is None:
        return case
    sizes = {"width": case.model_width, "kv_heads": 1, "head_dim": rank, "value_dim": rank}
    return replace(case, **sizes, scale=case.softmax_scale)


def weights_of(case: Case) -> dict[str, tuple[int, ...]]:
    """Shapes of the layer's weights by name: wq, wk, wv, wo, or by way of a latent; its sinks."""
    rank = cache_of(case)[1].get("rank")
    way = "separate" if rank is None else f"mla:{rank}"
    sink = {"sink": (case.heads,)} if case.sinks else {}
    return {**projections.weights_of(replace(case, projection=way)), **sink}


def cache_bytes(case: Case) -> int:
    """What the cache takes once the last new token is in it: keys, values, scales, block table."""
    kind, values = cache_of(case)
    places, beside = kind.places(case, values), kind.beside_bytes(case, values)
    of_layer = as_seen(case).kv_heads * places * kind.key_bytes(case) + beside
    return of_layer * len(set(keys_of_layers(case)))


def reason_against_cache(case: Case) -> str | None:
    """Why decoding makes no sense of the case, or None."""
    kind, values = cache_of(case)
    if (case.new_tokens or 1) % case.query_tokens:
        return (
            f"takes {case.query_tokens} tokens a step (--query-tokens), which do not divide"
            f" {case.new_tokens or 1} (--new-tokens)"
        )
    if case.mask.lengths and (not kind.ragged or case.query_tokens > 1):
        ragged = ", ".join(name for name, other in CACHES.items() if other.ragged)
        return f"takes batch items of different lengths with caches {ragged}, one query at a time"
    moved = case.mask.lengths or values.get("capacity") or kind.keeps_window
    if moved and case.position.encoding.kind == "bias":
        return (
            f"with position {case.position.name} needs each key in its place among the first n:"
            " no ring, no lengths, no room to spare"
        )
    if reason := kind.reason(case, values):
        return f"with cache {case.cache} {reason}"
    return None
