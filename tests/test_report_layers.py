"""Layers, recurrent networks and sizes for the floor in the charts of a report."""

from pathlib import Path
from typing import Any

import pytest

from attnbench.analysis.axes import floor_size
from attnbench.analysis.compare import compared, rope_cost
from attnbench.case import Case
from attnbench.report import beside
from attnbench.report.charts import CHARTS, with_rate_interval
from attnbench.report.sheets import sheets
from attnbench.store import load_run
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
    assert floor_size(lengths) == floor


def test_a_chart_says_that_it_leaves_out_the_floor(tmp_path):
    records = [synthetic.ok(Case(seq_len=n), "naive") for n in (1, 128, 256)]
    cells = compared(load_run(synthetic.write_run(tmp_path, "floor", records)))
    (sheet,) = sheets(cells, "impl")
    assert "(n=1, for the floor, is not drawn)" in sheet.title
    assert sorted(sheet.rows["seq_len"]) == [128, 256]
