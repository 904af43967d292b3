"""What a gate run says on the terminal, in JUnit XML, in Markdown, and on its page."""

import re
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from msgspec import structs
from rich.console import Console

from attnbench.errors import StoreError
from attnbench.gate.decide.data import Checked, GateRun, Round
from attnbench.gate.decide.outcome import Outcome
from attnbench.gate.decide.stored import write_gate
from attnbench.gate.decide.verdict import decide
from attnbench.report import figures
from attnbench.report.gate import figure, outputs, texts
from tests import gate_runs
from tests.conftest import Cli, Refused
from tests.test_report import Page, unwritten

KINDS = gate_runs.the_kinds()
STRANGE = "a\x00\x1b[31m|`<b>&\"'\ud800\ufffe]]>\n*x*"


def strange() -> tuple[GateRun, Outcome]:
    """A run with what no name should hold, wherever a text comes from outside."""
    run = KINDS["broken"]
    failed = Checked(status="error", reason=STRANGE, metrics={"kernel": STRANGE})
    cells = (replace(run.cells[0], impl=f"{STRANGE}$x"), *run.cells[1:])
    run = replace(
        run,
        cells=cells,
        checks={**run.checks, 0: {"base": failed, "candidate": failed}},
        base=replace(run.base, ref=STRANGE, root=STRANGE, files=(STRANGE,)),
        environment={STRANGE: STRANGE, "device_name": STRANGE},
        options={"--base": STRANGE},
    )
    return run, decide(run)


def printed(run, outcome, width=80):
    return outputs.terminal(run, outcome, Path("results/g"), Console(width=width, highlight=False))


def test_a_ratio_is_written_as_a_change_in_percent():
    for ratio, text in (
        (1.104, "+10.4 %"), (0.8, "−20.0 %"), (1.0, "0.0 %"), (1.0004, "0.0 %"),
        (0.9999, "0.0 %"), (3.5, "+250 %"), (None, "–"), (float("nan"), "–"),
    ):  # fmt: skip
        assert texts.change(ratio) == text
    assert texts.interval(0.98, 1.11) == "−2.0 … +11.0 %"
    assert texts.interval(None, 1.0) == "–"


def test_the_change_says_of_which_metric_it_is_and_no_interval_of_another_stands_beside_it():
    shown = {
        kind: {line.number: line.columns for line in texts.lines(KINDS[kind], decide(KINDS[kind]))}
        for kind in ("broken", "regressed")
    }
    assert [shown["broken"][cell][1:4] for cell in (0, 2, 7)] == [
        ("error", "–", "–"), ("–", "–", "–"), ("workspace +100 %", "–", "–"),
    ]  # fmt: skip
    change, ends, wins = shown["regressed"][5][1:4]
    assert change.startswith("time +12.")
    assert "…" in ends
    assert wins == "12/12"


def test_labels_say_what_differs_and_stay_apart():
    common, names = texts.labels(gate_runs.CELLS)
    assert common == "attention forward B=1 H=4 D=64 float32"
    assert names[0] == "naive n=128"
    first = gate_runs.CELLS[0]
    odd = [first, replace(first, case=replace(first.case, scale=0.5))]
    assert len(set(texts.labels(odd)[1])) == 2
    assert texts.labels([]) == ("", [])


@pytest.mark.parametrize("kind", KINDS)
def test_terminal_and_markdown_show_every_cell_its_verdict_and_the_conclusion(kind):
    run, outcome = KINDS[kind], decide(KINDS[kind])
    out = printed(run, outcome)
    text = outputs.markdown(run, outcome, Path("results/my run/gate.json"))
    for cell, row in zip(texts.labels(run.cells)[1], outcome.rows, strict=True):
        assert re.search(rf"^{cell} .*. {row.verdict} *$", out, re.MULTILINE), cell
        assert re.search(rf"^\| {cell} \|.*. {row.verdict} \|$", text, re.MULTILINE), cell
    assert f"(exit code {int(outcome.exit_code)})" in out.replace("\n", " ")
    assert "attnbench gate --replay results/g/gate.json" in out
    lines = [line for line in out.splitlines() if "attnbench profile" not in line]  # to be copied
    assert max(map(len, lines)) <= 80
    assert text.startswith(f"## attnbench gate: {texts.TITLES[outcome.exit_code]}")
    assert "    attnbench gate --replay 'results/my run/gate.json'" in text
    assert text.count("<details>") == text.count("</details>") == 1


