"""gate.html, and its figure with a dot for every round."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from matplotlib import image
from msgspec import structs

from attnbench.errors import StoreError
from attnbench.gate.decide.data import Round
from attnbench.gate.decide.verdict import decide
from attnbench.report.gate import figure
from attnbench.report.gate.outputs import write_page
from tests import gate_runs
from tests.conftest import Cli, Refused
from tests.test_gate_outputs import strange
from tests.test_report import Page

KINDS = gate_runs.the_kinds()


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Page]:
    folder = tmp_path_factory.mktemp("gates")
    return {
        kind: Page(write_page(made(folder / kind), run, decide(run))) for kind, run in KINDS.items()
    }


def made(folder: Path) -> Path:
    folder.mkdir(parents=True)
    return folder


def strips(run, found=None):
    return figure.cells(run, found or decide(run))


@pytest.mark.parametrize("kind", KINDS)
def test_every_page_nests_and_loads_nothing(kind, pages):
    page = pages[kind]
    assert page.open == []
    assert not page.all("script")
    assert not page.all("link")
    assert all((a.get("src") or "").startswith("data:") for a in page.all("img"))
    targets = {a["id"] for _, a in page.tags if "id" in a}
    assert {a["href"] for a in page.all("a")} <= {f"#{target}" for target in targets}


@pytest.mark.parametrize("kind", KINDS)
def test_a_page_says_verdict_sides_controls_promise_and_replay(kind, pages):
    outcome, text = decide(KINDS[kind]), " ".join(pages[kind].text.split())
    assert outcome.words in text
    assert "base: main (3f2a91c0d1)" in text
    assert "with uncommitted changes" in text
    assert "positive control (a slowdown of 10 %)" in text
    assert "is called a regression in at most 1 % of runs" in text
    assert "attnbench gate --replay" in text
    for row in outcome.rows:
        assert row.reason in text


def test_a_page_shows_what_repeats_exactly_side_by_side(pages):
    text = " ".join(pages["broken"].text.split())
    assert "memory_workspace_bytes2.0 MiB (2,097,152)4.0 MiB (4,194,304)" in text
    assert "flops_counted33,554,43233,554,432" in text
    assert "kernels: +aten::clone, −aten::_softmax" in text
    assert "Nothing differs between the sides." in pages["clean"].text
    assert "naive n=512: candidate: crashed: killed by signal 11 (SIGSEGV)" in pages["broken"].text
    assert "round 4: vetoed: another process used 1.3 CPUs" in pages["regressed"].text


def test_the_image_has_its_content_in_words(pages):
    assert pages["nothing"].all("img") == []
    (figure,) = pages["regressed"].all("img")
    assert "sdpa n=256 +12" in (figure["alt"] or "")
    assert "12/12 ✗ regressed" in (figure["alt"] or "")
    assert "positive control (+10 %)" in (figure["alt"] or "")


def test_each_round_is_a_dot_hollow_full_or_vetoed():
    run = KINDS["regressed"]
    first = strips(run)[0]
    assert first.label == "sdpa n=256"
    timed = [found for found in run.rounds if found.log_ratio(5, "candidate") is not None]
    assert len(first.dots) == len(timed)
    assert sum(dot.vetoed for dot in first.dots) == 2
    assert sum(dot.full and not dot.vetoed for dot in first.dots) == 12
    assert first.ends is not None
    assert first.middle is not None
    assert first.ends[0] < first.middle < first.ends[1]


def test_controls_have_rows_of_their_own():
    null, planted = figure.controls(KINDS["clean"], decide(KINDS["clean"]))
    assert len(null.dots) == 8 * 9
    assert len(planted.dots) == 9
    assert planted.beside[2] == "found"
    blind = figure.controls(KINDS["blind"], decide(KINDS["blind"]))[1]
    assert blind.beside[2] == "NOT found"


def test_the_scale_shows_threshold_margin_and_every_interval():
    run = KINDS["inconclusive"]
    scale = figure.scale_of(run, strips(run))
    assert scale.linear is None
    assert scale.low < -scale.margin < scale.threshold < scale.high
    for strip in strips(run):
        assert strip.ends is None or scale.low < strip.ends[0] < strip.ends[1] < scale.high


def test_a_cell_far_out_makes_the_scale_logarithmic_and_squeezes_no_other():
    run = KINDS["broken"]
    scale = figure.scale_of(run, strips(run))
    assert scale.linear == pytest.approx(15)
    assert scale.high > 129


def test_a_stray_round_stands_at_the_edge_and_does_not_move_the_scale():
    run = KINDS["clean"]
    cell = run.rounds[0].samples[0]
    slow = {**cell, "candidate": tuple(tuple(20 * ns for ns in t) for t in cell["candidate"])}
    stray: Round = structs.replace(run.rounds[0], samples={**run.rounds[0].samples, 0: slow})
    other = replace(run, rounds=(stray, *run.rounds[1:]))
    scale = figure.scale_of(other, strips(other, decide(run)))
    assert scale.high < 3 * scale.threshold
    beyond = [dot for strip in strips(other) for dot in strip.dots if dot.percent > scale.high]
    assert len(beyond) == 1


@pytest.mark.parametrize("count", [1, 40, 130])
def test_one_cell_or_very_many_are_drawn_legibly(count, tmp_path):
    run = gate_runs.a_run({0: 0.2}, cells=(gate_runs.many_cells(40) * 4)[:count])
    drawn = figure.draw_all(run, decide(run), tmp_path)
    assert len(drawn) == -(-count // (figure.MOST_ROWS - 3))
    for plot in drawn:
        height, width, _ = image.imread(plot.png).shape
        assert width < 2000
        assert height / 160 < 14


def test_the_same_run_gives_the_same_figure(tmp_path):
    run = KINDS["regressed"]
    first, second = (
        figure.draw_all(run, decide(run), tmp_path / name)[0].svg.read_bytes() for name in "ab"
    )
    assert first == second


def test_strange_texts_are_escaped_on_the_page(tmp_path):
    run, outcome = strange()
    page = Page(write_page(made(tmp_path / "g"), run, outcome))
    assert page.open == []
    assert "b" not in {tag for tag, _ in page.tags}
    assert not re.search("[\x00-\x08\x1b]", page.text)


def test_report_draws_the_page_of_a_gate_again(cli: Cli, tmp_path: Path) -> None:
    from attnbench.gate.decide.stored import write_gate

    run = KINDS["regressed"]
    file = write_gate(tmp_path / "g", run, decide(run))
    for name in ("g", file, file.parent):
        result = cli("report", name, "--output", tmp_path)
        assert (result.exit_code, result.stdout) == (0, f"{tmp_path / 'g' / 'gate.html'}\n")
    assert "1 regressed" in (tmp_path / "g" / "gate.html").read_text()


def test_report_of_a_damaged_gate_is_one_line(
    cli: Cli, assert_refused: Refused, tmp_path: Path
) -> None:
    made(tmp_path / "g")
    (tmp_path / "g" / "gate.json").write_text("{")
    assert_refused(cli("report", "g", "--output", tmp_path), "gate.json", "damaged")


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "g").write_text("a file")
    with pytest.raises(StoreError, match="cannot write"):
        write_page(tmp_path / "g", KINDS["clean"], decide(KINDS["clean"]))
