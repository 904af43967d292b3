"""Columns that hold a cell against what its machine can do, and times that cannot be right."""

from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from attnbench.analysis.table import load
from attnbench.analysis.times import launch_bound
from attnbench.execution.store import Run
from attnbench.machine import limits
from attnbench.schema.case import Case
from attnbench.schema.record import Cell, Record, Sample
from tests import synthetic

MEASURED = {
    "matmul_tflops": {"float32": 0.2},
    "copy_gbps": 25.0,
    "read_gbps": 20.0,
    "launch_us": 1.0,
    "cache_bytes": 2**25,
}
CPU = {"device": "cpu", "device_name": "Some CPU", "ceilings": MEASURED}
H200 = {"device": "cuda", "device_name": "NVIDIA H200", "matmul_precision": "highest"}
WORK = {"flops_useful": 10**6, "flops_executed": 2 * 10**6, "bytes_min": 10**5, "kernel_count": 3}


def row_of(
    environment: dict[str, Any], case: Case | None = None, time_us: float = 100.0, **metrics: Any
) -> "pd.Series[Any]":
    sample = Sample(round=0, position=0, calls=1, time_us=time_us, e2e_us=time_us)
    record = Record(
        cell=Cell(case=case or Case(), impl="naive"),
        status="ok",
        samples=(sample,),
        metrics=WORK | metrics,
    )
    info = {"run_id": "r", "environment": environment}
    return load(Run(path=Path("r"), info=info, records=[record])).iloc[0]


@pytest.mark.parametrize(
    ("enqueue_us", "time_us", "is_it"),
    [(95.0, 100.0, True), (94.9, 100.0, False), (None, 100.0, False), (95.0, None, False)],
)
def test_a_call_is_launch_bound_where_issuing_it_takes_as_long_as_running_it(
    enqueue_us, time_us, is_it
):
    assert launch_bound(enqueue_us, time_us) is is_it


def test_each_column_is_its_formula():
    row = row_of(CPU)
    seconds = 100e-6
    assert row["arithmetic_intensity"] == pytest.approx(1e6 / 1e5)
    assert row["fraction_of_compute_peak"] == pytest.approx(2e6 / seconds / 0.2e12)
    assert row["fraction_of_memory_peak"] == pytest.approx(1e5 / seconds / 20e9)
    assert row["peak_tflops_measured"] == 0.2
    assert row["read_gbps_measured"] == 20.0
    assert row["copy_gbps_measured"] == 25.0
    assert row["launch_us_measured"] == 1.0
    useful = row_of(CPU, flops_executed=None)  # these are then held against the matmul
    assert useful["fraction_of_compute_peak"] == pytest.approx(1e6 / 100e-6 / 0.2e12)


@pytest.mark.parametrize(
    ("metrics", "bound"),
    [
        ({}, "compute"),  # 10 µs of matmuls, 5 µs of traffic, 3 µs of launches
        ({"flops_executed": 900_000}, "memory"),  # 4.5, 5 and 3 µs
        ({"kernel_count": 11}, "launch"),  # 10, 5 and 11 µs
        ({"enqueue_us": 95.0}, "launch"),  # the host takes 95 of 100 µs
        ({"enqueue_us": 94.9}, "compute"),
        ({"enqueue_us": 100.0, "kernel_count": None}, "launch"),
        ({"flops_executed": None}, "compute"),  # the useful ones: 5 µs, as much as the traffic
        ({"kernel_count": None}, None),
        ({"bytes_min": None}, None),
        ({"flops_executed": None, "flops_useful": None}, None),
    ],
)
def test_the_bound_is_the_limit_whose_least_time_is_longest(metrics, bound):
    found = row_of(CPU, **metrics)["bound"]
    assert pd.isna(found) if bound is None else found == bound


@pytest.mark.parametrize("lost", ["read_gbps", "launch_us", "matmul_tflops"])
def test_a_ceiling_that_is_unknown_leaves_what_needs_it_unknown_and_no_more(lost):
    row = row_of({**CPU, "ceilings": MEASURED | {lost: None}})
    needs = {
        "read_gbps": {"fraction_of_memory_peak", "read_gbps_measured"},
        "launch_us": {"launch_us_measured"},
        "matmul_tflops": {"fraction_of_compute_peak", "peak_tflops_measured"},
    }
    for name in set().union(*needs.values()) | {"arithmetic_intensity"}:
        assert pd.isna(row[name]) == (name in needs[lost]), name
    assert pd.isna(row["bound"])


def test_kernels_of_a_decode_are_shared_by_its_tokens():
    case = synthetic.decode_case(128, "static")  # 8 tokens a call, times are per token
    assert case.new_tokens == 8
    assert row_of(CPU, case, kernel_count=79)["bound"] == "compute"  # 9.9 µs of launches, 10 µs
    assert row_of(CPU, case, kernel_count=81)["bound"] == "launch"


def test_the_datasheet_stands_beside_what_was_measured():
    measured = MEASURED | {"matmul_tflops": {"bfloat16": 700.0}, "read_gbps": 4200.0}
    case = Case(device="cuda", dtype="bfloat16")
    row = row_of(H200 | {"ceilings": measured}, case)
    assert (row["peak_tflops_measured"], row["peak_tflops_datasheet"]) == (700.0, 989.0)
    assert (row["read_gbps_measured"], row["memory_gbps_datasheet"]) == (4200.0, 4800.0)
    unknown = row_of({**CPU, "device": "cuda", "ceilings": measured}, case)
    assert unknown["peak_tflops_measured"] == 700.0
    assert unknown[["peak_tflops_datasheet", "memory_gbps_datasheet"]].isna().all()


