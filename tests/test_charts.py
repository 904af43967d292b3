"""What the charts of a report draw: which rows, in which panels, on which axes; the roofline."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from attnbench.analysis.table import load, rope_cost
from attnbench.report import roofline
from attnbench.report.charts import CHARTS, pages, with_rate_interval, with_recurrent
from attnbench.report.looks import looks_of
from attnbench.schema.case import Case
from attnbench.schema.record import Record
from attnbench.store.runs import load_run
from tests import synthetic

MEASURED = {
    "matmul_tflops": {"float32": 0.2, "bfloat16": 745.0}, "copy_gbps": 28.0, "read_gbps": 31.0,
    "launch_us": 0.63, "cache_bytes": 2**25,
}  # fmt: skip
TIME = CHARTS.get("time")
CPU = {"environment": synthetic.CPU | {"ceilings": MEASURED}}
GPU = {"environment": synthetic.GPU | {"ceilings": MEASURED | {"read_gbps": 4290.0}}}


def cells(tmp_path: Path, records: list[Record], info: dict[str, Any] | None = None):
    """The table of a run of these records."""
    return with_rate_interval(load(load_run(synthetic.write_run(tmp_path, "run", records, info))))


def naive(workload: Any = "attention", **fields: Any) -> Record:
    return synthetic.ok(Case(workload=workload, **fields), "naive")


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
    return {"cells": with_rate_interval(load(run)), "costs": rope_cost(run)}


def test_a_recurrent_network_stands_beside_each_layer_of_its_width(layers):
    found = {page.slug: page for page in CHARTS.get("time").pages(layers)}
    layer = found["layer-cpu-float32-forward"]
    assert [set(panel.rows["impl"]) for panel in layer.panels] == [{"naive", "gru"}] * 2
    assert set(found["recurrent-cpu-float32-forward"].rows["width"]) == {512}
    alone = layers["cells"][layers["cells"]["workload"] != "layer"]
    assert with_recurrent(alone).equals(alone)


# The roofline.


@pytest.mark.parametrize(("name", "info", "roofs"), [("quick", CPU, 1), ("gpu", GPU, 2)])
def test_every_ok_cell_is_one_marker_inside_the_axes(tmp_path, name, info, roofs):
    frame = cells(tmp_path, synthetic.RUNS[name](), info)
    page = pages(frame[frame["tflops"].notna()], TIME)[0]
    figure = roofline.draw(looks_of(frame["impl"].unique()), page)
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
