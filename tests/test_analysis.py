"""The records table, its exports, and what is computed from it."""

import io
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pandas as pd
import pytest

from attnbench.analysis import doubts
from attnbench.analysis.axes import fixed, label, label_axes, varying
from attnbench.analysis.columns import COLUMNS
from attnbench.analysis.doubts import doubt_sentence
from attnbench.analysis.highlights import (
    SUMMARY,
    cache_sentence,
    fastest_sentence,
    highlights,
    summary_rows,
)
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
from attnbench.schema.case import Case, Position, parse_mask, parse_position
from attnbench.schema.record import Record
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


NAMES = ("quick", "failed", "bare", "hostile", "one", "empty")


class Loaded(NamedTuple):
    run: Run
    frame: pd.DataFrame
    compared: pd.DataFrame
    costs: pd.DataFrame


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Loaded]:
    folder = tmp_path_factory.mktemp("runs")
    runs = {name: load_run(synthetic.write_named(folder, name)) for name in NAMES}
    return {n: Loaded(run, load(run), compared(run), rope_cost(run)) for n, run in runs.items()}


def test_the_designed_columns_come_first_and_in_their_order(loaded):
    names = re.split(r",\s+", DESIGNED.strip())
    assert list(loaded["quick"].frame.columns)[: len(names)] == names


def test_every_recorded_cell_is_a_row_and_failures_are_too(loaded):
    frame = loaded["failed"].frame
    assert len(frame) == 7
    assert frame["time_us_median"].isna().all()
    assert frame["reason"].notna().all()
    assert loaded["empty"].frame.shape == (0, len(COLUMNS))


def test_what_is_unknown_is_null_and_never_zero(loaded):
    frame = loaded["bare"].frame
    unknown = ["flops_useful", "tflops", "gbps", "memory_workspace_bytes", "error_max", "kernel"]
    assert frame[unknown].isna().all(axis=None)
    assert frame["time_us_ci_low"].isna().all()  # four samples give no interval
    assert frame["interval"].isna().all()
    assert frame["time_us_median"].notna().all()


def test_a_known_zero_stays_zero_and_large_counts_keep_every_digit(tmp_path):
    metrics = {"memory_workspace_bytes": 0, "error_max": 0.0, "flops_useful": 2**60 + 1}
    record = replace(synthetic.ok(Case(), "naive"), metrics=metrics)
    row = load(synthetic.write_run(tmp_path, "cell", [record])).iloc[0]
    assert {name: row[name] for name in metrics} == metrics


def test_integers_beside_nulls_stay_integers(loaded):
    frame = loaded["quick"].frame
    assert frame["flops_useful"].isna().any()
    integers = [name for name, column in COLUMNS.items() if column.kind == "int"]
    assert {str(frame[name].dtype) for name in integers} == {"Int64"}


def test_rates_are_the_metrics_over_the_median_time(loaded):
    row = loaded["one"].frame.iloc[0]
    assert row["tflops"] == pytest.approx(row["flops_useful"] / row["time_us_median"] / 1e6)
    assert row["gbps"] == pytest.approx(row["bytes_min"] / row["time_us_median"] / 1e3)
    assert row["time_us_ci_low"] <= row["time_us_median"] <= row["time_us_ci_high"]
    assert row["interval"] == "within_process"


@pytest.mark.parametrize("name", NAMES)
def test_exports_keep_integers_and_nulls(loaded, name, tmp_path):
    frame = loaded[name].frame
    csv, as_json, parquet = io.StringIO(), io.StringIO(), tmp_path / "run.parquet"
    to_csv(frame, csv)
    back = pd.read_csv(io.StringIO(csv.getvalue()), dtype=str, keep_default_na=False)
    assert len(back) == len(frame)
    for column in ("batch", "flops_useful", "memory_workspace_bytes", "new_tokens"):
        assert all(re.fullmatch(r"\d*", text) for text in back[column])
        assert ((back[column] == "").to_numpy() == frame[column].isna().to_numpy()).all()
    to_json(frame, as_json)
    rows = json.loads(as_json.getvalue())
    assert len(rows) == len(frame)
    for row in rows:
        assert type(row["batch"]) is int
        assert row["flops_useful"] is None or type(row["flops_useful"]) is int
        assert row["energy_j"] is None or type(row["energy_j"]) is float
    to_parquet(frame, parquet)
    pd.testing.assert_frame_equal(pd.read_parquet(parquet), frame)


def test_what_is_no_run_and_what_cannot_be_written_are_refused(loaded, tmp_path):
    with pytest.raises(StoreError, match="no run"):
        load(tmp_path)
    with pytest.raises(StoreError, match="cannot write"):
        to_parquet(loaded["one"].frame, tmp_path / "missing" / "run.parquet")


