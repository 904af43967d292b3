"""The roofline and the limits in a report."""

from typing import Any

import pandas as pd
import pytest
from matplotlib.text import Text

from attnbench.analysis.table import compared
from attnbench.base import units
from attnbench.execution.store import load_run
from attnbench.report import roofline, style, write_report
from attnbench.report.charts import CHARTS
from attnbench.report.content import limit_rows
from attnbench.report.panels import Frame
from attnbench.report.roofline import Roof
from attnbench.report.sheets import sheets
from attnbench.schema.case import Case
from tests import synthetic

MEASURED = {
    "matmul_tflops": {"float32": 0.2, "bfloat16": 745.0},
    "copy_gbps": 28.0,
    "read_gbps": 31.0,
    "launch_us": 0.63,
    "cache_bytes": 2**25,
}
CPU = {"environment": synthetic.CPU | {"ceilings": MEASURED}}
GPU = {"environment": synthetic.GPU | {"ceilings": MEASURED | {"read_gbps": 4290.0}}}


def cells_of(tmp_path, name: str, info: dict[str, Any] | None) -> pd.DataFrame:
    return compared(load_run(synthetic.write_run(tmp_path, name, synthetic.RUNS[name](), info)))


def test_a_roof_is_a_slope_up_to_the_plateau():
    roof = Roof(tflops=0.2, gbps=20.0)
    assert roof.ridge == pytest.approx(10.0)
    assert roof.at(1.0) == pytest.approx(0.02)
    assert roof.at(roof.ridge) == roof.at(1e6) == 0.2


@pytest.mark.parametrize(
    "ceilings",
    [None, MEASURED | {"read_gbps": None}, MEASURED | {"matmul_tflops": {"float32": None}}],
)
def test_there_is_no_roofline_without_both_ceilings(tmp_path, ceilings):
    info = {"environment": synthetic.CPU | {"ceilings": ceilings}}
    assert roofline.draw_all(cells_of(tmp_path, "quick", info), tmp_path) == []


@pytest.mark.parametrize("name", ["empty", "failed", "bare"])
def test_there_is_no_roofline_without_a_rate(tmp_path, name):
    assert roofline.draw_all(cells_of(tmp_path, name, CPU), tmp_path) == []


def test_a_page_shows_the_roofline_of_each_workload_and_says_its_limits(tmp_path):
    path = synthetic.write_run(tmp_path, "quick", synthetic.quick_records(), CPU)
    page = write_report(path).read_text()
    drawn = sorted(p.name for p in (path / "plots").glob("roofline-*"))
    slices = ("attention-cpu-float32-forward", "decode-cpu-float32-forward")
    assert drawn == [f"roofline-{slice_}.{kind}" for slice_ in slices for kind in ("png", "svg")]
    assert "measured limits 200 GFLOP/s, 31.0 GB/s." in page  # in the alternative text
    assert '<h2 id="limits">Limits measured in this run</h2>' in page
    assert "<td>read</td><td>31.0 GB/s</td><td>–</td>" in page
    markdown = (path / "report.md").read_text()
    assert "| matmul, float32 | 200 GFLOP/s | – |" in markdown


def test_a_run_without_limits_has_no_section_of_them(tmp_path):
    path = synthetic.write_run(tmp_path, "old", [synthetic.ok(Case(), "naive")])
    assert "Limits measured" not in write_report(path).read_text()
    assert "Limits measured" not in (path / "report.md").read_text()


def test_the_datasheet_stands_beside_the_measured_limits():
    rows = {row["limit"]: row for row in limit_rows(GPU["environment"])}
    assert rows["matmul, bfloat16"]["measured"] == "745 TFLOP/s"
    assert rows["matmul, bfloat16"]["datasheet"] == "989 TFLOP/s"
    assert rows["read"]["datasheet"] == rows["copy, read and written"]["datasheet"] == "4.80 TB/s"
    assert rows["cheapest op"]["measured"] == "630 ns"
    unknown = limit_rows(CPU["environment"])
    assert {row["datasheet"] for row in unknown} == {units.UNKNOWN}
    assert limit_rows(synthetic.CPU) == []
    assert [row["limit"] for row in limit_rows({"matmul_tflops": {"float32": 0.2}})] == [
        "matmul, float32"
    ]


def drawn(tmp_path, name: str, info: dict[str, Any]) -> list[Any]:
    cells = cells_of(tmp_path, name, info)
    rows = cells[cells["tflops"].notna()]
    looks = style.looks(sorted(cells["impl"].unique()))
    return [
        (sheet, roofline.draw(sheet, roofline.roofs_of(sheet.rows), looks))
        for sheet in sheets(rows, "impl")
    ]


