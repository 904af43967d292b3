"""What a gate run says on the terminal, in JUnit XML, in Markdown, and on its page."""

import re
from dataclasses import replace
from xml.etree import ElementTree

import pytest
from rich.console import Console

from attnbench.errors import StoreError
from attnbench.gate.decide.data import Checked, GateRun
from attnbench.gate.decide.outcome import Outcome
from attnbench.gate.decide.verdict import decide
from attnbench.report import files
from attnbench.report.documents import gate
from attnbench.report.render import terminal
from tests import gate_runs
from tests.test_report import Page

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


def test_strange_texts_break_no_output(tmp_path):
    run, outcome = strange()
    files.write_gate_files(tmp_path, run, outcome)
    root = ElementTree.fromstring((tmp_path / "gate.xml").read_bytes())
    names = [case.get("classname", "") for case in root.iter("testcase")]
    assert [name for name in names if name.startswith("a[31m|`<b>&\"'")]
    text = (tmp_path / "gate.md").read_text(encoding="utf-8")
    assert "<b>" not in text
    assert all("\n" not in line and "\x1b" not in line for line in text.splitlines())
    console = Console(width=80, highlight=False)
    assert "\x1b[31m" not in terminal.render(gate.document(run, outcome), console)
    page = Page(tmp_path / "gate.html")
    assert page.open == []
    assert "b" not in {tag for tag, _ in page.tags}
    assert not re.search("[\x00-\x08\x1b]", page.text)


def test_all_files_are_written_and_the_summary_of_the_job_is_appended_to(tmp_path, monkeypatch):
    summary, run = tmp_path / "summary.md", KINDS["nothing"]
    summary.write_text("before\n")
    monkeypatch.setenv(files.SUMMARY, str(summary))
    assert files.write_gate_files(tmp_path / "g", run, decide(run))[1] == []
    names = {path.name for path in (tmp_path / "g").iterdir()}
    assert names == {"gate.json", "gate.xml", "gate.md", "gate.html"}
    assert summary.read_text().startswith("before\n## attnbench gate: – nothing is comparable")
    whole = summary.read_text()
    monkeypatch.setattr(files, "MOST_BYTES", len(whole.encode()) // 2)
    monkeypatch.setenv(files.SUMMARY, str(tmp_path / "short.md"))
    files.write_gate_files(tmp_path / "g", run, decide(run))
    short = (tmp_path / "short.md").read_text().removesuffix("\n\n… more in gate.html\n\n")
    assert whole.removeprefix("before\n").startswith(short)
    assert len(short) < len(whole) / 2
    monkeypatch.setenv(files.SUMMARY, str(tmp_path / "no" / "summary.md"))
    [warning] = files.write_gate_files(tmp_path / "g", run, decide(run))[1]
    assert re.fullmatch(r"cannot append to .* \(No such file or directory\)", warning)


def test_a_page_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "file").write_text("a file")
    run = KINDS["clean"]
    with pytest.raises(StoreError, match="cannot write"):
        files.write_files(tmp_path / "file", gate.document(run, decide(run)))
