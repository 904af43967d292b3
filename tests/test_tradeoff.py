"""Error against time: which cells are drawn, at which n; and families in panels of their own."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from attnbench.analysis.highlights import summary_columns, summary_rows
from attnbench.analysis.table import compared
from attnbench.execution.store import load_run
from attnbench.report import figures, tradeoff
from attnbench.report.charts import CHARTS, MOST_LINES, pages
from attnbench.schema.case import Case
from attnbench.schema.record import Record
from tests import synthetic

FAMILIES = {"naive": "exact", "sdpa": "exact", "near": "sparse", "sums": "linear"}


def cell(n: int, impl: str, **errors: float) -> Record:
    return synthetic.ok(Case(seq_len=n), impl, **errors)


def cells(tmp_path: Path, records: list[Record]) -> pd.DataFrame:
    rows = [{"name": name, "family": family} for name, family in FAMILIES.items()]
    info: dict[str, Any] = {"environment": synthetic.CPU, "implementations": rows}
    return compared(load_run(synthetic.write_run(tmp_path, "run", records, info)))


RECORDS = [
    *(cell(n, name) for n in (256, 512, 1024) for name in ("naive", "sdpa")),
    *(cell(n, "near:32", approx_error=1.5, approx_error_local=0.02) for n in (256, 512)),
    *(cell(n, "near:64", approx_error=1.0, approx_error_local=0.01) for n in (256, 512)),
    *(cell(n, "sums", approx_error=0.5, approx_error_local=0.9) for n in (256, 512, 1024)),
]


def test_methods_are_drawn_at_the_largest_n_that_most_of_them_share(tmp_path: Path) -> None:
    found = tradeoff.draw_all(cells(tmp_path, RECORDS), tmp_path)
    assert [plot.subject.endswith("n=512") for plot in found] == [True]
    assert all(name in found[0].alt for name in ("near:32", "near:64", "sums"))
    assert found[0].svg.is_file()


def test_each_method_is_a_point_for_each_kind_of_inputs_and_exact_ones_are_lines(
    tmp_path: Path,
) -> None:
    frame = cells(tmp_path, RECORDS)
    rows = frame[frame["seq_len"] == 512]
    looks = figures.looks(["near", "sums"])
    figure = tradeoff.draw(looks, rows)
    local, spread = figure.axes
    for ax, errors in ((local, {0.02, 0.01, 0.9}), (spread, {1.5, 1.0, 0.5})):
        markers = {look.marker for look in looks.values()}
        drawn = [np.asarray(line.get_ydata()) for line in ax.lines if line.get_marker() in markers]
        points = {float(y) for ys in drawn for y in ys}
        assert points == errors
        assert {text.get_text() for text in ax.texts} == {"naive", "sdpa", "32", "64", ""}
    assert spread.get_ylim() == local.get_ylim()


def test_a_run_of_exact_attention_has_neither_the_figure_nor_the_column(tmp_path: Path) -> None:
    frame = cells(tmp_path, RECORDS[:6])
    assert tradeoff.draw_all(frame, tmp_path) == []
    assert "approx" not in summary_columns(frame)


def test_where_every_method_is_exact_but_for_rounding_there_is_no_figure(tmp_path: Path) -> None:
    exact = [cell(256, "near:512", approx_error=3e-7, approx_error_local=2e-7)]
    frame = cells(tmp_path, [*RECORDS[:2], *exact])
    assert tradeoff.draw_all(frame, tmp_path) == []


def test_the_table_says_how_far_a_method_is_from_exact_attention(tmp_path: Path) -> None:
    frame = cells(tmp_path, RECORDS)
    assert "approx" in summary_columns(frame)
    texts = {row["impl"]: row["approx"] for row in summary_rows(frame[frame["seq_len"] == 256])}
    assert texts["near:32"] == "150 %, 2.0 %"
    assert texts["naive"] == "–"
    assert set(frame[frame["impl"] == "near:64"]["family"]) == {"sparse"}


@pytest.mark.parametrize(
    ("count", "titles"), [(1, [""]), (MOST_LINES, ["exact", "sparse", "linear"])]
)
def test_many_lines_of_several_families_get_a_panel_each(
    tmp_path: Path, count: int, titles: list[str]
) -> None:
    more = [cell(n, f"near:{2 * i + 2}") for n in (256, 512) for i in range(count)]
    frame = cells(tmp_path, [*RECORDS, *more])
    (page,) = pages(frame, CHARTS.get("time"))
    assert sorted(panel.title for panel in page.panels) == sorted(titles)
    assert all({"naive", "sdpa"} <= set(panel.rows["impl"]) for panel in page.panels)
