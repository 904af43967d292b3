"""Workload `decode`: T new tokens after a context of n, one at a time, through projections.

The hidden states of all n + T tokens are given, so that every step does the work of generation
without a vocabulary. What differs between `--caches` is where the keys and values come from.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import linear

from attnbench import costs
from attnbench.api import AttentionCall, Implementation
from attnbench.case import Case, Position, parse_mask
from attnbench.check import PlainResult, Truth, plain_attention, truth_of
from attnbench.inputs import Draw, Tensors, empty, fill_normal
from attnbench.positions import Rotation, rotation
from attnbench.registry import Registry
from attnbench.workloads.base import WORKLOADS, Bound

KeysValues = tuple[torch.Tensor, torch.Tensor]  # k_BGSD, v_BGSV


class Layer:
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
    `all_keys`: it projects the keys and values of every token.
    """

    doc: str
    prefill: Callable[[Layer], KeysValues | None]
    steps: Callable[[Layer], Extend]
    all_queries: bool = False
    all_keys: bool = False


def _nothing(layer: Layer) -> None:
    """Nothing is kept between steps."""


def _recompute(layer: Layer) -> Extend:
    turns = [layer.turn(0, layer.context + t + 1) for t in range(layer.total - layer.context)]

    def extend(_: Any, __: Any, t: int) -> KeysValues:
        return layer.keys_values(slice(0, layer.context + t + 1), turns[t])

    return extend


def _new_token(layer: Layer) -> Callable[[int], KeysValues]:
    turns = [layer.turn(place, 1) for place in range(layer.context, layer.total)]

    def project(t: int) -> KeysValues:
        place = layer.context + t
        return layer.keys_values(slice(place, place + 1), turns[t])

    return project


def _prefill_exact(layer: Layer) -> KeysValues:
    k, v = layer.keys_values(slice(0, layer.context), layer.turn(0, layer.context))
    return k.contiguous(), v.contiguous()


def _concatenate(layer: Layer) -> Extend:
    project = _new_token(layer)

    def extend(_: Any, previous: KeysValues, t: int) -> KeysValues:
        k_new, v_new = project(t)
        return torch.cat((previous[0], k_new), dim=2), torch.cat((previous[1], v_new), dim=2)

    return extend


def _prefill_whole(layer: Layer) -> KeysValues:
    """Buffers for all n + T tokens, of which the context is filled in."""
    k, v = layer.keys_values(slice(0, layer.context), layer.turn(0, layer.context))
    buffers = []
    for x in (k, v):
        whole = x.new_zeros(x.shape[0], x.shape[1], layer.total, x.shape[3])
        whole[:, :, : layer.context] = x
        buffers.append(whole)
    return buffers[0], buffers[1]


def _write_in_place(layer: Layer) -> Extend:
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
CACHES.add("concat", Cache(doc="grown by torch.cat", prefill=_prefill_exact, steps=_concatenate))
CACHES.add(
    "static",
    Cache(doc="preallocated, written in place", prefill=_prefill_whole, steps=_write_in_place),
)


def step_case(case: Case, t: int) -> Case:
    """The attention case that a core sees at step t: one query, or all, over n + t + 1 keys.

    The core sees tensors that were turned already, hence no position encoding.
    """
    tokens = case.seq_len + t + 1
    queries = tokens if CACHES.get(case.cache or "static").all_queries else 1
    return dataclasses.replace(
        case,
        workload="attention",
        seq_len=queries,
        kv_len=tokens,
        position=Position(),
        width=None,
        cache=None,
        new_tokens=None,
    )


class _Generate:
    """The timed call: T steps from the same prefilled state; returns one (B, 1, E) a step."""

    def __init__(self, case: Case, impl: Implementation, tensors: Tensors) -> None:
        steps = range(case.new_tokens or 1)
        self._cache = CACHES.get(case.cache or "static")
        self._layer = layer = Layer(case, tensors)
        self._extend = self._cache.steps(layer)
        self._cores: list[AttentionCall] = [impl.build(step_case(case, t)) for t in steps]
        self._tokens = [
            slice(0 if self._cache.all_queries else end - 1, end)
            for end in range(layer.context + 1, layer.total + 1)
        ]
        self._turns = [layer.turn(s.start, s.stop - s.start) for s in self._tokens]
        self.refresh()

    def refresh(self) -> None:
        with torch.no_grad():
            self._prefilled = self._cache.prefill(self._layer)

    def __call__(self) -> list[torch.Tensor]:
        layer, prefilled, outputs = self._layer, self._prefilled, []
        state = prefilled
        for t, core in enumerate(self._cores):
            q = layer.queries(self._tokens[t], self._turns[t])
            k, v = state = self._extend(prefilled, state, t)
            outputs.append(layer.output(core(q, k, v))[:, -1:])
        return outputs


