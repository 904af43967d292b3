"""Workload `decode`: T new tokens after a context of n, one or a few at a time, in one layer.

The hidden states of all n + T tokens are given, so that every step does the work of generation
without a vocabulary. What differs between `--caches` is where the keys and values come from. With
`--query-tokens` a step takes several tokens, which see each other causally, as where drafted tokens
are verified (Leviathan et al. 2023, arXiv:2211.17192); the mask `padding` gives each batch item a
context of its own length. Each of the `--layers` is given hidden states of its own: what a layer
would add to those of the next changes no work.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from attnbench.api import Estimate, Implementation, SizeFormula
from attnbench.schema.case import Case, parse_mask
from attnbench.schema.position import NONE, for_core
from attnbench.theory import costs
from attnbench.theory.caches import (
    as_seen,
    cache_bytes,
    cache_of,
    context_lengths,
    keys_of_layers,
    weights_of,
)
from attnbench.worker.inputs import Draw, Tensors, empty, fill_normal, fill_sinks, wanted_keys
from attnbench.worker.positions import placed, rotated_last
from attnbench.worker.reference import (
    Core,
    PlainResult,
    Reference,
    core_of,
    plain_attention,
    reference_of,
)
from attnbench.worker.workloads.base import WORKLOADS, Bound, Workload, unread_keys
from attnbench.worker.workloads.caches import (
    AsRead,
    DecodeLayer,
    as_read_of,
    layer_of,
    store_of,
    with_wk_and_wv,
)

_CAUSAL = parse_mask("causal")


def step_case(case: Case, end: int) -> Case:
    """The attention case that a core sees in the step after which there are `end` tokens.

    It sees tensors that were encoded already but for a bias.
    """
    kind, values = cache_of(case)
    keys, mask = kind.seen(case, values, end)
    return replace(
        as_seen(case),
        workload="attention",
        seq_len=end if kind.all_queries else case.query_tokens,
        kv_len=keys,
        mask=mask,
        position=for_core(case.position),
        width=None,
        cache=None,
        new_tokens=None,
        query_tokens=1,
        layers=1,
    )


def step_ends(case: Case) -> range:
    """How many tokens there are after each step."""
    tokens, together = case.new_tokens or 1, case.query_tokens
    return range(case.seq_len + together, case.seq_len + tokens + 1, together)


def each_item(case: Case, tensors: Tensors) -> Iterator[tuple[Case, Tensors]]:
    """Of batch items that differ in length, each by itself: its context, then its new tokens."""
    for item, length in enumerate(context_lengths(case)):
        x_1NE = tensors["x"][item : item + 1]
        own = {"x": torch.cat((x_1NE[:, :length], x_1NE[:, case.seq_len :]), dim=1)}
        yield replace(case, batch=1, seq_len=length, kv_len=length, mask=_CAUSAL), tensors | own


def plant_cached_needles(case: Case, tensors: Tensors) -> None:
    """Turn one token of the context towards the query of each new token.

    The hidden state x_j is chosen, by least squares through wk, so that the key of each
    key/value head aligns with the query of its first query head at step t, with a logit of
    ln(n) + 6 where the width allows it exactly: a cache that lost the token shows in bfloat16.
    Under a window it is one of those that the query still sees.
    """
    if case.mask.lengths:
        for item, (one, own) in enumerate(each_item(case, tensors)):
            plant_cached_needles(one, own)
            tensors["x"][item, : one.seq_len] = own["x"][0, : one.seq_len]
        return
    added_BLE, seen = placed(tensors["x"], case) - tensors["x"], as_seen(case)
    layer = unplaced(case, tensors, layer_of)
    count = min(layer.total - layer.context, layer.context)
    places = torch.arange(layer.context, layer.context + count, device=case.device)
    # Spread over what the first and the last of them see: its first token, its last, and between.
    first = case.mask.span(0, 1, layer.context + count)[0]
    keys = torch.linspace(min(first, layer.context - count), layer.context - 1, count)
    keys = keys.to(case.device).long()
    q_BHTD = layer.queries(layer.context, layer.context + count)
    rows_BGTD = q_BHTD[:, :: seen.heads // seen.kv_heads]
    wanted_BTK = wanted_keys(seen, rows_BGTD, places, keys, layer.context + 1)
    of_keys = tensors["wdown"] if "wdown" in tensors else tensors["wk"]
    solved_BTE = hidden_states(of_keys.double(), wanted_BTK)
    tensors["x"][:, keys] = (solved_BTE - added_BLE[:, keys]).to(tensors["x"].dtype)


def hidden_states(w_KE: torch.Tensor, wanted_BTK: torch.Tensor) -> torch.Tensor:
    """The shortest x_BTE that w turns into what is wanted, or as near as least squares come.

    Through the Gram matrix of the shorter side of w, which random weights leave of full rank: a
    pseudo-inverse takes a singular value decomposition, on a GPU seconds of a width of 1024.
    """
    if w_KE.shape[0] <= w_KE.shape[1]:
        solved_BKT: torch.Tensor = torch.linalg.solve(w_KE @ w_KE.mT, wanted_BTK.mT)
        return solved_BKT.mT @ w_KE
    solved_BET: torch.Tensor = torch.linalg.solve(w_KE.mT @ w_KE, w_KE.mT @ wanted_BTK.mT)
    return solved_BET.mT


def unplaced(
    case: Case, tensors: Tensors, around: Callable[[Case, Tensors], DecodeLayer] = DecodeLayer
) -> DecodeLayer:
    """The layer of x with its places added, and nothing rotated; `around` its cache, if asked."""
    placed_x = {"x": placed(tensors["x"], case)}
    return around(replace(case, position=NONE), {**with_wk_and_wv(tensors), **placed_x})


def each_layer(case: Case, tensors: Tensors) -> list[Tensors]:
    """The inputs of each layer; the names of those after the first end in their number."""
    suffixes = ["", *map(str, range(1, case.layers))]
    return [
        {name: tensors[name + suffix] for name in ("x", *weights_of(case))} for suffix in suffixes
    ]


def _sink_of(case: Case, tensors: Tensors) -> Tensors:
    return {"sink": tensors["sink"]} if case.sinks else {}


class Generate:
    """The timed call: T tokens from the same prefilled state; returns one (B, A, M·E) a step.

    The outputs of M layers stand side by side.
    """

    def __init__(self, case: Case, impl: Implementation, tensors: Tensors) -> None:
        kind, _ = cache_of(case)
        self._all_queries, self._all_keys = kind.all_queries, kind.all_keys
        self._layers = [layer_of(case, own) for own in each_layer(case, tensors)]
        self._sinks = [_sink_of(case, own) for own in each_layer(case, tensors)]
        self._keys_of, self._together = keys_of_layers(case), case.query_tokens
        ends = step_ends(case)
        # A cold clock flushes between the steps, as the other layers of a model would.
        self.steps = [
            functools.partial(self._step, end, impl.build(step_case(case, end)), end == ends[-1])
            for end in ends
        ]
        self.refresh()

    def refresh(self) -> None:
        """Prefill the caches from the inputs as they are now."""
        self.stores = {}
        with torch.no_grad():
            for number in sorted(set(self._keys_of)):
                layer = self._layers[number]
                layer.place(0, layer.context)
                self.stores[number] = store_of(layer)

    def __call__(self) -> list[torch.Tensor]:
        """The output of every layer for the new tokens of each step."""
        return [step() for step in self.steps]

    def core(self, _: Tensors) -> Callable[[], Any]:
        """The core's call in the middle step, on what the first layer gives it.

        Keys that each step makes anew have just been written when the core reads them.
        """
        calls: list[functools.partial[Any]] = []

        def given(core: Any, q: Any, k: Any, v: torch.Tensor, *sink: Any) -> torch.Tensor:
            calls.append(functools.partial(core, q, k, v, *sink))
            return v.new_zeros(*q.shape[:3], v.shape[-1])

        with torch.no_grad():
            for step in self.steps:
                end, core, last = step.args
                self._step(end, functools.partial(given, core), last)
        first, call = calls[0], calls[len(self._layers) * (len(self.steps) // 2)]
        k, v = call.args[1:3]
        if k.untyped_storage().data_ptr() != first.args[1].untyped_storage().data_ptr():
            setattr(call, "behind_flush", lambda: (k.mul_(1), v.mul_(1)))  # noqa: B010
        return call

    def _step(self, end: int, core: Callable[..., torch.Tensor], last: bool) -> torch.Tensor:
        outputs, together = [], self._together
        for number, layer in enumerate(self._layers):
            layer.place(0 if self._all_keys else end - together, end)
            q = layer.queries(0 if self._all_queries else end - together, end)
            if number in self.stores:  # else k and v are those of the layer before
                k, v = self.stores[number].extend(end - together, end)
            y = layer.output(core(q, k, v, *self._sinks[number].values()))
            # A view of the last tokens would keep the outputs of all of them alive.
            outputs.append(y[:, -together:].clone() if y.shape[1] > together else y)
        for store in self.stores.values() if last else ():
            store.restore()
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)


def plain_layer(
    case: Case, tensors: Tensors, keys: Tensors, core: Core, as_read: AsRead | None, terms: bool
) -> list[torch.Tensor]:
    """One layer's output for the new tokens, (B, T, E), with the `keys` and values of a layer.

    Behind it, where asked for, its terms, which go through wo by their squares. Step by step, as
    generation goes: a sum over n keys for one query is added up in another way than for eight at
    once, and rounds otherwise (float32, n = 32768: seven times the error).
    """
    if case.mask.lengths:
        items = zip(each_item(case, tensors), each_item(case, keys), strict=True)
        each = [plain_layer(c, own, k, core, as_read, terms) for (c, own), (_, k) in items]
        return [torch.cat(of_items) for of_items in zip(*each, strict=True)]
    layer = unplaced(case, tensors)
    k, v = unplaced(case, keys).keys_values(0, layer.total)
    q = layer.queries(layer.context, layer.total)
    mask = case.mask if case.mask.after is not None else _CAUSAL
    step = replace(case, workload="attention", seq_len=case.query_tokens, mask=mask)
    if as_read:
        q = rotated_last(q, case.position, layer.total)
        k = as_read(rotated_last(k, case.position, layer.total), layer.context)
        v, step = as_read(v, layer.context), replace(step, position=for_core(case.position))
    steps = []
    for end in step_ends(case):
        new = slice(end - case.query_tokens - layer.context, end - layer.context)
        seen = {"q": q[:, :, new], "k": k[:, :, :end], "v": v[:, :, :end]}
        steps.append(core(replace(step, kv_len=end), seen | _sink_of(case, tensors), terms=terms))
    o = layer.output(torch.cat([found.values["o"] for found in steps], dim=2))
    if not terms:
        return [o]
    squares_BHTV = torch.cat([found.terms["o"].square() for found in steps], dim=2)
    squares = squares_BHTV.transpose(1, 2).flatten(2) @ tensors["wo"].square().mT
    return [o, squares.sqrt()]


class _Decode(Workload):
    """x_BNE -> the layer's output for the last T tokens, one step a token; forward only."""

    def reason_against(self, case: Case, impl: Implementation) -> str | None:
        if case.mask.name not in ("causal", "window", "padding"):
            return f"decode is causal; mask {case.mask.text} makes no sense (--masks causal)"
        of_length, values = case.position.encoding.frequencies, case.position.values
        ends = case.seq_len, step_ends(case)[-1]
        if len({tuple(of_length(values, case.head_dim, end)) for end in ends}) > 1:
            return f"{case.position.name} turns keys again that are in a cache, past its length"
        if cache_of(case)[0].keeps_window and impl.definition is not None:
            return f"cache {case.cache} keeps keys in any order, and {impl.name} minds their places"
        if as_seen(case) != case and impl.family not in ("exact", "sparse"):
            return f"cache {case.cache} gives products of q and k alone, and {impl.name} needs both"
        # A window may hide nothing in the first step, and keys later.
        last = step_case(case, step_ends(case)[-1])
        return super().reason_against(case, impl) or impl.reason_against(last)

    def core_case(self, case: Case) -> Case:
        return step_case(case, case.seq_len + case.query_tokens)

    def tensors(self, case: Case) -> Tensors:
        """x_BNE and wq, wk, wv, wo of each layer, or what is in their place where it keeps latents.

        One that reads another's keys has a wk and a wv all the same, and does not use them.
        """
        tokens = case.seq_len + (case.new_tokens or 1)
        shapes: dict[str, tuple[int, ...]] = {"x": (case.batch, tokens, case.model_width)}
        shapes |= weights_of(case)
        return {
            f"{name}{number or ''}": empty(case, shape)
            for number in range(case.layers)
            for name, shape in shapes.items()
        }

    def fill(self, case: Case, tensors: Tensors, draw: Draw) -> None:
        fill_normal(tensors.values(), draw.seed)
        for name, x in tensors.items():
            if name.startswith("sink"):
                fill_sinks(x, case.total_len, draw.seed)
            elif not name.startswith("x"):
                x.mul_(x.shape[1] ** -0.5)
        for number, own in enumerate(each_layer(case, tensors)):
            if draw.needles and number in keys_of_layers(case):
                plant_cached_needles(case, own)
            own["wq"].mul_(draw.query_amplitude)

    def bind(self, case: Case, impl: Implementation, tensors: Tensors) -> Bound:
        generate = Generate(case, impl, tensors)
        return Bound(
            call=generate,
            named=lambda steps: {"o": torch.cat(steps, dim=1)},
            refresh=generate.refresh,
            grad=False,
            units=case.new_tokens or 1,
            core=generate.core,
        )

    def plain(
        self,
        case: Case,
        tensors: Tensors,
        *,
        terms: bool,
        core: Core = plain_attention,
        as_read: AsRead | None = None,
    ) -> PlainResult:
        """The output of every layer; `as_read` makes of keys and values what a cache gives back."""
        every = each_layer(case, tensors)
        outputs = [
            plain_layer(case, own, every[number], core, as_read, terms)
            for own, number in zip(every, keys_of_layers(case), strict=True)
        ]
        o, *squares = (torch.cat(parts, dim=-1) for parts in zip(*outputs, strict=True))
        return PlainResult(values={"o": o}, terms={"o": squares[0]} if squares else {})

    def truth(self, case: Case, tensors: Tensors, impl: Implementation | None = None) -> Reference:
        """As for all; a cache that rounds may err by twice as much as its rounding alone makes.

        It is held against exact keys and values. Its own rounding, by its definition, is no truth
        to be held to bit by bit: a key that lies between two codes falls to either side.
        """
        as_read = as_read_of(case)
        if as_read is None:
            return super().truth(case, tensors, impl)
        plain = functools.partial(self.plain, case, core=core_of(impl))
        return reference_of(case, tensors, plain, functools.partial(plain, as_read=as_read))

    def approximates(self, case: Case) -> bool:
        return cache_of(case)[0].lossy

    def costs(self, case: Case, impl: Implementation) -> dict[str, int | None]:
        """FLOPs and traffic per token; the predicted workspace is that of a whole generation."""
        steps = (replace(step_case(case, n), seq_len=case.query_tokens) for n in step_ends(case))
        useful = sum(map(impl.useful, steps)) if impl.useful else None
        reads_all = unread_keys(self.core_case(case), impl) == 0
        return {
            "flops_useful": costs.decode_flops_useful(case, useful),
            "flops_executed": _flops_of(case, impl.flops) if impl.flops else None,
            "bytes_min": costs.decode_bytes_min(case) if reads_all else None,
            "memory_predicted_bytes": _workspace(case, impl),
            "cache_bytes": cache_bytes(case),
        }

    def live_bytes(self, case: Case, found: Mapping[str, Any]) -> tuple[int, int]:
        """The cache beside inputs and outputs; that it is made wide or gathered is left out."""
        return costs.decode_bytes_given(case), found["cache_bytes"]

    def why_flops(self, case: Case, flops: int) -> list[str]:
        kind, _ = cache_of(case)
        if kind.all_keys:
            return [kind.doc]
        longer = step_case(case, case.seq_len + case.query_tokens).mask.lengths
        return ["places of the buffer that hold no token are multiplied, too"] if longer else []


