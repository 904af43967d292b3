"""Layers, recurrent networks and sizes for the floor in the charts of a report."""

from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from attnbench.analysis.axes import fixed, overhead_size
from attnbench.analysis.scaling.cells import same_text
from attnbench.analysis.table import compared, rope_cost
from attnbench.execution.store import load_run
from attnbench.report import beside
from attnbench.report.charts import CHARTS, with_rate_interval
from attnbench.report.sheets import sheets
from attnbench.report.write import write_report
from attnbench.schema.case import Case
from tests import synthetic


def layers(tmp_path: Path, **fields: Any):
    records = [
        synthetic.ok(Case(workload="layer", seq_len=n, width=256, projection=p, **fields), "naive")
        for n in (128, 256, 512) for p in ("fused", "separate")
    ]  # fmt: skip
    records += [
        synthetic.ok(Case(workload="recurrent", seq_len=n, width=w), "gru")
        for n in (128, 256, 512) for w in (256, 512)
    ]  # fmt: skip
    records += [synthetic.ok(Case(seq_len=n), "naive") for n in (128, 256, 512)]
    run = load_run(synthetic.write_run(tmp_path, "layers", records))
    return {"cells": with_rate_interval(compared(run)), "costs": rope_cost(run)}


def test_no_panel_mixes_attention_and_layers_or_two_projections(tmp_path):
    tables = layers(tmp_path)
    for chart in map(CHARTS.get, CHARTS.names()):
        for sheet in sheets(chart.rows(tables), chart.lines):
            assert sheet.rows["workload"].nunique() == 1
            if chart.lines == "impl":
                assert all(panel.rows["projection"].nunique() <= 1 for panel in sheet.panels)


def test_a_recurrent_network_stands_beside_each_layer_of_its_width(tmp_path):
    chart = CHARTS.get("time")
    found = {s.slug: s for s in sheets(chart.rows(layers(tmp_path)), chart.lines)}
    layer = found["layer-cpu-float32-forward"]
    assert [set(panel.rows["impl"]) for panel in layer.panels] == [{"naive", "gru"}] * 2
    alone = found["recurrent-cpu-float32-forward"].rows
    assert set(alone["width"]) == {512}


def test_networks_without_layers_stay_what_they_are(tmp_path):
    cells = layers(tmp_path)["cells"]
    alone = cells[cells["workload"] != "layer"]
    assert beside.with_guests(alone).equals(alone)


def test_projections_are_drawn_only_where_there_are_several(tmp_path):
    tables = layers(tmp_path)
    chart = CHARTS.get("projections")
    assert set(chart.rows(tables)["projection"]) == {"fused", "separate"}
    cells = tables["cells"]
    one = tables | {"cells": cells[cells["projection"] != "separate"]}
    assert chart.rows(one).empty


@pytest.mark.parametrize(
    ("lengths", "floor"),
    [
        ([1, 128, 256], 1), ([1, 8, 64], None), ([1, 128], None), ([16, 256, 512], 16),
        ([32, 2048, 4096], None), ([128, 256], None), ([], None),
    ],
)  # fmt: skip
def test_a_size_for_the_floor_is_one_far_below_all_others(lengths, floor):
    assert overhead_size(lengths) == floor


def test_a_chart_says_that_it_leaves_out_the_floor(tmp_path):
    records = [synthetic.ok(Case(seq_len=n), "naive") for n in (1, 128, 256)]
    cells = compared(load_run(synthetic.write_run(tmp_path, "floor", records)))
    (sheet,) = sheets(cells, "impl")
    assert "(n=1, for the floor, is not drawn)" in sheet.title
    assert sorted(sheet.rows["seq_len"]) == [128, 256]


def test_a_panel_of_one_projection_among_those_of_several_is_left_out(tmp_path):
    records = [
        synthetic.ok(Case(workload="layer", seq_len=n, width=width, projection=p), "naive")
        for n in (128, 256) for width in (256, 512) for p in ("fused", "separate")
        if p == "fused" or width == 256
    ]  # fmt: skip
    cells = compared(load_run(synthetic.write_run(tmp_path, "one", records)))
    (sheet,) = sheets(cells, "projection", several=True)
    assert set(sheet.rows["width"]) == {256}
    assert len(sheet.panels) == 1


@pytest.mark.parametrize(
    ("batches", "text"),
    [((2,), "1 more with a single n is in"), ((2, 4), "2 more with a single n are in")],
)
def test_points_are_left_out_beside_curves_and_counted(tmp_path, batches, text):
    curve = [synthetic.ok(Case(seq_len=n), "naive") for n in (128, 256)]
    points = [synthetic.ok(Case(seq_len=128, batch=b), "naive") for b in batches]
    decode = [synthetic.ok(Case(workload="decode", cache="static"), "naive")]
    every = decode + curve + points  # what comes first must not shift the rows of the others
    cells = compared(load_run(synthetic.write_run(tmp_path, "points", every)))
    cells = cells[cells["workload"] == "attention"]
    (sheet,) = sheets(cells, "impl")
    assert sorted(sheet.rows["case_id"]) == sorted(r.cell.case.case_id for r in curve)
    assert text in sheet.title
    assert [set(panel.rows["batch"]) for panel in sheet.panels] == [{1}]
    (alone,) = sheets(cells[cells["batch"] > 1], "impl")
    assert "more with" not in alone.title
    assert len(alone.panels) == len(batches)


def test_no_workload_crowds_the_figures_of_another_out(tmp_path, monkeypatch):
    monkeypatch.setattr("attnbench.report.plots.MOST_SHEETS", 1)
    records = [
        synthetic.ok(Case(workload=w, seq_len=n, pass_=p), "naive")  # type: ignore[arg-type]
        for w in ("attention", "layer") for p in ("forward", "both") for n in (128, 256)
    ]  # fmt: skip
    run = synthetic.write_run(tmp_path, "many", records)
    write_report(run)
    drawn = sorted(path.name for path in (run / "plots").glob("time-*.png"))
    assert [name.split("-")[1] for name in drawn] == ["attention", "layer"]


def test_nothing_is_said_of_heads_where_there_are_none():
    case = Case(workload="recurrent", seq_len=64, width=512, heads=1, head_dim=512)
    assert same_text(case, "n") == "recurrent forward B=1 E=512 float32"
    assert same_text(case, "d") == "recurrent forward n=64 B=1 float32"
    said = fixed(pd.DataFrame([case.to_json()]))
    assert "E=512" in said
    assert not {"H", "D", "G", "V"} & {part.strip()[0] for part in said.split(",")}
