"""Attention in regions that torch.compile took: read from their graphs, counted when they run.

A wrapper of the backend reads the graph before it is compiled. Graphs, guards and results stay.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from attnbench.capturing.calls import Call, Seen, described
from attnbench.capturing.masks import Found, classify, top_left

_OPTIONS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
_FLEX = ("query", "key", "value", "score", "blocks", "scale")
_LARGEST = 1 << 24  # pairs of a block mask that are looked at


def _sized(x: Any, sizes: Mapping[Any, int]) -> int:
    """A size as it is in this run: of a dynamic graph an expression of its symbols."""
    return int(x.node.expr.xreplace(sizes)) if isinstance(x, torch.SymInt) else int(x)


@dataclass(frozen=True)
class Attention:
    """One call of attention in a graph: its arguments as nodes or values."""

    graph: GraphModule
    given: Mapping[str, Any]
    flex: bool

    def tensors(self, sizes: Mapping[Any, int]) -> list[torch.Tensor]:
        """q, k and v without contents."""
        found = []
        for name in _OPTIONS[:3]:
            fake = self.given[name].meta["example_value"]
            shape, stride = (
                [_sized(n, sizes) for n in part] for part in (fake.shape, fake.stride())
            )
            found.append(torch.empty_strided(shape, stride, dtype=fake.dtype, device="meta"))
        return found

    def call(self, sizes: Mapping[Any, int], mask: Any, grad: bool) -> Call:
        """What it is; `mask` is its tensor, if it has one that came into the region."""
        q, k, v = self.tensors(sizes)
        L, S, rate = q.shape[-2], k.shape[-2], self.given.get("dropout_p") or 0.0
        problems = [f"dropout {rate:g}"] * bool(rate)
        device = self.given["query"].meta["example_value"].device.type
        if self.flex:
            found = self._blocks(L, S)
            problems += ["a score function"] * (not _identity(self.graph, self.given["score"]))
        elif isinstance(mask, torch.Tensor):
            found = classify(mask, L, S)
        elif self.given.get("attn_mask") is not None:
            found = Found("full", S, "a mask that is made in a compiled region")
        else:
            found = top_left(L, S) if self.given.get("is_causal") else Found("full", S)
        scale = self.given.get("scale")
        return described(
            "flex" if self.flex else "sdpa", (q, k[..., : found.keys, :], v[..., : found.keys, :]),
            found, device=device, scale=scale if isinstance(scale, float) else None, grad=grad,
            backend="compiled", problems=problems,
        )  # fmt: skip

    def _blocks(self, queries: int, keys: int) -> Found:
        """The mask that the function of a block mask gives."""
        function = next((x for x in reversed(self.given["blocks"]) if isinstance(x, Node)), None)
        if function is None or function.op != "get_attr" or queries * keys > _LARGEST:
            return Found("full", keys, "a block mask that cannot be read")
        zero, of = torch.tensor(0), getattr(self.graph, str(function.target))
        try:
            seen = of(zero, zero, torch.arange(queries)[:, None], torch.arange(keys))
        except Exception as err:  # it takes tensors of the region
            return Found("full", keys, f"a block mask that takes more: {type(err).__name__}")
        return classify(torch.as_tensor(seen).expand(queries, keys), queries, keys)


def _identity(graph: GraphModule, function: Any) -> bool:
    """Whether a score function gives back the score."""
    inner = getattr(graph, str(function.target)).graph
    first = next(node for node in inner.nodes if node.op == "placeholder")
    output = next(node for node in inner.nodes if node.op == "output").args[0]
    return first in (output if isinstance(output, tuple) else (output,))


def _read(graph: GraphModule) -> list[Attention]:
    found = []
    for node in graph.graph.nodes:
        name = getattr(node.target, "__name__", "")  # hooks stand wherever the function stood
        flex = name == "flex_attention"
        if node.op == "call_function" and (flex or name == "scaled_dot_product_attention"):
            names = _FLEX if flex else _OPTIONS
            given = dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
            found.append(Attention(graph, given, flex))
    return found


class Backend:
    """A backend of torch.compile that reads graphs first; equal to it where torch compares them."""

    def __init__(
        self, inner: Any, active: Sequence[Seen], around: Callable[[], AbstractContextManager[Any]]
    ) -> None:
        self.inner, self.active, self.around = inner, active, around
        # Copied and not handed on: torch's C++ keeps what it looks up here without a reference.
        for name in ("compiler_name", "get_compiler_config", "reset"):
            if hasattr(inner, name):
                setattr(self, name, getattr(inner, name))

    def __eq__(self, other: object) -> bool:
        return bool(self.inner == getattr(other, "inner", other))

    def __hash__(self) -> int:
        return hash(type(self))

    def __call__(self, graph: GraphModule, inputs: Any, **options: Any) -> Any:
        """The compiled graph; one with attention counts when it runs."""
        calls = _read(graph)
        names = [node for node in graph.graph.nodes if node.op == "placeholder"]
        run = self.inner(graph, inputs, **options)
        if not calls:
            return run

        def counted(*args: Any) -> Any:
            with self.around():
                out = run(*args)
            _count(self.active, calls, dict(zip(names, args, strict=False)), out)
            return out

        return counted


def _count(
    active: Sequence[Seen], calls: list[Attention], values: dict[Any, Any], out: Any
) -> None:
    """Count the attention of a compiled graph that has run; its calls have no time of their own."""
    symbols = [(node, node.meta.get("example_value")) for node in values]
    sizes = {x.node.expr: values[node] for node, x in symbols if isinstance(x, torch.SymInt)}
    outputs = out if isinstance(out, list | tuple) else (out,)
    last = next((x for x in outputs if getattr(x, "requires_grad", False)), None)
    for seen in tuple(active):
        for one in calls:
            mask = values.get(one.given.get("attn_mask"))
            key = (id(one), *sizes.values(), seen.fingerprints.of(mask), last is not None)
            make = functools.partial(one.call, sizes, mask, last is not None)
            try:
                seen.add(key, make, 0, last, 0.0, sys._getframe(2))
            except Exception as err:
                seen.undescribed[f"compiled: {type(err).__name__}: {err}"[:100]] += 1
                seen.count += 1
