"""All that an author of an implementation needs: two decorators, the case, and dense masks.

    from attnbench.api import attention

    @attention("mine", time="n^2 d", memory="n^2")
    def mine(q_BHLD, k_BGSD, v_BGSV, *, causal, scale):
        ...
        return o_BHLV

One that must prepare (compile, allocate, build a mask) or that takes other masks uses
`attention_builder` instead and returns the callable that is timed.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from attnbench.api.compiling import compile_alone, reason_against_compiling
from attnbench.api.masks import dense_mask, hidden_and_blind, mask_for
from attnbench.base.registry import Registry
from attnbench.errors import UsageError
from attnbench.schema.case import Case, Mask, Position
from attnbench.theory.costs import core_flops, output_bytes
from attnbench.theory.law import parse
from attnbench.theory.traits import TRAITS

__all__ = [
    "Case",
    "Implementation",
    "Mask",
    "Position",
    "attention",
    "attention_builder",
    "compile_alone",
    "core_flops",
    "dense_mask",
    "hidden_and_blind",
    "mask_for",
    "output_bytes",
    "reason_against_compiling",
    "recurrent_builder",
]


class AttentionCall(Protocol):
    """What is timed: q_BHLD, k_BGSD, v_BGSV positionally, o_BHLV back.

    Of a recurrent network: x_BLE and the weights w_ih, w_hh, (3E, E) each, and o_BLE back.
    """

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, /) -> torch.Tensor: ...


SizeFormula = Callable[[Case], int]


@dataclass(frozen=True, kw_only=True)
class Implementation:
    """A named way to compute attention, with what it can take and how it should grow.

    `time`, `memory` (the workspace) and `flops_law` (None: as `time`) are laws such as `n^2 d`
    for masks full and causal; `flops(case)` is what one call executes, `workspace(case)` the
    bytes it allocates beyond its output (None where that is not known), both for the case's
    pass. `workloads` are those in which it serves: as the core, or as the recurrent network.
    `dtypes`, `devices`, `passes` and `masks` (by name) list what it takes; `gqa` and
    `value_dims` whether it takes fewer key/value heads, and a value width other than D.
    `compiles` says that the first call compiles, so that its time goes to `compile_s`.
    """

    name: str
    build: Callable[[Case], AttentionCall]
    time: str | None = None
    memory: str | None = None
    flops_law: str | None = None
    flops: SizeFormula | None = None
    workspace: Callable[[Case], int | None] | None = None
    dtypes: tuple[str, ...] = ("float32", "bfloat16", "float16", "float64")
    devices: tuple[str, ...] = ("cpu", "cuda")
    passes: tuple[str, ...] = ("forward", "backward", "both")
    masks: tuple[str, ...] = ("full", "causal")
    workloads: tuple[str, ...] = ("attention", "layer", "decode")
    gqa: bool = True
    value_dims: bool = True
    compiles: bool = False
    supports: Callable[[Case], str | None] | None = None
    doc: str = ""
    file: str = ""

    def reason_against_workload(self, workload: str) -> str | None:
        """Why it has no place in the workload, or None."""
        if workload in self.workloads:
            return None
        return f"serves {', '.join(self.workloads)}, not {workload}"

    def reason_against(self, case: Case) -> str | None:
        """Why this implementation cannot take the case, or None where it can."""
        limits = (
            (case.dtype in self.dtypes, f"takes {', '.join(self.dtypes)}, not {case.dtype}"),
            (case.device in self.devices, f"runs on {', '.join(self.devices)}, not {case.device}"),
            (case.pass_ in self.passes, f"has no {case.pass_} pass"),
            (
                case.unmasked or case.mask.text.partition(":")[0] in self.masks,
                f"takes masks {', '.join(self.masks)}, not {case.mask.text}",
            ),
            (self.gqa or case.kv_heads == case.heads, "takes no grouped key/value heads"),
            (self.value_dims or case.value_dim == case.head_dim, "needs value dim = head dim"),
        )
        for fine, reason in limits:
            if not fine:
                return reason
        verdict: object = self.supports(case) if self.supports else None
        if verdict is not None and not isinstance(verdict, str):
            raise TypeError(f"supports() returned {verdict!r}, not None or the reason as text")
        return verdict


IMPLEMENTATIONS: Registry[Implementation] = Registry("implementation", "--impls")


def attention_builder(name: str, **capabilities: Any) -> Callable[[Any], Any]:
    """Register `build(case) -> callable`; only the returned callable is timed.

    The callable takes q_BHLD, k_BGSD, v_BGSV positionally and returns o_BHLV. `case.mask`,
    `case.softmax_scale` and the sizes tell what to build; what the callable holds on to is
    reported as prepared memory. `capabilities` are the fields of `Implementation`.

    Raises:
        UsageError: the name is taken, or an unknown capability is given.
    """

    def register(build: Callable[[Case], AttentionCall]) -> Callable[[Case], AttentionCall]:
        _add(name, build, build, capabilities)
        return build

    return register


def recurrent_builder(name: str, **capabilities: Any) -> Callable[[Any], Any]:
    """Register `build(case) -> callable` of a recurrent network of width `case.model_width`.

    The callable takes x_BLE and the weights of a GRU, w_ih and w_hh, (3E, E) each, positionally
    and returns the hidden states o_BLE. `capabilities` are the fields of `Implementation`.

    Raises:
        UsageError: the name is taken, or an unknown capability is given.
    """
    return attention_builder(name, **({"workloads": ("recurrent",)} | capabilities))


def attention(name: str, **capabilities: Any) -> Callable[[Any], Any]:
    """Register a plain function `f(q_BHLD, k_BGSD, v_BGSV, *, causal, scale) -> o_BHLV`.

    Serves full and causal masks (bottom-right where L ≠ S). `capabilities` as for
    `attention_builder`.

    Raises:
        UsageError: the name is taken, or an unknown capability is given.
    """

    def register(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def build(case: Case) -> AttentionCall:
            return functools.partial(function, causal=not case.unmasked, scale=case.softmax_scale)

        _add(name, build, function, capabilities)
        return function

    return register


_LAWS = ("time", "memory", "flops_law")
_NAMES = dict.fromkeys(("dtypes", "devices", "passes", "masks", "workloads"), "a tuple of names")
_TEXTS = dict.fromkeys((*_LAWS, "doc"), "a text")
_FORMULAS = dict.fromkeys(("flops", "workspace", "supports"), "a function of the case")
_FLAGS = dict.fromkeys(("gqa", "value_dims", "compiles"), "True or False")
_EXPECTED = _NAMES | _TEXTS | _FORMULAS | _FLAGS
_KINDS: dict[str, Any] = (
    dict.fromkeys(_NAMES, (tuple, list))
    | dict.fromkeys(_TEXTS, str)
    | dict.fromkeys(_FORMULAS, Callable)
    | dict.fromkeys(_FLAGS, bool)
)


def _add(name: str, build: Any, described: Any, capabilities: dict[str, Any]) -> None:
    strange = sorted(set(capabilities) - set(Implementation.__dataclass_fields__))
    if strange:
        raise UsageError(f"implementation '{name}' declares unknown {', '.join(strange)}")
    for field_name, kinds in _KINDS.items():
        value = capabilities.get(field_name)
        if value is not None and not isinstance(value, kinds):
            raise UsageError(
                f"implementation '{name}' declares {field_name}={value!r}, a"
                f" {type(value).__name__}; expected {_EXPECTED[field_name]}"
            )
    for workload in capabilities.get("workloads") or ():
        if workload not in TRAITS:
            raise UsageError(
                f"implementation '{name}' declares workloads with {workload!r}, which is none;"
                f" known: {', '.join(TRAITS.names())}"
            )
    defaults = {
        "doc": inspect.getdoc(described) or "",
        "file": inspect.getsourcefile(described) or "",
    }
    fields = defaults | capabilities | _laws(name, capabilities)
    IMPLEMENTATIONS.add(name, Implementation(name=name, build=build, **fields))


def _laws(name: str, capabilities: dict[str, Any]) -> dict[str, str]:
    """The laws that are declared, each in its one way of writing."""
    laws = {}
    for field_name in _LAWS:
        text = capabilities.get(field_name)
        if text is None:
            continue
        try:
            laws[field_name] = str(parse(text))
        except UsageError as err:
            raise UsageError(f"implementation '{name}' declares {field_name}: {err}") from err
    return laws
