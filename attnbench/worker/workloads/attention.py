"""Workload `attention`: q, k, v given, o asked for; forward, backward, or both."""

from __future__ import annotations

import torch

from attnbench.api import AttentionCall, Estimate, Implementation
from attnbench.schema.case import Case
from attnbench.theory import costs
from attnbench.worker.inputs import Draw, Tensors, attention_tensors, fill_attention
from attnbench.worker.positions import rotation
from attnbench.worker.reference import PlainResult, plain_attention
from attnbench.worker.workloads.base import WORKLOADS, Bound, Workload, bind_pass


def with_position(core: AttentionCall, case: Case) -> AttentionCall:
    """The core with the case's position encoding applied to q and k inside the call."""
    turn_q = rotation(case, case.kv_len - case.seq_len, case.seq_len)
    turn_k = rotation(case, 0, case.kv_len)
    if turn_q is None or turn_k is None:
        return core
    return lambda q, k, v: core(turn_q(q), turn_k(k), v)


class _Attention(Workload):
    """q_BHLD, k_BGSD, v_BGSV -> o_BHLV: O(n²d)."""

    def tensors(self, case: Case, *, strided: bool = False) -> Tensors:
        return attention_tensors(case, strided=strided)

    def fill(self, case: Case, tensors: Tensors, draw: Draw) -> None:
        fill_attention(case, tensors, draw)

    def bind(self, case: Case, impl: Implementation, tensors: Tensors) -> Bound:
        inputs, core = tuple(tensors[name] for name in "qkv"), with_position(impl.build(case), case)

        def named(gradients: tuple[torch.Tensor, ...]) -> dict[str, torch.Tensor]:
            return dict(zip(("dq", "dk", "dv"), gradients, strict=True))

        return bind_pass(case.pass_, core, inputs, tensors.get("do"), named)

    def plain(self, case: Case, tensors: Tensors, *, terms: bool) -> PlainResult:
        return plain_attention(case, tensors, terms=terms)

    def costs(self, case: Case, impl: Implementation) -> dict[str, int | None]:
        return {
            "flops_useful": costs.attention_flops_useful(case),
            "flops_executed": impl.flops(case) if impl.flops else None,
            "bytes_min": costs.attention_bytes_min(case),
            "memory_predicted_bytes": rotated_workspace(case, impl),
        }

    def why_flops(self, case: Case, flops: int) -> list[str]:
        return costs.why_core_flops(case, flops)


def rotated_workspace(case: Case, impl: Implementation) -> int | None:
    """Workspace of a core (bytes); with rotary encoding q and k are there a second time, rotated.

    That is an estimate, since turning them takes as much again for a moment. None for the backward
    passes of a rotary encoding, where it is not known.
    """
    core_bytes = impl.workspace(case) if impl.workspace else None
    if core_bytes is None or case.position.name == "none":
        return core_bytes
    rows = case.heads * case.seq_len + case.kv_heads * case.kv_len
    rotated = case.batch * rows * case.head_dim * case.element_bytes
    return None if case.needs_grad else Estimate(rotated + core_bytes)


WORKLOADS.add("attention", _Attention())
