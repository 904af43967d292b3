"""Workload `decode`: T new tokens after a context of n, one at a time, through projections.

The hidden states of all n + T tokens are given, so that every step does the work of generation
without a vocabulary. What differs between `--caches` is where the keys and values come from.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch.nn.functional import linear

from attnbench.api import Implementation, SizeFormula
from attnbench.base.registry import Registry
from attnbench.schema.case import Case, parse_mask
from attnbench.schema.position import NONE, for_core
from attnbench.theory import costs
from attnbench.worker.inputs import Draw, Tensors, empty, fill_normal, wanted_keys
from attnbench.worker.positions import addition, placed, rotation
from attnbench.worker.reference import Core, PlainResult, plain_attention
from attnbench.worker.workloads.base import WORKLOADS, Bound, Workload

KeysValues = tuple[torch.Tensor, torch.Tensor]  # k_BGSD, v_BGSV


class DecodeLayer:
    """The projections of one layer around its n + T tokens; rotary tables are shared."""

    def __init__(self, case: Case, tensors: Tensors) -> None:
        self.case, self._tensors = case, tensors
        self.context, self.total = case.seq_len, case.seq_len + (case.new_tokens or 1)
        rotate = rotation(case, 0, self.total, self.total)
        # The tables are made in the untimed check.
        self._rotate = functools.cache(rotate.window) if rotate else None
        self._added_LE = addition(case, self.total)
        self._x_BLE, self._first = tensors["x"], 0

    def place(self, first: int, end: int) -> None:
        """Add to tokens `first` to `end` what their places add; the others are not to be used."""
        if self._added_LE is not None:
            self._x_BLE = self._tensors["x"][:, first:end] + self._added_LE[first:end]
            self._first = first

    def queries(self, first: int, end: int) -> torch.Tensor:
        """q_BHLD of tokens `first` to `end`, rotated to their places."""
        return self._rotated(self._heads("wq", self.case.heads, first, end), first, end)

    def keys_values(self, first: int, end: int) -> KeysValues:
        """k_BGSD, rotated to its places, and v_BGSV of tokens `first` to `end`."""
        k, v = (self._heads(name, self.case.kv_heads, first, end) for name in ("wk", "wv"))
        return self._rotated(k, first, end), v

    def output(self, o_BHLV: torch.Tensor) -> torch.Tensor:
        """Heads merged and projected: (B, L, E)."""
        return linear(o_BHLV.transpose(1, 2).flatten(2), self._tensors["wo"])

    def _heads(self, weight: str, heads: int, first: int, end: int) -> torch.Tensor:
        x_BLE = self._x_BLE[:, first - self._first : end - self._first]
        projected = linear(x_BLE, self._tensors[weight])
        return projected.view(*projected.shape[:2], heads, -1).transpose(1, 2)

    def _rotated(self, x_BHLD: torch.Tensor, first: int, end: int) -> torch.Tensor:
        return self._rotate(first, end - first)(x_BHLD) if self._rotate else x_BHLD


def unplaced(case: Case, tensors: Tensors) -> DecodeLayer:
    """The layer by its definition: of x with its places added, and nothing rotated."""
    placed_x = {"x": placed(tensors["x"], case)}
    return DecodeLayer(replace(case, position=NONE), {**tensors, **placed_x})


class Cache(NamedTuple):
    """Where keys and values come from.

    `prefill(layer)` is done untimed and again whenever the inputs change. `extend(layer, prefilled,
    previous, t)` is timed: the keys and values of the first n + t + 1 tokens, from what the prefill
    left and from what the step before returned (the prefilled ones at t = 0).
    `all_queries`: the step runs the layer for every token, not for the new one alone;
    `all_keys`: it projects the keys and values of every token; `grows`: it makes them anew, one
    longer, beside the old ones.
    """

    doc: str
    prefill: Callable[[DecodeLayer], KeysValues | None]
    extend: Callable[[DecodeLayer, Any, Any, int], KeysValues]
    all_queries: bool = False
    all_keys: bool = False
    grows: bool = False


def _recompute(layer: DecodeLayer, _: Any, __: Any, t: int) -> KeysValues:
    return layer.keys_values(0, layer.context + t + 1)


def _prefill_exact(layer: DecodeLayer) -> KeysValues:
    k, v = layer.keys_values(0, layer.context)
    return k.contiguous(), v.contiguous()


def _concatenate(layer: DecodeLayer, _: Any, previous: KeysValues, t: int) -> KeysValues:
    k_new, v_new = layer.keys_values(layer.context + t, layer.context + t + 1)
    return torch.cat((previous[0], k_new), dim=2), torch.cat((previous[1], v_new), dim=2)


def _prefill_whole(layer: DecodeLayer) -> KeysValues:
    """Buffers for all n + T tokens, of which the context is filled in."""
    k, v = layer.keys_values(0, layer.context)
    k_whole, v_whole = (x.new_zeros(*x.shape[:2], layer.total, x.shape[3]) for x in (k, v))
    k_whole[:, :, : layer.context], v_whole[:, :, : layer.context] = k, v
    return k_whole, v_whole


def _write_in_place(layer: DecodeLayer, prefilled: KeysValues, _: Any, t: int) -> KeysValues:
    end = layer.context + t + 1
    (k_whole, v_whole), (k_new, v_new) = prefilled, layer.keys_values(end - 1, end)
    k_whole[:, :, end - 1 : end], v_whole[:, :, end - 1 : end] = k_new, v_new
    return k_whole[:, :, :end], v_whole[:, :, :end]


CACHES: Registry[Cache] = Registry("cache", "--caches")
CACHES.add(
    "rerun",
    Cache(
        "no cache: the whole layer over all tokens at each step",
        prefill=lambda _: None,
        extend=_recompute,
        all_queries=True,
        all_keys=True,
    ),
)
CACHES.add(
    "none",
    Cache(
        "no cache: keys and values recomputed, one query",
        prefill=lambda _: None,
        extend=_recompute,
        all_keys=True,
    ),
)
CACHES.add("concat", Cache("grown by torch.cat", _prefill_exact, _concatenate, grows=True))
CACHES.add("static", Cache("preallocated, written in place", _prefill_whole, _write_in_place))


def cache_of(case: Case) -> Cache:
    """The case's cache; `static` where it names none."""
    return CACHES.get(case.cache or "static")


