"""What holds for every right implementation, whatever it computes: checks without a reference.

They catch what a definition may share with its implementation: a look into the future, items of a
batch that mix, a limit in which a method is not exact after all. Each takes a case, an
implementation and drawn tensors, and raises where the property does not hold.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.autograd.gradcheck import GradcheckError

from attnbench.api import Implementation, dense_mask, implementation
from attnbench.base.parameters import Values, base_name, shown
from attnbench.base.registry import Registry
from attnbench.schema.case import Case
from attnbench.worker.inputs import Tensors
from attnbench.worker.reference import Size
from attnbench.worker.trial import IncorrectError
from attnbench.worker.workloads import WORKLOADS

Property = Callable[[Case, Implementation, Tensors], None]
HIDDEN_NAN = "hidden-may-be-nan"


def output(case: Case, impl: Implementation, tensors: Tensors) -> torch.Tensor:
    """o_BHLV of a fresh build, so that nothing is left of another call."""
    bound = WORKLOADS.get(case.workload).bind(case, impl, tensors)
    return bound.named(bound.call())["o"].detach().clone()


def same(o: torch.Tensor, other: torch.Tensor, what: str, name: str = "o") -> None:
    """See that two outputs differ by rounding alone: √eps of their size, in the root mean square.

    Raises:
        IncorrectError: they differ by more; the message begins with `what`.
    """
    off, most = Size.of(o - other).rms, torch.finfo(o.dtype).eps ** 0.5 * Size.of(other).rms
    if not off <= most:
        raise IncorrectError(f"{what}: {name} changes by {off:.3g} where {most:.3g} is rounding")


def _redrawn(x: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator(device=x.device).manual_seed(0)
    drawn = torch.randn(x.shape, generator=generator, device=x.device)
    return (8 * drawn).to(x.dtype)  # so large that a share of them shows


def _with(impl: Implementation, values: Values) -> Implementation:
    written = ":".join(f"{key}={shown(value)}" for key, value in (impl.values | values).items())
    return implementation(f"{base_name(impl.name)}:{written}")


def no_look_ahead(case: Case, impl: Implementation, tensors: Tensors) -> None:
    """Queries see nothing of later tokens: these are replaced, and their outputs stay."""
    before, first = output(case, impl, tensors), case.seq_len * 2 // 3
    with torch.no_grad():
        for name in "qkv":
            later = tensors[name][:, :, first + (case.kv_len - case.seq_len) * (name != "q") :]
            later.copy_(_redrawn(later))
    after = output(case, impl, tensors)
    same(after[:, :, :first], before[:, :, :first], "later tokens show in earlier queries")


def apart(case: Case, impl: Implementation, tensors: Tensors) -> None:
    """Batch items, and heads that share no keys, know nothing of each other."""
    before = output(case, impl, tensors)
    with torch.no_grad():
        for name in "qkv":
            heads = tensors[name].shape[1] // case.kv_heads
            for part in tensors[name][0], tensors[name][1, :heads]:
                part.copy_(_redrawn(part))
    after, heads = output(case, impl, tensors), case.heads // case.kv_heads
    same(after[1:, heads:], before[1:, heads:], "another batch item or head shows")


def hidden_nan(case: Case, impl: Implementation, tensors: Tensors) -> None:
    """NaN in keys and values that a query does not see does not reach its output.

    With most kernels it does, as 0 · NaN is NaN: it is wrong where `hidden_may_be_nan` is declared.
    """
    if impl.definition is not None:
        return
    before, first = output(case, impl, tensors), case.kv_len * 11 // 12
    admitted = dense_mask(case.mask, case.seq_len, case.kv_len, case.device, batch=case.batch)
    unseeing = ~admitted[..., first:].any(-1).expand(case.batch, case.heads, -1)
    with torch.no_grad():
        for name in "kv":
            tensors[name][:, :, first:] = torch.nan
    after = output(case, impl, tensors)
    same(after[unseeing], before[unseeing], "NaN in keys that are hidden shows")


def any_order(case: Case, impl: Implementation, tensors: Tensors) -> None:
    """Where the method sees its keys as a set, their order changes nothing."""
    generator = torch.Generator().manual_seed(1)
    order = torch.randperm(case.kv_len, generator=generator).to(case.device)
    if impl.definition is not None:
        q, k, v, *sink = (tensors[name].detach().double() for name in case.inputs)
        method: Callable[..., Any] = impl.definition(case)
        moved = method(q, k[:, :, order], v[:, :, order], *sink)
        if not torch.allclose(method(q, k, v, *sink), moved, rtol=1e-6, atol=1e-9):
            return
    before = output(case, impl, tensors)
    with torch.no_grad():
        for name in "kv":
            tensors[name].copy_(tensors[name][:, :, order].clone())
    same(output(case, impl, tensors), before, "the order of the keys shows")


def any_blocks(case: Case, impl: Implementation, tensors: Tensors) -> None:
    """Parameters that the definition does not name, such as sizes of blocks, change no result."""
    named = inspect.signature(impl.definition).parameters if impl.definition else {}
    before = output(case, impl, tensors)
    for key, value in impl.values.items():
        if key in named or not isinstance(value, int):
            continue
        for other in (max(1, value // 2), 2 * value):
            variant = _with(impl, {key: other})
            if variant.reason_against(case) is None:
                same(output(case, variant, tensors), before, f"{key}={other} shows")


def exact_in_its_limit(case: Case, impl: Implementation, tensors: Tensors) -> None:
    """At the parameters that it names itself (`exact_at`), it is attention as any other.

    In float64 where it can: a limit may be one that rounding keeps a method from.
    """
    values = impl.exact_at(case) if impl.exact_at is not None else None
    if values is None:
        return
    limit = _with(impl, values)
    if "float64" in impl.dtypes:
        case, tensors = replace(case, dtype="float64"), {n: x.double() for n, x in tensors.items()}
    if reason := limit.reason_against(case):
        raise IncorrectError(f"{limit.name}, said to be exact, is refused: {reason}")
    exact = WORKLOADS.get(case.workload).exact_output(case, tensors)
    o = output(case, limit, tensors)
    same(exact.to(o.dtype), o, f"{limit.name}, said to be exact, is not")


def gradients(case: Case, impl: Implementation, tensors: Tensors) -> None:
    """Gradients are those of the output, by finite differences in float64 (torch's gradcheck)."""
    call: Any = impl.build(case)
    inputs = [tensors[name].detach().requires_grad_() for name in case.inputs]
    with torch.enable_grad():
        try:
            torch.autograd.gradcheck(call, inputs, atol=1e-4, rtol=1e-3, nondet_tol=1e-9)
        except GradcheckError as err:
            text = str(err).partition("\n")[0]
            if "Jacobian mismatch" in text:
                text = _farthest(call, dict(zip(case.inputs, inputs, strict=True)))
            raise IncorrectError(f"gradients are not those of the output: {text}") from err


def _farthest(call: Any, inputs: Tensors) -> str:
    """Where the gradient of ½ Σ o² differs most from central differences, and both values."""

    def loss() -> torch.Tensor:
        found: torch.Tensor = call(*inputs.values()).square().sum() / 2
        return found

    worst, step = (-1.0, ""), 1e-5
    every = tuple(inputs.values())
    grads = torch.autograd.grad(loss(), every, allow_unused=True, materialize_grads=True)
    for (name, x), grad in zip(inputs.items(), grads, strict=True):
        for place in itertools.product(*map(range, x.shape)):
            with torch.no_grad():
                value, ends = x[place].clone(), []
                for moved in (value + step, value - step):
                    x[place] = moved
                    ends.append(float(loss()))
                x[place] = value
            numeric, own = (ends[0] - ends[1]) / (2 * step), float(grad[place])
            where = f"d{name}{list(place)} is {own:.3g}, by finite differences {numeric:.3g}"
            worst = max(worst, (abs(own - numeric), where))
    return f"{worst[1]} (off by {worst[0]:.3g}, the most)"


def two_in_flight(case: Case, impl: Implementation, tensors: Tensors) -> None:
    """A forward pass on other inputs between a forward pass and its backward one changes nothing.

    It does where what the backward pass needs is kept in one place for all calls.
    """
    if impl.reuses_output:
        return  # by declaration the first output is gone
    call: Any = impl.build(case)
    inputs = [tensors[name].detach().requires_grad_() for name in case.inputs]
    with torch.enable_grad():
        found = []
        for others in ([], [_redrawn(x).requires_grad_() for x in inputs]):
            o = call(*inputs)
            later = call(*others) if others else None
            unused: Any = {"allow_unused": True, "materialize_grads": True}  # as hashing keys of q
            found.append(torch.autograd.grad(o, inputs, _redrawn(o), **unused))
            del later
    for name, one, other in zip(case.inputs, *found, strict=True):
        same(other, one, "another forward pass before the backward one shows", f"d{name}")


_PROPERTIES: dict[str, Property] = {
    "no-look-ahead": no_look_ahead,
    "batch-and-heads-apart": apart,
    HIDDEN_NAN: hidden_nan,
    "any-order-of-keys": any_order,
    "any-block-size": any_blocks,
    "exact-in-its-limit": exact_in_its_limit,
    "gradcheck": gradients,
    "two-calls-in-flight": two_in_flight,
}
PROPERTIES: Registry[Property] = Registry("property", items=_PROPERTIES)
