"""All that an author of an implementation needs: decorators, the case, and a few helpers.

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
from dataclasses import dataclass, field, replace
from typing import Any, Literal, ParamSpec, Protocol, TypeVar, get_type_hints

import msgspec
import torch

from attnbench.api.bias import PositionBias, dense_bias, position_bias
from attnbench.api.helpers import (
    Estimate,
    Patterned,
    building_mask,
    by_slice,
    chunk_sizes,
    compile_alone,
    dense_mask,
    flops_in_chunks,
    hidden_and_blind,
    in_chunks,
    kernelised,
    mask_for,
    mask_spans,
    reason_against_compiling,
    reason_against_flex,
    rows_of,
)
from attnbench.base.parameters import Parameter, Values, read_name
from attnbench.base.registry import Registry
from attnbench.errors import UsageError
from attnbench.schema.case import DEVICES, PASSES, Case, Device, Dtype, Mask, Pass, Position
from attnbench.schema.mask import MASKS
from attnbench.schema.position import POSITIONS
from attnbench.theory.costs import bias_flops, core_flops
from attnbench.theory.law import parse
from attnbench.theory.masks import visible_blocks
from attnbench.theory.traits import TRAITS

# For what leaves masks and position biases to the helpers, which know every one.
ALL_MASKS = tuple(MASKS.names())
ALL_BIASES = tuple(name for name, encoding in POSITIONS.items() if encoding.kind == "bias")

__all__ = [
    "ALL_BIASES", "ALL_MASKS", "AttentionCall", "Case", "Estimate", "Implementation", "Mask",
    "Patterned", "Position", "PositionBias", "attention", "attention_builder",
    "bias_flops", "building_mask", "by_slice", "chunk_sizes", "compile_alone", "core_flops",
    "dense_bias", "dense_mask", "flops_in_chunks", "hidden_and_blind", "in_chunks",
    "kernelised", "mask_for", "mask_spans", "position_bias", "reason_against_compiling",
    "reason_against_flex", "recurrent_builder", "rows_of", "visible_blocks",
]  # fmt: skip


class AttentionCall(Protocol):
    """What is timed."""

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, /) -> torch.Tensor:
        """q_BHLD, k_BGSD, v_BGSV positionally, o_BHLV back; sink_H is the fourth of `sinks`.

        Of a recurrent network: x_BLE and the weights w_ih, w_hh, (3E, E) each, and o_BLE back.
        """


# With the parameters of the implementation bound.
SizeFormula = Callable[[Case], int]
Build = Callable[[Case], AttentionCall]
# What `attention_builder` takes: functions of the case and, by keyword, of parameters.
OfCase = Callable[..., Any]
Family = Literal["exact", "sparse", "linear", "low-rank", "recurrent"]
FAMILIES: dict[str, str] = {
    "exact": "softmax attention itself, however it is computed",
    "sparse": "softmax attention over some of the pairs",
    "linear": "a kernel of q and k in place of the softmax: sums over keys",
    "low-rank": "keys, or the score matrix, through a few landmarks or projections",
    "recurrent": "a network that goes token by token, the baseline",
}
P = ParamSpec("P")
F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True, kw_only=True)
class Implementation:
    """A named way to compute attention, with what it takes and how it should grow.

    See `attention_builder` for the fields; `doc` and `file` say what it is and where it stands.
    `values` are those of its parameters, which its name tells where they are not the defaults.
    """

    name: str
    build: Build
    family: Family = "exact"
    parameters: dict[str, Parameter] = field(default_factory=dict)
    values: Values = field(default_factory=dict)
    definition: Build | None = None
    exact_at: Callable[[Case], Values] | None = None
    time: str | None = None
    memory: str | None = None
    flops_law: str | None = None
    flops: SizeFormula | None = None
    useful: SizeFormula | None = None
    workspace: Callable[[Case], int | None] | None = None
    dtypes: tuple[Dtype, ...] = ("float32", "bfloat16", "float16", "float64")
    devices: tuple[Device, ...] = DEVICES
    passes: tuple[Pass, ...] = PASSES
    masks: tuple[str, ...] = ("full", "causal")
    positions: tuple[str, ...] = ()
    softcap: bool = False
    sinks: bool = False
    workloads: tuple[str, ...] = ("attention", "layer", "decode")
    gqa: bool = True
    value_dims: bool = True
    compiles: bool = False
    reuses_output: bool = False
    hidden_may_be_nan: bool = False
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
                case.unmasked or case.mask.name in self.masks,
                f"takes masks {', '.join(self.masks)}, not {case.mask.text}",
            ),
            (
                case.position.encoding.kind != "bias" or case.position.name in self.positions,
                f"takes position biases {', '.join(self.positions) or 'none'},"
                f" not {case.position.text}",
            ),
            (self.softcap or not case.softcap, "caps no scores (--softcaps)"),
            (self.sinks or not case.sinks, "takes no attention sinks (--sinks)"),
            (self.gqa or case.kv_heads == case.heads, "takes no grouped key/value heads"),
            (self.value_dims or case.value_dim == case.head_dim, "needs value dim = head dim"),
        )
        for fine, reason in limits:
            if not fine:
                return reason
        answer: object = self.supports(case) if self.supports else None
        if answer is not None and not isinstance(answer, str):
            raise TypeError(f"supports() returned {answer!r}, not None or the reason as text")
        return answer


IMPLEMENTATIONS: Registry[Implementation] = Registry("implementation", "--impls")
_FUNCTIONS = ("build", "definition", "exact_at", "flops", "useful", "workspace", "supports")


def implementation(text: str) -> Implementation:
    """The implementation that `text` names, with its parameters: `performer:features=64`.

    Raises:
        UnknownNameError: nothing is registered under the name.
        UsageError: a parameter that it does not have, or a value that is none.
    """
    name, found, values = read_name(text, IMPLEMENTATIONS)
    return _with_values(found, name, values)


def _with_values(impl: Implementation, name: str, values: Values) -> Implementation:
    """The implementation with other values bound to its functions, each to those that it names."""
    bound = {}
    for key in _FUNCTIONS:
        function = getattr(impl, key)
        function = function.func if isinstance(function, _WithValues) else function
        if function is not None and values:
            names = inspect.signature(function).parameters
            taken = {key: value for key, value in values.items() if key in names}
            function = _WithValues(function, **taken)
        bound[key] = function
    return replace(impl, name=name, values=values, **bound)


class _WithValues(functools.partial[Any]):
    """A function of the case with an implementation's parameters bound; can be bound again."""


