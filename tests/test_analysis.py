"""The records table, its exports, and what is computed from it."""

import io
import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import pytest

from attnbench.analysis import notes
from attnbench.analysis.columns import COLUMNS
from attnbench.analysis.notes import doubt
from attnbench.analysis.table import load, rope_cost, to_csv, to_json, to_parquet
from attnbench.schema.case import Case
from attnbench.store.runs import Run, load_run
from tests import synthetic

NAMES = ("quick", "failed", "bare", "hostile", "one", "empty")


class Loaded(NamedTuple):
    run: Run
    frame: pd.DataFrame
    costs: pd.DataFrame


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Loaded]:
    folder = tmp_path_factory.mktemp("runs")
    runs = {name: load_run(synthetic.write_named(folder, name)) for name in NAMES}
    return {n: Loaded(run, load(run), rope_cost(run)) for n, run in runs.items()}


def test_every_recorded_cell_is_a_row_and_failures_are_too(loaded):
    frame = loaded["failed"].frame
    assert len(frame) == 7
    assert frame["time_us"].isna().all()
    assert frame["reason"].notna().all()
    assert loaded["empty"].frame.shape == (0, len(COLUMNS))


def test_what_is_unknown_is_null_and_never_zero(loaded):
    frame = loaded["bare"].frame
    unknown = ["flops_useful", "tflops", "gbps", "memory_workspace_bytes", "error_max", "kernel"]
    unknown += ["count"]  # no step says so
    assert frame[unknown].isna().all(axis=None)
    assert frame["time_us_low"].isna().all()  # four samples give no interval
    assert frame["time_us"].notna().all()


def test_rates_are_the_metrics_over_the_median_time(loaded):
    row = loaded["one"].frame.iloc[0]
    assert row["tflops"] == pytest.approx(row["flops_useful"] / row["time_us"] / 1e6)
    assert row["gbps"] == pytest.approx(row["bytes_min"] / row["time_us"] / 1e3)
    assert row["time_us_low"] <= row["time_us"] <= row["time_us_high"]


@pytest.mark.parametrize("name", NAMES)
def test_exports_keep_integers_and_nulls(loaded, name, tmp_path):
    frame, csv, as_json = loaded[name].frame, io.StringIO(), io.StringIO()
    to_csv(frame, csv)
    back = pd.read_csv(io.StringIO(csv.getvalue()), dtype=str, keep_default_na=False)
    assert len(back) == len(frame)
    for column in ("batch", "flops_useful", "memory_workspace_bytes", "new_tokens"):
        assert all(re.fullmatch(r"\d*", text) for text in back[column])
        assert ((back[column] == "").to_numpy() == frame[column].isna().to_numpy()).all()
    to_json(frame, as_json)
    rows = json.loads(as_json.getvalue())
    assert len(rows) == len(frame)
    for column, kinds in {"batch": "int", "flops_useful": "int NoneType"}.items():
        assert {type(row[column]).__name__ for row in rows} <= {*kinds.split()}
    to_parquet(frame, tmp_path / "run.parquet")
    pd.testing.assert_frame_equal(pd.read_parquet(tmp_path / "run.parquet"), frame)


def test_a_command_that_is_proposed_repeats_no_default() -> None:
    from attnbench.cli.sweep import sweep

    plain = (str, int, float)
    defaults = {p.name: p.default for p in sweep.params if isinstance(p.default, plain)}
    defaults["output"] = "results"  # a path
    assert {name: value for name, value in defaults.items() if value} == notes._DEFAULTS | {
        "processes": 1  # proposed in any case
    }


def test_the_line_of_doubt_says_what_disturbed_a_run_what_that_did_and_what_to_run():
    asked: dict[str, Any] = {"device": "auto", "heads": [4, 8]}

    def line(spread: float, threads: int, **options: object) -> str:
        times = [100.0 * (1 + spread * (i % 3)) for i in range(12)]
        record = synthetic.timed(Case(seq_len=256, threads=threads), "naive", times, cpu_share=0.6)
        info = {"run_id": "r", "options": asked, "settings": options}
        run = Run(path=Path("r"), info=info, records=[record])
        return " | ".join(filter(None, doubt(run, load(run))))

    assert line(0.0, 1) == ""  # whatever took processor time: it did nothing to the figures
    assert line(0.5, 1) == (
        "The machine was disturbed: other processes took 40 % of the CPU time. So 1 of 1 intervals"
        " is wider than ± 10 %. The command 'narrow' below measures them longer. |"
        " attnbench sweep --heads 4 --seq-lens 256 --impls naive --max-time 3 --processes 3"
    )
    assert "one thread (--threads 1) repeats best" in line(0.5, 2)
    asked.update(preset="quick", seq_lens=[64, 256])
    assert line(0.5, 1).endswith("sweep --case n=256 --max-time 3 --impls naive --processes 3")
    assert line(0.5, 1, max_time_s=3.0, processes=3).endswith("on a quieter machine.")
