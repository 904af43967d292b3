"""The pages and plots of a report."""

import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pandas as pd
import pytest

from attnbench.analysis.table import compared
from attnbench.base import units
from attnbench.base.units import table
from attnbench.errors import StoreError
from attnbench.execution.store import load_run
from attnbench.report import scales, style, write_report
from attnbench.report.charts import CHARTS
from attnbench.report.labels import spread
from attnbench.report.panels import value_axis
from attnbench.report.sheets import PANELS_A_SHEET, sheets
from attnbench.schema.case import PASSES, Case
from tests import synthetic

GROWTH = ("exponents", "fit", "model", "exact")  # figures with tests of their own
VOID = {"meta", "img", "br", "link", "input", "hr"}


class Page(HTMLParser):
    """What a test needs to know of a page: its tags, what it loads, and whether it nests."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data

    def all(self, name: str) -> list[dict[str, str | None]]:
        return [attributes for tag, attributes in self.tags if tag == name]


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("runs")
    return {name: write_report(synthetic.write_named(folder, name)) for name in synthetic.RUNS}


@pytest.mark.parametrize("name", synthetic.RUNS)
def test_every_run_gives_a_page_that_nests_and_a_markdown_file(pages, name):
    page = Page(pages[name])
    assert page.open == []
    assert (pages[name].parent / "report.md").read_text().startswith("## attnbench: ")
    assert page.all("html") == [{"lang": "en"}]
    assert len(page.all("title")) == 1


@pytest.mark.parametrize("name", synthetic.RUNS)
def test_a_page_loads_nothing_from_anywhere(pages, name):
    page = Page(pages[name])
    for _, attributes in page.tags:
        source = attributes.get("src") or "data:"
        target = attributes.get("href") or "#"
        assert source.startswith("data:")
        assert target.startswith("#")
    assert not page.all("script")
    assert not page.all("link")
    style_sheet = pages[name].read_text().partition("</style>")[0]
    assert "@import" not in style_sheet
    assert "url(" not in style_sheet


@pytest.mark.parametrize("name", synthetic.RUNS)
def test_every_image_says_in_words_what_it_shows(pages, name):
    images = Page(pages[name]).all("img")
    assert all(len(image["alt"] or "") > 20 for image in images)


@pytest.mark.parametrize("name", synthetic.RUNS)
def test_every_plot_is_there_as_png_and_as_svg(pages, name):
    folder = pages[name].parent / "plots"
    pngs, svgs = ({p.stem for p in folder.glob(f"*.{kind}")} for kind in ("png", "svg"))
    assert pngs == svgs
    assert len(pngs) == len(Page(pages[name]).all("img"))


def test_a_full_run_has_every_chart(pages):
    stems = {path.stem for path in (pages["quick"].parent / "plots").glob("*.svg")}
    stems = {stem for stem in stems if stem.split("-")[0] not in GROWTH}
    slice_ = "cpu-float32-forward"
    assert stems == {
        *(f"{c}-attention-{slice_}" for c in ("time", "speed", "tflops", "workspace", "rope")),
        *(f"{c}-decode-{slice_}" for c in ("decode", "decode-workspace")),
    }


@pytest.mark.parametrize("name", ["failed", "empty"])
def test_no_plot_is_drawn_without_data(pages, name):
    assert not list((pages[name].parent / "plots").iterdir())


@pytest.mark.parametrize("name", ["quick", "gpu", "failed", "hostile"])
def test_every_reason_of_a_failure_stands_in_both_pages(pages, name):
    page, run = Page(pages[name]), load_run(pages[name].parent)
    flat = re.sub(r"\s+", " ", page.text)
    markdown = (pages[name].parent / "report.md").read_text()
    for record in run.records:
        if record.reason:
            assert re.sub(r"\s+", " ", record.reason) in flat
            assert f"| {record.status} |" in markdown


def test_texts_from_outside_are_escaped(pages):
    source = pages["hostile"].read_text()
    assert "<script" not in source
    assert "<b>x</b>" not in source
    markdown = (pages["hostile"].parent / "report.md").read_text()
    assert "<script" not in markdown
    for line in markdown.splitlines():
        if line.startswith("|"):
            cells = len(re.findall(r"(?<!\\)\|", line))
            assert cells in (4, 6, 10)  # one more than the columns of each of the three tables


def test_a_killed_run_still_gets_its_page(tmp_path):
    records = [synthetic.ok(Case(seq_len=n), "naive") for n in (64, 128)]
    path = synthetic.write_run(tmp_path, "killed", records, {"spent": None, "options": None})
    with (path / "records.jsonl").open("a") as file:
        file.write('{"schema": 1, "case')
    assert "killed" in Page(write_report(path)).text


def test_a_second_report_replaces_the_first_with_the_same_bytes(tmp_path):
    path = synthetic.write_named(tmp_path, "single-n")
    write_report(path)
    first = {p.name: p.read_bytes() for p in path.rglob("*") if p.is_file()}
    (path / "plots" / "old.png").write_text("left over")
    write_report(path)
    assert {p.name: p.read_bytes() for p in path.rglob("*") if p.is_file()} == first


def test_a_folder_that_is_no_run_is_refused(tmp_path):
    with pytest.raises(StoreError, match="no run"):
        write_report(tmp_path)


def test_a_big_run_is_cut_short_and_the_page_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr("attnbench.report.content.MOST_ROWS", 20)
    monkeypatch.setattr("attnbench.report.write.draw_all", lambda *_: [])
    records = [
        synthetic.ok(Case(seq_len=n, heads=h), "naive") for h in range(1, 9) for n in (8, 16, 32)
    ]
    page = Page(write_report(synthetic.write_run(tmp_path, "big", records)))
    assert "6 more cells are not shown" in page.text
    assert "attnbench export big" in page.text


def test_many_panels_are_spread_over_several_sheets(tmp_path):
    records = [
        synthetic.ok(Case(seq_len=n, heads=h), "naive") for h in range(1, 9) for n in (8, 16, 32)
    ]
    frame = compared(load_run(synthetic.write_run(tmp_path, "wide", records)))
    pages = sheets(frame, "impl")
    assert [len(page.panels) for page in pages] == [PANELS_A_SHEET, 2]
    assert len({page.slug for page in pages}) == 2


def test_built_ins_look_the_same_in_every_company():
    alone, together = style.looks(["sdpa"]), style.looks(["sdpa", "mine", "zeta", *style.KNOWN])
    assert alone["sdpa"] == together["sdpa"] == style.KNOWN["sdpa"]
    assert len(set(style.KNOWN.values())) == len(style.KNOWN)
    assert len({look.colour for look in style.KNOWN.values()}) == len(style.KNOWN)


def test_other_names_keep_their_look_and_never_share_one():
    assert style.looks(["mine"])["mine"] == style.looks(["mine", "naive"])["mine"]
    names = [f"impl-{i}" for i in range(40)]
    assert len(set(style.looks(names).values())) == 40
    assert style.looks(names) == style.looks(reversed(names))


def test_more_names_than_looks_is_no_error():
    assert len(style.looks([f"impl-{i}" for i in range(200)])) == 200


@pytest.mark.parametrize(
    ("wanted", "places"),
    [
        ([], []),
        ([0.5], [0.5]),
        ([0.2, 0.8], [0.2, 0.8]),
        ([0.5, 0.5], [0.45, 0.55]),
        ([1.0, 1.0], [0.9, 1.0]),
        ([2.0], [1.0]),
        ([0.5, 0.55, 0.9], [0.475, 0.575, 0.9]),
    ],
)
def test_labels_move_apart_as_little_as_needed(wanted, places):
    assert spread(wanted, 0.1, 0.0, 1.0) == pytest.approx(places)


def test_labels_that_do_not_fit_share_the_room_evenly():
    assert spread([0.5] * 5, 0.5, 0.0, 1.0) == pytest.approx([0, 0.25, 0.5, 0.75, 1.0])


@pytest.mark.parametrize(
    ("low", "high"), [(1.0, 2.0), (3.0, 5.0), (60, 150), (1e-3, 1e9), (16, 512)]
)
def test_an_axis_has_a_few_ticks_and_all_inside(low, high):
    for ticks in (scales.decimal_ticks(low, high), scales.binary_ticks(low, high)):
        assert all(low <= tick <= high for tick in ticks)
        assert len(ticks) <= 9
    assert len(scales.decimal_ticks(low, high)) >= 2


def test_markdown_cells_cannot_break_the_table():
    text = table(["a", "b"], [["x|y", "two\nlines"]])
    assert text.splitlines()[2] == r"| x\|y | two lines |"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (units.time(999.6), "1.00 ms"),
        (units.time(0.85), "850 ns"),
        (units.time(None), "–"),
        (units.time(float("nan")), "–"),
        (units.time_interval(990, 1310), "0.990–1.31 ms"),
        (units.size(0), "0 B"),
        (units.size(1023.99 * 1024), "1.0 MiB"),
        (units.size(8 * 2**20), "8.0 MiB"),
        (units.flop_rate(0.0512), "51.2 GFLOP/s"),
        (units.ratio(4.1), "4.10×"),
        (units.ratio_interval(3.9, None), "–"),
        (units.digits(0), "0"),
        (units.digits(9.999), "10.0"),
        (units.digits(4567.8), "4570"),
        (units.percent(0.083), "8.3 %"),
        (units.count(1234567), "1,234,567"),
        (units.seconds(99.7), "1 min 40 s"),
        (units.seconds(7400), "2 h 3 min"),
        (units.length(131072), "128k"),
        (units.length(1000), "1000"),
        (units.moment("2026-11-21T01:02:03+00:00"), "2026-11-21 01:02 UTC"),
        (units.moment("yesterday"), "yesterday"),
    ],
)
def test_numbers_are_written_for_people(text, expected):
    assert text == expected


def test_a_report_is_written_without_torch_and_without_pyplot(pages):
    code = (
        "import sys; from pathlib import Path; from attnbench.report import write_report;"
        f"write_report(Path({str(pages['one'].parent)!r}));"
        "assert not {'torch', 'matplotlib.pyplot'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


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


def test_figures_that_are_left_out_are_counted(tmp_path, monkeypatch):
    monkeypatch.setattr("attnbench.report.plots.MOST_SHEETS", 1)
    records = [
        synthetic.ok(Case(seq_len=n, pass_=p), "naive") for p in PASSES[:2] for n in (8, 16, 32)
    ]
    page = Page(write_report(synthetic.write_run(tmp_path, "many", records)))
    assert "1 more such figures are left out" in page.text
