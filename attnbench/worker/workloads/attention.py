"""Workload `attention`: q, k, v given, o asked for; forward, backward, or both."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from attnbench.api import Estimate, Implementation
from attnbench.schema.case import Case
from attnbench.theory import costs
from attnbench.worker.inputs import (
    Draw,
    Tensors,
    empty,
    fill_local,
    fill_normal,
    fill_sinks,
    inputs_of,
    needle_pairs,
    wanted_keys,
)
from attnbench.worker.positions import rotation
from attnbench.worker.reference import Core, PlainResult, plain_attention
from attnbench.worker.workloads.base import WORKLOADS, Bound, Workload, bind_pass, unread_keys


def with_position(core: Callable[..., Any], case: Case) -> Callable[..., Any]:
    """The core with the case's position encoding applied to q and k inside the call."""
    turn_q = rotation(case, case.kv_len - case.seq_len, case.seq_len, case.kv_len)
    turn_k = rotation(case, 0, case.kv_len, case.kv_len)
    if turn_q is None or turn_k is None:
        return core
    return lambda q, k, v, *sink: core(turn_q(q), turn_k(k), v, *sink)


class _Attention(Workload):
    """q_BHLD, k_BGSD, v_BGSV -> o_BHLV: O(n²d)."""

    def tensors(self, case: Case) -> Tensors:
        """q_BHLD, k_BGSD, v_BGSV, sink_H of sinks and, where the pass differentiates, do_BHLV."""
        tensors = inputs_of(case) | ({"sink": empty(case, (case.heads,))} if case.sinks else {})
        tensors = {name: x.requires_grad_(case.needs_grad) for name, x in tensors.items()}
        if case.needs_grad:
            shape = case.batch, case.heads, case.seq_len, case.value_dim
            tensors["do"] = empty(case, shape)
        return tensors

    def fill(self, case: Case, tensors: Tensors, draw: Draw) -> None:
        if case.sinks:
            fill_sinks(tensors["sink"], case.kv_len, draw.seed)
        if draw.local:
            q, k, v = (tensors[name] for name in "qkv")
            fill_local(q, k, v, case.softmax_scale, draw.seed)
            return
        fill_normal((x for name, x in tensors.items() if name != "sink"), draw.seed)
        with torch.no_grad():
            if draw.needles:
                plant_needles(tensors["q"], tensors["k"], case, draw.seed)
            tensors["q"].mul_(draw.query_amplitude)
            if draw.score_offset:  # half of it in each: neither is so long that it rounds away
                share = math.sqrt(abs(draw.score_offset) / case.softmax_scale)
                tensors["q"][..., 0] = share
                tensors["k"][..., 0] = math.copysign(share, draw.score_offset)

    def bind(self, case: Case, impl: Implementation, tensors: Tensors) -> Bound:
        inputs = tuple(tensors[name] for name in case.inputs)
        core = with_position(impl.build(case), case)

        def named(gradients: tuple[torch.Tensor, ...]) -> dict[str, torch.Tensor]:
            asked = ["d" + name for name in case.inputs if tensors[name].requires_grad]
            return dict(zip(asked, gradients, strict=True))

        return bind_pass(case.pass_, core, inputs, tensors.get("do"), named)

    def plain(
        self, case: Case, tensors: Tensors, *, terms: bool, core: Core = plain_attention
    ) -> PlainResult:
        return core(case, tensors, terms=terms)

    def costs(self, case: Case, impl: Implementation) -> dict[str, int | None]:
        rotating = costs.rotation_flops(case, case.seq_len, case.kv_len)
        unread = unread_keys(case, impl)
        unread_bytes = (unread or 0) * (case.head_dim + case.value_dim) * case.element_bytes
        return {
            "flops_useful": (impl.useful or costs.attention_flops_useful)(case),
            "flops_executed": impl.flops(case) + rotating if impl.flops else None,
            "bytes_min": None if unread is None else costs.attention_bytes_min(case) - unread_bytes,
            "memory_predicted_bytes": rotated_workspace(case, impl),
        }

    def live_bytes(self, case: Case, found: Mapping[str, Any]) -> tuple[int, int]:
        """All keys, also those that no query sees."""
        return costs.attention_bytes_given(case), 0

    def why_flops(self, case: Case, flops: int) -> list[str]:
        rotating = costs.rotation_flops(case, case.seq_len, case.kv_len)
        turned = ["products with rotation matrices"] if rotating else []
        return costs.why_core_flops(case, flops - rotating) + turned


def plant_needles(q_BHLD: torch.Tensor, k_BGSD: torch.Tensor, case: Case, seed: int) -> None:
    """Turn a few keys towards one query each, so that a lost key cannot hide in rounding noise.

    A position encoding is undone first, so that it is so after both were rotated. Of the query
    heads that share a key/value head, the first one's query is used.
    """
    pairs = needle_pairs(case.mask, case.seq_len, case.kv_len, seed)
    if not pairs:
        return
    queries, keys = (torch.tensor(side, device=q_BHLD.device) for side in zip(*pairs, strict=True))
    rows_BGMD = q_BHLD[:, :: case.heads // case.kv_heads, queries]
    places = queries + (case.kv_len - case.seq_len)
    wanted_BMK = wanted_keys(case, rows_BGMD, places, keys, case.kv_len)
    wanted_BMGD = wanted_BMK.view(case.batch, len(keys), case.kv_heads, -1)
    k_BGSD[:, :, keys] = wanted_BMGD.transpose(1, 2).to(k_BGSD.dtype)


def rotated_workspace(case: Case, impl: Implementation) -> int | None:
    """Workspace of a core (bytes); with rotary encoding q and k are there a second time, rotated.

    At most, since turning them takes as much again for a moment, and a backward pass turns their
    gradients back beside them. In another layout than BHLD a core may copy q, k and v.
    """
    core_bytes = impl.workspace(case) if impl.workspace else None
    turned, moved = case.position.encoding.kind == "rotary", case.layout != "BHLD"
    if core_bytes is None or not (turned or moved):
        return core_bytes
    keys = case.kv_heads * case.kv_len
    numbers = (case.heads * case.seq_len + keys) * case.head_dim
    numbers = (2 + 2 * case.needs_grad) * turned * numbers + moved * (
        numbers + keys * case.value_dim
    )
    return Estimate(case.batch * numbers * case.element_bytes + core_bytes)


WORKLOADS.add("attention", _Attention())