def test_all_that_is_not_ok_has_its_reason_and_controls_say_what_they_showed():
    for kind, says in {
        "broken": [
            "✗ naive n=128: wrong result: o is off by 0.31 at [0, 1, 5, 7]",
            "✗ sdpa n=1024: workspace grew from 2.0 MiB to 4.0 MiB",
            "note: kernels: +aten::clone",
            "– naive n=256: new: the base does not have it",
            "✗ naive n=512: failed in 5 rounds: crashed: killed by signal 11",
        ],
        "blind": [
            "positive control (a slowdown of 10 %) was not found, so that passing says nothing:"
            " beyond the margin in 0 of 48 rounds, where it takes 34; rerun on a quieter machine",
            "? not passed: blind",
        ],
        "untrusted": ["A/A control (the base again): +", "; not to be trusted: "],
        "nothing": ["– naive n=128, naive n=256: new: the base", ": none, since no time was"],
    }.items():
        out = printed(KINDS[kind], decide(KINDS[kind]), width=200)
        assert [text for text in says if text not in out] == []
    # the worst comes first, and of equals the slowest
    rows = [line.row for line in texts.lines(KINDS["broken"], decide(KINDS["broken"]))]
    verdicts = ["incorrect", "incorrect", "regressed", "regressed", "not comparable"]
    assert [row.verdict for row in rows][:5] == verdicts
    assert (rows[2].ratio or 0) > (rows[3].ratio or 0)


def test_versions_name_ref_commit_and_uncommitted_changes_and_if_the_code_is_the_same():
    run = KINDS["clean"]
    assert texts.versions(run) == [
        "base: main (3f2a91c0d1)",
        "candidate: the working tree at 9b01c2d3e4, with uncommitted changes",
    ]
    bare = replace(
        run, base=replace(run.base, ref=None, commit=None), options={"loaded_alike": True}
    )
    assert texts.versions(bare)[0] == "base: the files in /tmp/base"
    named = replace(run, base=replace(run.base, ref=run.base.commit))
    assert texts.versions(named)[0] == "base: 3f2a91c0d1"
    assert "the same code" in texts.versions(bare)[2]


