"""What goes with an exponent in words: the power that a law gives an axis, and plain facts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

from attnbench.analysis.scaling.results import Axis, Series
from attnbench.base import units
from attnbench.theory.law import Law
from attnbench.theory.traits import TRAITS

NOUNS: dict[Axis, str] = {
    "n": "n", "d": "d", "heads": "H", "heads at fixed width": "H", "batch": "B",
}  # fmt: skip
BOUNDARIES = ("the working set", "the kernels")  # how remarks on what lies between two sizes begin


def power_text(noun: str, power: float) -> str:
    """As people write a power: `n^2`, `n`, `1`."""
    return "1" if power == 0 else noun if power == 1 else f"{noun}^{power:g}"


def power_of(series: Series, used: Sequence[float]) -> tuple[float | None, bool, float | None]:
    """The power that the declared law gives the axis, whether as a bound, and its logs' slope.

    None, False, None without a law. A law of several terms along the axis bounds the exponent by
    the largest power; the model judges the terms. Only along n is a law taken as exact: products of
    other widths have other tiles, and more heads or batches may be served at once. Batch and
    heads are factors of every term; where d is the width of a layer, more heads at a fixed head
    dim widen it. At a fixed width more heads leave the products alone, and each has a softmax of
    its own.
    """
    law = series.law
    if law is None:
        return None, False, None
    power = _POWERS[series.axis](law, series.workload)
    variable = "n" if series.axis == "n" else "d" if series.axis == "d" else None
    several = len({term.degree("n") for term in law.terms}) > 1 if len(law.terms) > 1 else False
    bound = law.bound or series.axis != "n" or several
    return power, bound, _log_slope(law, variable, used) if variable and law.has_logs else None


def _of_heads(law: Law, workload: str) -> float:
    wide = workload in TRAITS and "widths" in TRAITS.get(workload).axes
    return float(law.degree("d")) if wide else 1.0


_POWERS: dict[Axis, Callable[[Law, str], float]] = {
    "n": lambda law, _: float(law.degree("n")),
    "d": lambda law, _: float(law.degree("d")),
    "heads": _of_heads,
    "heads at fixed width": lambda law, _: 1.0,
    "batch": lambda law, _: 1.0,
}


def _log_slope(law: Law, variable: str, used: Sequence[float]) -> float | None:
    """What the logarithms of the leading terms add to the slope: q / ln(the middle size)."""
    along = law.along(variable)
    leading = [term for term in along.terms if term.degree(variable) == along.degree(variable)]
    power = max(float(dict(term.logs).get(variable, 0)) for term in leading)
    large = [size for size in used if size > math.e]
    if not power:
        return None
    return power / (sum(map(math.log, large)) / len(large)) if large else power


def remarks(series: Series, left_out: Sequence[str | None], counted_from: str) -> tuple[str, ...]:
    """Facts beside the exponent: what counts, kernels and caches passed, doubts about times."""
    found = [f"sizes count from {counted_from}"]
    found += [text for text in (_cache(series), *_kernels(series)) if text]
    noun, doubts = NOUNS[series.axis], series.doubts or (None,) * len(series.sizes)
    found += [
        f"{noun} = {size_text(size)}: {doubt}"
        for size, doubt, why in zip(series.sizes, doubts, left_out, strict=True)
        if doubt and why is None
    ]
    return tuple(found)


def _cache(series: Series) -> str | None:
    cache = series.cache_bytes
    if cache is None:
        return None
    for (size, inside), (larger, outside) in pairwise(
        zip(series.sizes, series.working_set_bytes, strict=False)
    ):
        if inside is not None and outside is not None and inside <= cache < outside:
            return (
                f"the working set passes the last cache ({units.size(cache)}) between"
                f" {_between(series, size, larger)}"
            )
    return None


def _kernels(series: Series) -> list[str]:
    named = list(zip(series.sizes, series.kernels, strict=False))
    return [
        f"the kernels change between {_between(series, size, larger)}"
        for (size, before), (larger, after) in pairwise(named)
        if before is not None and after is not None and before != after
    ]


def _between(series: Series, size: float, larger: float) -> str:
    return f"{NOUNS[series.axis]} = {size_text(size)} and {size_text(larger)}"


def size_text(size: float) -> str:
    """A size as it is written: 4096, not 4.1e+03."""
    return f"{size:.0f}" if size == round(size) else f"{size:g}"
