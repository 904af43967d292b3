"""The section "How cost grows" of a report."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text

from attnbench.analysis.crossovers import crossovers
from attnbench.analysis.scaling.model_terms import TERMS
from attnbench.analysis.scaling.results import Scaling, Uncertain
from attnbench.analysis.table import compared
from attnbench.report import exponents, figures, growth, lines, models
from attnbench.report.pages import draw_growth, write_report
from attnbench.schema.case import Case
from tests import fits, synthetic, test_report
from tests.test_crossovers import passing, run_of, square
from tests.test_report import Page

NOTHING = Scaling()


@pytest.fixture
def unwritten(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Figure]]:
    """The figures that would be written, by their stems; writing costs most of the time."""
    found: list[tuple[str, Figure]] = []

    def write(figure: Figure, stem: str, folder: Path) -> Path:
        found.append((stem, figure))
        return test_report.unwritten(figure, stem, folder)

    monkeypatch.setattr("attnbench.report.figures.write", write)
    return found


def test_an_interval_that_nothing_bounds_ends_at_the_edge_of_its_panel():
    _, (ax,) = figures.panels(1, 2.0, "", "")
    ax.set(yscale="log", ylim=(1.0, 100.0))
    unbounded = Uncertain(value=10.0, low=0.0, high=math.inf)
    growth.points(ax, [(1.0, unbounded)], figures.KNOWN["naive"], {})
    (bars,) = ax.containers[0].lines[2]  # type: ignore[attr-defined]
    assert bars.get_segments()[0][:, 1].tolist() == [1.0, 100.0]


def report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, found: Scaling, **info: Any) -> Path:
    """A report of a small run whose scaling is `found`; charts against n are left out."""
    monkeypatch.setattr("attnbench.report.content.scaling", lambda _: found)
    monkeypatch.setattr("attnbench.report.pages.draw_charts", lambda *_: [])
    sizes = info.pop("sizes", (128, 256, 512))
    records = [synthetic.ok(Case(seq_len=n), impl) for n in sizes for impl in ("naive", "sdpa")]
    return write_report(synthetic.write_run(tmp_path, "grown", records))


def texts(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.findobj(Text) if text.get_text()]


@pytest.mark.usefixtures("unwritten")
def test_a_run_with_series_has_the_section_with_verdicts_figures_and_crossovers(
    tmp_path, monkeypatch
):
    page = report(tmp_path, monkeypatch, fits.full())
    read = Page(page)
    assert read.open == []
    assert {"growth", "crossovers"} <= {
        a.get("id") for name in ("h2", "h3") for a in read.all(name)
    }
    stems = {path.stem.split("-")[0] for path in (page.parent / "plots").glob("*.svg")}
    assert {"exponents", "fit", "model", "exact"} <= stems
    markdown = (page.parent / "report.md").read_text()
    assert "### How cost grows" in markdown
    assert "9 hold, 1 refuted, 1 inconclusive" in markdown
    assert "9 hold, 1 refuted, 1 inconclusive" in read.text


@pytest.mark.usefixtures("unwritten")
@pytest.mark.parametrize(
    ("found", "sizes", "verdicts", "crossovers"),
    [
        (NOTHING, (128,), False, False),
        (NOTHING, (128, 256, 512), False, True),
        (Scaling(problems=(fits.finding("inconclusive"),)), (128,), False, False),
    ],
)
def test_without_series_and_pairs_there_is_no_such_section(
    tmp_path, monkeypatch, found, sizes, verdicts, crossovers
):
    page = report(tmp_path, monkeypatch, found, sizes=sizes)
    text = Page(page).text
    assert ("How cost grows" in text, "Crossovers" in text) == (crossovers, crossovers)
    assert ("Verdicts" in text) == verdicts
    assert ("How cost grows" in (page.parent / "report.md").read_text()) == crossovers


def test_verdicts_are_told_apart_by_sign_and_word_and_the_refuted_come_first():
    rows = growth.verdicts(fits.full())
    assert [row.verdict for row in rows][:2] == ["refuted", "holds"]
    shown = [row for row in rows if not row.as_predicted]
    assert shown[-1].mark == "? inconclusive"
    assert {row.question for row in rows[len(shown) :]} == {"FLOPs in n"}
    assert {row.mark for row in rows} == {"✗ refuted", "✓ holds", "? inconclusive"}
    assert len(rows) == len(fits.full().findings)


@pytest.mark.usefixtures("unwritten")
def test_a_long_table_of_verdicts_says_what_it_leaves_out(tmp_path, monkeypatch):
    monkeypatch.setattr("attnbench.report.growth.MOST_FINDINGS", 4)
    monkeypatch.setattr("attnbench.report.pages.MOST_VERDICTS", 3)
    page = report(tmp_path, monkeypatch, fits.full())
    assert "7 more verdicts are not shown here" in Page(page).text
    markdown = (page.parent / "report.md").read_text()
    assert "Of these, 4 are FLOPs and workspace that are as predicted" in markdown
    assert "and 4 more verdicts in report.html" in markdown


LONG = "an-implementation-whose-name-goes-on-and-on-and-on-for-ever"
UNKNOWN = Uncertain(value=1.9)
_ODD_EXPONENTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "no interval": {"exponent": UNKNOWN, "top": UNKNOWN, "time_us": (UNKNOWN,) * 7},
    LONG: {},
    "no law, no finding, no overhead": {
        "series": fits.series("no law", law=None, overhead_us=None), "overhead_us": 0.0,
        "declared": None, "finding": None,
    },
    "knows nothing": {"exponent": Uncertain(value=2.0, low=-80.0, high=90.0)},
    "a changepoint": {"changepoint": (512.0, 1.4)},
    "two sizes": {"series": fits.series("two", sizes=(64, 128))},
    "zero and NaN": {
        "time_us": (Uncertain(value=0.0), Uncertain(value=float("nan")), *[UNKNOWN] * 5)
    },
}  # fmt: skip
_ODD_MODELS: dict[str, dict[str, Any]] = {
    "no interval": {"overtakes_n": UNKNOWN},
    LONG: {},
    "no finding": {"finding": None, "held_out": None},
    "overtaking out of sight": {"overtakes_n": fits.estimate(9e5), "overtakes_theory": 3.0},
}
_ODD_COUNTS: dict[str, dict[str, Any]] = {
    LONG: {},
    "nothing counted": {"measured": (None,) * 7},
    "far off": {"measured": tuple(float(n) for n in fits.SIZES)},
    "nothing allocated": {
        "quantity": "workspace", "measured": (0.0,) * 7, "predicted": (0.0,) * 7
    },
}  # fmt: skip
ODD: dict[str, tuple[Scaling, int]] = {  # with how many figures are drawn of them
    "exponents": (
        Scaling(exponents=tuple(fits.exponent_fit(n, **v) for n, v in _ODD_EXPONENTS.items())), 3
    ),
    "no exponent": (
        Scaling(exponents=(fits.exponent_fit(exponent=None, top=None, intercept=None),)), 1
    ),
    "models": (Scaling(models=tuple(fits.model_fit(n, **v) for n, v in _ODD_MODELS.items())), 1),
    "counts": (Scaling(exact=tuple(fits.exact_fit(n, **v) for n, v in _ODD_COUNTS.items())), 1),
    "nothing counted": (Scaling(exact=(fits.exact_fit(measured=(None,) * 7),)), 0),
}  # fmt: skip


@pytest.mark.parametrize("name", ODD)
def test_odd_findings_are_drawn_without_a_complaint(
    tmp_path, unwritten, recwarn, monkeypatch, name
):
    monkeypatch.setattr("attnbench.report.growth.PAGES", (6, 9))
    found, count = ODD[name]
    plots = draw_growth(found, tmp_path)
    assert len(plots) == len(unwritten) == count
    assert all(plot.alt for plot in plots)
    assert [str(w.message) for w in recwarn] == []
    growth.verdicts(found)


def test_a_fit_shows_overhead_exponent_verdict_and_why_sizes_do_not_count(tmp_path, unwritten):
    exponents.draw_fits([fits.exponent_fit("naive")], figures.looks(["naive"]), tmp_path)
    ((stem, figure),) = unwritten
    assert stem == "fit-attention-n"
    found = " ".join(texts(figure)).replace("\n", " ")
    for part in ("overhead 16.0 µs", "n^2.00 (1.96 … 2.04)", "below 20 × the floor", "✓ holds"):
        assert part in found


def test_the_fitted_line_passes_through_the_points_on_both_sides_of_a_changepoint(
    tmp_path, unwritten
):
    factor = 1.5
    times = tuple(16.0 + 2e-3 * n**2 * (factor if n > 512 else 1.0) for n in fits.SIZES)
    fit = fits.exponent_fit(
        time_us=tuple(fits.estimate(t) for t in times), left_out=(None,) * 7,
        intercept=math.log(2e-3 * factor),
        changepoint=(512.0, factor),
    )  # fmt: skip
    exponents.draw_fits([fit], figures.looks(["naive"]), tmp_path)
    lines = [line for line in unwritten[0][1].axes[0].lines if line.get_linewidth() == 1.4]
    drawn = {
        round(float(x)): float(y) for line in lines for x, y in zip(*line.get_data(), strict=True)
    }
    for n in (64, 512, 1024, 4096):
        assert drawn[n] == pytest.approx(times[fits.SIZES.index(n)], rel=1e-6)


def test_a_forest_has_a_row_for_each_exponent_and_none_for_a_series_without(tmp_path, unwritten):
    found = fits.full().exponents
    exponents.draw_forests(found, figures.looks([f.series.impl for f in found]), tmp_path)
    labels = [t.get_text() for t in unwritten[0][1].axes[0].get_yticklabels()]
    assert labels == ["attention, along n", "naive", "chunked", "mine", "sdpa"]
    assert {"✓ holds", "✗ refuted"} <= set(texts(unwritten[0][1]))


def test_shares_are_stacked_to_one_and_both_overtakings_are_named(tmp_path, unwritten):
    models.draw_all([fits.model_fit()], figures.looks(["naive"]), tmp_path)
    lower = unwritten[0][1].axes[1]
    tops = [max(path.vertices[:, 1]) for area in lower.collections for path in area.get_paths()]
    assert max(tops) == pytest.approx(1.0)
    found = " ".join(text.get_text() for text in lower.get_legend().get_texts())
    assert "in time: 330 (264 … 396)" in found
    assert "in FLOPs: 512" in found
    assert {name for row in TERMS.values() for name in row.names} == models.SHADES.keys()


@pytest.mark.parametrize(
    ("draw", "drawn", "left_out"),
    [
        (exponents.draw_forests, exponents.MOST_FORESTS, 100 - 2 * exponents.MOST_FITS),
        (exponents.draw_fits, 1, 100 - growth.PAGES[0]),
    ],
)
def test_what_is_drawn_on_no_page_is_counted_in_the_reading(
    tmp_path, unwritten, draw, drawn, left_out
):
    many = [fits.exponent_fit(f"impl-{i:03}") for i in range(100)]
    plots = draw(many, figures.looks([f.series.impl for f in many]), tmp_path)
    assert len(plots) == len(unwritten) == drawn
    assert f"{left_out} more such panels are left out" in plots[0].reading


def test_what_was_not_counted_is_no_ratio_and_nothing_over_nothing_is_right():
    fit = fits.exact_fit(
        sizes=(1, 2, 4, 8), measured=(None, 0.0, 3.0, 5.0), predicted=(1.0, 0.0, 2.0, 0.0)
    )
    assert growth.ratios(fit) == ((2.0, 1.0), (4.0, 1.5))


@pytest.mark.parametrize(
    ("text", "shown"),
    [("n^2 d", "n² d"), ("n^1.5", "n^1.5"), ("O(n^2 d)", "O(n² d)"), ("n^10", "n¹⁰"), ("1", "1")],
)
def test_whole_powers_of_a_law_are_raised(text, shown):
    assert growth.raised(text) == shown


def test_a_crossing_is_marked_where_the_line_crosses_1(tmp_path):
    run = run_of({"naive": square, "mine": passing(700.0), "third": passing(300.0)}, noise=0.001)
    rows = compared(run)
    figure = Figure()
    ax = figure.add_subplot()
    ax.set_xscale("log")
    ax.set_xlim(100, 5000)
    lines.mark_crossings(ax, rows, crossovers(run))
    marks = [x for x in ax.lines if x.get_marker() == "|" and x.get_markersize() > 10]
    where = sorted(tuple(np.ravel(mark.get_xydata())) for mark in marks)
    assert [x for x, _ in where] == pytest.approx([300, 700], rel=0.05)
    assert [y for _, y in where] == [1.0, 1.0]
    others = figure.add_subplot()
    lines.mark_crossings(others, rows[rows["impl"] != "mine"], crossovers(run))
    (mark,) = [x for x in others.lines if x.get_marker() == "|" and x.get_markersize() > 10]
    assert float(np.ravel(mark.get_xydata())[0]) == pytest.approx(300, rel=0.05)


def test_pairs_that_change_the_lead_come_first_and_the_rest_is_counted(monkeypatch):
    run = run_of({"naive": square, "mine": passing(700.0), "slow": lambda n: 9 * square(n)})
    ((_, pairs),), left_out = growth.crossover_tables(crossovers(run))
    assert "overtakes" in pairs[0][1]
    assert left_out == 0
    monkeypatch.setattr("attnbench.report.growth.MOST_CROSSOVERS", 1)
    assert growth.crossover_tables(crossovers(run))[1] == 2
