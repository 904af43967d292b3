"""Workloads: what is computed around a core implementation. Each module registers one.

A workload gives its tensors, the callable that is timed, the reference, and the costs.
"""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from attnbench.api import Implementation, Patterned
from attnbench.base.registry import Registry
from attnbench.schema.case import Case
from attnbench.worker.inputs import Draw, Tensors
from attnbench.worker.positions import reason_against_position
from attnbench.worker.reference import (
    Core,
    PlainResult,
    Reference,
    core_of,
    plain_attention,
    reference_of,
)

MOST_PAIRS = 2**24  # of a sparse method's pattern that is built to see which keys it reads
Gradients = tuple[torch.Tensor, ...]  # one for each of a pass's inputs


@dataclass(frozen=True, kw_only=True)
class Bound:
    """A core bound to its inputs.

    `call()` is what is timed; `named(result)` names the tensors it returned; `refresh()` redoes
    what was prepared from the inputs (a graph, a cache) after they were overwritten in place.
    `grad` says whether the call needs autograd; a call does `units` units of work (tokens). Of a
    layer, or a step, `core(heads)` gives the call of its attention alone; `heads` keeps what all
    implementations can share.
    """

    call: Callable[[], Any]
    named: Callable[[Any], dict[str, torch.Tensor]]
    refresh: Callable[[], None] = lambda: None
    grad: bool
    units: int = 1
    core: Callable[[Tensors], Callable[[], Any]] | None = None


def unread_keys(case: Case, impl: Implementation) -> int | None:
    """Keys that a sparse method's pattern admits to no query, in all items and key/value heads.

    None where the pattern is too large to look. With a query for each key, each sees itself.
    """
    if impl.definition is None or impl.family != "sparse" or case.seq_len >= case.kv_len:
        return 0
    if case.seq_len * case.kv_len > MOST_PAIRS:
        return None
    method = impl.definition(case)
    if not isinstance(method, Patterned):
        return 0
    sizes = case.batch, case.kv_heads, case.heads // case.kv_heads, case.kv_len
    seen_BHS = method.admitted.any(-2).expand(case.batch, case.heads, case.kv_len)
    return int((~seen_BHS.reshape(sizes).any(2)).sum())


class Workload(abc.ABC):
    """One workload. All sizes come from the case; costs are for its pass.

    What planning must know of it is its row in `attnbench.theory.traits`, by the same name.
    """

    def reason_against(self, case: Case, impl: Implementation) -> str | None:
        """Why the implementation cannot take a case that makes sense, or None."""
        return reason_against_position(case) or impl.reason_against(self.core_case(case))

    def core_case(self, case: Case) -> Case:
        """The case that the implementation sees."""
        return case

    @abc.abstractmethod
    def tensors(self, case: Case) -> Tensors:
        """Uninitialised inputs by name; matrices are (out features, in features)."""

    @abc.abstractmethod
    def fill(self, case: Case, tensors: Tensors, draw: Draw) -> None:
        """Overwrite the inputs in place by normal numbers; weights keep q, k and v normal."""

    @abc.abstractmethod
    def bind(self, case: Case, impl: Implementation, tensors: Tensors) -> Bound:
        """Build the core, prepare what is not timed, return the callable."""

    @abc.abstractmethod
    def plain(
        self, case: Case, tensors: Tensors, *, terms: bool, core: Core = plain_attention
    ) -> PlainResult:
        """The results by definition, in the dtype of the tensors; gradients where there is `do`.

        `core` is the definition of what is computed in the place of attention.
        """

    def truth(self, case: Case, tensors: Tensors, impl: Implementation | None = None) -> Reference:
        """Float64 results and allowed errors for the inputs as they are now."""
        plain = functools.partial(self.plain, case, core=core_of(impl))
        return reference_of(case, tensors, plain)

    def exact_output(self, case: Case, tensors: Tensors) -> torch.Tensor:
        """The output of exact attention for the inputs as they are now, in float64."""
        wide = {name: x.detach().double() for name, x in tensors.items() if name != "do"}
        return self.plain(case, wide, terms=False).values["o"]

    def approximates(self, case: Case) -> bool:
        """Whether what surrounds the core makes the output another than that of attention."""
        return False

    @abc.abstractmethod
    def costs(self, case: Case, impl: Implementation) -> dict[str, int | None]:
        """flops_useful, flops_executed, bytes_min (each per unit), memory_predicted_bytes.

        The last is exact, or an `Estimate`; None where the core declares none.
        """

    def live_bytes(self, case: Case, found: Mapping[str, Any]) -> tuple[int, int]:
        """Bytes of inputs and outputs, by the costs `found`; and of what is prepared, at least."""
        return found["bytes_min"], 0

    def why_flops(self, case: Case, flops: int) -> list[str]:
        """In plain words, why `flops` a unit are not the useful ones; empty where unknown."""
        return []


WORKLOADS: Registry[Workload] = Registry("workload", "--workload")


def bind_pass(
    pass_: str,
    function: Callable[..., torch.Tensor],
    inputs: tuple[torch.Tensor, ...],
    do: torch.Tensor | None,
    named: Callable[[Gradients], dict[str, torch.Tensor]],
) -> Bound:
    """`function(*inputs)` for a pass; `do` is the gradient of its result where one is asked for.

    `named` gives the gradients, one for each of the inputs that require one, the names that the
    check knows. For `backward` the graph is made once per content of the inputs, and held.
    """
    if pass_ == "forward":
        return Bound(
            call=functools.partial(function, *inputs), named=lambda o: {"o": o}, grad=False
        )
    # An input that the output does not depend on has gradient 0, which the check then judges.
    asked = tuple(x for x in inputs if x.requires_grad)
    gradients = functools.partial(
        torch.autograd.grad, grad_outputs=do, allow_unused=True, materialize_grads=True
    )
    if pass_ == "both":

        def both() -> tuple[torch.Tensor, Gradients]:
            o = function(*inputs)
            return o, gradients(o, asked)

        return Bound(call=both, named=lambda result: {"o": result[0]} | named(result[1]), grad=True)
    held: list[torch.Tensor] = []

    def refresh() -> None:
        with torch.enable_grad():
            held[:] = [function(*inputs)]

    refresh()
    return Bound(
        call=lambda: gradients(held[0], asked, retain_graph=True),
        named=named,
        refresh=refresh,
        grad=True,
    )