def step_case(case: Case, t: int) -> Case:
    """The attention case that a core sees at step t: one query, or all, over n + t + 1 keys.

    The core sees tensors that were encoded already but for a bias.
    """
    tokens = case.seq_len + t + 1
    return replace(
        case,
        workload="attention",
        seq_len=tokens if cache_of(case).all_queries else 1,
        kv_len=tokens,
        position=for_core(case.position),
        width=None,
        cache=None,
        new_tokens=None,
    )


def plant_cached_needles(case: Case, tensors: Tensors) -> None:
    """Turn one token of the context towards the query of each new token.

    The hidden state x_j is chosen, by least squares through wk, so that the key of each
    key/value head aligns with the query of its first query head at step t, with a logit of
    ln(n) + 6 where the width allows it exactly: a cache that lost the token shows in bfloat16.
    """
    added_BLE = placed(tensors["x"], case) - tensors["x"]
    layer = unplaced(case, tensors)
    count = min(layer.total - layer.context, layer.context)
    places = torch.arange(layer.context, layer.context + count, device=case.device)
    # Spread over the context: its first token, its last one, and some between.
    keys = torch.linspace(0, layer.context - 1, count, device=case.device).long()
    q_BHTD = layer.queries(layer.context, layer.context + count)
    rows_BGTD = q_BHTD[:, :: case.heads // case.kv_heads]
    wanted_BTK = wanted_keys(case, rows_BGTD, places, keys, layer.context + 1)
    solved_BTE = wanted_BTK @ torch.linalg.pinv(tensors["wk"].double()).mT
    tensors["x"][:, keys] = (solved_BTE - added_BLE[:, keys]).to(tensors["x"].dtype)


class Generate:
    """The timed call: T steps from the same prefilled state; returns one (B, 1, E) a step."""

    def __init__(self, case: Case, impl: Implementation, tensors: Tensors) -> None:
        self._cache, self._layer = cache_of(case), DecodeLayer(case, tensors)
        self._cores = [impl.build(step_case(case, t)) for t in range(case.new_tokens or 1)]
        self.refresh()

    def refresh(self) -> None:
        """Prefill the cache from the inputs as they are now."""
        with torch.no_grad():
            self._layer.place(0, self._layer.context)
            self._prefilled = self._cache.prefill(self._layer)

    def __call__(self) -> list[torch.Tensor]:
        """The layer's output for each new token."""
        layer, cache, outputs = self._layer, self._cache, []
        state = self._prefilled
        for t, core in enumerate(self._cores):
            end = layer.context + t + 1
            layer.place(0 if cache.all_keys else end - 1, end)
            q = layer.queries(0 if cache.all_queries else end - 1, end)
            k, v = state = cache.extend(layer, self._prefilled, state, t)
            y = layer.output(core(q, k, v))
            # A view of the last token would keep the outputs of all of them alive.
            outputs.append(y[:, -1:].clone() if y.shape[1] > 1 else y)
        return outputs


class _Decode(Workload):
    """x_BNE -> the layer's output for the last T tokens, one step a token; forward only."""

    def reason_against(self, case: Case, impl: Implementation) -> str | None:
        if case.mask.name not in ("causal", "window"):
            return f"decode is causal; mask {case.mask.text} makes no sense (--masks causal)"
        if case.position.encoding.by_length:
            return (
                f"{case.position.name} turns every key anew with each token;"
                " those in a cache are turned already"
            )
        return super().reason_against(case, impl)

    def core_case(self, case: Case) -> Case:
        return step_case(case, 0)

    def tensors(self, case: Case, *, strided: bool = False) -> Tensors:
        """x_BNE and wq, wk, wv, wo."""
        e, d, v = case.model_width, case.head_dim, case.value_dim
        shapes = {
            "x": (case.batch, case.seq_len + (case.new_tokens or 1), e),
            "wq": (case.heads * d, e),
            "wk": (case.kv_heads * d, e),
            "wv": (case.kv_heads * v, e),
            "wo": (e, case.heads * v),
        }
        return {name: empty(case, shape) for name, shape in shapes.items()}

    def fill(self, case: Case, tensors: Tensors, draw: Draw) -> None:
        fill_normal(tensors.values(), draw.seed)
        for name, x in tensors.items():
            if name != "x":
                x.mul_(x.shape[1] ** -0.5)
        if draw.needles:
            plant_cached_needles(case, tensors)
        tensors["wq"].mul_(draw.query_amplitude)

    def bind(self, case: Case, impl: Implementation, tensors: Tensors) -> Bound:
        generate = Generate(case, impl, tensors)
        return Bound(
            call=generate,
            named=lambda steps: {"o": torch.cat(steps, dim=1)},
            refresh=generate.refresh,
            grad=False,
            units=case.new_tokens or 1,
        )

    def plain(
        self, case: Case, tensors: Tensors, *, terms: bool, core: Core = plain_attention
    ) -> PlainResult:
        """The layer's output; the floor of its error scales with it, so that it has no terms.

        Token by token, as generation goes: the sum over n keys of a single query is added up in
        another way than those of eight at once, and rounds otherwise (float32, n = 32768: seven
        times the error).
        """
        layer = unplaced(case, tensors)
        k, v = layer.keys_values(0, layer.total)
        q = layer.queries(layer.context, layer.total)
        mask = case.mask if case.mask.after is not None else parse_mask("causal")
        steps = []
        for t in range(layer.total - layer.context):
            end = layer.context + t + 1
            step = replace(case, workload="attention", seq_len=1, kv_len=end, mask=mask)
            seen = {"q": q[:, :, t : t + 1], "k": k[:, :, :end], "v": v[:, :, :end]}
            steps.append(core(step, seen).values["o"])
        return PlainResult(values={"o": layer.output(torch.cat(steps, dim=2))})

    def costs(self, case: Case, impl: Implementation) -> dict[str, int | None]:
        """FLOPs and traffic per token; the predicted workspace is that of a whole generation."""
        return {
            "flops_useful": costs.decode_flops_useful(case),
            "flops_executed": _flops_of(case, impl.flops) if impl.flops else None,
            "bytes_min": costs.decode_bytes_min(case),
            "memory_predicted_bytes": _workspace(case, impl),
        }

    def why_flops(self, case: Case, flops: int) -> list[str]:
        return [cache_of(case).doc] if cache_of(case).all_keys else []


def _workspace(case: Case, impl: Implementation) -> int | None:
    """Bytes that a generation allocates beyond its outputs, at its worst moment, the last step.

    It holds q; then the new token's k and v and, where the cache grows, keys and values of both
    lengths; then the longer ones, o and what the core takes. None without a cache: a core is then
    handed strided keys, of which it may make copies. None in half precision on CPU, where oneDNN
    packs the operands of products as the processor wants.
    """
    cache, last = cache_of(case), (case.new_tokens or 1) - 1
    packed = case.device == "cpu" and case.element_bytes < 4
    taken = impl.workspace(step_case(case, last)) if impl.workspace else None
    if taken is None or cache.all_keys or packed:
        return None
    element = case.batch * case.element_bytes
    y = element * case.model_width
    q, o = element * case.heads * case.head_dim, element * case.heads * case.value_dim
    token = element * case.kv_heads * (case.head_dim + case.value_dim)  # of k and v
    longer = token * (case.seq_len + last + 1) * cache.grows
    shorter = token * (case.seq_len + last) * cache.grows * (last > 0)
    return type(taken)(q + max(token + shorter + longer, longer + o + max(y, taken)) - y)


def _flops_of(case: Case, core_flops: SizeFormula) -> int:
    """FLOPs per token of a generation whose core executes `core_flops` of each step."""
    cache, tokens = cache_of(case), case.new_tokens or 1
    total = 0
    for t in range(tokens):
        step = step_case(case, t)
        total += core_flops(step)
        tokens_in = step.seq_len, step.kv_len if cache.all_keys else 1
        total += costs.projection_flops(case, *tokens_in) + costs.rotation_flops(case, *tokens_in)
    return total // tokens


WORKLOADS.add("decode", _Decode())