def test_rows_of_a_case_come_fastest_first_and_failures_last(loaded):
    for _, rows in loaded["quick"].compared.groupby("case_id"):
        times = rows["time_us_median"]
        assert times.dropna().is_monotonic_increasing
        assert times.isna().is_monotonic_increasing


def test_speed_is_naives_time_over_this_time(loaded):
    frame = loaded["one"].compared
    assert frame["speed"].isna().all()  # there is no naive to compare with
    frame = loaded["quick"].compared
    for _, rows in frame[frame["speed"].notna()].groupby("case_id"):
        base = rows[rows["impl"] == "naive"].iloc[0]
        assert base["speed"] == 1.0
        assert rows["speed"].to_numpy() == pytest.approx(
            base["time_us_median"] / rows["time_us_median"].to_numpy(), rel=0.05
        )
        others = rows[rows["impl"] != "naive"]
        assert (others["speed_low"] <= others["speed"]).all()
        assert (others["speed"] <= others["speed_high"]).all()


def test_the_cost_of_rope_pairs_the_same_case_with_and_without(tmp_path):
    def cell(position: Position, factor: float) -> Record:
        record = synthetic.ok(Case(position=position), "naive")
        samples = synthetic.samples(100.0 * factor, "same")
        return Record(cell=record.cell, status="ok", samples=samples)

    alone = synthetic.ok(Case(seq_len=64, position=parse_position("rope")), "naive")
    pair = [cell(Position(), 1.0), cell(parse_position("rope"), 1.25)]
    costs = rope_cost(load_run(synthetic.write_run(tmp_path, "rope", [*pair, alone])))
    assert costs["cost"].tolist() == [pytest.approx(1.25)]


@pytest.mark.parametrize("name", NAMES)
def test_highlights_and_summaries_are_whole_texts(loaded, name):
    sentences = highlights(loaded[name].run, loaded[name].compared, loaded[name].costs)
    assert sentences
    assert all(text.endswith(".") and "nan" not in text.split() for text in sentences)
    for row in summary_rows(loaded[name].compared):
        assert list(row) == ["case", *SUMMARY.names()]
        assert all(isinstance(text, str) and text for text in row.values())


def sentences(**times: float) -> str:
    """The highlights of one case of implementations that take so many microseconds."""
    records = [
        replace(synthetic.ok(Case(), impl), samples=synthetic.samples(time_us, impl))
        for impl, time_us in times.items()
    ]
    run = Run(path=Path("r"), info={"run_id": "r"}, records=records)
    return " ".join(highlights(run, compared(run), rope_cost(run)))


def test_highlights_name_the_fastest_only_where_it_is_faster_than_every_other():
    text = sentences(naive=100.0, sdpa=50.0, slow=200.0)
    assert "sdpa is fastest with" in text
    assert "× as fast as naive (95 % interval" in text
    text = sentences(naive=100.0, sdpa=50.0, twin=50.2, slow=200.0)
    assert "fastest" not in text
    assert re.search(r"twin with 5.* µs is level with sdpa \(± \d+(\.\d+)? %\)\.", text)
    assert "naive takes 1" in sentences(naive=100.0)


def test_what_a_cache_saves_is_of_cases_that_differ_in_nothing_but_the_cache():
    one = Case(workload="decode", mask=parse_mask("causal"), cache="static", new_tokens=8)
    times = {one: 100.0, replace(one, cache="concat"): 200.0}
    times |= {replace(case, layers=4): 4 * time_us for case, time_us in times.items()}
    records = [
        replace(synthetic.ok(case, "naive"), samples=synthetic.samples(time_us, "naive"))
        for case, time_us in times.items()
    ]
    run = Run(path=Path("r"), info={"run_id": "r"}, records=records)
    sentence = cache_sentence(run, compared(run))
    assert "cache concat" in sentence
    assert "2.00×" in sentence


def test_a_tie_that_is_known_badly_is_no_level_in_the_sentence_either():
    records = [
        replace(synthetic.ok(Case(), impl), samples=synthetic.samples(us, impl))
        for impl, us in (("naive", 100.0), ("sdpa", 50.0), ("twin", 60.0), ("other", 70.0))
    ]
    frame = compared(Run(path=Path("r"), info={"run_id": "r"}, records=records))
    for impl, low, high in (("twin", 0.97, 1.06), ("other", 0.6, 1.7), ("naive", 1.8, 2.2)):
        frame.loc[frame["impl"] == impl, ["behind_low", "behind_high"]] = low, high
    end = "is level with twin (± 6 %), and not told apart from other (0.600–1.70×)."
    assert fastest_sentence(frame).endswith(end)


