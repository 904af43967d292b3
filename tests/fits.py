"""Hand-made fits, as the analysis would leave them; for tests of what is drawn from them."""

from __future__ import annotations

import math
from typing import Any

from attnbench.analysis.scaling.results import (
    ExactFit,
    ExponentFit,
    ModelFit,
    Scaling,
    Series,
    Uncertain,
)
from attnbench.schema.finding import LawFinding, Verdict
from attnbench.theory.law import parse

SIZES = (64, 128, 256, 512, 1024, 2048, 4096)


def estimate(value: float, spread: float = 0.02) -> Uncertain:
    """A figure with an interval of ± spread, relative."""
    return Uncertain(value=value, low=value * (1 - spread), high=value * (1 + spread))


def finding(verdict: Verdict = "holds", **values: Any) -> LawFinding:
    """A finding of any verdict."""
    texts = {
        "subject": "naive, attention forward float32 H=2 D=64", "question": "time in n",
        "law": "n^2", "reason": "1.98 within 1.85 … 2.15 over 5.0 octaves",
    }  # fmt: skip
    return LawFinding(**(texts | values), verdict=verdict)


def series(impl: str = "naive", **values: Any) -> Series:
    """A series along n of an imagined implementation."""
    sizes = values.pop("sizes", SIZES)
    times = tuple((16.0 + 2e-3 * float(n) ** 2,) * 3 for n in sizes)
    plain: dict[str, Any] = {
        "workload": "attention", "axis": "n", "same": "attention forward float32 H=2 D=64",
        "times_us": times, "overhead_us": (16.0,), "law": parse("n^2 d"),
    }  # fmt: skip
    return Series(impl=impl, sizes=sizes, **(plain | values))


def exponent_fit(impl: str = "naive", verdict: Verdict = "holds", **values: Any) -> ExponentFit:
    """The fit of that series, its two smallest sizes left out."""
    given = values.pop("series", None) or series(impl)
    left_out = min(2, len(given.sizes) - 1)
    plain: dict[str, Any] = {
        "time_us": tuple(estimate(times[0]) for times in given.times_us),
        "left_out": ("below 20 × the floor",) * left_out + (None,) * (len(given.sizes) - left_out),
        "overhead_us": 16.0, "exponent": estimate(2.0), "top": estimate(1.98),
        "intercept": math.log(2e-3),
        "finding": finding(verdict, subject=f"{impl}, {given.same}"),
    }  # fmt: skip
    return ExponentFit(series=given, **(plain | values))


def exact_fit(impl: str = "naive", **values: Any) -> ExactFit:
    """Counts that are what the formula says."""
    counted = [float(4 * 2 * n * n * 64) for n in SIZES]
    measured, predicted = values.pop("measured", counted), values.pop("predicted", counted)
    plain: dict[str, Any] = {
        "workload": "attention", "quantity": "flops", "axis": "n",
        "same": "attention forward float32 H=2 D=64",
        "rows": tuple(zip(SIZES, measured, predicted, strict=True)), "growth": 2.0,
        "finding": finding(subject=f"{impl}, attention", question="FLOPs in n"),
    }  # fmt: skip
    return ExactFit(impl=impl, **(plain | values))


TERMS = ("floor", "n d^2", "n^2 d")


def model_fit(impl: str = "naive", **values: Any) -> ModelFit:
    """A layer of three terms over n and d."""
    parts = [_parts(n, 256.0) for n in SIZES]
    totals = [sum(row.values()) for row in parts]
    points = [
        {"n": float(n), "d": d, "heads": 4.0, "batch": 1.0} for d in (128.0, 256.0) for n in SIZES
    ]
    times = [sum(_parts(p["n"], p["d"]).values()) for p in points]
    shares = [{k: v / t for k, v in row.items()} for row, t in zip(parts, totals, strict=True)]
    plain: dict[str, Any] = {
        "workload": "layer", "same": "layer forward float32 fused",
        "points": tuple(points), "cells": (),
        "time_us": tuple(estimate(t * (1.03 if i % 2 else 0.98)) for i, t in enumerate(times)),
        "predicted_us": tuple(times), "at_largest": len(points) - 1,
        "shares": {term: estimate(shares[-1][term], 0.1) for term in TERMS},
        "along_n": tuple(float(n) for n in SIZES), "shares_along": tuple(shares),
        "held_out": 0.031,
        "finding": finding(subject=f"{impl}, layer", question="model of time", law="n d^2 + n^2 d"),
    }  # fmt: skip
    return ModelFit(impl=impl, **(plain | values))


def _parts(n: float, d: float) -> dict[str, float]:
    values = (30.0, 2e-5 * n * d * d, 2e-5 * n * n * d)
    return dict(zip(TERMS, values, strict=True))


def full() -> Scaling:
    """A bit of everything."""
    impls = ("naive", "sdpa", "chunked")
    return Scaling(
        exponents=(
            *(exponent_fit(impl) for impl in impls),
            exponent_fit("mine", "refuted", exponent=estimate(2.9)),
            exponent_fit(
                "naive", "inconclusive", series=series("naive", axis="d"), exponent=None,
                top=None, intercept=None,
            ),
        ),
        exact=(*(exact_fit(impl) for impl in impls), exact_fit("naive", quantity="workspace")),
        models=tuple(model_fit(impl) for impl in impls[:2]),
    )  # fmt: skip
