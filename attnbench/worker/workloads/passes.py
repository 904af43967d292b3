"""Forward, backward, or both of any function of tensors: what a workload's pass comes to."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from attnbench.worker.workloads.base import Bound

Function = Callable[..., torch.Tensor]
Gradients = tuple[torch.Tensor, ...]


def bind_pass(
    pass_: str,
    function: Function,
    inputs: tuple[torch.Tensor, ...],
    do: torch.Tensor | None,
    named: Callable[[Gradients], dict[str, torch.Tensor]],
) -> Bound:
    """`function(*inputs)` for a pass; `do` is the gradient of its result where one is asked for.

    `named` gives the gradients, one for each of the inputs, the names that the check knows. For
    `backward` the forward graph is held.
    """
    if pass_ == "forward":
        call: Callable[[], Any] = functools.partial(function, *inputs)
        return Bound(call=call, named=lambda o: {"o": o}, refresh=_nothing, grad=False)
    assert do is not None, "a pass that differentiates has a gradient to begin with"
    if pass_ == "both":
        both = functools.partial(_forward_backward, function, inputs, do)
        return Bound(
            call=both,
            named=lambda result: {"o": result[0]} | named(result[1]),
            refresh=_nothing,
            grad=True,
        )
    backward = _Backward(function, inputs, do)
    return Bound(call=backward, named=named, refresh=backward.refresh, grad=True)


def _nothing() -> None:
    """Nothing was prepared from the inputs."""


def _forward_backward(
    function: Function, inputs: tuple[torch.Tensor, ...], do: torch.Tensor
) -> tuple[torch.Tensor, Gradients]:
    o = function(*inputs)
    return o, torch.autograd.grad(o, inputs, do, allow_unused=True, materialize_grads=True)


class _Backward:
    """Only the backward pass: the graph is made once per content of the inputs, and retained."""

    def __init__(
        self, function: Function, inputs: tuple[torch.Tensor, ...], do: torch.Tensor
    ) -> None:
        self._function, self._inputs, self._do = function, inputs, do
        self.refresh()

    def refresh(self) -> None:
        with torch.enable_grad():
            self._o = self._function(*self._inputs)

    def __call__(self) -> Gradients:
        # An input that the output does not depend on has gradient 0, which the check then judges.
        return torch.autograd.grad(
            self._o,
            self._inputs,
            self._do,
            retain_graph=True,
            allow_unused=True,
            materialize_grads=True,
        )