def test_what_is_level_with_naive_is_called_so_in_the_table_too():
    for time_us, expected in ((100.4, r"level ± [\d.]+ %"), (50.0, r"[\d.]+×")):
        records = [
            replace(synthetic.ok(Case(), impl), samples=synthetic.samples(us, impl))
            for impl, us in (("naive", 100.0), ("mine", time_us))
        ]
        rows = summary_rows(compared(Run(path=Path("r"), info={"run_id": "r"}, records=records)))
        assert re.fullmatch(expected, next(r["speed"] for r in rows if r["impl"] == "mine"))


@pytest.mark.parametrize(
    ("low", "high", "shown"),
    [(0.98, 1.06, "level ± 6 %"), (0.9, 1.7, "0.900–1.70×"), (1.1, 1.7, "1.30×")],
)
def test_a_tie_that_is_known_badly_is_shown_as_its_interval(low, high, shown):
    row = {"impl": "mine", "speed": 1.3, "speed_low": low, "speed_high": high}
    assert SUMMARY.get("speed").text(row) == shown


def test_failures_are_gathered_by_reason_and_the_wrong_ones_come_first(loaded):
    rows = failures(loaded["failed"].frame)
    assert rows["status"].tolist()[0] == "incorrect"
    assert len(rows) == 7
    quick = failures(loaded["quick"].frame)
    flex = quick[quick["impl"] == "flex"].iloc[0]
    assert (flex["cells"], flex["smallest_n"], flex["largest_n"]) == (5, 128, 2048)


def test_wall_time_adds_up_and_a_killed_run_tells_what_its_records_know(loaded):
    run = loaded["quick"].run
    assert sum(s for _, s in spent(run)) == pytest.approx(run.info["spent"]["wall_s"])
    killed = dict(spent(replace(run, info=run.info | {"spent": None})))
    assert killed["check"] == pytest.approx(sum(r.spent_s["check"] for r in run.records))


def test_labels_name_only_what_varies_in_a_workload(loaded):
    frame = loaded["quick"].frame
    names = label_axes(frame)
    assert "width" in varying(frame)
    assert "width" not in names["decode"]
    assert names["attention"] == ["workload", "position", "heads", "seq_len"]
    assert label(frame.iloc[0], names["attention"]) == "attention H=4 n=128"
    assert fixed(frame) == "cpu, float32, forward, full, D=64, B=1"


def test_a_cell_recorded_twice_is_one_row_and_one_of_another_device_has_no_device_name(tmp_path):
    lost = synthetic.failed(Case(), "naive", "timeout", "60 s")
    records = [lost, *(synthetic.ok(Case(device=d), "naive") for d in ("cpu", "cuda"))]
    frame = load(synthetic.write_run(tmp_path, "again", records))
    assert frame["status"].tolist() == ["ok", "ok"]
    assert frame["device_name"].notna().tolist() == [True, False]


def test_a_command_that_is_proposed_repeats_no_default() -> None:
    from attnbench.cli.sweep import sweep

    plain = (str, int, float)
    defaults = {p.name: p.default for p in sweep.params if isinstance(p.default, plain)}
    defaults["output"] = "results"  # a path
    assert {name: value for name, value in defaults.items() if value} == doubts._DEFAULTS | {
        "processes": 1  # proposed in any case
    }


def test_the_line_of_doubt_says_what_disturbed_a_run_what_that_did_and_what_to_run():
    def line(spread: float, threads: int, **options: object) -> str:
        times = [100.0 * (1 + spread * (i % 3)) for i in range(12)]
        record = synthetic.timed(Case(seq_len=256, threads=threads), "naive", times, cpu_share=0.6)
        info = {"run_id": "r", "options": {"device": "auto", "heads": [4]}, "settings": options}
        run = Run(path=Path("r"), info=info, records=[record])
        return doubt_sentence(run, compared(run))

    assert line(0.0, 1) == ""  # whatever took processor time: it did nothing to the figures
    assert line(0.5, 1) == (
        "Other work took 40 % of the samples' processor time: 1 of 1 intervals is wider than"
        " ± 10 %; measure longer, in fresh processes:"
        " attnbench sweep --heads 4 --seq-lens 256 --max-time 3 --processes 3"
    )
    assert "--threads 1, repeats best" in line(0.5, 2)
    assert line(0.5, 1, max_time_s=3.0, processes=3).endswith("when the machine is less busy")