def _parameters_of(build: OfCase) -> dict[str, Parameter]:
    """The keyword-only arguments of `build` that have numbers as defaults."""
    declared = {}
    for name, argument in inspect.signature(build).parameters.items():
        default = argument.default
        many, real = isinstance(default, tuple), isinstance(default, float)
        number = isinstance(default, (int, float, tuple)) and not isinstance(default, bool)
        if argument.kind is argument.KEYWORD_ONLY and number and name not in ("scale", "softcap"):
            least = 0 if real or default == 0 else 1
            declared[name] = Parameter(default=default, real=real, many=many, least=least)
    return declared


def attention_builder(
    name: str,
    *,
    family: Family = "exact",
    time: str | None = None,
    memory: str | None = None,
    flops_law: str | None = None,
    flops: OfCase | None = None,
    useful: OfCase | None = None,
    workspace: OfCase | None = None,
    definition: OfCase | None = None,
    exact_at: OfCase | None = None,
    dtypes: tuple[Dtype, ...] = Implementation.dtypes,
    devices: tuple[Device, ...] = Implementation.devices,
    passes: tuple[Pass, ...] = Implementation.passes,
    masks: tuple[str, ...] = Implementation.masks,
    positions: tuple[str, ...] = Implementation.positions,
    softcap: bool = False,
    sinks: bool = False,
    workloads: tuple[str, ...] = Implementation.workloads,
    gqa: bool = True,
    value_dims: bool = True,
    compiles: bool = False,
    reuses_output: bool = False,
    hidden_may_be_nan: bool = False,
    supports: OfCase | None = None,
    doc: str | None = None,
) -> Callable[[F], F]:
    """Register `build(case) -> callable`; only the returned callable is timed.

    The callable takes q_BHLD, k_BGSD, v_BGSV positionally and returns o_BHLV. `case.mask`,
    `case.softmax_scale` and the sizes say what to build; what the callable holds on to is
    reported as prepared memory.

    Keyword-only arguments of `build` whose defaults are numbers are the implementation's
    parameters: `def build(case, *, window=256)` is asked for as `--impls name:window=128`. Each
    function of the case below is given those parameters that it names, too.

    - `family`: where it stands in `attnbench list`; of all but `exact` the sweep measures those
      that it is asked for.
    - `time`, `memory`, `flops_law`: laws such as `n^2 d` of the time, the workspace and the FLOPs
      (as `time` unless given), for masks full and causal. `O(n)` is an upper bound.
    - `flops`: FLOPs that one call executes, for the case's pass.
    - `useful`: beside a `definition`, the least of them that its formula needs; else unknown.
    - `workspace`: bytes that one call allocates beyond its output, for the case's pass; an
      `Estimate` where a formula only comes close, None where there is none.
    - `definition`: for what is not softmax attention over the case's mask. `definition(case)`
      returns the method as `f(q_BHLD, k_BGSD, v_BGSV) -> o_BHLV`, dense and plain, in the dtype of
      its inputs and differentiable: what results are held against, in float64.
    - `exact_at`: the parameters, as a dict, at which it is exact attention in a case.
    - `dtypes`, `devices`, `passes`, `masks`: what it takes, by name.
    - `positions`: the biases on scores that it adds (`position_bias`), by name; what turns q and k
      or is added to x is done around it.
    - `softcap`: whether it caps scaled scores by `case.softcap`, a number or None, before a bias.
    - `sinks`: whether its callable, where the case has sinks, takes sink_H as a fourth tensor.
    - `workloads`: those in which it serves, as the core or as the recurrent network.
    - `gqa`, `value_dims`: whether it takes fewer key/value heads, and a value width other than D.
    - `compiles`: the first call compiles, so that its time goes to `compile_s`.
    - `reuses_output`: each call returns the same memory, so that who keeps a result must copy it.
    - `hidden_may_be_nan`: NaN in keys and values that a query does not see leaves it as it is.
    - `supports`: why it cannot take a case that these limits admit, or None.
    - `doc`: what it is; the docstring unless given.

    Raises:
        UsageError: the name is taken, or a value is not of its parameter's type.
    """
    declared = {key: value for key, value in locals().items() if key not in ("name", "doc")}

    def register(build: F) -> F:
        source = inspect.unwrap(getattr(build, "func", build))  # of a functools.partial, too
        text = inspect.getdoc(source) if doc is None else doc
        file = inspect.getsourcefile(source) or ""
        _add(name, build, doc=text or "", file=file, **declared)
        return build

    return register


