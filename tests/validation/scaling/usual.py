"""The usual rule, for comparison: one coefficient, and the curve with the least error.

As google/benchmark fits complexity (its `complexity.cc`): no intercept, absolute error, no
interval, and always an answer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

CURVES: dict[str, Callable[[float], float]] = {
    "1": lambda n: 1.0,
    "lg n": math.log2,
    "n": lambda n: n,
    "n lg n": lambda n: n * math.log2(n),
    "n^2": lambda n: n**2,
    "n^3": lambda n: n**3,
}


def usual(sizes: Sequence[float], times_us: Sequence[float]) -> str:
    """The name of the curve whose root mean square error over the sizes is least."""
    times = np.asarray(times_us, dtype=float)

    def missed(curve: Callable[[float], float]) -> float:
        values = np.array([curve(n) for n in sizes], dtype=float)
        coefficient = (times @ values) / (values @ values)
        return float(((times - coefficient * values) ** 2).sum())

    return min(CURVES, key=lambda name: missed(CURVES[name]))
