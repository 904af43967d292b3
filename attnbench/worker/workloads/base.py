"""What every workload answers: its tensors, the callable that is timed, the truth, the costs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from attnbench.api import Implementation
from attnbench.base.registry import Registry
from attnbench.schema.case import Case
from attnbench.worker.inputs import Draw, Tensors
from attnbench.worker.reference import Truth


@dataclass(frozen=True, kw_only=True)
class Bound:
    """A core bound to its inputs.

    `call()` is what is timed; `named(result)` names the tensors it returned; `refresh()` redoes
    what was prepared from the inputs (a graph, a cache) after they were overwritten in place.
    `grad` says whether the call needs autograd; a call does `units` units of work (tokens).
    """

    call: Callable[[], Any]
    named: Callable[[Any], dict[str, torch.Tensor]]
    refresh: Callable[[], None]
    grad: bool
    units: int = 1


class Workload(Protocol):
    """One workload. All sizes come from the case; costs are for its pass.

    What planning must know of it is its row in `attnbench.theory.traits.TRAITS`, by the same
    name.
    """

    def reason_against(self, case: Case, impl: Implementation) -> str | None:
        """Why this pair cannot run, or None."""

    def tensors(self, case: Case, *, strided: bool = False) -> Tensors:
        """Uninitialised inputs by name."""

    def fill(self, case: Case, tensors: Tensors, draw: Draw) -> None:
        """Overwrite the inputs in place."""

    def bind(self, case: Case, impl: Implementation, tensors: Tensors) -> Bound:
        """Build the core, prepare what is not timed, return the callable."""

    def truth(self, case: Case, tensors: Tensors) -> Truth:
        """Float64 results and allowed errors for the inputs as they are now."""

    def costs(self, case: Case, impl: Implementation) -> dict[str, int | None]:
        """flops_useful, flops_executed, bytes_min (each per unit), memory_predicted_bytes."""

    def why_flops(self, case: Case, flops: int) -> list[str]:
        """In plain words, why `flops` a unit are not the useful ones; empty where unknown."""


WORKLOADS: Registry[Workload] = Registry("workload", "--workload")
