"""`attnbench gate` on real repositories, with imagined rounds: what it asks, says and leaves.

And what it refuses, by one line with the flag, before anything is measured or written.
"""

from __future__ import annotations

import json
import re
import tempfile
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from attnbench.errors import StoreError, WorkerError
from attnbench.execution.events import Events, RoundMeasured, Total, Working
from attnbench.gate.decide.data import GateRun, Rules
from attnbench.gate.decide.stored import keep_round, load_gate
from attnbench.gate.decide.verdict import decide
from attnbench.gate.run.measuring import GateRequest
from attnbench.planning.plan import Axes
from attnbench.report.documents import gate
from attnbench.store.folder import GATE, RunFolder
from tests import gate_runs, repositories
from tests.gate_runs import a_run
from tests.repositories import commit, git, kernel, write

TABLE = "[tool.attnbench.gate]\nfiles = 'a.py'\n"
KINDS = gate_runs.the_kinds()


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with two commits on `main`, in which the command runs."""
    made = repositories.new(tmp_path.resolve() / "repo")
    (made / "pyproject.toml").write_text(TABLE)
    commit(made, a="old = 1")
    commit(made, a=kernel(), b=kernel("other"))
    monkeypatch.chdir(made)
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)
    monkeypatch.setattr("attnbench.report.rounds.draw_all", lambda *_: [])
    return made


@dataclass
class Imagined:
    """Stands for the measuring: keeps what it was asked for, and answers with `run`."""

    run: GateRun = field(default_factory=a_run)
    error: BaseException | None = None
    requests: list[GateRequest] = field(default_factory=list)
    base_text: str = ""

    def __call__(self, request: GateRequest) -> Events[GateRun]:
        self.requests.append(request)
        self.base_text = (Path(request.base.root) / "a.py").read_text()
        yield Working("checking both versions")
        yield Total(len(self.run.cells))
        for number, found in enumerate(self.run.rounds, start=1):
            request.keep(self.run, found)
            yield RoundMeasured(number, found.discarded, "screening 8 cells")
        if self.error is not None:
            raise self.error
        return replace(self.run, base=request.base, candidate=request.candidate)

    @property
    def request(self) -> GateRequest:
        (request,) = self.requests
        return request


@pytest.fixture
def imagined(monkeypatch: pytest.MonkeyPatch) -> Imagined:
    answer = Imagined()
    monkeypatch.setattr("attnbench.gate.run.measuring.run_gate", answer)
    monkeypatch.setattr(
        "attnbench.gate.run.watched.surveyed", lambda asked, environment: ("cpu", {})
    )
    return answer


def test_both_sides_are_asked_for_and_the_base_is_gone_afterwards(cli, imagined, root):
    result = cli("gate", "--base", "HEAD~1", "--name", "r", "--impl", "a.py", "--impl", "b.py")
    assert result.exit_code == 0, result.stderr
    assert "Warning: the base has no b.py" in result.stderr
    base, candidate = imagined.request.base, imagined.request.candidate
    assert imagined.base_text == "old = 1"
    assert (base.ref, base.commit) == ("HEAD~1", git(root, "rev-parse", "HEAD~1"))
    assert base.files == (f"{base.root}/a.py",)
    assert not Path(base.root).exists()
    assert (candidate.root, candidate.commit) == (str(root), git(root, "rev-parse", "HEAD"))
    assert candidate.files == (f"{root}/a.py", f"{root}/b.py")
    assert not candidate.dirty
    assert imagined.request.sweeps == (Axes(seq_lens=(128, 256, 512, 1024), threads=(1,)),)
    rules, settings = imagined.request.rules, imagined.request.settings
    assert (settings.threads, rules.threshold, rules.budget_s) == (1, 0.1, 300)
    assert not imagined.request.keep_going
    assert (root / "results" / "r" / "gate.json").is_file()
    assert "results" not in git(root, "status", "--porcelain")


# How it ends.


def test_the_exit_code_is_that_of_the_outcome_and_advisory_tells_it(cli, imagined):
    for kind, code in {
        "clean": 0, "regressed": 1, "broken": 1, "nothing": 2, "blind": 3, "cut short": 3,
        "untrusted": 4,
    }.items():  # fmt: skip
        imagined.run = KINDS[kind]
        assert cli("gate").exit_code == code
        name = kind.replace(" ", "-")
        result = cli("gate", "--advisory", "--quiet", "--name", name)
        assert (result.exit_code, result.stdout) == (0, f"results/{name}\n")
        expected = f"advisory: exit code {code} was changed to 0 (--advisory)\n" if code else ""
        assert result.stderr == expected


def assert_nothing_is_left(root: Path) -> None:
    assert not (root / "results").exists()
    assert git(root, "status", "--porcelain") == ""


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [(KeyboardInterrupt(), 130, "Interrupted"), (WorkerError("no worker"), 4, "Error: no worker")],
)
def test_what_ends_a_run_before_its_first_round_leaves_nothing_behind(
    cli, imagined, root, error, code, says
):
    imagined.error, imagined.run = error, replace(imagined.run, rounds=())
    result = cli("gate")
    assert (result.exit_code, says in result.stderr) == (code, True)
    assert not Path(imagined.request.base.root).exists()
    if code == 4:
        assert cli("gate", "--advisory").exit_code == 0
    assert_nothing_is_left(root)


def test_what_nobody_foresaw_is_no_finding_and_leaves_its_rounds(
    cli, imagined, tmp_path, monkeypatch
):
    def broken(run: GateRun) -> Any:
        raise KeyError(3)

    monkeypatch.setattr("attnbench.gate.decide.verdict.decide", broken)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    result = cli("gate", "--name", "r")
    assert result.exit_code == 70
    error = result.stderr.splitlines()[-1]
    assert error.startswith("Error: internal error: KeyError: 3; please report it, and attach /")
    assert "in broken" in Path(error.partition("attach ")[2]).read_text()
    kept = "the rounds so far are kept; decide from them: attnbench gate --replay results/r"
    assert kept in result.stderr
    assert load_gate(Path("results/r")).rounds == imagined.run.rounds


def full_disk(folder: Path, *_: Any) -> None:
    raise StoreError(f"cannot write {folder} (No space left on device)")


def test_a_disk_that_is_full_in_the_end_hides_no_verdict(cli, imagined, monkeypatch):
    imagined.run = KINDS["regressed"]
    monkeypatch.setattr("attnbench.report.files.write_gate_files", full_disk)
    result = cli("gate")
    assert result.exit_code == 2
    assert "regressed" in result.stdout
    assert "Error: cannot write" in result.stderr


# Two files, without git.


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder outside of any repository, in which the command runs, with versions of a file."""
    folder = tmp_path / "files"
    old, new = (f"import beside\n{kernel()}{kernel(name)}" for name in ("gone", "new"))
    write(folder, old=old, new=new, beside="", bad="def (", apart=kernel("apart"))
    monkeypatch.chdir(folder)
    return folder


