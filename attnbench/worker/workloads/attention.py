"""Workload `attention`: q, k, v given, o asked for; forward, backward, or both."""

from __future__ import annotations

import torch

from attnbench.api import AttentionCall, Implementation
from attnbench.schema.case import Case
from attnbench.theory import costs
from attnbench.worker.inputs import Draw, Tensors, attention_tensors, fill_attention
from attnbench.worker.positions import rotation
from attnbench.worker.reference import Truth, attention_truth
from attnbench.worker.workloads.base import WORKLOADS, Bound
from attnbench.worker.workloads.passes import Gradients, bind_pass


def with_position(core: AttentionCall, case: Case) -> AttentionCall:
    """The core with the case's position encoding applied to q and k inside the call."""
    turn_q = rotation(case, case.kv_len - case.seq_len, case.seq_len)
    turn_k = rotation(case, 0, case.kv_len)
    if turn_q is None or turn_k is None:
        return core
    return lambda q, k, v: core(turn_q(q), turn_k(k), v)


class AttentionWorkload:
    """q_BHLD, k_BGSD, v_BGSV -> o_BHLV: O(n²d)."""

    def reason_against(self, case: Case, impl: Implementation) -> str | None:
        """The implementation's own limits are all there is."""
        return impl.reason_against(case)

    def tensors(self, case: Case, *, strided: bool = False) -> Tensors:
        """q, k, v and, where the pass differentiates, do."""
        return attention_tensors(case, strided=strided)

    def fill(self, case: Case, tensors: Tensors, draw: Draw) -> None:
        """Normal random numbers, needles where asked for."""
        fill_attention(case, tensors, draw)

    def bind(self, case: Case, impl: Implementation, tensors: Tensors) -> Bound:
        """Bind the core for the case's pass; for `backward` the forward graph is held."""
        core = with_position(impl.build(case), case)
        q, k, v = (tensors[name] for name in "qkv")
        return bind_pass(case.pass_, core, (q, k, v), tensors.get("do"), _named_gradients)

    def truth(self, case: Case, tensors: Tensors) -> Truth:
        """The float64 reference."""
        return attention_truth(case, tensors)

    def costs(self, case: Case, impl: Implementation) -> dict[str, int | None]:
        """From sizes alone; null where the implementation declares no formula."""
        core_bytes = impl.workspace(case) if impl.workspace else None
        return {
            "flops_useful": costs.attention_flops_useful(case),
            "flops_executed": impl.flops(case) if impl.flops else None,
            "bytes_min": costs.attention_bytes_min(case),
            "memory_predicted_bytes": rotated_workspace(case, core_bytes),
        }

    def why_flops(self, case: Case, flops: int) -> list[str]:
        """What the mask wastes, and the scores that a backward pass does not make again."""
        return costs.why_core_flops(case, flops)


def rotated_workspace(case: Case, core_bytes: int | None) -> int | None:
    """Workspace of a core (bytes) with rotary encoding around it, forward.

    Turning a tensor of X bytes holds X for the two turned halves and X for the result, the
    latter until the core is done. None for the backward passes, where it is not predicted.
    """
    if core_bytes is None or case.position.name == "none":
        return core_bytes
    if case.pass_ != "forward":
        return None
    per_token = case.batch * case.head_dim * case.element_bytes
    halves = case.batch * (case.head_dim // 2 * 2) * case.element_bytes
    q_tokens, k_tokens = case.heads * case.seq_len, case.kv_heads * case.kv_len
    q_bytes, k_bytes = q_tokens * per_token, k_tokens * per_token
    turning = max(q_bytes + q_tokens * halves, q_bytes + k_bytes + k_tokens * halves)
    output = case.batch * case.heads * case.seq_len * case.value_dim * case.element_bytes
    return max(turning - output, q_bytes + k_bytes + core_bytes)


def _named_gradients(gradients: Gradients) -> dict[str, torch.Tensor]:
    return dict(zip(("dq", "dk", "dv"), gradients, strict=True))


WORKLOADS.add("attention", AttentionWorkload())
