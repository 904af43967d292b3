"""The pages and plots of a report."""

import re
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from msgspec import structs
from rich.console import Console

from attnbench.analysis.axes import label_axes
from attnbench.analysis.table import load
from attnbench.base import units
from attnbench.report import figures
from attnbench.report.document import Table, Text, Value
from attnbench.report.documents import sweep
from attnbench.report.render import rendered, tables
from attnbench.schema.case import PASSES, Case, parse_mask
from attnbench.store.runs import load_run
from tests import synthetic
from tests.conftest import environment

GROWTH = ("fit", "model")  # figures with tests of their own
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


def unwritten(figure: Figure, stem: str, folder: Path) -> bytes:
    """Write a mark in the place of a figure: writing takes most of the time."""
    (folder / f"{stem}.png").write_text("")
    return b"<svg/>"


CEILINGS = {"matmul_tflops": {"float32": 0.2}, "read_gbps": 31.0, "copy_gbps": 28.0}


class Pages(dict[str, Path]):
    """The page of each run, drawn when first asked for; the figures of one are written for real."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __missing__(self, name: str) -> Path:
        with pytest.MonkeyPatch.context() as patch:
            if name != "one":
                patch.setattr(figures, "write", unwritten)
            quick = {"environment": synthetic.CPU | {"ceilings": CEILINGS}}
            info = quick if name == "quick" else None
            records = synthetic.RUNS[name]()
            run = synthetic.write_run(self.folder, name, records, info)
            self[name] = synthetic.write_report(run)
        return self[name]


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Pages:
    return Pages(tmp_path_factory.mktemp("runs"))


@pytest.mark.parametrize("name", ["quick", "failed"])
def test_every_run_gives_a_page_that_nests_and_loads_nothing_and_a_markdown_file(pages, name):
    page = Page(pages[name])
    assert page.open == []
    assert (pages[name].parent / "report.md").read_text().startswith("## attnbench report: ")
    assert page.all("html") == [{"lang": "en"}]
    assert len(page.all("title")) == 1
    images = page.all("img")
    assert all(len(image["alt"] or "") > 20 for image in images)
    folder = pages[name].parent / "plots"
    assert len(list(folder.glob("*"))) <= len(images)
    assert folder.exists() == bool(images) == (name != "failed")
    for _, attributes in page.tags:  # nothing is loaded from anywhere
        assert (attributes.get("src") or "data:").startswith("data:")
        assert (attributes.get("href") or "#").startswith("#")
    assert not page.all("script")
    assert not page.all("link")
    style_sheet = pages[name].read_text().partition("</style>")[0]
    assert "@import" not in style_sheet
    assert "url(" not in style_sheet


def test_a_full_run_has_every_chart(pages):
    stems = {path.stem for path in (pages["quick"].parent / "plots").glob("*.png")}
    stems = {stem for stem in stems if stem.split("-")[0] not in GROWTH}
    slice_ = "cpu-float32-forward"
    assert stems == {
        *(
            f"{c}-attention-{slice_}"
            for c in ("time", "speedup", "tflops", "workspace", "flops", "rope")
        ),
        *(f"{c}-decode-{slice_}" for c in ("decode", "decode-workspace")),
        *(f"roofline-{workload}-{slice_}" for workload in ("attention", "decode")),
    }


def test_a_page_shows_the_limits_where_they_were_measured(pages):
    page, markdown = (pages["quick"].with_name(n).read_text() for n in ("report.html", "report.md"))
    assert re.search(r"measured limits \d+ GFLOP/s, 31.0 GB/s", page)  # at least the best cell
    assert "<summary>Limits of the machine</summary>" in page
    assert re.search(r"<td>read</td>\s*<td[^>]*>31.0 GB/s</td>\s*<td[^>]*>–</td>", page)
    assert "| matmul, float32 | 200 GFLOP/s | – |" in markdown
    for name in ("report.html", "report.md"):
        assert "Limits of the machine" not in pages["one"].with_name(name).read_text()


ON_A_GPU = {"device": "cuda", "device_name": "H200", "driver": "570.00", "allocator": None}
ON_A_CPU = {"device": "cpu", "device_name": "EPYC", "allocator": "settled"}
TAKEN = {
    "graph": (ON_A_GPU, [("graph", "warm", 1410.2), ("graph", "warm", 1980.0)],
              "driver 570.00, timed in a CUDA graph, L2 warm, SM clock 1410–1980 MHz"),
    "mixed": (ON_A_GPU, [("graph", "warm", None), ("events", "cold", None)],
              "driver 570.00, timed by CUDA events and in a CUDA graph, L2 cold and warm"),
    "cpu, keep": (ON_A_CPU | {"allocator": "keep"}, [("host", "warm", None)], "allocator keep"),
}  # fmt: skip


@pytest.mark.parametrize(("environment", "cells", "how"), TAKEN.values(), ids=TAKEN)
def test_the_head_of_both_pages_and_the_end_of_a_sweep_say_how_times_were_taken(
    tmp_path, monkeypatch, capsys, environment, cells, how
):
    monkeypatch.setattr(figures, "write", unwritten)
    records = [
        synthetic.ok(Case(device=environment["device"], seq_len=64 << i), "sdpa", **metrics)
        for i, metrics in enumerate(
            {"timer": timer, "l2": l2, "sm_mhz": mhz} for timer, l2, mhz in cells
        )
    ]
    run = synthetic.write_run(tmp_path, "r", records, {"environment": environment})
    page = synthetic.write_report(run)
    name, markdown = environment["device_name"], page.with_suffix(".md").read_text()
    head = " · ".join(filter(None, (name, how, "2026-11-21")))
    assert f"- {head}" in markdown
    assert head in Page(page).text
    assert " · ".join(filter(None, (name, how))) in rendered(sweep.document(load_run(run)))


@pytest.mark.parametrize("name", ["failed", "hostile"])
def test_every_reason_of_a_failure_stands_in_both_pages(pages, name):
    page, run = Page(pages[name]), load_run(pages[name].parent)
    flat = re.sub(r"\s+", " ", page.text)
    markdown = (pages[name].parent / "report.md").read_text()
    for record in run.records:
        if record.reason:
            assert re.sub(r"\s+", " ", record.reason) in flat
            assert f": {record.status}: " in markdown


def test_a_run_without_a_time_has_no_figures_and_says_so_if_one_is_asked_for(pages, cli):
    assert "A colour and a marker" not in Page(pages["failed"]).text
    asked = cli("report", pages["failed"].parent, "--figure", "time")
    assert (asked.exit_code, "none: no cell has a time" in asked.stderr) == (2, True)


def test_a_footnote_stands_right_below_the_table_that_has_its_mark():
    run = load_run(Path(__file__).parents[1] / "results" / "verify-cpu")
    frame = load(run, None)
    odd = frame["speedup_reason"].notna() & frame["speedup"].notna()
    own = frame[frame["case_id"].isin(frame[odd]["case_id"])]
    table, notes, *_ = sweep.results_table(own, label_axes(own))
    assert isinstance(table, Table)
    assert isinstance(notes, Text)
    cells = [cell for row in table.rows for cell in row if isinstance(cell, Value)]
    assert [cell for cell in cells if cell.mark.startswith("*")]
    assert notes.lines
    assert all(str(line).startswith("* ") for line in notes.lines)


def test_a_killed_run_still_gets_its_page(tmp_path, monkeypatch):
    monkeypatch.setattr(figures, "write", unwritten)
    all_records = synthetic.RUNS["quick"]()
    plan, records = [record.cell.to_json() for record in all_records], all_records[:2]
    info = {"spent": None, "options": None, "plan": plan}
    path = synthetic.write_run(tmp_path, "killed", records, info)
    with (path / "records.jsonl").open("a") as file:
        file.write('{"schema": 1, "case')
    counts = f"only 2 of {len(plan)} planned cells measured; the last line of records.jsonl was cut"
    for text in (Page(synthetic.write_report(path)).text, (path / "report.md").read_text()):
        text = text.replace("\\", "")  # of Markdown
        assert f"{counts} off and is left out; go on with: attnbench sweep --resume {path}" in text
        assert "All 2 cells" not in text


def test_a_big_run_is_cut_short_and_the_page_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(sweep, "SHOWN", 5)
    monkeypatch.setattr(sweep, "MOST_ROWS", 10)
    monkeypatch.setattr("attnbench.report.charts.MOST_PAGES", 1)
    monkeypatch.setattr(figures, "write", unwritten)
    records = [
        synthetic.ok(Case(seq_len=n, heads=h, pass_=p), "naive")
        for p in PASSES[:2] for h in (1, 2) for n in (8, 16, 32)
    ]  # fmt: skip
    page = Page(synthetic.write_report(synthetic.write_run(tmp_path, "big", records)))
    assert "3 more cells are not shown" in page.text
    assert "attnbench export" in page.text
    assert "2 more such panels are left out" in page.text


@pytest.mark.parametrize(("text", "expected"), [
    (units.time(999.6), "1.00 ms"), (units.time(0.85), "850 ns"), (units.time(None), "–"),
    (units.time(float("nan")), "–"), (units.time_interval(990, 1310), "0.990–1.31 ms"),
    (units.size(0), "0 B"), (units.size(1023.99 * 1024), "1.0 MiB"),
    (units.size(8 * 2**20), "8.0 MiB"), (units.flop_rate(0.0512), "51.2 GFLOP/s"),
    (units.ratio(4.1), "4.10×"), (units.ratio_interval(3.9, None), "–"), (units.digits(0), "0"),
    (units.digits(9.999), "10.0"), (units.digits(4567.8), "4570"), (units.percent(0.083), "8.3 %"),
    (units.count(1234567), "1,234,567"), (units.seconds(99.7), "1 min 40 s"),
    (units.seconds(7400), "2 h 3 min"), (units.length(131072), "128k"),
    (units.length(1000), "1000"),
    (units.moment("2026-11-21T01:02:03+00:00"), "2026-11-21 01:02 UTC"),
    (units.moment("yesterday"), "yesterday"),
])  # fmt: skip
def test_numbers_are_written_for_people(text, expected):
    assert text == expected


def test_a_report_is_written_without_torch_and_without_pyplot(pages):
    code = (
        "import sys; from pathlib import Path; import attnbench.report.rounds;"
        "from tests.synthetic import write_report;"
        f"write_report(Path({str(pages['empty'].parent)!r}));"
        "assert not {'torch', 'matplotlib.pyplot'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_where_no_home_can_be_written_a_library_says_nothing_of_it_to_the_user():
    clean = environment(HOME="/dev/null/none")
    for name in ("MPLCONFIGDIR", "XDG_CONFIG_HOME", "XDG_CACHE_HOME"):
        clean.pop(name, None)
    command = [sys.executable, "-c", "import attnbench.report.figures"]
    ended = subprocess.run(command, env=clean, capture_output=True, text=True, check=True)
    assert ended.stderr == ""


@pytest.mark.parametrize("width", [45, 64, 80, 200])
def test_a_table_splits_no_word_and_says_which_columns_it_leaves_out(width):
    header = ("implementation", "verdict", "where", "reason")
    rows = [
        ("naive-compiled", "holds", "a long place", "flops_counted as predicted 12.5 % " * 4)
    ] * 2
    to = Console(width=width)
    text = tables.shown(tables.grid(header, rows, right=["verdict"], spare=["where"], to=to), to=to)
    assert max(map(len, text.splitlines())) <= width
    words = {*header, *(word for cell in rows[0] for word in cell.split())}
    left_out = {"place", "long", "a"} if "columns left out: where" in text else set()
    assert words - left_out <= set(text.replace(":", " ").split())
    assert bool(left_out) == (width == 45)
    assert text.count("12.5 %") == 8, "a number and its unit stay together"


def test_a_time_marked_as_unsteady_has_its_reason_on_the_screen(tmp_path):
    timed = ((1024, 999.0), (2048, 888.0))
    late = [synthetic.timed(Case(seq_len=n), "late", [us] * 7 + [100.0] * 5) for n, us in timed]
    text = rendered(sweep.document(load_run(synthetic.write_run(tmp_path, "run", late))), "text")
    reason = r"\? late.* n=1024, late.* n=2048: settling.*: it took 999 µs in 7 samples"
    assert re.search(reason, text)
    assert text.count("it took") == 1, "a kind is listed once"


def test_what_is_held_and_why_sdpa_took_math_stands_on_the_screen(tmp_path):
    records = [
        synthetic.ok(Case(seq_len=n), impl, **metrics)
        for n in (256, 512)
        for impl, metrics in (
            ("grows", {"memory_retained_bytes": 4 * n * n}),
            ("constant", {"memory_retained_bytes": 4096, "build_us": 9e6, "compile_s": 9.0}),
            ("planned", {"build_us": 1e6 * n, "mask_build_us": 5e5 * n}),
            ("naive", {"page_faults": 8192.0, "page_faults_us": 1000.0 * (n > 256)}),
            ("sdpa", {"sdpa_backend": "math", "sdpa_reason": "For a reason."}),
        )
    ]
    for cache, held in (("static", 2**19), ("int8", 2**17)):
        case = Case(workload="decode", width=256, mask=parse_mask("causal"), cache=cache)
        records.append(synthetic.ok(case, "naive", cache_bytes=held))
    for impl, part in (("naive", 0.75), ("sdpa", 0.5)):
        layer = synthetic.ok(Case(workload="layer", width=256, projection="fused"), impl)
        core = [structs.replace(s, core_us=part * s.time_us) for s in layer.samples]
        records.append(replace(layer, samples=(*core,)))
    run = load_run(synthetic.write_run(tmp_path, "run", records))
    text = rendered(sweep.document(run), "markdown")
    share = r"attention takes 50 % .*49–52.* with sdpa, 75 % .*73–77.* with naive; projections"
    assert re.search(share, text)
    grows = "grows holds memory after its first call, more at each n: 256.0 KiB at n=256, 1.0 MiB"
    assert grows in text
    assert "constant holds" not in text
    assert re.search(r"Building planned takes 128 s at n=256, .* times its call, and is not", text)
    assert "Building constant" not in text, "what compiling takes has a column"
    assert re.search(r"more than 10 % of 1 time, .* % of naive at n=512, 8,192 page faults", text)
    assert re.search(r"attnbench sweep .*--seq-lens 512 .*--allocator keep", text)
    assert "In 2 cells of sdpa SDPA took its math path: For a reason.\n" in text
    assert "| cache size |" in text
    assert re.search(r"cache=int8 .* 128.0 KiB .*\n.*cache=static .* 512.0 KiB ", text)