class DecodeWorkload:
    """x_BNE -> the layer's output for the last T tokens, one step a token."""

    doc = "tokens one at a time after a context of n: O(n) a step with a cache"

    def reason_against(self, case: Case, impl: Implementation) -> str | None:
        """Forward only; otherwise what the core says of its first step."""
        if case.pass_ != "forward":
            return f"decode has no {case.pass_} pass"
        if case.mask.after is None:
            return f"decode is causal; mask {case.mask.text} makes no sense"
        return impl.reason_against(step_case(case, 0))

    def tensors(self, case: Case, *, strided: bool = False) -> Tensors:
        """x_BNE and the weights wq, wk, wv, wo, each (out features, in features)."""
        e, d, v = case.width or case.heads * case.head_dim, case.head_dim, case.value_dim
        total = case.seq_len + (case.new_tokens or 1)
        shapes = {
            "x": (case.batch, total, e),
            "wq": (case.heads * d, e),
            "wk": (case.kv_heads * d, e),
            "wv": (case.kv_heads * v, e),
            "wo": (e, case.heads * v),
        }
        return {name: empty(case, shape) for name, shape in shapes.items()}

    def fill(self, case: Case, tensors: Tensors, draw: Draw) -> None:
        """Normal hidden states; weights scaled by 1/√(in features), so that q, k, v are normal."""
        fill_normal(tensors.values(), draw.seed)
        for name, x in tensors.items():
            if name != "x":
                x.mul_(x.shape[1] ** -0.5)
        tensors["wq"].mul_(draw.query_amplitude)

    def bind(self, case: Case, impl: Implementation, tensors: Tensors) -> Bound:
        """Build a core for each of the T lengths and prefill the cache, untimed."""
        generate = _Generate(case, impl, tensors)
        return Bound(
            call=generate,
            named=lambda steps: {"o": torch.cat(steps, dim=1)},
            refresh=generate.refresh,
            grad=False,
            units=case.new_tokens or 1,
        )

    def truth(self, case: Case, tensors: Tensors) -> Truth:
        """The full forward pass over all tokens, of which the last T are compared."""
        return truth_of(case, tensors, lambda given: _plain_layer(case, given))

    def costs(self, case: Case, impl: Implementation) -> dict[str, int | None]:
        """Per token; the workspace of a whole generation is not predicted."""
        return {
            "flops_useful": costs.decode_flops_useful(case),
            "flops_executed": _flops_executed(case, impl),
            "bytes_min": costs.decode_bytes_min(case),
            "memory_predicted_bytes": None,
        }


def _plain_layer(case: Case, tensors: Tensors) -> PlainResult:
    new = case.new_tokens or 1
    layer = Layer(dataclasses.replace(case, position=Position()), tensors)
    k, v = layer.keys_values(slice(0, layer.total), None)
    q = layer.queries(slice(layer.context, layer.total), None)
    mask = case.mask if case.mask.after is not None else parse_mask("causal")
    attention = dataclasses.replace(
        case, workload="attention", seq_len=new, kv_len=layer.total, mask=mask
    )
    o_BHLV = plain_attention(attention, {"q": q, "k": k, "v": v}).values["o"]
    return PlainResult(values={"o": layer.output(o_BHLV)})


def _flops_executed(case: Case, impl: Implementation) -> int | None:
    if impl.flops is None:
        return None
    cache, tokens = CACHES.get(case.cache or "static"), case.new_tokens or 1
    total = 0
    for t in range(tokens):
        step = step_case(case, t)
        total += impl.flops(step)
        total += costs.projection_flops(case, step.seq_len, step.kv_len if cache.all_keys else 1)
    return total // tokens


WORKLOADS.add("decode", DecodeWorkload())