@pytest.mark.parametrize(("name", "info", "roofs"), [("quick", CPU, 1), ("gpu", GPU, 2)])
def test_every_ok_cell_is_one_marker_inside_the_axes(tmp_path, name, info, roofs):
    for sheet, figure in drawn(tmp_path, name, info):
        for panel, ax in zip(sheet.panels, figure.axes, strict=True):
            markers = [line for line in ax.lines if line.get_marker() not in ("None", None, "")]
            found = sorted((float(m.get_xdata()[0]), float(m.get_ydata()[0])) for m in markers)
            cells = panel.rows[["arithmetic_intensity", "tflops"]].itertuples(index=False)
            assert found == sorted(map(tuple, cells))
            (x_low, x_high), (y_low, y_high) = ax.get_xlim(), ax.get_ylim()
            assert all(x_low < x < x_high and y_low < y < y_high for x, y in found)
            assert len(ax.get_legend().get_texts()) == roofs


@pytest.mark.parametrize(("name", "info"), [("quick", CPU), ("gpu", GPU)])
def test_no_text_of_a_panel_covers_another(tmp_path, name, info):
    for _, figure in drawn(tmp_path, name, info):
        figure.canvas.draw()
        for ax in figure.axes:
            texts = [text for text in ax.findobj(Text) if text.get_text() and text.get_visible()]
            boxes = [text.get_window_extent() for text in texts]
            for i, box in enumerate(boxes):
                for text, other in zip(texts[:i], boxes[:i], strict=True):
                    covers = box.shrunk(0.9, 0.7).overlaps(other.shrunk(0.9, 0.7))
                    assert not covers, (texts[i].get_text(), text.get_text())


def test_a_line_is_named_at_the_height_of_its_last_point(tmp_path):
    records = [synthetic.ok(Case(seq_len=n), "naive") for n in (128, 256, 1024)]
    cells = compared(load_run(synthetic.write_run(tmp_path, "ends", records, CPU)))
    (sheet,) = sheets(cells, "impl")
    ax = roofline.draw(sheet, roofline.roofs_of(cells), style.looks(["naive"])).axes[0]
    (name,) = [text for text in ax.texts if text.get_text() == "naive"]
    to_axes = ax.transData + ax.transAxes.inverted()
    last = cells.sort_values("seq_len").iloc[-1]
    x, y = to_axes.transform((last["arithmetic_intensity"], last["tflops"]))
    assert name.get_position()[1] == pytest.approx(y)
    assert name.get_position()[0] > x


def test_lengths_at_the_same_intensity_share_a_text(tmp_path):
    same = {"flops_useful": 10**6, "bytes_min": 10**6}
    records = [synthetic.ok(Case(seq_len=n), "naive", **same) for n in (128, 256, 1024)]
    cells = compared(load_run(synthetic.write_run(tmp_path, "same", records, CPU)))
    (sheet,) = sheets(cells, "impl")
    figure = roofline.draw(sheet, roofline.roofs_of(cells), style.looks(["naive"]))
    assert [t.get_text() for t in figure.axes[0].texts if "n=" in t.get_text()] == ["n=128…1k"]


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


def test_figures_beyond_the_most_are_counted_in_the_reading(tmp_path, monkeypatch):
    monkeypatch.setattr("attnbench.report.plots.MOST_SHEETS", 1)
    monkeypatch.setattr("attnbench.report.sheets.PANELS_A_SHEET", 1)
    cells = cells_of(tmp_path, "quick", CPU)
    whole = len(sheets(cells, "impl"))
    plots = roofline.draw_all(cells, tmp_path)
    workloads = [plot.subject.partition(",")[0] for plot in plots]
    assert workloads == list(dict.fromkeys(cells["workload"]))  # one figure of each
    assert whole > len(plots)
    assert f"{whole - len(plots)} more such figures are left out" in plots[0].reading


def test_points_that_lie_close_together_still_get_an_axis_of_a_decade(tmp_path):
    records = [synthetic.ok(Case(seq_len=n), "naive") for n in (1024, 2048)]
    cells = compared(load_run(synthetic.write_run(tmp_path, "close", records, CPU)))
    (sheet,) = sheets(cells, "impl")
    ax = roofline.draw(sheet, roofline.roofs_of(cells), style.looks(["naive"])).axes[0]
    low, high = ax.get_ylim()
    assert high > 10 * low
    assert 3 <= len(ax.get_yticks()) <= 6