def test_a_cell_is_not_held_against_the_ceilings_of_another_device():
    row = row_of(CPU, Case(device="cuda"))
    assert row[["peak_tflops_measured", "fraction_of_memory_peak", "bound"]].isna().all()
    assert row["arithmetic_intensity"] == 10.0


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"matmul_tflops": {"float32": 0.2}},
        {"matmul_tflops": None},
        {"ceilings": None, "matmul_tflops": {"float32": 0.2}},
        {"ceilings": {"matmul_tflops": {"float32": 0.2}, "of a later version": 1}},
    ],
)
def test_runs_of_other_versions_load(environment):
    found = limits.ceilings_of(environment)
    assert found.matmul_tflops.get("float32") == (
        0.2 if environment.get("matmul_tflops") or environment.get("ceilings") else None
    )
    assert found.read_gbps is None
    row = row_of(environment)
    assert row[["read_gbps_measured", "fraction_of_memory_peak", "bound"]].isna().all()
    known = found.matmul_tflops.get("float32")
    assert known is None or row["peak_tflops_measured"] == known


FAST: dict[str, Any] = {"device_name": "Some CPU", "dtype": "float32", "matmul_precision": None}


def test_on_an_unknown_device_traffic_is_held_against_what_a_large_copy_or_read_reached():
    measured = limits.ceilings_of(CPU)
    past = 2**25 + 1  # one byte more than the last cache
    limit_us = past / (3 * 25e9) * 1e6  # three times the faster of both, the copy

    def suspect(time_us: float, bytes_min: int, ceilings: limits.Ceilings) -> str | None:
        return limits.suspect(
            **FAST, time_us=time_us, flops=1, bytes_min=bytes_min, measured=ceilings
        )

    assert "4 times what a large copy or read reached here" in str(
        suspect(limit_us * 3 / 4, past, measured)
    )
    assert suspect(limit_us * 1.001, past, measured) is None
    assert suspect(limit_us / 100, 2**25, measured) is None, "a cache may be as fast as it likes"
    unknown = limits.ceilings_of({"ceilings": MEASURED | {"cache_bytes": None}})
    assert suspect(limit_us / 100, past, unknown) is None


@pytest.mark.parametrize(
    ("device", "dtype", "time_us", "flops", "bytes_min", "why"),
    [
        ("NVIDIA H200", "bfloat16", 1000.0, 10**12, None, "above the datasheet peak of 989"),
        ("NVIDIA H200", "bfloat16", 1100.0, 10**12, None, None),
        ("NVIDIA H200", "float32", 10_000.0, 10**12, None, "above the datasheet peak of 67"),
        ("NVIDIA H200", "float64", 1.0, 10**12, None, None),  # no peak is known for it
        ("NVIDIA H200", "bfloat16", None, 10**12, None, None),
        ("NVIDIA H200", "bfloat16", 1.0, None, 40 * 2**20, None),  # within the last cache
        ("NVIDIA H200", "bfloat16", 1.0, None, 60 * 2**20, "TB/s at least, above the memory's"),
        ("NVIDIA H200 MIG 1g.18gb", "bfloat16", 1e-3, 10**12, None, None),
        ("NVIDIA L40S", "bfloat16", 1e-3, 10**12, None, None),
        (None, "bfloat16", 1e-3, 10**12, None, None),
    ],
)
def test_a_known_device_is_held_against_its_datasheet(
    device, dtype, time_us, flops, bytes_min, why
):
    given = {**FAST, "device_name": device, "dtype": dtype, "matmul_precision": "highest"}
    found = limits.suspect(**given, time_us=time_us, flops=flops, bytes_min=bytes_min)
    assert found is None if why is None else why in str(found)


def test_on_an_unknown_device_a_time_is_held_against_three_times_a_measured_matmul():
    measured = limits.ceilings_of({"matmul_tflops": {"float32": 0.2}})  # as older runs have it
    given: dict[str, Any] = {**FAST, "flops": 10**6, "bytes_min": 1, "measured": measured}
    assert "5 times what a large matmul reached" in str(limits.suspect(**given, time_us=1.0))
    assert limits.suspect(**given, time_us=2.0) is None, "the matmul may have met a busy moment"
    assert limits.suspect(**(given | {"measured": None}), time_us=1e-9) is None


def test_a_dtype_without_a_datasheet_peak_is_held_against_the_measured_one():
    measured = limits.ceilings_of({"matmul_tflops": {"float64": 50.0}})
    given: dict[str, Any] = {**FAST, "device_name": "NVIDIA H200", "dtype": "float64"}
    given |= {"time_us": 1.0, "bytes_min": None, "measured": measured}
    assert limits.suspect(**given, flops=150 * 10**6) is None
    assert "what a large matmul reached" in str(limits.suspect(**given, flops=151 * 10**6))


def test_a_known_device_is_held_against_its_datasheet_not_against_a_slow_moment():
    measured = limits.ceilings_of({"matmul_tflops": {"bfloat16": 10.0}, "ceilings": None})
    given: dict[str, Any] = {**FAST, "device_name": "NVIDIA H200", "dtype": "bfloat16"}
    found = limits.suspect(
        **given, time_us=1.0, flops=900 * 10**6, bytes_min=None, measured=measured
    )
    assert found is None


def test_executed_flops_make_a_time_suspect_not_useful_ones():
    assert pd.isna(row_of(CPU, time_us=4.0, flops_executed=10**6)["suspect"])
    assert "TFLOP/s executed" in row_of(CPU, time_us=4.0, flops_executed=10**7)["suspect"]
