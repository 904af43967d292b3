"""Speed of the fits over 10^5 cells: `make benchmark`. The aim is 5 s; nothing asserts it."""

from itertools import product
from pathlib import Path

import numpy as np
import pytest

from attnbench.analysis.scaling import scaling
from attnbench.analysis.scaling.model import models
from attnbench.execution.store import Run
from attnbench.schema.case import Case, parse_mask
from attnbench.schema.record import Cell, Record, Sample

SIZES = (1, 128, 256, 512, 1024, 2048, 4096, 8192)
SAMPLES = 7
IMPLS = tuple(f"impl-{i}" for i in range(29))


@pytest.fixture(scope="module")
def large_run() -> Run:
    """Cells of 29 implementations: passes, dtypes, masks, batches, heads and head dims by n."""
    rng = np.random.default_rng(0)
    grid = product(
        IMPLS, ("forward", "backward", "both"), ("float32", "bfloat16"), ("full", "causal"),
        (1, 2), (1, 2, 4, 8), (16, 32, 64, 96, 128), SIZES,
    )  # fmt: skip
    masks = {text: parse_mask(text) for text in ("full", "causal")}
    records = []
    for impl, pass_, dtype, mask, batch, heads, d, n in grid:
        case = Case(
            pass_=pass_, dtype=dtype, mask=masks[mask], batch=batch, heads=heads, head_dim=d,
            seq_len=n,
        )  # fmt: skip
        time_us = 20 + batch * heads * n**2 * (1e-3 + 4e-5 * d)
        records.append(_record(Cell(case=case, impl=impl), time_us, rng))
    laws = [{"name": impl, "time": "n^2 d", "memory": "n^2"} for impl in IMPLS]
    return Run(
        path=Path("large"), info={"run_id": "large", "implementations": laws}, records=records
    )


def _record(cell: Cell, time_us: float, rng: np.random.Generator) -> Record:
    times = (time_us * np.exp(0.015 * rng.standard_normal(SAMPLES))).tolist()
    samples = tuple(
        Sample(round=i, position=0, calls=1, time_us=t, e2e_us=t) for i, t in enumerate(times)
    )
    return Record(cell=cell, status="ok", samples=samples)


@pytest.mark.benchmark(group="fits over 10^5 rows")
def test_every_fit_and_verdict(benchmark, large_run):
    benchmark.extra_info["rows"] = len(large_run.records)
    found = benchmark.pedantic(scaling, args=(large_run,), rounds=2)
    _print(benchmark, len(large_run.records), len(found.findings))


@pytest.mark.benchmark(group="fits over 10^5 rows")
def test_models_of_several_terms_alone(benchmark, large_run):
    benchmark.extra_info["rows"] = len(large_run.records)
    found = benchmark.pedantic(models, args=(large_run,), rounds=2)
    _print(benchmark, len(large_run.records), len(found))


def _print(benchmark, rows: int, results: int) -> None:
    print(f"\n{rows} rows: {benchmark.stats.stats.min:.1f} s for {results} results (aim: 5 s)")