def test_two_files_are_compared_in_real_rounds_and_decided_again(cli, files, monkeypatch):
    brief = partial(Rules, screen_rounds=1, looks=(1,))  # too few to call anything slower
    monkeypatch.setattr("attnbench.gate.run.watched.Rules", brief)
    small = ("--seq-lens", "16", "--heads", "1", "--head-dims", "8", "--name", "r")
    result = cli("gate", "--impl", "new.py", "--against", "../files/old.py", *small)
    assert result.exit_code in (0, 3, 4), result.stderr
    assert "in one file alone, so left out: gone, new\n" in result.stderr
    run, again = load_gate(Path("results/r")), cli("gate", "--replay", "r")
    assert (run.base.ref, run.candidate.ref) == ("../files/old.py", "new.py")
    assert [cell.impl for cell in run.cells] == ["mine"]
    assert {"base", "candidate", "null"} < {each for of in run.rounds for each in of.samples[0]}
    assert again.exit_code == result.exit_code
    page, words = (Path(f"results/r/gate.{kind}").read_text() for kind in ("html", "md"))
    for text in (result.stdout, result.stderr, again.stdout, page, words):
        assert "base: ../files/old.py" in text
        assert "candidate: new.py" in text
    slower = replace(KINDS["regressed"], base=run.base, candidate=run.candidate)
    lines = gate.profiles(slower, decide(slower))
    assert lines
    for line in lines:  # one comparison, not two profiles
        assert line.endswith(" --impl new.py --against ../files/old.py")


def test_the_two_versions_of_a_file_are_profiled_and_compared(cli, assert_refused, files):
    small = ("mine", "--seq-lens", "16", "--name", "p", "--against", "../files/old.py")
    assert_refused(cli("profile", *small), "--against", "--impl FILE")
    shown = cli("profile", *small, "--impl", "new.py")
    assert shown.exit_code == 0, shown.stderr
    assert "A: mine of ../files/old.py → B: mine: attention forward n=16" in shown.stdout


