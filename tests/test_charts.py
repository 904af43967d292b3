"""What the charts of a report draw: which rows, in which panels, on which axes; the roofline."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from attnbench.analysis.axes import fixed, overhead_size
from attnbench.analysis.scaling.series import same_text
from attnbench.analysis.table import compared, rope_cost
from attnbench.base import units
from attnbench.execution.store import load_run
from attnbench.report import axes, figures, roofline
from attnbench.report.charts import (
    CHARTS,
    PANELS_A_PAGE,
    first_of_each,
    pages,
    with_rate_interval,
    with_recurrent,
)
from attnbench.report.content import limit_rows
from attnbench.report.figures import looks
from attnbench.report.lines import HOLLOW_NOTE, Frame, draw_page, uncertain, value_axis
from attnbench.schema.case import Case
from attnbench.schema.record import Record
from tests import synthetic

MEASURED = {
    "matmul_tflops": {"float32": 0.2, "bfloat16": 745.0},
    "copy_gbps": 28.0,
    "read_gbps": 31.0,
    "launch_us": 0.63,
    "cache_bytes": 2**25,
}
TIME = CHARTS.get("time")
CPU = {"environment": synthetic.CPU | {"ceilings": MEASURED}}
GPU = {"environment": synthetic.GPU | {"ceilings": MEASURED | {"read_gbps": 4290.0}}}


def cells(tmp_path: Path, records: list[Record], info: dict[str, Any] | None = None):
    """The table of a run of these records."""
    return with_rate_interval(
        compared(load_run(synthetic.write_run(tmp_path, "run", records, info)))
    )


def naive(workload: Any = "attention", **fields: Any) -> Record:
    return synthetic.ok(Case(workload=workload, **fields), "naive")


# How implementations look.


def test_built_ins_look_the_same_in_every_company():
    known = figures.KNOWN
    assert looks(["sdpa"])["sdpa"] == looks(["sdpa", "mine", *known])["sdpa"] == known["sdpa"]
    assert len({look.colour for look in known.values()}) == len(known)


def test_other_names_keep_their_look_and_share_one_only_where_there_are_too_many():
    assert looks(["mine"])["mine"] == looks(["mine", "naive"])["mine"]
    names = [f"impl-{i}" for i in range(40)]
    assert len(set(looks(names).values())) == 40
    assert looks(names) == looks(reversed(names))
    assert len(looks([f"impl-{i}" for i in range(200)])) == 200


# Axes and labels.


@pytest.mark.parametrize(
    ("low", "high"), [(1.0, 2.0), (3.0, 5.0), (60, 150), (1e-3, 1e9), (16, 512)]
)
def test_an_axis_has_a_few_ticks_and_all_inside(low, high):
    for base in (2, 10):
        ticks = axes.round_ticks(low, high, base)
        assert all(low <= tick <= high for tick in ticks)
        assert 2 <= len(ticks) <= 9


def test_ratios_that_spread_far_get_a_logarithmic_axis():
    near, far = (
        value_axis(
            CHARTS.get("rope"), pd.DataFrame({"cost": c, "cost_low": c, "cost_high": c}), None
        )
        for c in ([1.0, 1.3], [0.01, 400.0])
    )
    assert near[0] == "linear"
    assert far[0] == "log10"
    assert far[1][0] < 0.01 < 400 < far[1][1]


@pytest.mark.parametrize(
    ("top", "axis", "tick"),
    [(0.18, "useful GFLOP/s", "150"), (800.0, "useful TFLOP/s", "0.15")],
)
def test_rates_on_an_axis_have_the_unit_of_the_tables(top, axis, tick):
    chart = CHARTS.get("tflops")
    frame = Frame(chart=chart, looks={}, lengths=(), scale="linear", limits=(0.0, top))
    assert frame.axis == axis
    assert frame.axis.split()[1] == units.flop_rate(top).split()[1]
    assert frame.text(0.15) == tick


# Which rows share a figure and a panel.


@pytest.fixture(scope="module")
def layers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, pd.DataFrame]:
    """Layers with two projections, recurrent networks of two widths, and attention."""
    lengths = (128, 256, 512)
    records = [
        *(naive("layer", seq_len=n, width=256, projection=p)
          for n in lengths for p in ("fused", "separate")),
        *(synthetic.ok(Case(workload="recurrent", seq_len=n, width=w), "gru")
          for n in lengths for w in (256, 512)),
        *(naive(seq_len=n) for n in lengths),
    ]  # fmt: skip
    run = load_run(synthetic.write_run(tmp_path_factory.mktemp("runs"), "layers", records))
    return {"cells": with_rate_interval(compared(run)), "costs": rope_cost(run)}


def test_many_panels_are_spread_over_several_pages(tmp_path):
    frame = cells(tmp_path, [naive(seq_len=n, heads=h) for h in range(1, 9) for n in (8, 16, 32)])
    found = pages(frame, TIME)
    assert [len(page.panels) for page in found] == [PANELS_A_PAGE, 2]
    assert len({page.slug for page in found}) == 2


def test_no_panel_mixes_attention_and_layers_or_two_projections(layers):
    for chart in map(CHARTS.get, CHARTS.names()):
        for page in chart.pages(layers):
            assert page.rows["workload"].nunique() == 1
            if chart.lines == "impl":
                assert all(panel.rows["projection"].nunique() <= 1 for panel in page.panels)


def test_a_recurrent_network_stands_beside_each_layer_of_its_width(layers):
    found = {page.slug: page for page in CHARTS.get("time").pages(layers)}
    layer = found["layer-cpu-float32-forward"]
    assert [set(panel.rows["impl"]) for panel in layer.panels] == [{"naive", "gru"}] * 2
    assert set(found["recurrent-cpu-float32-forward"].rows["width"]) == {512}
    alone = layers["cells"][layers["cells"]["workload"] != "layer"]
    assert with_recurrent(alone).equals(alone)


def test_projections_are_drawn_only_where_there_are_several(layers, tmp_path):
    chart, frame = CHARTS.get("projections"), layers["cells"]
    assert set(chart.rows(layers)["projection"]) == {"fused", "separate"}
    assert chart.rows(layers | {"cells": frame[frame["projection"] != "separate"]}).empty
    records = [
        naive("layer", seq_len=n, width=width, projection=p)
        for n in (128, 256) for width in (256, 512) for p in ("fused", "separate")
        if p == "fused" or width == 256
    ]  # fmt: skip
    (page,) = pages(cells(tmp_path, records), CHARTS.get("projections"))
    assert [set(panel.rows["width"]) for panel in page.panels] == [{256}]


@pytest.mark.parametrize(
    ("lengths", "size"),
    [
        ([1, 128, 256], 1), ([1, 8, 64], None), ([1, 128], None), ([16, 256, 512], 16),
        ([32, 2048, 4096], None), ([128, 256], None), ([], None),
    ],
)  # fmt: skip
def test_a_size_for_the_overhead_is_one_far_below_all_others(lengths, size):
    assert overhead_size(lengths) == size


def test_a_chart_says_that_it_leaves_out_the_overhead(tmp_path):
    (page,) = pages(cells(tmp_path, [naive(seq_len=n) for n in (1, 128, 256)]), TIME)
    assert "(n=1, for the overhead, is not drawn)" in page.title
    assert sorted(page.rows["seq_len"]) == [128, 256]


def test_points_are_left_out_beside_curves_and_counted(tmp_path):
    curve = [naive(seq_len=n) for n in (128, 256)]
    points = [naive(seq_len=128, batch=b) for b in (2, 4)]
    decode = [naive("decode", cache="static")]
    frame = cells(tmp_path, decode + curve + points)  # what comes first must not shift the others
    frame = frame[frame["workload"] == "attention"]
    (page,) = pages(frame, TIME)
    assert sorted(page.rows["case_id"]) == sorted(r.cell.case.case_id for r in curve)
    assert "2 more with a single n are in" in page.title
    assert "1 more with a single n is in" in pages(frame[frame["batch"] < 4], TIME)[0].title
    assert [set(panel.rows["batch"]) for panel in page.panels] == [{1}]
    (alone,) = pages(frame[frame["batch"] > 1], TIME)
    assert "more with" not in alone.title
    assert len(alone.panels) == 2


def test_no_workload_crowds_the_figures_of_another_out(tmp_path, monkeypatch):
    monkeypatch.setattr("attnbench.report.charts.MOST_PAGES", 1)
    frame = cells(
        tmp_path,
        [
            naive(w, seq_len=n, pass_=p)
            for w in ("attention", "layer") for p in ("forward", "both") for n in (128, 256)
        ],
    )  # fmt: skip
    found = pages(frame, TIME)
    assert len(found) == 4
    assert [page.workload for page in first_of_each(found)] == ["attention", "layer"]


def test_nothing_is_said_of_heads_where_there_are_none():
    case = Case(workload="recurrent", seq_len=64, width=512, heads=1, head_dim=512)
    assert same_text(case, "n") == "recurrent forward B=1 E=512 float32"
    assert same_text(case, "d") == "recurrent forward n=64 B=1 float32"
    text = fixed(pd.DataFrame([case.to_json() | {"device_name": "x"}]))
    assert "E=512" in text
    assert not {"H", "D", "G", "V"} & {part.strip()[0] for part in text.split(",")}


# The roofline.


@pytest.mark.parametrize(
    ("name", "ceilings"),
    [
        ("one", None), ("one", MEASURED | {"read_gbps": None}),
        ("one", MEASURED | {"matmul_tflops": {"float32": None}}),
        ("empty", MEASURED), ("failed", MEASURED), ("bare", MEASURED),
    ],
)  # fmt: skip
def test_there_is_no_roofline_without_both_ceilings_and_a_rate(tmp_path, name, ceilings):
    info = {"environment": synthetic.CPU | {"ceilings": ceilings}}
    frame = cells(tmp_path, synthetic.RUNS[name](), info)
    assert roofline.draw_all(frame, tmp_path) == []


def test_the_datasheet_stands_beside_the_measured_limits():
    rows = {limit: texts for limit, *texts in limit_rows(GPU["environment"])}
    assert rows["matmul, bfloat16"] == ["745 TFLOP/s", "989 TFLOP/s"]
    assert rows["read"][1] == rows["copy, read and written"][1] == "4.80 TB/s"
    assert rows["cheapest op"] == ["630 ns", units.UNKNOWN]
    assert {datasheet for *_, datasheet in limit_rows(CPU["environment"])} == {units.UNKNOWN}
    assert limit_rows(synthetic.CPU) == []


@pytest.mark.parametrize(("name", "info", "roofs"), [("quick", CPU, 1), ("gpu", GPU, 2)])
def test_every_ok_cell_is_one_marker_inside_the_axes(tmp_path, name, info, roofs):
    frame = cells(tmp_path, synthetic.RUNS[name](), info)
    page = pages(frame[frame["tflops"].notna()], TIME)[0]
    figure = roofline.draw(looks(frame["impl"].unique()), page)
    for panel, ax in zip(page.panels, figure.axes, strict=True):
        found = sorted(
            tuple(point) for marks in ax.collections for point in np.array(marks.get_offsets())
        )
        known = panel.rows[["arithmetic_intensity", "tflops"]].itertuples(index=False)
        assert found == sorted(map(tuple, known))
        (x_low, x_high), (y_low, y_high) = ax.get_xlim(), ax.get_ylim()
        assert all(x_low < x < x_high and y_low < y < y_high for x, y in found)
    names = [text.get_text() for text in figure.legends[0].get_texts()]
    assert set(page.rows["impl"]) <= set(names)
    assert sum("GB/s" in text or "TB/s" in text for text in names) == roofs


def test_points_that_are_wide_unsteady_or_without_an_interval_are_hollow_and_named(tmp_path):
    frame = cells(tmp_path, [naive(seq_len=n) for n in (128, 256, 512, 1024)])
    chart, middle = CHARTS.get("time"), frame["time_us_median"]
    frame["time_us_ci_low"], frame["time_us_ci_high"] = 0.99 * middle, 1.01 * middle
    assert not uncertain(frame, chart).any()
    frame.loc[0, "time_us_ci_high"] = 1.3 * middle[0]
    frame.loc[1, "time_us_ci_low"] = None
    frame.loc[2, "unsteady"] = "meddles"
    assert uncertain(frame, chart).tolist() == [True, True, True, False]
    (page,) = chart.pages({"cells": frame})
    figure = draw_page(chart, looks(["naive"]), {}, (), page)
    white = [line for line in figure.axes[0].lines if line.get_markerfacecolor() == "white"]
    assert [np.sort(line.get_xdata()).tolist() for line in white] == [[128, 256, 512]]
    assert HOLLOW_NOTE.get_label() in [text.get_text() for text in figure.legends[0].get_texts()]
    assert not uncertain(frame, CHARTS.get("workspace")).any()  # which has no interval at all
