"""Where the keys and values of decoding come from: recomputed, concatenated, or preallocated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import linear

from attnbench.base.registry import Registry
from attnbench.schema.case import Case
from attnbench.worker.inputs import Tensors
from attnbench.worker.positions import Rotation, rotation

KeysValues = tuple[torch.Tensor, torch.Tensor]  # k_BGSD, v_BGSV


class DecodeLayer:
    """The projections of one layer around its n + T tokens; rotary tables are shared."""

    def __init__(self, case: Case, tensors: Tensors) -> None:
        self.case = case
        self.context = case.seq_len
        self.total = case.seq_len + (case.new_tokens or 1)
        self.x_BNE = tensors["x"]
        self._weights = tensors
        self._rotation = rotation(case, 0, self.total)

    def turn(self, first: int, count: int) -> Rotation | None:
        """The rotation of tokens `first` …, as a view of the shared tables."""
        return self._rotation.window(first, count) if self._rotation else None

    def queries(self, tokens: slice, turn: Rotation | None) -> torch.Tensor:
        """q_BHLD of the tokens, turned to their places."""
        return self._heads("wq", self.case.heads, tokens, turn)

    def keys_values(self, tokens: slice, turn: Rotation | None) -> KeysValues:
        """k_BGSD, turned to its places, and v_BGSV of the tokens."""
        groups = self.case.kv_heads
        return self._heads("wk", groups, tokens, turn), self._heads("wv", groups, tokens, None)

    def output(self, o_BHLV: torch.Tensor) -> torch.Tensor:
        """Heads merged and projected: (B, L, E)."""
        return linear(o_BHLV.transpose(1, 2).flatten(2), self._weights["wo"])

    def _heads(self, weight: str, heads: int, tokens: slice, turn: Rotation | None) -> torch.Tensor:
        projected = linear(self.x_BNE[:, tokens], self._weights[weight])
        x_BHLD = projected.view(*projected.shape[:2], heads, -1).transpose(1, 2)
        return turn(x_BHLD) if turn else x_BHLD


# extend(prefilled, previous, t): the keys and values of the first n + t + 1 tokens, from what
# the prefill left and from what the step before returned (the prefilled ones at t = 0).
Extend = Callable[[Any, Any, int], KeysValues]


@dataclass(frozen=True, kw_only=True)
class Cache:
    """Where keys and values come from.

    `prefill(layer)` is done untimed and again whenever the inputs change; `steps(layer)` returns
    the `extend` that is timed.
    `all_queries`: the step runs the layer for every token, not for the new one alone;
    `all_keys`: it projects the keys and values of every token; `grows`: it makes them anew, one
    longer, beside the old ones.
    """

    doc: str
    prefill: Callable[[DecodeLayer], KeysValues | None]
    steps: Callable[[DecodeLayer], Extend]
    all_queries: bool = False
    all_keys: bool = False
    grows: bool = False


def _nothing(layer: DecodeLayer) -> None:
    """Nothing is kept between steps."""


def _recompute(layer: DecodeLayer) -> Extend:
    turns = [layer.turn(0, layer.context + t + 1) for t in range(layer.total - layer.context)]

    def extend(_: Any, __: Any, t: int) -> KeysValues:
        return layer.keys_values(slice(0, layer.context + t + 1), turns[t])

    return extend


def _new_token(layer: DecodeLayer) -> Callable[[int], KeysValues]:
    turns = [layer.turn(place, 1) for place in range(layer.context, layer.total)]

    def project(t: int) -> KeysValues:
        place = layer.context + t
        return layer.keys_values(slice(place, place + 1), turns[t])

    return project


def _prefill_exact(layer: DecodeLayer) -> KeysValues:
    k, v = layer.keys_values(slice(0, layer.context), layer.turn(0, layer.context))
    return k.contiguous(), v.contiguous()


def _concatenate(layer: DecodeLayer) -> Extend:
    project = _new_token(layer)

    def extend(_: Any, previous: KeysValues, t: int) -> KeysValues:
        k_new, v_new = project(t)
        return torch.cat((previous[0], k_new), dim=2), torch.cat((previous[1], v_new), dim=2)

    return extend


def _prefill_whole(layer: DecodeLayer) -> KeysValues:
    """Buffers for all n + T tokens, of which the context is filled in."""
    k, v = layer.keys_values(slice(0, layer.context), layer.turn(0, layer.context))
    buffers = []
    for x in (k, v):
        whole = x.new_zeros(x.shape[0], x.shape[1], layer.total, x.shape[3])
        whole[:, :, : layer.context] = x
        buffers.append(whole)
    return buffers[0], buffers[1]


def _write_in_place(layer: DecodeLayer) -> Extend:
    project = _new_token(layer)

    def extend(prefilled: KeysValues, _: Any, t: int) -> KeysValues:
        place = layer.context + t
        (k_whole, v_whole), (k_new, v_new) = prefilled, project(t)
        k_whole[:, :, place : place + 1] = k_new
        v_whole[:, :, place : place + 1] = v_new
        return k_whole[:, :, : place + 1], v_whole[:, :, : place + 1]

    return extend


CACHES: Registry[Cache] = Registry("cache", "--caches")
CACHES.add(
    "rerun",
    Cache(
        doc="no cache: the whole layer over all tokens at each step",
        prefill=_nothing,
        steps=_recompute,
        all_queries=True,
        all_keys=True,
    ),
)
CACHES.add(
    "none",
    Cache(
        doc="no cache: keys and values recomputed, one query",
        prefill=_nothing,
        steps=_recompute,
        all_keys=True,
    ),
)
CACHES.add(
    "concat",
    Cache(doc="grown by torch.cat", prefill=_prefill_exact, steps=_concatenate, grows=True),
)
CACHES.add(
    "static",
    Cache(doc="preallocated, written in place", prefill=_prefill_whole, steps=_write_in_place),
)