def _workspace(case: Case, impl: Implementation) -> Estimate | None:
    """Estimate the bytes that a generation allocates beyond its outputs, in its last step.

    It holds q, k, v, o and y of its tokens twice, as made and as laid out or turned; keys and
    values that the cache makes again, or that half precision packs; and what the core takes.
    """
    (kind, _), seen, end = cache_of(case), as_seen(case), step_ends(case)[-1]
    taken = impl.workspace(step_case(case, end)) if impl.workspace else None
    if taken is None:
        return None
    queries = end if kind.all_queries else case.query_tokens
    token = seen.kv_heads * (seen.head_dim + seen.value_dim)  # of k and v
    made = queries * (seen.heads * (seen.head_dim + seen.value_dim) + case.model_width)
    made += token * (end if kind.all_keys else case.query_tokens)
    packed = case.device == "cpu" and case.element_bytes < 4
    copies = (1 + case.layers) * kind.grows + kind.all_keys + 2 * packed
    return Estimate(case.batch * case.element_bytes * (2 * made + copies * token * end) + taken)


def _flops_of(case: Case, core_flops: SizeFormula) -> int:
    """FLOPs per token of a generation whose core executes `core_flops` of each step."""
    kind, total = cache_of(case)[0], 0
    for end in step_ends(case):
        step = step_case(case, end)
        keys = len(set(keys_of_layers(case))) * (end if kind.all_keys else case.query_tokens)
        tokens = case.layers * step.seq_len, keys
        total += case.layers * core_flops(step)
        total += costs.projection_flops(case, *tokens) + costs.rotation_flops(case, *tokens)
    return total // (case.new_tokens or 1)


WORKLOADS.add("decode", _Decode())
