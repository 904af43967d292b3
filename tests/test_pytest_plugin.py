"""`pytest --attnbench-gate`: tests of an example repository, whose times are counted steps."""

from __future__ import annotations

import itertools
import math
import runpy
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
import torch

from attnbench.cli import pytest_plugin
from attnbench.gate import protocol
from attnbench.gate.decide.data import Failure
from attnbench.gate.decide.stored import load_gate
from attnbench.gate.run import benchmarks, watched
from attnbench.gate.run.processes import ProcessError
from attnbench.report import files, pages, rounds
from attnbench.report.documents import gate
from attnbench.report.render import html, terminal
from tests.repositories import commit, git, new, write

pytest_plugins = ["pytester"]
# Pytester forgets the modules that a run imports first; others hold on to them, and torch cannot be
# loaded twice.
KEPT = pytest_plugin, watched, pages, rounds, files, gate, html, terminal, torch

# As `-p` names it where the entry point is not installed.
INSTALLED = any(point.name == "attnbench" for point in entry_points(group="pytest11"))
PLUGIN = () if INSTALLED else ("-p", "attnbench.cli.pytest_plugin")
SHAPES = """
def area(n):
    total = 0
    for i in range(n):
        total += i * i
    return total


def length(n):
    total = 0
    for i in range(n):
        total += i
    return total
"""
SLOWER = SHAPES.replace("i * i", "i * i\n    for i in range(n):\n        i * i", 1)
SPEED = """
import shapes


def test_area(benchmark):
    assert benchmark(shapes.area, 100) == 328350


def test_length(benchmark):
    assert benchmark(shapes.length, 100) == 4950


def test_nothing_that_is_timed():
    raise AssertionError("it is not run")
"""


@pytest.fixture
def root(pytester: pytest.Pytester) -> Path:
    """The example repository, where pytest is run."""
    path = new(pytester.path)
    (path / "pytest.ini").write_text("[pytest]\npythonpath = .\n")
    (path / ".gitignore").write_text("results\n__pycache__\n.cache\n")
    commit(path, shapes=SHAPES, tests__test_speed=SPEED)
    return path


class Counted(benchmarks.TestProcesses):
    """No process: a call takes a microsecond for each line that Python runs in it."""

    dying: dict[str, int]  # how often the candidate's process dies in a test
    gone: tuple[str, ...] = ()  # tests that only the base has

    def __init__(self, suite: Any, versions: Any, config: Any, settings: Any) -> None:
        self._roots = {variant: Path(version.root) for variant, version, _ in versions}
        self._tests = [cell.impl for cell in suite.tests]
        self._asked = config(files=(), root="", other_root="").cells

    def prepared(self, variant: Any) -> protocol.Prepared:
        absent = protocol.CellFailed("unsupported", "there is no such test")
        files = {n: self._roots[variant] / self._tests[n].partition("::")[0] for n in self._asked}
        failures = {n: absent for n in files if not files[n].is_file()}
        return protocol.Prepared(failures, {}, self.gone if variant == "base" else ())

    def ask(self, variant: Any, request: Any, kind: Any, within_s: float = math.inf) -> Any:
        match request:
            case protocol.EnterCell(cell) if variant == "candidate" and self.dying.get(
                self._tests[cell], 0
            ):
                self.dying[self._tests[cell]] -= 1
                failure = Failure(variant=variant, code="crashed", reason="killed by signal 11")
                raise ProcessError(failure, cell)
            case protocol.EnterCell():
                return protocol.CellEntered()
            case protocol.VerifyCell():
                return protocol.CellVerified(1.0)
            case protocol.ReadCounters():
                return protocol.CountersRead(0, None)
        name = self._tests[request.cell].partition("::test_")[2]
        lines = steps(runpy.run_path(str(self._roots[variant] / "shapes.py"))[name])
        ns = (round(1000 * lines * (1 + (request.slowdown or 0))),) * request.batches
        return protocol.SampleTaken(ns, 1 << 20, ns)

    def __exit__(self, *_: object) -> None:
        return


def steps(function: Any) -> int:
    """How many lines a call of it runs."""
    count = 0

    def trace(frame: Any, event: str, arg: Any) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        function(100)
    finally:
        sys.settrace(before)
    return count


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch, idle_machine: None) -> type[Counted]:
    monkeypatch.setattr(benchmarks, "TestProcesses", Counted)
    monkeypatch.setattr(Counted, "dying", {}, raising=False)
    return Counted


def gated(pytester: pytest.Pytester, *more: str, base: str = "HEAD") -> pytest.RunResult:
    return pytester.runpytest_inprocess(*PLUGIN, "--attnbench-gate", base, *more)


def only_result(root: Path) -> Path:
    (found,) = (root / "results").iterdir()
    return found


def test_code_that_is_the_same_passes(pytester, root, counted, cli):
    result = gated(pytester)
    assert result.ret == 0
    result.assert_outcomes(passed=2, deselected=1)
    result.stdout.fnmatch_lines(
        [
            "*attnbench gate*",
            "tests/test_speed.py::test_area *time 0.0 % *8/8*ok",
            "*positive control: a slowdown of 10 % was found: seen as +10.0 %*",
            "*passed: no regression of 10 % or more: 2 ok (exit code 0)",
        ]
    )
    run = load_gate(only_result(root))
    assert [cell.impl for cell in run.cells] == [
        f"tests/test_speed.py::test_{name}" for name in ("area", "length")
    ]
    assert not Path(run.base.root).exists()
    assert git(root, "status", "--porcelain") == ""
    again = cli("gate", "--replay", only_result(root))
    assert (again.exit_code, "2 ok" in again.stdout) == (0, True)


