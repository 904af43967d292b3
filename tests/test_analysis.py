"""The records table, its exports, and what is computed from it."""

import io
import json
import re
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from attnbench.analysis.axes import fixed, label, label_axes, varying
from attnbench.analysis.columns import COLUMNS
from attnbench.analysis.highlights import SUMMARY, highlights, summary_rows
from attnbench.analysis.table import (
    compared,
    failures,
    load,
    rope_cost,
    spent,
    to_csv,
    to_json,
    to_parquet,
)
from attnbench.errors import StoreError
from attnbench.execution.store import Run, load_run
from attnbench.machine import limits
from attnbench.schema.case import Case, Position
from attnbench.schema.record import Cell, Record, Sample
from tests import synthetic

DESIGNED = """
run_id, case_id, workload, impl, pass, device, device_name, dtype, batch, heads, kv_heads,
seq_len, kv_len, head_dim, mask, position, value_dim, width, projection, cache, new_tokens,
threads, status, reason, suspect, time_us_median, time_us_ci_low, time_us_ci_high, time_us_min,
e2e_us_median, n_samples, flops_useful, flops_executed, flops_counted, flops_counted_source,
tflops, bytes_min, gbps, memory_peak_bytes, memory_inputs_bytes, memory_outputs_bytes,
memory_prepared_bytes, memory_workspace_bytes, memory_predicted_bytes, error_max, error_rmse,
kernel, compile_s, energy_j
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("runs")
    for name in synthetic.RUNS:
        synthetic.write_named(folder, name)
    return folder


def one_cell(folder: Path, **metrics: float) -> Path:
    """A run of one measured cell with these metrics."""
    record = synthetic.ok(Case(), "naive")
    cell = Record(cell=record.cell, status="ok", samples=record.samples, metrics=metrics)
    return synthetic.write_run(folder, "cell", [cell])


def test_the_designed_columns_come_first_and_in_their_order(runs):
    names = re.split(r",\s+", DESIGNED.strip())
    assert list(load(runs / "quick").columns)[: len(names)] == names


def test_every_column_says_what_it_means():
    assert all(column.meaning for _, column in COLUMNS.items())


def test_every_recorded_cell_is_a_row_and_failures_are_too(runs):
    frame = load(runs / "failed")
    assert len(frame) == 7
    assert frame["time_us_median"].isna().all()
    assert frame["reason"].notna().all()


def test_a_run_without_records_has_all_columns_and_no_rows(runs):
    assert load(runs / "empty").shape == (0, len(COLUMNS))


def test_what_is_unknown_is_null_and_never_zero(runs):
    frame = load(runs / "bare")
    unknown = ["flops_useful", "tflops", "gbps", "memory_workspace_bytes", "error_max", "kernel"]
    assert frame[unknown].isna().all(axis=None)
    assert frame["time_us_ci_low"].isna().all()  # four samples give no interval
    assert frame["interval"].isna().all()
    assert frame["time_us_median"].notna().all()


def test_a_known_zero_stays_zero(tmp_path):
    frame = load(one_cell(tmp_path, memory_workspace_bytes=0, error_max=0.0))
    assert frame["memory_workspace_bytes"].tolist() == [0]
    assert frame["error_max"].tolist() == [0.0]


def test_integers_beside_nulls_stay_integers(runs):
    frame = load(runs / "quick")
    assert frame["flops_useful"].isna().any()
    integers = [name for name, column in COLUMNS.items() if column.kind == "int"]
    assert {str(frame[name].dtype) for name in integers} == {"Int64"}


def test_what_a_cell_was_measured_beside_has_columns(tmp_path):
    record = synthetic.ok(Case(), "naive", governor="powersave", cpu_quota=1.5)
    row = load(load_run(synthetic.write_run(tmp_path, "r", [record]))).iloc[0]
    assert (row["governor"], row["cpu_quota"]) == ("powersave", 1.5)


def test_large_counts_keep_every_digit(tmp_path):
    exact = 2**60 + 1
    frame = load(one_cell(tmp_path, flops_useful=exact))
    assert frame["flops_useful"].tolist() == [exact]


def test_rates_are_the_metrics_over_the_median_time(runs):
    row = load(runs / "one").iloc[0]
    assert row["tflops"] == pytest.approx(row["flops_useful"] / row["time_us_median"] / 1e6)
    assert row["gbps"] == pytest.approx(row["bytes_min"] / row["time_us_median"] / 1e3)
    assert row["time_us_ci_low"] <= row["time_us_median"] <= row["time_us_ci_high"]
    assert row["interval"] == "within_process"


def test_a_folder_that_is_no_run_is_refused(tmp_path):
    with pytest.raises(StoreError, match="no run"):
        load(tmp_path)


@pytest.mark.parametrize("name", synthetic.RUNS)
def test_csv_keeps_integers_and_writes_null_as_nothing(runs, name):
    frame = load(runs / name)
    stream = io.StringIO()
    to_csv(frame, stream)
    back = pd.read_csv(io.StringIO(stream.getvalue()), dtype=str, keep_default_na=False)
    assert len(back) == len(frame)
    for column in ("batch", "flops_useful", "memory_workspace_bytes", "new_tokens"):
        assert all(re.fullmatch(r"\d*", text) for text in back[column])
        assert ((back[column] == "").to_numpy() == frame[column].isna().to_numpy()).all()


@pytest.mark.parametrize("name", synthetic.RUNS)
def test_json_keeps_integers_and_writes_null_as_null(runs, name):
    frame = load(runs / name)
    stream = io.StringIO()
    to_json(frame, stream)
    rows = json.loads(stream.getvalue())
    assert len(rows) == len(frame)
    for row in rows:
        assert type(row["batch"]) is int
        assert row["flops_useful"] is None or type(row["flops_useful"]) is int
        assert row["energy_j"] is None or type(row["energy_j"]) is float


def test_parquet_round_trips_types_and_nulls(runs, tmp_path):
    frame = load(runs / "quick")
    to_parquet(frame, tmp_path / "run.parquet")
    back = pd.read_parquet(tmp_path / "run.parquet")
    pd.testing.assert_frame_equal(back, frame)


def test_parquet_into_a_missing_folder_is_a_readable_error(runs, tmp_path):
    with pytest.raises(StoreError, match="cannot write"):
        to_parquet(load(runs / "one"), tmp_path / "missing" / "run.parquet")


def test_rows_of_a_case_come_fastest_first_and_failures_last(runs):
    for _, rows in compared(load_run(runs / "quick")).groupby("case_id"):
        times = rows["time_us_median"]
        assert times.dropna().is_monotonic_increasing
        assert times.isna().is_monotonic_increasing


def test_speed_is_naives_time_over_this_time(runs):
    frame = compared(load_run(runs / "one"))
    assert frame["speed"].isna().all()  # there is no naive to compare with
    frame = compared(load_run(runs / "single-n"))
    for _, rows in frame.groupby("case_id"):
        base = rows[rows["impl"] == "naive"].iloc[0]
        assert base["speed"] == 1.0
        assert rows["speed"].to_numpy() == pytest.approx(
            base["time_us_median"] / rows["time_us_median"].to_numpy()
        )
        others = rows[rows["impl"] != "naive"]
        assert (others["speed_low"] <= others["speed"]).all()
        assert (others["speed"] <= others["speed_high"]).all()


def test_the_cost_of_rope_pairs_the_same_case_with_and_without(tmp_path):
    def cell(position: Position, factor: float) -> Record:
        record = synthetic.ok(Case(position=position), "naive")
        samples = synthetic.samples(100.0 * factor, "same")
        return Record(cell=record.cell, status="ok", samples=samples)

    alone = synthetic.ok(Case(seq_len=64, position=Position(name="rope")), "naive")
    pair = [cell(Position(), 1.0), cell(Position(name="rope"), 1.25)]
    costs = rope_cost(load_run(synthetic.write_run(tmp_path, "rope", [*pair, alone])))
    assert costs["cost"].tolist() == [pytest.approx(1.25)]


def test_failures_are_gathered_by_reason_and_the_wrong_ones_come_first(runs):
    rows = failures(load(runs / "failed"))
    assert rows["status"].tolist()[0] == "incorrect"
    assert len(rows) == 7
    quick = failures(load(runs / "quick"))
    flex = quick[quick["impl"] == "flex"].iloc[0]
    assert (flex["cells"], flex["smallest_n"], flex["largest_n"]) == (5, 128, 2048)


def test_wall_time_adds_up_and_a_killed_run_tells_what_its_records_know(tmp_path):
    records = [synthetic.ok(Case(), "naive")]
    run = load_run(synthetic.write_run(tmp_path, "whole", records))
    assert sum(s for _, s in spent(run)) == pytest.approx(run.info["spent"]["wall_s"])
    killed = load_run(synthetic.write_run(tmp_path, "killed", records, {"spent": None}))
    assert dict(spent(killed)) == records[0].spent_s


def test_labels_name_only_what_varies_in_a_workload(runs):
    frame = load(runs / "quick")
    names = label_axes(frame)
    assert "width" in varying(frame)
    assert "width" not in names["decode"]
    assert names["attention"] == ["workload", "position", "heads", "batch", "seq_len"]
    assert label(frame.iloc[0], names["attention"]) == "attention H=4 B=1 n=128"
    assert fixed(frame) == "cpu, float32, forward, full, D=64"


def test_summary_rows_are_texts_with_every_summary_column(runs):
    for name in synthetic.RUNS:
        for row in summary_rows(compared(load_run(runs / name))):
            assert list(row) == ["case", *SUMMARY.names()]
            assert all(isinstance(text, str) and text for text in row.values())


@pytest.mark.parametrize("name", synthetic.RUNS)
def test_highlights_are_whole_sentences(runs, name):
    run = load_run(runs / name)
    sentences = highlights(compared(run), rope_cost(run))
    assert sentences
    assert all(text.endswith(".") and "nan" not in text.split() for text in sentences)


def test_highlights_name_the_fastest_its_ratio_and_what_is_level_with_it(runs):
    run = load_run(runs / "gpu")
    text = " ".join(highlights(compared(run), rope_cost(run)))
    assert "sdpa-cudnn is fastest" in text
    assert "level within the intervals: sdpa)" in text
    assert "as fast as naive (95 % interval" in text


H200: dict[str, Any] = {
    "device_name": "NVIDIA H200",
    "matmul_precision": "highest",
    "flops": 10**12,
}


@pytest.mark.parametrize(
    ("dtype", "time_us", "why"),
    [
        ("bfloat16", 1000.0, "1000 TFLOP/s executed, above the datasheet peak of 989"),
        ("bfloat16", 1100.0, None),
        ("float32", 10_000.0, "above the datasheet peak of 67"),
        ("float64", 1.0, None),  # no peak is known for it
        ("bfloat16", None, None),
    ],
)
def test_more_flops_than_the_datasheet_allows_are_suspect(dtype, time_us, why):
    found = limits.suspect(**H200, dtype=dtype, time_us=time_us, bytes_min=None)
    assert found is None if why is None else why in str(found)


def test_traffic_is_suspect_only_beyond_the_last_cache():
    given: dict[str, Any] = {**H200, "flops": None, "dtype": "bfloat16", "time_us": 1.0}
    assert limits.suspect(**given, bytes_min=40 * 2**20) is None
    assert "TB/s" in str(limits.suspect(**given, bytes_min=60 * 2**20))


@pytest.mark.parametrize("name", [None, "AMD EPYC", "NVIDIA H200 MIG 1g.18gb", "NVIDIA L40S"])
def test_devices_without_a_known_peak_are_left_alone(name):
    given: dict[str, Any] = {**H200, "device_name": name}
    assert limits.suspect(**given, dtype="bfloat16", time_us=1e-3, bytes_min=None) is None


def test_a_suspect_time_is_told_in_its_row(tmp_path):
    case = Case(device="cuda", dtype="bfloat16")
    record = synthetic.ok(case, "sdpa", flops_executed=10**18)
    frame = load(synthetic.write_run(tmp_path, "fast", [record]))
    assert "above the datasheet peak" in frame["suspect"].iloc[0]


def test_the_environment_of_another_device_names_none(tmp_path):
    records = [synthetic.ok(Case(), "naive"), synthetic.ok(Case(device="cuda"), "naive")]
    frame = load(synthetic.write_run(tmp_path, "mixed", records))
    assert frame["device_name"].notna().tolist() == [True, False]


def test_a_cell_recorded_twice_is_one_row(tmp_path):
    cell = Cell(case=Case(), impl="naive")
    lost = Record(cell=cell, status="timeout", reason="60 s")
    path = synthetic.write_run(tmp_path, "again", [lost, synthetic.ok(Case(), "naive")])
    assert load(path)["status"].tolist() == ["ok"]


def test_wide_intervals_are_told(tmp_path):
    record = synthetic.ok(Case(), "naive")
    wild = tuple(
        Sample(round=i, position=0, calls=1, time_us=10.0**i, e2e_us=10.0**i) for i in range(9)
    )
    path = synthetic.write_run(
        tmp_path, "wild", [Record(cell=record.cell, status="ok", samples=wild)]
    )
    run = load_run(path)
    assert "1 of 1 intervals are wider" in " ".join(highlights(compared(run), rope_cost(run)))


def test_on_an_unknown_device_a_time_is_held_against_a_measured_matmul():
    given: dict[str, Any] = {
        "device_name": "Some CPU",
        "dtype": "float32",
        "matmul_precision": "highest",
    }
    measured = limits.ceilings_of({"matmul_tflops": {"float32": 0.2}})  # as older runs have it
    fast = limits.suspect(**given, time_us=1.0, flops=10**6, bytes_min=1, measured=measured)
    assert "5 times what a large matmul reached" in str(fast)
    slow = limits.suspect(**given, time_us=2.0, flops=10**6, bytes_min=1, measured=measured)
    assert slow is None, "within three times of it: the matmul may have met a busy moment"
    assert limits.suspect(**given, time_us=1e-9, flops=10**6, bytes_min=1) is None


def row_of(times_us, **metrics):
    cell = Cell(case=Case(), impl="naive")
    samples = tuple(
        Sample(round=i, position=0, calls=1, time_us=t, e2e_us=t) for i, t in enumerate(times_us)
    )
    record = Record(cell=cell, status="ok", samples=samples, metrics=metrics)
    run = Run(path=Path("r"), info={"run_id": "r", "environment": {}}, records=[record])
    return load(run).iloc[0]


def test_a_time_that_cannot_be_believed_says_why():
    steady = [100.0, 101.0, 102.0] * 3
    assert pd.isna(row_of(steady, interruptions_per_s=90.0)["notes"])
    assert "interrupted 250 times a second" in row_of(steady, interruptions_per_s=250.0)["notes"]
    two_speeds = row_of([100.0, 240.0, 240.0, 250.0])["notes"]
    assert "the reported time is 2.4 times the fastest sample" in two_speeds
    assert (
        "it changes the number of threads"
        in row_of(steady, meddles="the number of threads")["notes"]
    )
