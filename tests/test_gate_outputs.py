"""What a gate run says on the terminal, in JUnit XML, in Markdown and in a CI job's summary."""

import re
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from rich.console import Console

from attnbench.gate.decide.data import Checked, GateRun, Outcome
from attnbench.gate.decide.verdict import decide
from attnbench.report.gate import outputs, texts
from attnbench.theory.traits import case_label
from tests import gate_runs

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


def printed(run, outcome, capsys, width=80):
    to = Console(width=width, highlight=False)
    return outputs.terminal(run, outcome, Path("results/g"), to)


@pytest.mark.parametrize(
    ("ratio", "text"),
    [
        (1.104, "+10.4 %"), (0.8, "−20.0 %"), (1.0, "0.0 %"), (1.0004, "0.0 %"),
        (0.9999, "0.0 %"), (3.5, "+250 %"), (None, "–"), (float("nan"), "–"),
    ],
)  # fmt: skip
def test_a_ratio_is_written_as_a_change_in_percent(ratio, text):
    assert texts.change(ratio) == text
    assert texts.interval(0.98, 1.11) == "−2.0 … +11.0 %"
    assert texts.interval(None, 1.0) == "–"


def test_labels_say_what_differs_and_stay_apart():
    common, names = texts.labels(gate_runs.CELLS)
    assert common == "attention forward B=1 H=4 D=64 float32"
    assert names[0] == "naive n=128"
    twins = (gate_runs.CELLS[0], gate_runs.CELLS[0])
    assert texts.labels([*twins, replace(twins[0], impl="x")])[1][2] == "x n=128"
    odd = [twins[0], replace(twins[0], case=replace(twins[0].case, scale=0.5))]
    assert len(set(texts.labels(odd)[1])) == 2
    assert texts.labels([]) == ("", [])


def test_the_worst_comes_first_and_of_equals_the_slowest():
    rows = [row for _, row in texts.worst_first(decide(KINDS["broken"]).rows)]
    assert [row.verdict for row in rows][:4] == ["incorrect"] * 2 + ["regressed"] * 2
    assert (rows[2].ratio or 0) > (rows[3].ratio or 0)
    assert rows[4].verdict == "not comparable"


@pytest.mark.parametrize("kind", KINDS)
def test_the_terminal_shows_every_cell_its_verdict_and_the_conclusion(kind, capsys):
    run, outcome = KINDS[kind], decide(KINDS[kind])
    out = printed(run, outcome, capsys)
    for cell, row in zip(texts.labels(run.cells)[1], outcome.rows, strict=True):
        assert re.search(rf"^. +{cell} .*{row.verdict} *$", out, re.MULTILINE), cell
    assert f"(exit code {int(outcome.exit_code)})" in out.replace("\n", " ")
    assert "attnbench gate --replay results/g/gate.json" in out
    assert max(map(len, out.splitlines())) <= 80
    assert "…\n" not in out


def test_all_that_is_not_ok_has_its_reason(capsys):
    out = printed(KINDS["broken"], decide(KINDS["broken"]), capsys, width=200)
    assert "✗ naive n=128: wrong result: o is off by 0.31 at [0, 1, 5, 7]" in out
    assert "✗ sdpa n=1024: workspace grew from 2.0 MiB to 4.0 MiB" in out
    assert "note: kernels: +aten::clone" in out
    assert "– naive n=256: new: the base has no such implementation" in out
    assert "✗ naive n=512: failed in 5 rounds: crashed: killed by signal 11" in out


def test_controls_say_what_they_showed(capsys):
    blind = printed(KINDS["blind"], decide(KINDS["blind"]), capsys, width=200)
    assert "positive control (a slowdown of 10 %) was NOT found" in blind
    assert "? not passed: blind" in blind
    untrusted = printed(KINDS["untrusted"], decide(KINDS["untrusted"]), capsys, width=200)
    assert re.search(r"A/A control \(the base again\): \+\d\.\d %; not to be trusted", untrusted)
    none = printed(KINDS["nothing"], decide(KINDS["nothing"]), capsys, width=200)
    assert "none, since no time was compared" in none


def test_sides_name_ref_commit_and_uncommitted_changes():
    run = KINDS["clean"]
    assert texts.sides(run) == [
        "base: main (3f2a91c0d1)",
        "candidate: the working tree at 9b01c2d3e4, with uncommitted changes",
    ]
    bare = replace(run, base=replace(run.base, ref=None, commit=None))
    assert texts.sides(bare)[0] == "base: the files in /tmp/base"