def test_twice_the_work_is_named_and_exits_1(pytester, root, counted):
    write(root, shapes=SLOWER)
    result = gated(pytester, "--attnbench-output", "out", "--junitxml", "out.xml")
    assert result.ret == 1
    result.assert_outcomes(passed=1, failed=1, deselected=1)
    result.stdout.fnmatch_lines(
        [
            "+99.* % (+99.* … +99.* %), regressed: slower beyond the margin of 3.3 % in 8 of 8 *",
            "candidate: the working tree at *, 1 file changed",
            "tests/test_speed.py::test_area *time +99.* % *8/8*regressed",
            "tests/test_speed.py::test_length *time 0.0 % *8/8*ok",
            "*failed: 1 regressed: * time +99.* % (exit code 1)",
            "FAILED tests/test_speed.py::test_area - +99.* %*",
        ]
    )
    assert 'failures="1"' in (root / "out.xml").read_text()
    (xml,) = (root / "out").glob("*/gate.xml")
    assert 'classname="tests/test_speed.py" name="test_area"' in xml.read_text()
    assert not (root / "results").exists()


@pytest.mark.parametrize(("flags", "code"), [((), 0), (("--attnbench-fail-removed",), 1)])
def test_what_only_the_base_has_is_named(pytester, root, counted, monkeypatch, flags, code):
    monkeypatch.setattr(counted, "gone", ("tests/test_gone.py::test_old",))
    result = gated(pytester, *flags)
    assert result.ret == code
    result.assert_outcomes(passed=2, deselected=1, failed=code, skipped=1 - code)
    result.stdout.fnmatch_lines(
        ["tests/test_gone.py * [[]100%]", "*removed: tests/test_gone.py::test_old (exit code ?)"]
    )


def test_a_new_file_is_not_compared_and_what_dies_once_is_tried_again(pytester, root, counted):
    write(root, tests__test_more=SPEED.replace("def test_length", "def test_other"))
    counted.dying["tests/test_speed.py::test_area"] = 1
    result = gated(pytester)
    assert result.ret == 0
    result.assert_outcomes(passed=2, skipped=2, deselected=2)
    result.stdout.fnmatch_lines(["*new: the base does not have it*"])
    checks = load_gate(only_result(root)).checks
    assert {n: (of["base"].status, of["candidate"].status) for n, of in checks.items()} == {
        0: ("absent", "ok"), 1: ("absent", "ok"), 2: ("ok", "ok"), 3: ("ok", "ok"),
    }  # fmt: skip
    assert (
        checks[2]["candidate"].reason
        == "failed once on the candidate (crashed: killed by signal 11)"
    )


def test_an_interrupted_run_keeps_its_rounds(pytester, root, counted, monkeypatch):
    ask, asked = Counted.ask, itertools.count()

    def interrupted(processes: Any, *args: Any) -> Any:
        if next(asked) == 600:  # in the third round or so
            raise KeyboardInterrupt
        return ask(processes, *args)

    monkeypatch.setattr(Counted, "ask", interrupted)
    with pytest.raises(KeyboardInterrupt):
        gated(pytester)
    assert (only_result(root) / ".gitignore").is_file()
    assert load_gate(only_result(root)).rounds


# What is refused.

WRONG = {
    "--attnbench-gate gone": ["no commit 'gone'", "--attnbench-gate", "git branch -a"],
    "--attnbench-gate=": ["no commit ''"],
    "--attnbench-threshold ten": ["--attnbench-threshold", "10%"],
    "--attnbench-threshold 200%": ["--attnbench-gate HEAD: --threshold", "from 0.1% to 100%"],
    "--attnbench-budget soon": ["--attnbench-budget", "5m"],
    "-n 2": ["-n 0"],
    "-k nothing": ["no test", "fixture benchmark"],
    "--attnbench-output pytest.ini": ["pytest.ini"],
}


@pytest.mark.parametrize("options", WRONG)
def test_what_is_wrong_is_one_line_and_exit_code_4(pytester, root, counted, options):
    result = gated(pytester, *options.split())
    assert result.ret == 4
    (error,) = (line for line in result.stderr.lines if line)
    assert error.startswith("ERROR: ")
    assert [text for text in WRONG[options] if text not in error] == [], error
    assert git(root, "status", "--porcelain", "--ignored=no") == ""


def test_without_the_option_nothing_is_loaded_and_nothing_changes(pytester, root):
    result = pytester.runpytest_inprocess(*PLUGIN, "--benchmark-disable", "-k", "area or length")
    result.assert_outcomes(passed=2, deselected=1)
    assert "such as 5% [10%]" in pytester.runpytest_inprocess(*PLUGIN, "--help").stdout.str()
    words = "import sys, attnbench.cli.pytest_plugin; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", words], capture_output=True, text=True)
    ours = {name for name in loaded.stdout.split() if name.startswith("attnbench")}
    few = {"attnbench.errors", "attnbench.cli", "attnbench.cli.pytest_plugin", "attnbench.version"}
    assert ours == {"attnbench", *few}
    assert {"torch", "numpy", "click", "msgspec"}.isdisjoint(loaded.stdout.split())
