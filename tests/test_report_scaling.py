"""The section "How cost grows" of a report."""

from typing import Any

import pytest

from attnbench.analysis.scaling.results import Scaling, Uncertain
from attnbench.report import figures, models
from attnbench.report.documents.verify import laws
from attnbench.report.looks import looks_of
from attnbench.report.pages import draw_growth
from attnbench.schema.case import Case
from tests import fits, synthetic, test_report
from tests.test_report import Page


@pytest.fixture(autouse=True)
def unwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    """No figure is written, which costs most of the time."""
    monkeypatch.setattr(figures, "write", test_report.unwritten)


def test_a_long_table_of_verdicts_says_what_it_leaves_out(tmp_path, monkeypatch):
    monkeypatch.setattr("attnbench.report.documents.verify.MOST", 3)
    monkeypatch.setattr("attnbench.report.documents.sweep.scaling", lambda _: fits.full())
    records = [synthetic.ok(Case(seq_len=n), "naive") for n in (128, 256, 512)]
    page = synthetic.write_report(synthetic.write_run(tmp_path, "grown", records))
    for text in (Page(page).text, (page.parent / "report.md").read_text()):
        assert "5 series are not shown here" in text
        assert "4 series of FLOPs and workspace are as predicted" in text
        assert "on: n² holds (naive, sdpa, chunked), is refuted (mine)." in text


LONG = "an-implementation-whose-name-goes-on-and-on-and-on-for-ever"
UNKNOWN = Uncertain(value=1.9)
_ODD_EXPONENTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "no interval": {"exponent": UNKNOWN, "top": UNKNOWN, "time_us": (UNKNOWN,) * 7},
    LONG: {},
    "no law, no finding, no overhead": {
        "series": fits.series("no law", law=None, overhead_us=None), "overhead_us": 0.0,
        "finding": None,
    },
    "knows nothing": {"exponent": Uncertain(value=2.0, low=-80.0, high=90.0)},
    "a changepoint": {"changepoint": (512.0, 1.4)},
    "two sizes": {"series": fits.series("two", sizes=(64, 128))},
    "zero and NaN": {
        "time_us": (Uncertain(value=0.0), Uncertain(value=float("nan")), *[UNKNOWN] * 5)
    },
}  # fmt: skip
_ODD_MODELS: dict[str, dict[str, Any]] = {
    LONG: {},
    "no finding": {"finding": None},
    "no interval": {"shares": dict.fromkeys(fits.TERMS, UNKNOWN)},
}
ODD: dict[str, tuple[Scaling, int]] = {  # with how many figures are drawn of them
    "exponents": (
        Scaling(exponents=tuple(fits.exponent_fit(n, **v) for n, v in _ODD_EXPONENTS.items())), 2
    ),
    "no exponent": (
        Scaling(exponents=(fits.exponent_fit(exponent=None, top=None, intercept=None),)), 1
    ),
    "models": (Scaling(models=tuple(fits.model_fit(n, **v) for n, v in _ODD_MODELS.items())), 1),
}  # fmt: skip


@pytest.mark.parametrize("name", ODD)
def test_odd_findings_are_drawn_without_a_complaint(tmp_path, recwarn, monkeypatch, name):
    monkeypatch.setattr("attnbench.report.growth.PAGES", (6, 9))
    found, count = ODD[name]
    plots = draw_growth(found, tmp_path)
    assert len(plots) == count
    assert all(plot.alt for plot in plots)
    assert [str(w.message) for w in recwarn] == []
    assert list(laws(found))


def test_shares_are_stacked_to_one_and_named_with_their_intervals():
    (sketch,) = models.sketches([fits.model_fit()], looks_of(["naive"]))
    lower: Any = sketch.draw(figures.OWN).axes[0]
    tops = [max(path.vertices[:, 1]) for area in lower.collections for path in area.get_paths()]
    assert max(tops) == pytest.approx(1.0)
    found = " ".join(text.get_text() for text in lower.get_legend().get_texts())
    assert "n² d\n" in found
    assert "…" in found
