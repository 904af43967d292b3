"""Columns that hold a cell against what its machine can do, and times that cannot be right."""

from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from attnbench.analysis.table import load
from attnbench.machine import limits
from attnbench.schema.case import Case
from attnbench.store.runs import Run
from tests import synthetic

MEASURED = {
    "matmul_tflops": {"float32": 0.2}, "copy_gbps": 25.0, "read_gbps": 20.0, "launch_us": 1.0,
    "cache_bytes": 2**25,
}  # fmt: skip
CPU = {"device": "cpu", "device_name": "Some CPU", "ceilings": MEASURED}
WORK = {"flops_useful": 10**6, "flops_executed": 2 * 10**6, "bytes_min": 10**5, "kernel_count": 3}


def row_of(
    environment: dict[str, Any], case: Case | None = None, time_us: float = 100.0, **metrics: Any
) -> "pd.Series[Any]":
    record = synthetic.timed(case or Case(), "naive", [time_us], **WORK | metrics)
    info = {"run_id": "r", "environment": environment}
    return load(Run(path=Path("r"), info=info, records=[record])).iloc[0]


@pytest.mark.parametrize(("metrics", "bound"), [
    ({}, "compute"),  # 10 µs of matmuls, 5 µs of traffic, 3 µs of launches
    ({"flops_executed": 900_000}, "memory"),  # 4.5, 5 and 3 µs
    ({"kernel_count": 11}, "launch"),  # 10, 5 and 11 µs
    ({"enqueue_us": 80.0}, "launch"),  # the host takes 80 of 100 µs
    ({"enqueue_us": 79.9}, "compute"),
    ({"enqueue_us": 180.0, "hidden_us": 100.0}, "launch"),
    ({"enqueue_us": 180.0, "hidden_us": 101.0}, "compute"),  # issued before the device is done
    ({"enqueue_us": 100.0, "kernel_count": None}, "launch"),
    ({"flops_executed": None}, "compute"),  # the useful ones: 5 µs, as much as the traffic
    ({"kernel_count": None}, None),
    ({"bytes_min": None}, None),
    ({"flops_executed": None, "flops_useful": None}, None),
])  # fmt: skip
def test_the_bound_is_the_limit_whose_least_time_is_longest(metrics, bound):
    found = row_of(CPU, **metrics)["bound"]
    assert pd.isna(found) if bound is None else found == bound


@pytest.mark.parametrize(("l2", "us"), [("warm", 3.0), ("cold", 5.5), (None, 3.0)])
def test_a_cold_call_starts_its_kernels_between_events_of_its_own(l2, us):
    found = limits.Ceilings(launch_us=1.0, launch_cold_us=3.5)
    assert found.starts_us(3, l2=l2) == us
    assert limits.Ceilings(launch_us=1.0).starts_us(3, l2=l2) == 3.0, "an older run"
    row = row_of({**CPU, "ceilings": MEASURED | {"launch_cold_us": 3.5}}, l2=l2, kernel_count=9)
    assert row["bound"] == ("launch" if l2 == "cold" else "compute")  # 11.5 or 9, and 10 µs


H200_NAME, MATMUL = "NVIDIA H200", {"matmul_tflops": {"float32": 0.2, "float64": 50.0}}
PAST = 2**25 + 1  # bytes, one more than the last cache
COPIED_US = PAST / (3 * 25e9) * 1e6  # at three times the faster of copy and read


@pytest.mark.parametrize(("device", "dtype", "time_us", "flops", "bytes_min", "measured", "why"), [
    (H200_NAME, "bfloat16", 1000.0, 10**12, None, {}, "above the datasheet peak of 989"),
    (H200_NAME, "bfloat16", 1100.0, 10**12, None, {}, None),
    (H200_NAME, "float32", 10_000.0, 10**12, None, {}, "above the datasheet peak of 67"),
    (H200_NAME, "float64", 1.0, 10**12, None, {}, None),  # no peak is known for it
    (H200_NAME, "bfloat16", None, 10**12, None, {}, None),
    (H200_NAME, "bfloat16", 1.0, None, 40 * 2**20, {}, None),  # within the last cache
    (H200_NAME, "bfloat16", 1.0, None, 60 * 2**20, {}, "TB/s at least, above the memory's"),
    (H200_NAME, "bfloat16", 1.0, None, 55 * 2**20, {"cache_bytes": 60 * 2**20}, None),
    ("NVIDIA H200 MIG 1g.18gb", "bfloat16", 1e-3, 10**12, None, {}, None),
    (None, "bfloat16", 1e-3, 10**12, None, {}, None),
    # Without a datasheet's peak: three times what was measured, which met a busy moment.
    ("CPU", "float32", 1.0, 10**6, 1, MATMUL, "5 times what a large matmul reached"),
    ("CPU", "float32", 2.0, 10**6, 1, MATMUL, None),
    ("CPU", "float32", 1e-9, 10**6, 1, {}, None),
    (H200_NAME, "float64", 1.0, 150 * 10**6, None, MATMUL, None),
    (H200_NAME, "float64", 1.0, 151 * 10**6, None, MATMUL, "what a large matmul reached"),
    (H200_NAME, "float32", 1.0, 60 * 10**6, None, MATMUL, None),  # the datasheet's peak counts
    ("CPU", "float32", COPIED_US * 3 / 4, 1, PAST, MEASURED, "4 times what a large copy or"),
    ("CPU", "float32", COPIED_US * 1.001, 1, PAST, MEASURED, None),
    ("CPU", "float32", COPIED_US / 100, 1, 2**25, MEASURED, None),  # a cache may be fast
    ("CPU", "float32", COPIED_US / 100, 1, PAST, MEASURED | {"cache_bytes": None}, None),
])  # fmt: skip
def test_a_known_device_is_held_against_its_datasheet(
    device, dtype, time_us, flops, bytes_min, measured, why
):
    """And another one against what was measured in the run."""
    found = limits.suspect(
        {"device_name": device, "matmul_precision": "highest", "ceilings": measured},
        dtype,
        1,
        time_us,
        {"flops_executed": flops, "bytes_min": bytes_min},
    )
    assert found is None if why is None else why in str(found)
