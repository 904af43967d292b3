"""Does a call take as long, timed alone behind a flush, as inside a decode step?

The step is written in torch with the shapes of a Llama: RMSNorm, projections, a cache of each layer
that is written in place, attention, and a gated MLP. Attention is timed inside it.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn.functional import rms_norm, silu

from attnbench.api import implementation
from attnbench.api.loader import load_built_in
from attnbench.base.stats import median
from attnbench.measure.clock import HostClock
from attnbench.schema.case import Case
from tests.validation.page import Table
from tests.validation.runner import Ended, Tell

NAMES = ("sdpa", "sdpa-grouped", "naive")
CONTEXT, DIM, SHARING = 4096, 128, 4
WIDTHS = {4096: 11008, 512: 1376}  # of the model, with that of its MLP
OFF, APART = 0.15, 0.10  # a call from its step; implementations whose order must be right


class Layer:
    """Random weights and a full cache; `step` is one token's pass, and the attention's µs."""

    def __init__(self, width: int, inner: int) -> None:
        heads = width // DIM
        self.groups = heads // SHARING
        sizes = {"q": (width, width), "k": (width, self.groups * DIM), "o": (width, width)}
        sizes |= {"v": sizes["k"], "gate": (width, inner), "up": (width, inner)}
        self.w = {
            n: torch.randn(x) / width**0.5 for n, x in (sizes | {"down": (inner, width)}).items()
        }
        self.k, self.v = (torch.randn(1, self.groups, CONTEXT, DIM) for _ in "kv")

    def step(self, x_1E: torch.Tensor, attend: Callable[..., Any]) -> tuple[torch.Tensor, float]:
        h = rms_norm(x_1E, x_1E.shape[-1:])
        q_BHLD = (h @ self.w["q"]).view(1, 1, -1, DIM).transpose(1, 2)
        self.k[:, :, -1] = (h @ self.w["k"]).view(1, self.groups, DIM)
        self.v[:, :, -1] = (h @ self.w["v"]).view(1, self.groups, DIM)
        begin = time.perf_counter()
        o_BHLV = attend(q_BHLD, self.k, self.v)
        spent_us = 1e6 * (time.perf_counter() - begin)
        x_1E = x_1E + o_BHLV.transpose(1, 2).reshape(1, -1) @ self.w["o"]
        h = rms_norm(x_1E, x_1E.shape[-1:])
        return x_1E + (silu(h @ self.w["gate"]) * (h @ self.w["up"])) @ self.w["down"], spent_us


@torch.no_grad()
def times_us(width: int, layers: int, rounds: int, tell: Tell) -> dict[str, dict[str, float]]:
    """Medians by implementation: in the step, cold and warm, taken in turn."""
    model = [Layer(width, WIDTHS[width]) for _ in range(layers)]
    case = Case(
        heads=width // DIM, kv_heads=model[0].groups, seq_len=1, kv_len=CONTEXT, head_dim=DIM
    )
    clocks = {"cold": HostClock("cold"), "warm": HostClock("warm")}
    calls = {name: implementation(name).build(case) for name in NAMES}
    q = torch.randn(1, case.heads, 1, DIM)
    found: dict[str, dict[str, list[float]]] = {name: defaultdict(list) for name in NAMES}
    for number in range(rounds):
        for name, call in calls.items():
            x_1E = torch.randn(1, width)
            for layer in model:
                x_1E, us = layer.step(x_1E, call)
                found[name]["step"].append(us)
            for how, clock in clocks.items():
                alone = lambda: call(q, model[0].k, model[0].v)  # noqa: B023, E731
                alone()
                found[name][how] += [clock.batch(alone, 1).time_us for _ in range(layers)]
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
