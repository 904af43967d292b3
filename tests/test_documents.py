"""Documents in every format: what is written, and what no name may do to it."""

import json
import re
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from msgspec.structs import replace as replace_

from attnbench.analysis import compare as analysis
from attnbench.analysis.claims.statement import read
from attnbench.analysis.doctor import judge
from attnbench.analysis.failures import failures
from attnbench.analysis.history import series
from attnbench.analysis.profiles import difference
from attnbench.analysis.scaling.results import Scaling
from attnbench.errors import StoreError, UsageError
from attnbench.gate.decide.data import Checked
from attnbench.gate.decide.verdict import decide
from attnbench.planning.battery import battery
from attnbench.planning.lookup import PARTS
from attnbench.report import files
from attnbench.report.documents import (
    advise,
    check,
    claims,
    compare,
    doctor,
    gate,
    history,
    sweep,
    verify,
)
from attnbench.report.documents import catalogue as list_
from attnbench.report.documents import profile as profiles
from attnbench.report.render import FORMATS, rendered
from attnbench.schema.check import CheckResult
from attnbench.schema.finding import Finding as Found
from attnbench.schema.finding import LawFinding
from attnbench.store.runs import load_run
from tests import gate_runs, synthetic, test_doctor
from tests.conftest import parsed
from tests.test_compare import benchmarks
from tests.test_history import LEAST, made, noise, stepped
from tests.test_profiles import NAIVE, op, profile
from tests.test_report import Page

KINDS = gate_runs.the_kinds()
UNSEEN = "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]"
HOSTILE = {
    "control": "a\x00\x1b[31mb\nc\x9b",
    "markup": "|`<b>&\"'</table></script>]]>\n*x*",
    "direction": "a\u202eb\u2066c\u200f",
    "half": "a\ud800b\ufffe",
    "long": "x" * 10_000,
    "braces": "{name} {ratio.interval} $x^2$ \\frac",
}


def a_gate(name, folder):
    """A run with the name wherever a text comes from outside."""
    run = KINDS["broken"]
    failed = Checked(status="error", reason=name, metrics={"kernel": name})
    run = replace(
        run, cells=(replace(run.cells[0], impl=name), *run.cells[1:]),
        checks={**run.checks, 0: {"base": failed, "candidate": failed}},
        base=replace(run.base, ref=name, root=name, files=(name,)),
        environment={name: name, "device_name": name}, options={"--base": name},
    )  # fmt: skip
    return gate.document(run, decide(run), folder / "gate.json")


def a_comparison(name, folder):
    name = name.encode(errors="replace").decode()  # no JSON holds half a pair
    files = [benchmarks(folder / f"{seed}.json", seed, {}, node=name) for seed in (1, 2)]
    for file in map(Path, files):  # a test of that name
        file.write_text(file.read_text().replace("test_x.py", json.dumps(name)[1:-1]))
    return compare.document(analysis.compare(files, folder))


def a_history(name, folder):
    del folder
    logs = {name: stepped(noise(30, 9), 15, 0.4), "other": noise(30, 1), "more": noise(30, 2)}
    return history.document(series.history(made(logs, environments={9: {"torch": name}}), LEAST))


def a_profile(name, folder):
    both = profile(*NAIVE), profile(op(name, 400.0), *NAIVE, label=name, environment={name: name})
    return profiles.document([(of, folder) for of in both], difference(*both))


def a_run(name, folder):
    cell = replace(synthetic.hostile_records()[0].cell, impl=name)
    bad = synthetic.failed(cell.case, name, "error", name)
    return sweep.document(load_run(synthetic.write_run(folder, "run", [bad])))


def an_advice(name, folder):
    case = synthetic.hostile_records()[0].cell.case
    bad = synthetic.failed(case, "sdpa", "error", name)
    return advise.document(
        load_run(synthetic.write_run(folder, "run", [synthetic.timed(case, name, [9.0] * 9), bad]))
    )


def of_laws(name, folder):
    of = LawFinding(subject=name, question=name, law=name, verdict="refuted", reason=name)
    return verify.document(Scaling(problems=(of, of)), an_empty_run(folder), every=True)


def of_claims(name, folder):
    known = read().items()
    found = Found(subject=name, question=name, law=name, verdict="refuted", reason=name)
    claims_ = [
        (replace_(claim, says=name, source=name, right=name, open=False), found)
        for _, claim in known
    ]
    return claims.document(tuple(claims_), an_empty_run(folder))


def of_checks(name, folder):
    del folder
    fault = {"code": "raised", "type": name, "file": name, "line": 1}
    results = [
        CheckResult(item=item, impl=name, status="error", reason=name, metrics={"fault": fault})
        for item in battery("cpu", ("float32",))[:2]
    ]
    return check.document(results, failures(results))


def a_diagnosis(name, folder):
    del folder
    works = [{"name": name, "dtype": name, "works": False, "reason": name}]
    facts = {"facts.device": "cuda", "facts.device_name": name, "facts.cuda": name}
    diagnosis = test_doctor.changed(**facts, gpu=test_doctor.GPU | {"works": works})
    return doctor.document(diagnosis, judge(diagnosis))


def a_catalogue(name, folder):
    del folder
    catalogue = replace_(PARTS, families={name: name}, masks={name: name})
    return list_.document(catalogue, [(name, set(), ["attnbench sweep"])])


def an_empty_run(folder):
    return load_run(synthetic.write_run(folder, "run", []))


MAKERS = [
    a_gate, a_comparison, a_history, a_profile, a_run, of_laws, of_claims, of_checks, a_diagnosis,
    a_catalogue, an_advice,
]  # fmt: skip
WITHOUT_TESTS = [a_profile, a_run, a_catalogue, an_advice]


def are_parsed(document):
    for label, command in document.commands:
        if label not in ("page", "run", "records", "trace"):  # of these it is a path
            parsed(command)


@pytest.mark.parametrize("kind", KINDS)
def test_every_command_that_a_gate_prints_is_one(kind):
    document = gate.document(KINDS[kind], decide(KINDS[kind]))
    are_parsed(document)
    assert document.commands or kind not in ("regressed", "broken")


@pytest.mark.parametrize("name", HOSTILE.values(), ids=HOSTILE)
@pytest.mark.parametrize("make", MAKERS)
def test_hostile_names_are_harmless_in_every_format(make, name, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    document = make(name, tmp_path)
    found = {
        of: rendered(document, of) for of in FORMATS if of != "junit" or make not in WITHOUT_TESTS
    }
    for format_, text in found.items():
        assert not re.search(UNSEEN, text)
        assert text.encode(), format_
    commands = [command for _, command in document.commands]
    are_parsed(document)
    lines = found["text"].splitlines()
    assert max(len(x) for x in lines if not any(c[:20] in x for c in commands)) <= 80
    assert "<b>" not in found["markdown"]
    json.loads(found["json"])
    (tmp_path / "page.html").write_text(found["html"], encoding="utf-8")
    page = Page(tmp_path / "page.html")
    assert page.open == []
    assert not {"b", "script"} & {tag for tag, _ in page.tags}
    if "junit" in found:
        assert ElementTree.fromstring(found["junit"]).findall(".//testcase")


def test_a_document_without_verdicts_is_no_junit_xml(tmp_path):
    with pytest.raises(UsageError, match="profile has no verdicts"):
        rendered(a_profile("x", tmp_path), "junit")


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
