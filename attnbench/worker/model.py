"""What a model has around attention, in plain torch on random weights: a layer's MLP, and the head.

Norms, residuals, biases, the choice of experts and the loss are left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch.nn.functional import gelu, linear, relu, silu

from attnbench.base import units
from attnbench.machine.facts import free_bytes
from attnbench.schema.case import Case
from attnbench.schema.model import ModelSizes
from attnbench.worker.inputs import Tensors, empty
from attnbench.worker.workloads.base import bind_pass

FEWEST_TOKENS, FEWEST_EXPERTS = 256, 8  # from there on time is linear in them
_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": silu, "gelu": gelu, "gelu-tanh": partial(gelu, approximate="tanh"), "relu": relu,
}  # fmt: skip
Part = Literal["mlp", "head"]


@dataclass(frozen=True, kw_only=True)
class Work:
    """`copies` of an MLP with `inner` features, or the head, on so many `tokens`."""

    copies: int
    tokens: int
    inner: int


def work_of(
    part: Part, sizes: ModelSizes, case: Case, *, cut: bool
) -> tuple[list[Work], float, str]:
    """What a layer's MLP or the head computes for the case; of what is `cut`, the share and words.

    Where text is generated the head gives the logits of the last token alone. Every expert gets as
    many tokens as any other.
    """
    tokens = case.batch * (case.query_tokens if case.workload == "decode" else case.seq_len)
    if part == "head" and case.workload == "layer" and not case.needs_grad:
        tokens = case.batch
    if part == "head" or sizes.experts == 1:
        few = min(tokens, FEWEST_TOKENS) if cut else tokens
        inner = sizes.vocab if part == "head" else sizes.inner
        return [Work(copies=1, tokens=few, inner=inner)], few / tokens, f"{few} of {tokens} tokens"
    at_work = min(sizes.experts, tokens * sizes.chosen)
    few = min(at_work, FEWEST_EXPERTS) if cut else at_work
    each = math.ceil(tokens * sizes.chosen / at_work)
    work = [Work(copies=few, tokens=each, inner=sizes.inner)]
    if sizes.shared:
        few_tokens = math.ceil(tokens * few / at_work)
        work.append(Work(copies=1, tokens=few_tokens, inner=sizes.shared))
    return work, few / at_work, f"{few} of {at_work} experts"


def call_of(
    part: Part, sizes: ModelSizes, case: Case, work: list[Work], weights: Tensors
) -> Callable[[], Any]:
    """The pass of the case through an MLP, or the head; `weights` are made where they lack some.

    Raises:
        MemoryError: they would take most of the memory that is free.
    """
    width, calls = case.model_width, list[Callable[[], Any]]()

    def drawn(name: str, *shape: int) -> torch.Tensor:
        key = f"{name} {shape} {case.dtype}"
        if key not in weights:
            needed = math.prod(shape) * case.element_bytes * (2 if case.needs_grad else 1)
            if needed > (free := free_bytes(case.device) or needed) / 2:
                raise MemoryError(f"{units.size(needed)} of {units.size(free)} that are free")
            new = empty(case, shape).normal_().mul_(shape[-1] ** -0.5)
            weights[key] = new.requires_grad_(case.needs_grad)
        return weights[key]

    def mlp(x_TE: torch.Tensor, *w: torch.Tensor) -> torch.Tensor:
        h_TI = _ACTIVATIONS[sizes.activation](linear(x_TE, w[0]))
        return linear(h_TI * linear(x_TE, w[1]) if sizes.gated else h_TI, w[-1])

    for of in work:
        for number in range(of.copies):
            up = ("head",) if part == "head" else ("gate", "up") if sizes.gated else ("up",)
            inputs = [drawn("x", of.tokens, width)]
            inputs += [drawn(f"{name}{number}", of.inner, width) for name in up]
            if part == "mlp":
                inputs.append(drawn(f"down{number}", width, of.inner))
            function = mlp if part == "mlp" else linear
            do = None
            if case.needs_grad:
                do = drawn("do", of.tokens, inputs[-1].shape[0]).detach()
            calls.append(bind_pass(case.pass_, function, tuple(inputs), do, lambda _: {}).call)
    return calls[0] if len(calls) == 1 else lambda: [call() for call in calls]
