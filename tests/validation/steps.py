"""Does a call take as long, timed alone behind a flush, as inside a decode step?

The step is written in torch with the shapes of a Llama: RMSNorm, projections, a cache of each layer
that is written in place, attention, and a gated MLP. Inside it are timed attention, and the layer
as workload `decode` has it: the projections, the cache and attention.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch.nn.functional import rms_norm, silu

from attnbench.api import implementation
from attnbench.api.loader import load_built_in
from attnbench.base.stats import median
from attnbench.measure.clock import HostClock
from attnbench.schema.case import Case, parse_mask
from attnbench.worker.workloads.base import WORKLOADS
from attnbench.worker.workloads.decode import Generate
from tests.validation.page import Table
from tests.validation.runner import Ended, Tell

NAMES = ("sdpa", "sdpa-grouped", "naive")
CONTEXT, TOKENS, DIM, SHARING = 4096, 8, 128, 4
WIDTHS = {4096: 11008, 512: 1376}  # of the model, with that of its MLP
LAYER = ", its layer"
OFF, APART = 0.15, 0.10  # a call from its step; implementations whose order must be right

Parts = dict[str, float]  # times in µs: of attention, and of its layer


class Layer:
    """Random weights and a full cache; `step` is one token's pass, and the µs of its parts."""

    def __init__(self, width: int, inner: int) -> None:
        heads = width // DIM
        self.groups = heads // SHARING
        sizes = {"q": (width, width), "k": (width, self.groups * DIM), "o": (width, width)}
        sizes |= {"v": sizes["k"], "gate": (width, inner), "up": (width, inner)}
        self.w = {
            n: torch.randn(x) / width**0.5 for n, x in (sizes | {"down": (inner, width)}).items()
        }
        self.k, self.v = (torch.randn(1, self.groups, CONTEXT, DIM) for _ in "kv")

    def step(self, x_1E: torch.Tensor, attend: Callable[..., Any]) -> tuple[torch.Tensor, Parts]:
        h = rms_norm(x_1E, x_1E.shape[-1:])
        begin = time.perf_counter()
        q_BHLD = (h @ self.w["q"]).view(1, 1, -1, DIM).transpose(1, 2)
        self.k[:, :, -1] = (h @ self.w["k"]).view(1, self.groups, DIM)
        self.v[:, :, -1] = (h @ self.w["v"]).view(1, self.groups, DIM)
        called = time.perf_counter()
        o_BHLV = attend(q_BHLD, self.k, self.v)
        returned = time.perf_counter()
        y_1E = o_BHLV.transpose(1, 2).reshape(1, -1) @ self.w["o"]
        us = {"": 1e6 * (returned - called), LAYER: 1e6 * (time.perf_counter() - begin)}
        x_1E = x_1E + y_1E
        h = rms_norm(x_1E, x_1E.shape[-1:])
        return x_1E + (silu(h @ self.w["gate"]) * (h @ self.w["up"])) @ self.w["down"], us


@torch.no_grad()
def times_us(width: int, layers: int, rounds: int, tell: Tell) -> dict[str, dict[str, float]]:
    """Medians by implementation and part: in the step, cold and warm, taken in turn."""
    model = [Layer(width, WIDTHS[width]) for _ in range(layers)]
    sizes: dict[str, Any] = {"heads": width // DIM, "kv_heads": model[0].groups, "head_dim": DIM}
    core = Case(seq_len=1, kv_len=CONTEXT, **sizes)
    around: dict[str, Any] = {"workload": "decode", "mask": parse_mask("causal"), "cache": "static"}
    around |= {"seq_len": CONTEXT - TOKENS, "kv_len": CONTEXT - TOKENS, "new_tokens": TOKENS}
    layer = Case(**sizes, **around, width=width)
    tensors = WORKLOADS.get("decode").tensors(layer)
    for x in tensors.values():
        x.normal_().mul_(x.shape[-1] ** -0.5)
    clocks = {"cold": HostClock("cold"), "warm": HostClock("warm")}
    q = torch.randn(1, layer.heads, 1, DIM)
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    built = {name: implementation(name).build(core) for name in NAMES}
    alone: dict[str, Callable[..., Any]] = {
        name: partial(call, q, model[0].k, model[0].v) for name, call in built.items()
    }
    alone |= {n + LAYER: Generate(layer, implementation(n), tensors) for n in NAMES}
    for number in range(rounds):
        for name, call in built.items():
            x_1E = torch.randn(1, width)
            for each in model:
                x_1E, us = each.step(x_1E, call)
                for part in us:
                    found[name + part]["step"].append(us[part])
        for name, call in alone.items():
            steps, count = (TOKENS, 1) if name.endswith(LAYER) else (1, layers)
            for how, clock in clocks.items():
                call()
                found[name][how] += [clock.batch(call, 1).time_us / steps for _ in range(count)]
        tell(f"width {width}: round {number + 1} of {rounds}")
    return {n: {how: median(us) for how, us in of.items()} for n, of in found.items()}


def examine(tell: Tell, *, layers: int, rounds: int) -> Ended:
    """A table of medians, and whether each call meets its step."""
    load_built_in()
    torch.set_num_threads(1)
    rows, missed = [], list[str]()
    for width in WIDTHS:
        found = times_us(width, layers, rounds, tell)
        for name, us in found.items():
            ratio = us["cold"] / us["step"]
            shown = (f"{us[how]:.0f}" for how in ("step", "cold", "warm"))
            rows.append((f"{name}, width {width}", *shown, f"{ratio:.2f}"))
            missed += [f"{name}, width {width}: {ratio:.2f}"] * (abs(ratio - 1) > OFF)
        missed += [f"order of {pair}, width {width}" for pair in disordered(found)]
    header = ("call", "in the step, µs", "cold, µs", "warm, µs", "cold / step")
    said = f"missed: {'; '.join(missed)}" if missed else "each call within 15 % of its step"
    table = Table(title="Decode steps", header=header, rows=tuple(rows))
    return Ended(met=not missed, tables=[table], lines=[said])


def disordered(found: dict[str, dict[str, float]]) -> Iterator[str]:
    """Pairs that differ by more than a tenth in the step, and the other way round alone."""
    for one in NAMES:
        for other in NAMES:
            faster = found[one]["step"] * (1 + APART) < found[other]["step"]
            if faster and found[one]["cold"] >= found[other]["cold"]:
                yield f"{one} and {other}"