def _with_parameters_of(
    builder: Callable[P, Callable[[F], F]],
) -> Callable[[Callable[..., Callable[[F], F]]], Callable[P, Callable[[F], F]]]:
    """Give a function the parameters of another, for type checkers, editors and `help`."""

    def give(function: Callable[..., Callable[[F], F]]) -> Callable[P, Callable[[F], F]]:
        function.__signature__ = inspect.signature(builder)  # type: ignore[attr-defined]
        return function

    return give


@_with_parameters_of(attention_builder)
def attention(name: str, **declared: Any) -> Callable[[F], F]:
    """Register a plain function `f(q_BHLD, k_BGSD, v_BGSV, *, causal, scale) -> o_BHLV`.

    Serves full and causal masks (bottom-right where L ≠ S). With `softcap=True` it is given a
    keyword `softcap`, a number or None; with `sinks=True` sink_H as a fourth tensor in cases that
    have sinks. Further keyword-only arguments with numbers as defaults are its parameters. The rest
    is as in `attention_builder`.

    Raises:
        UsageError: the name is taken, or a value is not of its parameter's type.
    """

    def register(function: F) -> F:
        def build(case: Case, **values: Any) -> AttentionCall:
            if declared.get("softcap"):
                values["softcap"] = case.softcap
            return functools.partial(
                function, causal=not case.unmasked, scale=case.softmax_scale, **values
            )

        functools.update_wrapper(build, function)  # its docstring, its file and its parameters
        attention_builder(name, **declared)(build)
        return function

    return register


@_with_parameters_of(attention_builder)
def recurrent_builder(name: str, **declared: Any) -> Callable[[F], F]:
    """Register `build(case) -> callable` for a recurrent network of width `case.model_width`.

    The callable takes x_BLE and the weights of a GRU, w_ih and w_hh, (3E, E) each, positionally
    and returns o_BLE. The other parameters, and what is raised, are those of `attention_builder`.
    """
    here: dict[str, Any] = {"workloads": ("recurrent",), "family": "recurrent"}
    return attention_builder(name, **(here | declared))


_LAWS = ("time", "memory", "flops_law")
_NAMED: dict[str, Registry[Any]] = {"masks": MASKS, "positions": POSITIONS, "workloads": TRAITS}


def _add(name: str, build: Build, **declared: Any) -> None:
    """Register an implementation once each value is found to be of its field's type."""
    types = get_type_hints(Implementation)
    for key, value in declared.items():
        try:
            if key in _FUNCTIONS:
                if value is not None and not callable(value):
                    raise UsageError("expected a function of the case")
                continue
            declared[key] = msgspec.convert(value, types[key])
            if key in _LAWS and value is not None:
                declared[key] = str(parse(value))
            for item in value if key in _NAMED else ():
                _NAMED[key].get(item)
        except (msgspec.ValidationError, UsageError) as err:
            raise UsageError(f"implementation '{name}' declares {key}={value!r}: {err}") from err
    parameters = _parameters_of(build)
    impl = Implementation(name=name, build=build, parameters=parameters, **declared)
    defaults = {key: p.default for key, p in parameters.items() if p.default is not None}
    IMPLEMENTATIONS.add(name, _with_values(impl, name, defaults))
