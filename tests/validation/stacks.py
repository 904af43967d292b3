"""`make validate PART=stacks`: are right stacks of layers right, and is one wrong layer found?

A cell is a random stack (2 to 12 layers) with one right kernel, checked on two draws of inputs as
before timing. The kernels are built-ins and right ones of `wrong_kernels.py`, which round in other
ways: none of them may be `incorrect`. Then a kernel that is wrong in one layer alone, in each of 12
places.
"""

from __future__ import annotations

import importlib
import math
import random
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
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
from tests.validation.runner import Ended, Tell

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
KERNELS = (
    "naive", "chunked", "sdpa", "sdpa-flash", "sdpa-math", "right-blocks-of-48",
    "right-by-log-sum-exp", "right-grouped-einsum", "right-in-float64",
)  # fmt: skip


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


def right_stacks(cells: int, seed: int, tell: Tell) -> tuple[Table, list[str]]:
    """The largest ratio by layers, dtype and pass; and what was incorrect, in words."""
    load_built_in()
    importlib.import_module("tests.validation.wrong_kernels")
    kernels = list(map(implementation, KERNELS))
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


# What is done to q, k and v of the layer.
WRONG: dict[str, Callable[..., Any]] = {
    "heads exchanged": lambda q, k, v: (q, k, v.flip(1)),
    "mask off by a key": lambda q, k, v: (q, k.roll(1, dims=2), v.roll(1, dims=2)),
    "last key dropped": lambda q, k, v: (q, k, torch.cat((v[:, :, :-1], 0 * v[:, :, -1:]), dim=2)),
    **{
        f"scale off by {share:g} %": lambda q, k, v, factor=1 + share / 100: (q * factor, k, v)
        for share in (30, 10, 3, 1, 0.3, 0.1, 0.03, 0.01, 0.003, 0.001)
    },
}


def at_place(place: int, layers: int, change: Callable[..., Any]) -> Implementation:
    """`naive`, changed in one of the layers alone: calls are counted."""
    naive = implementation("naive")

    def build(case: Case) -> Kernel:
        right, calls = naive.build(case), -1

        def call(*heads: torch.Tensor) -> torch.Tensor:
            nonlocal calls
            calls += 1
            return right(*(change(*heads) if calls % layers == place else heads))

        return call

    return replace(naive, build=build)


def wrong_layers(repeats: int, seed: int, layers: int = 12) -> Table:
    """Of each kind of wrong in one layer, in how many of the places it is found."""
    load_built_in()
    kinds: list[Any] = list(product(("float32", "bfloat16"), ("forward", "both")))
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


def examine(tell: Tell, *, cells: int, repeats: int, seed: int) -> Ended:
    """Whether all right stacks are right, and where a wrong layer is found."""
    right, wrong = right_stacks(cells, seed, tell)
    return Ended(met=not wrong, tables=[right, wrong_layers(repeats, seed)], lines=wrong)
