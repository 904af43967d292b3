"""Workload `decode`: T new tokens after a context of n, one at a time, through projections.

The hidden states of all n + T tokens are given, so that every step does the work of generation
without a vocabulary. What differs between `--caches` is where the keys and values come from.
"""

from __future__ import annotations

import dataclasses
import math
from functools import partial

import torch

from attnbench.api import AttentionCall, Estimate, Implementation, SizeFormula
from attnbench.schema.case import Case, Position, parse_mask
from attnbench.theory import costs
from attnbench.theory.traits import impossible
from attnbench.worker.inputs import Draw, Tensors, empty, fill_normal
from attnbench.worker.positions import turned, unturned
from attnbench.worker.reference import PlainResult, Reference, plain_attention, reference_of
from attnbench.worker.workloads import WORKLOADS, Bound
from attnbench.worker.workloads.caches import CACHES, DecodeLayer


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


def plant_cached_needles(case: Case, tensors: Tensors) -> None:
    """Turn one token of the context towards the query of each new token.

    The hidden state x_j is chosen, by least squares through wk, so that the key of each
    key/value head aligns with the query of its first query head at step t, with a logit of
    ln(n) + 6 where the width allows it exactly: a cache that lost the token shows in bfloat16.
    """
    layer = DecodeLayer(dataclasses.replace(case, position=Position()), tensors)
    steps = range(min(layer.total - layer.context, layer.context))
    places = torch.tensor([layer.context + t for t in steps], device=case.device)
    # Spread over the context: its first token, its last one, and some between.
    keys = torch.linspace(0, layer.context - 1, len(steps), device=case.device).long()
    q_BHTD = layer.queries(slice(layer.context, layer.context + len(steps)), None).double()
    rows_BGTD = turned(q_BHTD[:, :: case.heads // case.kv_heads], case.position, places)
    aligned = unturned(rows_BGTD, case.position, keys)
    logit = math.log(layer.context + 1) + 6.0
    size = aligned.square().sum(-1, keepdim=True).clamp_min(1e-3) * case.softmax_scale
    wanted_BTK = (aligned * logit / size).transpose(1, 2).flatten(2)
    solved_BTE = wanted_BTK @ torch.linalg.pinv(tensors["wk"].double()).mT
    tensors["x"][:, keys] = solved_BTE.to(tensors["x"].dtype)


class _Generate:
    """The timed call: T steps from the same prefilled state; returns one (B, 1, E) a step."""

    def __init__(self, case: Case, impl: Implementation, tensors: Tensors) -> None:
        steps = range(case.new_tokens or 1)
        self._cache = CACHES.get(case.cache or "static")
        self._layer = layer = DecodeLayer(case, tensors)
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
            y = layer.output(core(q, k, v))
            # A view of the last token would keep the outputs of all of them alive.
            outputs.append(y[:, -1:].clone() if y.shape[1] > 1 else y)
        return outputs


class DecodeWorkload:
    """x_BNE -> the layer's output for the last T tokens, one step a token."""

    def reason_against(self, case: Case, impl: Implementation) -> str | None:
        """Forward only; otherwise what the core says of its first step."""
        if impossible(case):
            return impossible(case)
        if case.mask.after is None:
            return f"decode is causal; mask {case.mask.text} makes no sense"
        return impl.reason_against(step_case(case, 0))

    def tensors(self, case: Case, *, strided: bool = False) -> Tensors:
        """x_BNE and the weights wq, wk, wv, wo, each (out features, in features)."""
        e, d, v = case.model_width, case.head_dim, case.value_dim
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
        if draw.needles:
            plant_cached_needles(case, tensors)
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

    def truth(self, case: Case, tensors: Tensors) -> Reference:
        """The full forward pass over all tokens, of which the last T are compared."""
        return reference_of(case, tensors, partial(_plain_layer, case))

    def costs(self, case: Case, impl: Implementation) -> dict[str, int | None]:
        """FLOPs and traffic per token; the predicted workspace is that of a whole generation."""
        return {
            "flops_useful": costs.decode_flops_useful(case),
            "flops_executed": _flops_executed(case, impl),
            "bytes_min": costs.decode_bytes_min(case),
            "memory_predicted_bytes": _workspace(case, impl),
        }

    def why_flops(self, case: Case, flops: int) -> list[str]:
        """What the kind of cache does again at each step, and keys that the mask hides."""
        cache, tokens = CACHES.get(case.cache or "static"), case.new_tokens or 1
        if flops == costs.decode_flops_useful(case):
            return []
        reasons = []
        if cache.all_queries:
            reasons.append("each step runs the layer for all tokens, not for the new one alone")
        elif cache.all_keys:
            reasons.append("each step makes the keys and values of all tokens again")
        every_key = _flops_of(case, lambda step: costs.core_flops(step, step.seq_len * step.kv_len))
        if flops == every_key and not step_case(case, tokens - 1).unmasked:
            reasons.append("every pair of the steps is multiplied, hidden by the mask or not")
        return reasons


def _plain_layer(case: Case, tensors: Tensors, *, terms: bool) -> PlainResult:
    """The layer's output; the floor of its error scales with it, so that it has no terms.

    Token by token, as generation goes: the sum over n keys of a single query is added up in
    another way than those of eight at once, and rounds otherwise (float32, n = 32768: seven times
    the error).
    """
    del terms
    layer = DecodeLayer(dataclasses.replace(case, position=Position()), tensors)
    k, v = layer.keys_values(slice(0, layer.total), None)
    q = layer.queries(slice(layer.context, layer.total), None)
    mask = case.mask if case.mask.after is not None else parse_mask("causal")
    steps = []
    for t in range(layer.total - layer.context):
        end = layer.context + t + 1
        step = dataclasses.replace(case, workload="attention", seq_len=1, kv_len=end, mask=mask)
        seen = {"q": q[:, :, t : t + 1], "k": k[:, :, :end], "v": v[:, :, :end]}
        steps.append(plain_attention(step, seen).values["o"])
    return PlainResult(values={"o": layer.output(torch.cat(steps, dim=2))})


def _workspace(case: Case, impl: Implementation) -> int | None:
    """Bytes that a generation allocates beyond its outputs, at its worst moment.

    Step t holds the outputs so far and q; then the new token's k and v and, where the cache
    grows, keys and values of both lengths; then the longer ones, o and what the core takes.
    None without a cache: a core is then handed strided keys, of which it may make copies. None
    in half precision on CPU, where oneDNN packs the operands of products as the processor wants.
    """
    cache, tokens = CACHES.get(case.cache or "static"), case.new_tokens or 1
    packed = case.device == "cpu" and case.element_bytes < 4
    if impl.workspace is None or cache.all_keys or packed:
        return None
    element = case.batch * case.element_bytes
    y = element * case.model_width
    q, o = element * case.heads * case.head_dim, element * case.heads * case.value_dim
    token = element * case.kv_heads * (case.head_dim + case.value_dim)  # of k and v
    peak, exact = 0, True
    for t in range(tokens):
        longer = token * (case.seq_len + t + 1) if cache.grows else 0
        shorter = token * (case.seq_len + t) if cache.grows and t else 0
        taken = impl.workspace(step_case(case, t))
        if taken is None:
            return None
        exact &= not isinstance(taken, Estimate)
        core = o + max(y, taken)
        peak = max(peak, t * y + q + max(token + shorter + longer, longer + core))
    return peak - tokens * y if exact else Estimate(peak - tokens * y)


def _flops_executed(case: Case, impl: Implementation) -> int | None:
    return None if impl.flops is None else _flops_of(case, impl.flops)


def _flops_of(case: Case, core_flops: SizeFormula) -> int:
    """FLOPs per token of a generation whose core executes `core_flops` of each step."""
    cache, tokens = CACHES.get(case.cache or "static"), case.new_tokens or 1
    total = 0
    for t in range(tokens):
        step = step_case(case, t)
        total += core_flops(step)
        total += costs.projection_flops(case, step.seq_len, step.kv_len if cache.all_keys else 1)
    return total // tokens


WORKLOADS.add("decode", DecodeWorkload())
