"""Error against time: which cells are drawn, at which n."""

from pathlib import Path
from typing import Any

import pandas as pd

from attnbench.analysis.table import load
from attnbench.report import figures, tradeoff
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
    (found,) = tradeoff.sketches(cells(tmp_path, RECORDS))
    assert found.caption.endswith("n=512")
    assert {text.split()[0] for text in found.alt} == {"near:32", "near:64", "sums"}
    assert len(found.draw(figures.OWN).axes) == 2
