"""The times and ratios of the table, over every committed run and three of a busy machine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from attnbench.analysis.leads import MOST, leads
from attnbench.analysis.ratios import baseline_of
from attnbench.analysis.table import load
from attnbench.errors import UnknownNameError
from attnbench.schema.case import Case, parse_mask
from attnbench.schema.record import Record
from attnbench.store.runs import Run, load_run
from tests import synthetic

ROOT = Path(__file__).resolve().parents[1]
RUNS = sorted(
    file.parent.relative_to(ROOT).as_posix()
    for folder in ("results", "tests/runs")
    for file in (ROOT / folder).rglob("run.json")
)


@pytest.mark.parametrize("name", RUNS)
def test_times_lie_in_their_intervals_and_rows_in_one_order(name):
    run = load_run(ROOT / name)
    frame = load(run)
    timed = frame[frame["time_us"].notna()]
    assert len(timed) > 0
    for what in ("time_us", "speedup", "behind"):
        known = timed[timed[f"{what}_low"].notna()]
        assert (
            (known[f"{what}_low"] <= known[what]) & (known[what] <= known[f"{what}_high"])
        ).all()
    assert (timed["time_us_min"] <= timed["time_us_median"]).all()
    records = {record.cell.key: record for record in run.records}
    for row in timed.to_dict("records"):
        kept = records[row["case_id"], row["impl"]].kept
        assert row["time_us_median"] == np.median([sample.own_us for sample in kept])
        if row["device"] == "cuda":
            assert (row["clock"], np.isnan(row["wall_us_median"])) == ("stream", True)
            continue
        assert row["wall_us_median"] == np.median([sample.time_us for sample in kept])
        assert row["clock"] == ("processor" if any(s.disturbed for s in kept) else "wall")
    for _, rows in frame.groupby(["case_id", "device_name"], sort=False, dropna=False):
        there = rows[rows["time_us"].notna()]
        assert rows["time_us"].isna().is_monotonic_increasing  # failures come last
        if there["speedup"].notna().all():
            assert there["speedup"].is_monotonic_decreasing
        else:
            assert there["time_us"].is_monotonic_increasing


@pytest.mark.parametrize("name", RUNS)
def test_a_ratio_says_where_it_is_from_and_why_the_times_give_another(name):
    frame = load(ROOT / name)
    others = frame[frame["impl"] != frame["baseline"]]
    assert (others["speedup"].notna() == others["speedup_source"].notna()).all()
    assert others[others["speedup"].isna()]["speedup_reason"].notna().all()
    base = others.merge(
        frame[frame["impl"] == frame["baseline"]],
        on=["case_id", "device_name"],
        suffixes=("", "_b"),
    )
    quotient = base["time_us_b"] / base["time_us"]
    outside = (quotient < base["speedup_low"]) | (quotient > base["speedup_high"])
    assert (outside == (base["speedup_reason"].notna() & base["speedup"].notna())).all()


def test_the_baseline_is_naive_else_sdpa_else_the_first_or_the_one_asked_for():
    def run(*impls: str, **info: str) -> Run:
        records = [synthetic.ok(Case(), impl) for impl in impls]
        return Run(path=Path("r"), info={"run_id": "r", **info}, records=records)

    assert baseline_of(run("mine", "sdpa", "naive")) == "naive"
    assert baseline_of(run("mine", "sdpa")) == "sdpa"
    assert baseline_of(run("mine", "yours")) == "mine"
    assert baseline_of(run("mine", "sdpa", baseline="mine")) == "mine"
    assert baseline_of(run("mine", "sdpa", baseline="mine"), "sdpa") == "sdpa"
    with pytest.raises(UnknownNameError, match=r"'spda' \(--baseline\), did you mean 'sdpa'.*mine"):
        baseline_of(run("mine", "sdpa"), "spda")


def test_a_baseline_that_failed_in_a_case_leaves_its_ratios_null_with_the_reason():
    records = [
        timed(Case(seq_len=64), "naive", 200.0),
        timed(Case(seq_len=64), "sdpa", 100.0),
        synthetic.failed(Case(seq_len=128), "naive", "oom", "no memory"),
        timed(Case(seq_len=128), "sdpa", 100.0),
    ]
    frame = load(Run(path=Path("r"), info={"run_id": "r"}, records=records))
    row = frame[(frame["impl"] == "sdpa") & (frame["seq_len"] == 128)].iloc[0]
    assert pd.isna(row["speedup"])
    assert row["speedup_reason"] == "naive: oom, no memory"
    assert frame["speedup"].notna().sum() == 2


def timed(case: Case, impl: str, time_us: float, **metrics: float | str) -> Record:
    record = synthetic.ok(case, impl)
    samples = synthetic.samples(time_us, f"{case.case_id}{impl}")
    return replace(record, samples=samples, metrics=record.metrics | metrics)


def first_words(own: tuple[str, ...] = (), **times: float) -> str:
    records = [timed(Case(), impl, time_us) for impl, time_us in times.items()]
    info = {"run_id": "r", "own": list(own)}
    run = Run(path=Path("r"), info=info, records=records)
    return "\n".join(leads(run, load(run)))


def test_ones_own_comes_first_against_the_baseline_and_then_the_fastest_and_the_next():
    text = first_words(("mine",), mine=100.0, sdpa=50.0, chunked=60.0)
    own, fastest = text.splitlines()
    assert "mine takes 2.0" in own
    assert "times as long as sdpa [" in own
    assert "sdpa is 1.2" in fastest
    assert "times as fast as chunked [" in fastest
    assert "level with" in first_words(naive=100.0, sdpa=50.0, twin=50.2)
    assert "naive takes" in first_words(naive=100.0)


def test_what_is_not_exact_is_never_first_beside_what_is_and_names_its_error():
    records = [
        timed(Case(), "sdpa", 50.0),
        timed(Case(), "naive", 90.0),
        timed(Case(), "rough", 10.0, approx_error=0.5, approx_error_local=0.25),
    ]
    run = Run(path=Path("r"), info={"run_id": "r"}, records=records)
    (text,) = leads(run, load(run))
    assert "sdpa is 1.7" in text
    assert (
        "; rough is 4.92 times as fast, but off exact attention by 50 % (25 % on local inputs)"
        in text
    )


def test_equal_findings_are_one_sentence_and_there_are_at_most_six():
    masks = [f"window:{size}" for size in range(1, 13)]
    order = ["sdpa"] * 9 + ["chunked"] * 3
    run = Run(
        path=Path("r"), info={"run_id": "r"},
        records=[
            timed(replace(Case(), mask=parse_mask(mask)), impl, 50.0 if impl == first else 90.0)
            for mask, first in zip(masks, order, strict=True)
            for impl in ("sdpa", "chunked")
        ],
    )  # fmt: skip
    text = leads(run, load(run))
    assert "sdpa is fastest at the largest n in 9 of 12 masks" in text[0]
    assert "in 3 of 12 masks" in text[1]
    apart = replace(run, records=[timed(Case(), f"own{i}", 50.0 + i) for i in range(9)])
    apart.info["own"] = [f"own{i}" for i in range(9)]
    text = leads(apart, load(apart))
    assert len(text) == MOST
    assert "attnbench export r --format markdown --where" in text[-1]


def test_only_what_calls_sdpa_on_its_shapes_runs_its_kernel():
    shapes = {"sdpa": "(8, 64)", "fused": "(8, 64)", "sdpa-grouped": "(2, 256)"}
    records = [
        timed(Case(), name, 50.0 + len(name), sdpa_backend="flash", sdpa_shapes=text)
        for name, text in shapes.items()
    ]
    run = Run(path=Path("r"), info={"run_id": "r"}, records=records)
    (text,) = leads(run, load(run))
    assert "fused runs sdpa's kernel" in text
    assert "than sdpa-grouped" in text.replace("as fast as", "than"), "which is compared"
    assert "sdpa-grouped runs" not in text


def test_two_names_for_one_kernel_are_not_held_against_each_other():
    run = load_run(ROOT / "results/layouts-h200")
    (sentence,) = leads(run, load(run))
    assert sentence.startswith("sdpa is fastest")  # which runs cuDNN's kernel there
    assert sentence.endswith("as sdpa-flash.")
