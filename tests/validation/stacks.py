"""`make validate PART=stacks`: are right stacks of layers right, and is one wrong layer found?

A cell is a random stack (2 to 12 layers) with one right kernel, checked on two draws of inputs as
before timing. The kernels are built-ins and others written here, which round in other ways: none of
them may be `incorrect`. Then a kernel that is wrong in one layer alone, in each of 12 places.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from attnbench.api import Implementation, implementation
from attnbench.api.loader import load_built_in
from attnbench.schema.case import PASSES, Case, parse_mask, parse_position
from attnbench.theory.traits import impossible
from attnbench.worker.inputs import Draw
from attnbench.worker.reference import Reference, judge
from attnbench.worker.workloads import WORKLOADS
from tests.validation.page import Table

LAYER = WORKLOADS.get("layer")
Kernel = Callable[..., torch.Tensor]
AXES: dict[str, tuple[Any, ...]] = {
    "layers": tuple(range(2, 13)),
    "dtype": ("float32", "bfloat16", "float16", "float64"),
    "pass_": PASSES,
    "mask": ("full", "causal", "causal", "window:5"),
    "position": ("none", "none", "rope", "sinusoidal", "alibi", "shaw:4"),
    "projection": ("fused", "separate", "per-head", "mla:6", "pruned:1", "tied", "tied-layers"),
    "batch": (1, 2),
    "heads": (1, 2, 4),
    "seq_len": (1, 5, 16, 33, 64),
    "head_dim": (4, 8, 16),
    "width": (16, 32, 48),
}
BUILT_IN = ("naive", "chunked", "sdpa", "sdpa-flash", "sdpa-math")
_LOG2_E = math.log2(math.e)


def in_base_two(s: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Weights by exp2, normalised after the product with v."""
    e = torch.exp2(s * _LOG2_E - (s * _LOG2_E).amax(-1, keepdim=True))
    return (e @ v) / e.sum(-1, keepdim=True)


