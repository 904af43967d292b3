"""Kernels that take an overhead and exactly c · n^p: spinning on a clock, or working that long.

`spin-P` waits for the wall clock, so that what other work takes hides in it; `work-P` computes for
so much processor time, and takes longer where it has to wait for its core. The liars are the same
kernels under laws that are not theirs.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from torch.nn import functional

from attnbench.api import attention

OVERHEAD_S = 50e-6  # more than attention itself takes at n = 1
LARGEST_S, LARGEST = 64e-3, 1024  # of the work, at this n
CLOCKS = {"spin": time.perf_counter, "work": time.thread_time}
LAWS = {1: "n", 2: "n^2", 3: "n^3"}


def _kernel(power: int, clock: Callable[[], float]) -> Callable[..., Any]:
    def kernel(q_BHLD: Any, k_BGSD: Any, v_BGSV: Any, *, causal: bool, scale: float) -> Any:
        until = clock() + OVERHEAD_S + LARGEST_S * (q_BHLD.shape[2] / LARGEST) ** power
        o_BHLV = functional.scaled_dot_product_attention(
            q_BHLD, k_BGSD, v_BGSV, is_causal=causal, scale=scale
        )
        while clock() < until:
            pass
        return o_BHLV

    return kernel


def _register(name: str, power: int, clock: str, law: str) -> None:
    attention(name, time=law, dtypes=("float32",), gqa=False)(_kernel(power, CLOCKS[clock]))


for _power, _law in LAWS.items():
    for _clock in CLOCKS:
        _register(f"{_clock}-{_power}", _power, _clock, _law)
LIARS = {
    "cubic-says-square": (3, "work", "n^2 d"),
    "square-says-linear": (2, "work", "O(n d)"),
    "linear-says-square": (1, "spin", "n^2 d"),
}
for _name, _how in LIARS.items():
    _register(_name, *_how)