ELEMENTS = {
    "incorrect": "failure", "regressed": "failure", "inconclusive": "error",
    "not comparable": "skipped", "ok": None, "improved": None,
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_junit_has_a_case_a_cell_and_one_for_each_control(kind):
    run, outcome = KINDS[kind], decide(KINDS[kind])
    root = ElementTree.fromstring(outputs.junit(run, outcome).encode())
    cases = {(c.get("classname"), c.get("name")): c for c in root.iter("testcase")}
    for row in outcome.rows:
        case = cases[row.cell.impl, case_label(row.cell.case)]
        found = [e.tag for e in case if e.tag != "properties"]
        assert found == [e for e in [ELEMENTS[row.verdict]] if e]
    assert ("attnbench gate", "positive control") in cases
    assert ("attnbench gate", "A/A control") in cases


@pytest.mark.parametrize("kind", KINDS)
def test_junit_looks_like_a_pass_exactly_if_the_run_passed(kind):
    outcome = decide(KINDS[kind])
    root = ElementTree.fromstring(outputs.junit(KINDS[kind], outcome).encode())
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
    row = outcome.rows[5]
    assert float(known["ratio"] or 0) == pytest.approx(row.ratio, rel=1e-5)
    assert float(known["low"] or 0) < float(known["ratio"] or 0) < float(known["high"] or 0)
    assert known["wins"] == known["rounds"] == "12"
    assert next(case.iter("failure")).get("message", "").startswith("+12")


def test_strange_texts_break_no_output(tmp_path, capsys):
    run, outcome = strange()
    outputs.write_all(tmp_path, run, outcome)
    root = ElementTree.fromstring((tmp_path / "gate.xml").read_bytes())
    assert next(root.iter("testcase")).get("classname", "").startswith("a[31m|`<b>&\"'")
    text = (tmp_path / "gate.md").read_text(encoding="utf-8")
    assert "<b>" not in text
    assert all("\n" not in line and "\x1b" not in line for line in text.splitlines())
    out = printed(run, outcome, capsys)
    assert "\x1b[31m" not in out


@pytest.mark.parametrize("kind", KINDS)
def test_markdown_begins_with_the_verdict_and_has_a_row_a_cell(kind):
    run, outcome = KINDS[kind], decide(KINDS[kind])
    text = outputs.markdown(run, outcome, Path("results/my run/gate.json"))
    assert text.startswith(f"## attnbench gate: {texts.TITLES[outcome.exit_code]}")
    assert len(re.findall(r"^\| (?:naive|sdpa) n=", text, re.MULTILINE)) == len(run.cells)
    assert "    attnbench gate --replay 'results/my run/gate.json'" in text
    assert text.count("<details>") == text.count("</details>") == 1


def test_a_markdown_table_of_very_many_cells_is_cut_and_says_so():
    run = gate_runs.a_run(cells=gate_runs.many_cells(40) * 2)
    text = outputs.markdown(run, decide(run), Path("g.json"))
    assert f"… and {80 - outputs.MOST_ROWS} more cells in gate.html" in text


def test_all_files_are_written_and_the_summary_of_the_job_is_appended_to(tmp_path, monkeypatch):
    summary = tmp_path / "summary.md"
    summary.write_text("before\n")
    monkeypatch.setenv(outputs.SUMMARY, str(summary))
    run = KINDS["clean"]
    outputs.write_all(tmp_path / "g", run, decide(run))
    names = {path.name for path in (tmp_path / "g").iterdir()}
    assert names == {"gate.json", "gate.xml", "gate.md", "gate.html", "plots"}
    assert summary.read_text().startswith("before\n## attnbench gate: ✓ passed")


def test_a_summary_that_cannot_be_written_is_a_warning(tmp_path, monkeypatch):
    monkeypatch.setenv(outputs.SUMMARY, str(tmp_path / "no" / "summary.md"))
    run = KINDS["nothing"]
    warning = outputs.write_all(tmp_path / "g", run, decide(run))
    assert re.fullmatch(r"cannot append to .* \(No such file or directory\)", warning or "")
    assert (tmp_path / "g" / "gate.html").exists()