def by_lse(s: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Weights as exp(s − lse)."""
    return torch.exp(s - s.logsumexp(-1, keepdim=True)) @ v


def key_by_key(s: torch.Tensor, v: torch.Tensor, size: int = 3) -> torch.Tensor:
    """An online softmax over small blocks of keys, the last first."""
    top = s.new_full((*s.shape[:-1], 1), -torch.finfo(s.dtype).max / 4)
    o, total = v.new_zeros(*s.shape[:-1], v.shape[-1]), torch.zeros_like(top)
    for first in reversed(range(0, s.shape[-1], size)):
        block = s[..., first : first + size]
        new = torch.maximum(top, block.amax(-1, keepdim=True))
        e, shrink = torch.exp(block - new), torch.exp(top - new)
        o, total, top = o * shrink + e @ v[..., first : first + size, :], total * shrink, new
        total = total + e.sum(-1, keepdim=True)
    return o / total


OWN: dict[str, Kernel] = {"in-base-2": in_base_two, "by-lse": by_lse, "key-by-key": key_by_key}


def own(name: str, weigh: Kernel) -> Implementation:
    """A kernel of scores and values; in half precision it computes in float32."""

    def build(case: Case) -> Kernel:
        share, n = case.heads // case.kv_heads, case.seq_len
        places = torch.arange(n)
        hidden = places > places[:, None] + (n if case.mask.after is None else case.mask.after)
        hidden |= places < places[:, None] - (n if case.mask.before is None else case.mask.before)

        def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            wide = torch.promote_types(q.dtype, torch.float32)
            k, v = (x.to(wide).repeat_interleave(share, dim=1) for x in (k, v))
            s = (q.to(wide) @ (k * case.softmax_scale).mT).masked_fill(hidden, -math.inf)
            return weigh(s, v).to(q.dtype)

        return call

    masks = ("full", "causal", "window")
    return Implementation(name=name, build=build, masks=masks)


def stacks(count: int, seed: int) -> Iterator[Case]:
    """Random stacks that make sense."""
    draws, found = random.Random(seed), 0
    while found < count:
        fields = {name: draws.choice(values) for name, values in AXES.items()}
        fields |= {
            "mask": parse_mask(fields["mask"]), "position": parse_position(fields["position"]),
            "kv_heads": draws.choice([g for g in (1, 2, 4) if fields["heads"] % g == 0]),
            "value_dim": draws.choice((fields["head_dim"], 12)),
        }  # fmt: skip
        case = Case(workload="layer", **fields)
        # Of a bias, built-ins see the heads that are left: not what is examined here.
        biased = case.position.encoding.kind == "bias" and case.projection == "pruned:1"
        if not impossible(case) and not biased:
            found += 1
            yield case


def drawn(case: Case, seed: int) -> Iterator[tuple[dict[str, torch.Tensor], Reference]]:
    """Inputs and the truth, as they are checked: with needles, and without."""
    for number, needles in enumerate((True, False)):
        tensors = LAYER.tensors(case)
        LAYER.fill(case, tensors, Draw(seed=seed + number, needles=needles))
        yield tensors, LAYER.truth(case, tensors)


def ratio(
    case: Case, impl: Implementation, tensors: dict[str, torch.Tensor], truth: Reference
) -> float:
    """The kernel's largest error over what is allowed: right at 1 or below."""
    with torch.set_grad_enabled(case.needs_grad):
        bound = LAYER.bind(case, impl, tensors)
        outputs = bound.named(bound.call())
    found = judge(outputs, truth, case.dtype)
    return math.inf if found.error_ratio is None else found.error_ratio


def right_stacks(cells: int, seed: int, tell: Callable[[str], None]) -> tuple[Table, list[str]]:
    """The largest ratio by layers, dtype and pass; and what was incorrect, in words."""
    load_built_in()
    kernels = [*map(implementation, BUILT_IN), *(own(*item) for item in OWN.items())]
    ratios: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    wrong, done = list[str](), 0
    for number, case in enumerate(stacks(cells, seed)):
        able = [impl for impl in kernels if not LAYER.reason_against(case, impl)]
        chosen = random.Random(seed + number).sample(able, min(4, len(able)))
        worst = dict.fromkeys((impl.name for impl in chosen), 0.0)
        for tensors, truth in drawn(case, seed + 2 * number):
            if truth.beyond(case.dtype):
                continue
            for impl in chosen:
                worst[impl.name] = max(worst[impl.name], ratio(case, impl, tensors, truth))
        depth = "2-4" if case.layers < 5 else "5-8" if case.layers < 9 else "9-12"
        ratios[depth, case.dtype, case.pass_] += worst.values()
        for name, value in worst.items():
            if not value <= 1:
                wrong.append(f"{name}, {value:.3g} times what is allowed: {case.to_json()}")
        done += len(worst)
        if number % 200 == 199:
            tell(f"{done} of {cells} cells, {len(wrong)} incorrect")
        if done >= cells:
            break
    rows = tuple(
        (" ".join(key), str(len(found)), str(sum(not x <= 1 for x in found)), f"{max(found):.2f}")
        for key, found in sorted(ratios.items())
    )
    title = f"{done} right stacks, {len(wrong)} incorrect"
    header = ("layers, dtype, pass", "cells", "incorrect", "largest error / allowed")
    return Table(title=title, header=header, rows=rows), wrong


def _off_by_one(core: Kernel) -> Kernel:
    """Hides each query's own key, or of the first what is before it."""
    return lambda q, k, v: core(q, k.roll(1, dims=2), v.roll(1, dims=2))


def _last_dropped(core: Kernel) -> Kernel:
    """The last key has no value."""
    return lambda q, k, v: core(q, k, torch.cat((v[:, :, :-1], 0 * v[:, :, -1:]), dim=2))


def _scaled(factor: float) -> Callable[[Kernel], Kernel]:
    return lambda core: lambda q, k, v: core(q * factor, k, v)


WRONG: dict[str, Callable[[Kernel], Kernel]] = {
    "heads exchanged": lambda core: lambda q, k, v: core(q, k, v.flip(1)),
    "mask off by a key": _off_by_one,
    "last key dropped": _last_dropped,
    **{
        f"scale off by {share:g} %": _scaled(1 + share / 100)
        for share in (30, 10, 3, 1, 0.3, 0.1, 0.03, 0.01, 0.003, 0.001)
    },
}


def at_place(place: int, layers: int, change: Callable[[Kernel], Kernel]) -> Implementation:
    """`naive`, changed in one of the layers alone: calls are counted."""
    naive = implementation("naive")

    def build(case: Case) -> Kernel:
        right, calls = naive.build(case), -1
        wrong = change(right)

        def call(*heads: torch.Tensor) -> torch.Tensor:
            nonlocal calls
            calls += 1
            return (wrong if calls % layers == place else right)(*heads)

        return call

    return replace(naive, build=build)


def wrong_layers(repeats: int, seed: int, layers: int = 12) -> Table:
    """Of each kind of wrong in one layer, in how many of the places it is found."""
    load_built_in()
    kinds: list[tuple[Any, Any]] = [
        (dtype, pass_) for dtype in ("float32", "bfloat16") for pass_ in ("forward", "both")
    ]
    found: dict[str, list[str]] = {kind: [] for kind in WRONG}
    for dtype, pass_ in kinds:
        counts = dict.fromkeys(WRONG, 0)
        for repeat in range(repeats):
            case = Case(
                workload="layer", dtype=dtype, pass_=pass_, layers=layers, seq_len=48, head_dim=16,
                mask=parse_mask("causal"), width=48, batch=1 + repeat % 2,
            )  # fmt: skip
            draws = list(drawn(case, seed + 2 * repeat))
            for kind, change in WRONG.items():
                for place in range(layers):
                    impl = at_place(place, layers, change)
                    counts[kind] += any(not ratio(case, impl, *draw) <= 1 for draw in draws)
        for kind, count in counts.items():
            found[kind].append(f"{count} of {repeats * layers}")
    header = ("wrong in one layer", *(" ".join(kind) for kind in kinds))
    rows = tuple((kind, *row) for kind, row in found.items())
    return Table(title=f"one wrong layer of {layers}: found", header=header, rows=rows)