ELEMENTS = {
    "incorrect": "failure", "regressed": "failure", "inconclusive": "error",
    "not comparable": "skipped", "ok": None, "improved": None,
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_junit_has_a_case_a_cell_and_looks_like_a_pass_exactly_if_the_run_passed(kind):
    run, outcome = KINDS[kind], decide(KINDS[kind])
    root = ElementTree.fromstring(outputs.junit(run, outcome).encode())
    cases = {(c.get("classname"), c.get("name")): c for c in root.iter("testcase")}
    for row in outcome.rows:
        case = cases[row.cell.impl, texts.case_words(row.cell)]
        found = [e.tag for e in case if e.tag != "properties"]
        assert found == [e for e in [ELEMENTS[row.verdict]] if e]
    assert {("attnbench gate", "positive control"), ("attnbench gate", "A/A control")} < set(cases)
    suite = root.find("testsuite")
    assert suite is not None
    bad = int(suite.get("failures", "")) + int(suite.get("errors", ""))
    assert (bad == 0) == (outcome.exit_code == 0)
    for name, tag in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
        assert suite.get(name) == root.get(name) == str(len(list(root.iter(tag))))
    assert suite.get("tests") == str(len(list(root.iter("testcase"))))


def test_junit_gives_ratio_and_interval_as_properties():
    run, outcome = KINDS["regressed"], decide(KINDS["regressed"])
    root = ElementTree.fromstring(outputs.junit(run, outcome).encode())
    case = next(c for c in root.iter("testcase") if c.find("failure") is not None)
    known = {p.get("name"): p.get("value") for p in case.iter("property")}
    assert float(known["ratio"] or 0) == pytest.approx(outcome.rows[5].ratio, rel=1e-5)
    assert float(known["low"] or 0) < float(known["ratio"] or 0) < float(known["high"] or 0)
    assert known["wins"] == known["rounds"] == "12"
    assert next(case.iter("failure")).get("message", "").startswith("time +12")


def test_strange_texts_break_no_output(tmp_path):
    run, outcome = strange()
    outputs.write_all(tmp_path, run, outcome)
    root = ElementTree.fromstring((tmp_path / "gate.xml").read_bytes())
    names = [case.get("classname", "") for case in root.iter("testcase")]
    assert [name for name in names if name.startswith("a[31m|`<b>&\"'")]
    text = (tmp_path / "gate.md").read_text(encoding="utf-8")
    assert "<b>" not in text
    assert all("\n" not in line and "\x1b" not in line for line in text.splitlines())
    assert "\x1b[31m" not in printed(run, outcome)
    page = Page(tmp_path / "gate.html")
    assert page.open == []
    assert "b" not in {tag for tag, _ in page.tags}
    assert not re.search("[\x00-\x08\x1b]", page.text)


def test_all_files_are_written_and_the_summary_of_the_job_is_appended_to(tmp_path, monkeypatch):
    summary, run = tmp_path / "summary.md", KINDS["nothing"]
    summary.write_text("before\n")
    monkeypatch.setenv(outputs.SUMMARY, str(summary))
    assert outputs.write_all(tmp_path / "g", run, decide(run)) is None
    names = {path.name for path in (tmp_path / "g").iterdir()}
    assert names == {"gate.json", "gate.xml", "gate.md", "gate.html"}
    assert summary.read_text().startswith("before\n## attnbench gate: – nothing is comparable")
    whole = summary.read_text()
    monkeypatch.setattr(outputs, "MOST_BYTES", len(whole.encode()) // 2)
    monkeypatch.setenv(outputs.SUMMARY, str(tmp_path / "short.md"))
    outputs.write_all(tmp_path / "g", run, decide(run))
    short = (tmp_path / "short.md").read_text().removesuffix("\n\n… more in gate.html\n\n")
    assert whole.removeprefix("before\n").startswith(short)
    assert len(short) < len(whole) / 2
    monkeypatch.setenv(outputs.SUMMARY, str(tmp_path / "no" / "summary.md"))
    warning = outputs.write_all(tmp_path / "g", run, decide(run))
    assert re.fullmatch(r"cannot append to .* \(No such file or directory\)", warning or "")


# The page.


def test_every_page_nests_loads_nothing_and_says_what_the_run_found(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for kind in ("broken", "nothing", "clean", "regressed"):
        if kind == "clean":  # from here on without figures: most of the time goes into them
            monkeypatch.setattr(figures, "write", unwritten)
        run, outcome = KINDS[kind], decide(KINDS[kind])
        write_gate(tmp_path / kind, run, outcome)
        result = cli("report", kind, "--output", tmp_path)
        assert (result.exit_code, result.stdout) == (0, f"{tmp_path / kind / 'gate.html'}\n")
        page = Page(tmp_path / kind / "gate.html")
        assert page.open == []
        assert not page.all("script") + page.all("link")
        assert all((a.get("src") or "").startswith("data:") for a in page.all("img"))
        targets = {a["id"] for _, a in page.tags if "id" in a}
        assert {a["href"] for a in page.all("a")} <= {f"#{target}" for target in targets}
        text = " ".join(page.text.split())
        says = [
            outcome.words, "base: main (3f2a91c0d1)", "with uncommitted changes",
            "positive control (a slowdown of 10 %)", "attnbench gate --replay",
            "is called a regression in at most 1 % of runs", *(row.reason for row in outcome.rows),
            *SAYS.get(kind, ()),
        ]  # fmt: skip
        assert [words for words in says if words not in text] == []
        alt = " ".join(image["alt"] or "" for image in page.all("img"))
        assert [words for words in ALT.get(kind, ()) if words not in alt] == []
        assert bool(alt) == (kind != "nothing")


# What repeats exactly stands side by side.
SAYS = {
    "broken": [
        "memory_workspace_bytes2.0 MiB (2,097,152)4.0 MiB (4,194,304)",
        "flops_counted33,554,43233,554,432", "kernels: +aten::clone, −aten::_softmax",
        "naive n=512: candidate: crashed: killed by signal 11 (SIGSEGV)",
    ],
    "clean": ["Nothing differs between the versions."],
    "regressed": ["round 4: discarded: another process used 1.3 CPUs"],
}  # fmt: skip
ALT = {"regressed": ["sdpa n=256 time +12", "12/12  ✗ regressed", "positive control (+10 %)"]}


def test_each_round_is_a_dot_hollow_full_or_discarded_and_controls_have_their_rows():
    run = KINDS["regressed"]
    first = figure.cells(run, decide(run))[0]
    markers = [marker for _, marker in first.dots]
    assert first.label == "sdpa n=256"
    assert (markers.count("×"), markers.count("●")) == (2, 12)
    assert first.ends is not None
    assert first.middle is not None
    assert first.ends[0] < first.middle < first.ends[1]
    null, planted = figure.controls(KINDS["clean"], decide(KINDS["clean"]))
    assert (len(null.dots), len(planted.dots)) == (8 * 9, 9)
    assert planted.words.endswith(" found")
    assert figure.controls(KINDS["blind"], decide(KINDS["blind"]))[1].words == "0/48  not found"


def test_the_axis_shows_threshold_and_every_interval_and_no_stray_round_moves_it():
    for kind in ("inconclusive", "broken"):
        run = KINDS[kind]
        strips = figure.cells(run, decide(run))
        low, high = figure.limits(run, strips)
        assert low < -10
        assert all(s.ends is None or low < s.ends[0] < s.ends[1] < high for s in strips)
    run = KINDS["clean"]
    cell = run.rounds[0].samples[0]
    slow = {**cell, "candidate": tuple(tuple(20 * ns for ns in t) for t in cell["candidate"])}
    stray: Round = structs.replace(run.rounds[0], samples={**run.rounds[0].samples, 0: slow})
    other = replace(run, rounds=(stray, *run.rounds[1:]))
    assert figure.limits(run, figure.cells(other, decide(run)))[1] < 30


def test_very_many_cells_are_drawn_on_several_figures(tmp_path, monkeypatch):
    monkeypatch.setattr(figures, "write", unwritten)
    run = gate_runs.a_run({0: 0.2}, cells=gate_runs.CELLS * 6)
    drawn = figure.draw_all(run, decide(run), tmp_path)
    assert [plot.alt.count(" n=") for plot in drawn] == [42, 6]
    discarded = gate_runs.a_run(discarded=range(3), most_rounds=3)  # nothing counts: all is drawn
    assert len(figure.draw_all(discarded, decide(discarded), tmp_path)) == 1


def test_a_gate_that_is_damaged_or_cannot_be_written_is_one_line(
    cli: Cli, assert_refused: Refused, tmp_path: Path
) -> None:
    (tmp_path / "g").mkdir()
    (tmp_path / "g" / "gate.json").write_text("{")
    assert_refused(cli("report", "g", "--output", tmp_path), "gate.json", "damaged")
    (tmp_path / "file").write_text("a file")
    with pytest.raises(StoreError, match="cannot write"):
        outputs.write_page(tmp_path / "file", KINDS["clean"], decide(KINDS["clean"]))