@pytest.mark.parametrize(("given", "says"), [
    ("--impl new.py --against gone.py", "no file gone.py in {} (--against)"),
    ("--impl gone.py --against old.py", "no file gone.py in {} (--impl)"),
    ("--against old.py", "--against takes one --impl, the new version of old.py; got 0"),
    ("--impl new.py --against old.py --base main", "--against compares two files; remove --base"),
    ("--impl new.py --against bad.py", "bad.py does not import (--against): SyntaxError"),
    ("--impl new.py --against apart.py", "(--against): apart.py has apart; new.py has mine, new"),
])  # fmt: skip
def test_two_files_that_cannot_be_compared_are_one_line(cli, assert_refused, files, given, says):
    assert_refused(cli("gate", "--quiet", *given.split()), says.format(files))
    assert not (files / "results").exists()


def test_a_trade_is_named_in_every_format_and_exits_1(cli, imagined, tmp_path):
    grown = gate_runs.changed(memory_workspace_bytes=4_194_304)
    imagined.run = a_run({6: -0.2}, other_checks={6: grown})
    shown = cli("gate", "--name", "r")
    said = r"failed: 1 larger: sdpa n=512 workspace \+100 %, (19|20|21)[.\d]* % faster"
    assert shown.exit_code == 1
    assert re.search(said, shown.stdout)
    for line in gate.profiles(imagined.run, decide(imagined.run)):
        assert "sdpa --seq-lens 512" in line
    found = json.loads(cli("gate", "--replay", "r", "--json").stdout)
    assert re.search(said[8:], found["conclusion"]["reason"]["text"])
    rows = [row["verdict"] for row in found["sections"][0]["parts"][0]["table"]]
    (row,) = (row for row in rows if row["verdict"] == "larger")
    assert (row["sign"], row["figures"]["workspace"]["value"]) == ("bad", 2)
    assert row["figures"]["ratio"]["high"] < 0.9
    xml = cli("gate", "--replay", "r", "--format", "junit").stdout
    assert re.search(
        r'<failure type="larger" message="time −[^"]*: workspace grew [^"]* faster', xml
    )


# What is stored.


def test_a_replay_decides_again_without_a_repository(cli, imagined, tmp_path, monkeypatch):
    imagined.run = KINDS["regressed"]
    shown = cli("gate", "--output", tmp_path / "o", "--name", "r").stdout
    monkeypatch.chdir(tmp_path)
    for text in (tmp_path / "o" / "r" / "gate.json", "r", "latest"):
        again = cli("gate", "--replay", text, "--output", tmp_path / "o")
        assert again.exit_code == 1
        assert [line for line in again.stdout.splitlines() if line not in shown] == []
    assert len(imagined.requests) == 1
    assert cli("gate", "--replay", "r", "--output", "o", "--name", "s").exit_code == 1
    assert (tmp_path / "o" / "s" / "gate.html").is_file()


def test_an_interrupted_run_is_decided_from_its_rounds_and_says_so(cli, tmp_path):
    whole = KINDS["regressed"]
    begun = replace(whole, rounds=(), spent={})
    with RunFolder.create(GATE, tmp_path, "cut") as folder:
        for seen in whole.rounds[:4]:
            keep_round(folder, begun, seen)
    said = cli("gate", "--replay", tmp_path / "cut").stdout
    assert "screening; 1 more discarded; interrupted\n" in said
    assert "0.00 s" not in said
    assert "only the forward pass was compared: --passes both" in said
    shown = json.loads(cli("gate", "--replay", tmp_path / "cut", "--json").stdout)
    assert shown["facts"]["rounds"] == 3


# What is refused.

WRONG = {
    "--base gone": ["no commit 'gone'", "--base", "git branch -a"],
    "--base mian": ["did you mean 'main'"],
    "--base=": ["no commit ''", "--base"],
    "--threshold ten": ["--threshold", "10%"],
    "--threshold 0": ["--threshold", "from 0.1% to 100%"],
    "--growth=-1%": ["--growth"],
    "--growth time=1%": ["--growth", "flops and memory", "memory=300%"],
    "--budget soon": ["--budget", "5m"],
    "--budget 0.1s": ["--budget", "at least 1 s"],
    "--workload decoder": ["workload", "'decode'?"],
    "--name ..": ["--name"],
    "--name a": ["'a' exists in results", "--name"],
    "--output a.py": ["a.py", "--output"],
    "--replay gone.json": ["gone.json"],
    "--replay=": ["gate"],
    "--replay r --base x": ["--replay", "stored", "remove --base"],
}


def test_what_is_wrong_is_one_line_and_nothing_is_written(cli, assert_refused, imagined, root):
    (root / "results" / "a").mkdir(parents=True)
    for args, says in WRONG.items():
        assert_refused(cli("gate", "--quiet", *args.split()), *says)
    assert imagined.requests == []
    assert [path.name for path in (root / "results").iterdir()] == ["a"]
