"""Error against time: which cells are drawn, at which n; and families in panels of their own."""

from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from attnbench.analysis.table import load
from attnbench.report import tradeoff
from attnbench.report.charts import CHARTS, MOST_LINES, pages
from attnbench.schema.case import Case
from attnbench.schema.record import Record
from attnbench.store.runs import load_run
from tests import synthetic

FAMILIES = {"naive": "exact", "sdpa": "exact", "near": "sparse", "sums": "linear"}


def cell(n: int, impl: str, **errors: float) -> Record:
    return synthetic.ok(Case(seq_len=n), impl, **errors)


def cells(tmp_path: Path, records: list[Record]) -> pd.DataFrame:
    rows = [{"name": name, "family": family} for name, family in FAMILIES.items()]
    info: dict[str, Any] = {"environment": synthetic.CPU, "implementations": rows}
    return load(load_run(synthetic.write_run(tmp_path, "run", records, info)))


RECORDS = [
    *(cell(n, name) for n in (256, 512, 1024) for name in ("naive", "sdpa")),
    *(cell(n, "near:32", approx_error=1.5, approx_error_local=0.02) for n in (256, 512)),
    *(cell(n, "near:64", approx_error=1.0, approx_error_local=0.01) for n in (256, 512)),
    *(cell(n, "sums", approx_error=0.5, approx_error_local=0.9) for n in (256, 512, 1024)),
]


def test_methods_are_drawn_at_the_largest_n_that_most_of_them_share(tmp_path):
    found = tradeoff.draw_all(cells(tmp_path, RECORDS), tmp_path)
    assert ["n=512: " in plot.alt for plot in found] == [True]
    assert all(name in found[0].alt for name in ("near:32", "near:64", "sums"))
    assert found[0].svg.startswith(b"<?xml")


@pytest.mark.parametrize(
    ("count", "titles"), [(1, [""]), (MOST_LINES, ["exact", "sparse", "linear"])]
)
def test_many_lines_of_several_families_get_a_panel_each(tmp_path, count, titles):
    more = [cell(n, f"near:{2 * i + 2}") for n in (256, 512) for i in range(count)]
    frame = cells(tmp_path, [*RECORDS, *more])
    (page,) = pages(frame, CHARTS.get("time"))
    assert sorted(panel.title for panel in page.panels) == sorted(titles)
    assert all({"naive", "sdpa"} <= set(panel.rows["impl"]) for panel in page.panels)
