"""What a model has around attention, in plain torch on random weights: a layer's MLP, and the head.

Norms, residuals, biases, the choice of experts and the loss are left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.nn.functional import gelu, linear, relu, silu

from attnbench.schema.case import Case
from attnbench.schema.messages import ModelSizes
from attnbench.worker.inputs import Tensors, empty
from attnbench.worker.workloads.base import bind_pass

FEWEST_TOKENS = 256  # from there on time is linear in them
MOST_FLOPS = {"cpu": 1e11, "cuda": 1e14}  # of a forward pass, about a second: more is not timed
_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": silu, "gelu": gelu, "gelu-tanh": partial(gelu, approximate="tanh"), "relu": relu,
}  # fmt: skip


def part_of(
    sizes: ModelSizes, case: Case, weights: Tensors, *, head: bool
) -> tuple[Callable[[], Any], float, str]:
    """The case's pass through a layer's MLP, or the head; which share of it that is, and in words.

    Where text is generated the head gives the logits of the last token alone. Every expert gets as
    many tokens as any other. `weights` are made where they lack some.
    """
    step = case.query_tokens if case.workload == "decode" else case.seq_len
    tokens = case.batch * (1 if head and case.workload == "layer" and not case.needs_grad else step)
    width, inner, matrices = case.model_width, sizes.inner, 2 + sizes.gated
    if head:
        inner, matrices = sizes.vocab, 1
    experts = 1 if head else min(sizes.experts, tokens * sizes.chosen)
    each = math.ceil(tokens * sizes.chosen / experts) if experts > 1 else tokens
    most = MOST_FLOPS[case.device] / (2 * matrices * width * inner)  # tokens
    timed = min(experts, max(1, int(most / each)))
    few = min(each, max(FEWEST_TOKENS, int(most))) if experts == 1 else each

    def drawn(name: str, *shape: int) -> torch.Tensor:
        if (key := f"{name} {shape} {case.dtype}") not in weights:
            weights[key] = empty(case, shape).normal_().mul_(shape[-1] ** -0.5)
        return weights[key].requires_grad_(case.needs_grad)

    def mlp(x_TE: torch.Tensor, *w: torch.Tensor) -> torch.Tensor:
        h_TI = _ACTIVATIONS[sizes.activation](linear(x_TE, w[0]))
        return linear(h_TI * linear(x_TE, w[1]) if sizes.gated else h_TI, w[-1])

    calls, x_TE = [], drawn("x", few, width)
    do = drawn("do", few, inner if head else width).detach() if case.needs_grad else None
    for number in range(timed):
        w = [drawn(f"w{number}.{i}", inner, width) for i in range(matrices - (not head))]
        w += [] if head else [drawn(f"down{number}", width, inner)]
        function = linear if head else mlp
        calls.append(bind_pass(case.pass_, function, (x_TE, *w), do, lambda _: {}).call)
    words = f"{timed} of {experts} experts" if experts > 1 else f"{few} of {tokens} tokens"
    return lambda: [call() for call in calls], timed * few / (experts * each), words
