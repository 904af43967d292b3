"""Environments that the gate compares: what one must have, what it is lent, and who runs where."""

from __future__ import annotations

import importlib
import json
import shlex
import subprocess
import sys
import sysconfig
import venv
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from attnbench.errors import ExitCode, UsageError, WorkerError
from attnbench.execution import process
from attnbench.gate.decide.data import Environment
from attnbench.gate.decide.sequential import RoundPlan
from attnbench.gate.decide.verdict import decide
from attnbench.gate.run import measuring
from attnbench.gate.run.rounds import measure_round
from attnbench.report.documents import gate
from attnbench.versions.environments import find_environment, interpreter_of
from tests.conftest import yielding
from tests.gate_runs import a_run
from tests.test_gate_rounds import a_bench

command = importlib.import_module("attnbench.cli.gate")  # beside the command of that name
MINOR = list(sys.version_info[:2])
PYTHON = shlex.quote(sys.executable)
GOOD: dict[str, Any] = {
    "minor": MINOR, "python": "3.11.7", "implementation": "CPython", "has_compiled": False,
    "has_torch": True, "torch": "2.11.0+cpu", "packages": {"numpy": "2.4.6"},
}  # fmt: skip


def fake(folder: Path, name: str = "fake", **facts: Any) -> Path:
    """An interpreter that says of itself whatever a test wants; nothing of what is None."""
    told = {key: value for key, value in (GOOD | facts).items() if value is not None}
    script = folder / name / "bin" / "python"
    script.parent.mkdir(parents=True)
    script.write_text(f"#!/bin/sh\necho noise\ncat <<'END'\n{json.dumps(told)}\nEND\n")
    script.chmod(0o755)
    return script.parent.parent


@pytest.mark.parametrize(("facts", "why"), [
    ({"torch": None, "has_torch": False}, "it has no torch; install one: "),
    ({"torch": None, "failure": "OSError: libmkl.so:\n gone"}, "(OSError: libmkl.so: gone)"),
    ({"torch": "2.3.1"}, "torch 2.3.1, where torch ≥ 2.4 is needed"),
    ({"minor": [3, 9], "python": "3.9.18"}, "CPython 3.9.18, where CPython ≥ 3.11 is needed"),
    ({"implementation": "PyPy"}, "PyPy 3.11.7, where CPython"),
    ({"minor": [3, 99], "python": "3.99.0"}, "cannot load the msgspec of this Python"),
])  # fmt: skip
def test_what_an_environment_lacks_is_said_in_one_line(tmp_path, facts, why):
    with pytest.raises(UsageError) as caught:
        find_environment(str(fake(tmp_path, **facts)))
    assert why in str(caught.value)
    assert str(caught.value).startswith(f"--python {tmp_path}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"\x7fELF of another machine", "cannot be run here (Exec format error)"),
        (b"#!/bin/sh\necho never; echo 'the last word' >&2; exit 3", "(the last word)"),
        (b"#!/bin/sh\nexit 3", "(exit code 3)"),
    ],
)
def test_what_is_no_python_of_this_machine_is_said_in_one_line(tmp_path, content, why):
    file = tmp_path / "python"
    file.write_bytes(content)
    file.chmod(0o755)
    with pytest.raises(UsageError) as caught:
        find_environment(str(file))
    assert why in str(caught.value)
    with pytest.raises(UsageError, match=r"No such file"):
        find_environment(str(tmp_path / "none"))


def test_another_minor_version_of_python_keeps_its_own_compiled_package(tmp_path):
    own: dict[str, Any] = {"minor": [3, 99], "python": "3.99.0", "has_compiled": True}
    with interpreter_of(find_environment(str(fake(tmp_path, **own)))) as fields:
        lent = {path.name for path in Path(fields["lent"]).iterdir()}
    assert {"attnbench", "psutil"} <= lent
    assert "msgspec" not in lent
    with interpreter_of(find_environment(str(fake(tmp_path, "like")))) as fields:
        assert (Path(fields["lent"]) / "msgspec" / "__init__.py").is_file()
    assert not Path(fields["lent"]).exists()


# What torch imports: nothing else of this environment is in the one that is made of it.
OF_TORCH = (
    "torch", "torchgen", "functorch", "typing_extensions.py", "sympy", "mpmath", "networkx",
    "jinja2", "markupsafe", "fsspec", "filelock",
)  # fmt: skip


@pytest.fixture(scope="module")
def bare(tmp_path_factory) -> Environment:
    """An environment with this torch and no package of ours."""
    folder = tmp_path_factory.mktemp("bare")
    venv.create(folder, with_pip=False, symlinks=True)
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
    source = Path(torch.__file__).parents[1]
    for name in OF_TORCH:
        if (source / name).exists():
            (packages / name).symlink_to(source / name)
    return find_environment(str(folder))


@pytest.mark.slow
def test_a_version_is_timed_in_its_environment_which_holds_nothing_of_ours(tmp_path, bare):
    """Base and A/A control in this interpreter, the candidate in the other."""
    note = f"import sys; open({str(tmp_path / 'ran')!r}, 'a').write(sys.prefix + chr(10))"
    bench = a_bench(tmp_path, mine=note)
    with interpreter_of(bare) as own:
        bench.settings = {
            "base": bench.settings["base"], "candidate": replace(bench.settings["base"], **own)
        }  # fmt: skip
        found = measure_round(bench, RoundPlan(stage="screen", cells=(0,), slowed=0), 0)
    assert not found.failures
    assert set(found.samples[0]) == {"base", "candidate", "null", "planted"}
    assert set((tmp_path / "ran").read_text().splitlines()) == {str(Path(bare.python).parents[1])}
    without = subprocess.run([bare.python, "-c", "import msgspec"], capture_output=True)
    assert without.returncode, "the environment would not have needed what it was lent"


# A server that reads what it is asked for until nobody is there any more, and says nothing.
SILENT = """
import json, socket, sys
control = socket.socket(fileno=json.loads(sys.argv[-1])[0])
while control.recv(99): pass
"""


@pytest.mark.parametrize(
    ("trouble", "limit_s", "why"),
    [
        ("echo 'the last word' >&2; exit 3", 120.0, "the last word"),
        pytest.param("exit 3", 120.0, "exit code 3", marks=pytest.mark.slow),
        pytest.param(
            f"exec {PYTHON} -c '{SILENT}' \"$@\"",
            0.1,
            "no answer for 0.1 s",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_an_environment_that_dies_or_hangs_costs_its_round_and_twice_in_a_row_the_run(
    tmp_path, monkeypatch, trouble, limit_s, why
):
    """It does so as often as `left` has letters."""
    left, python = tmp_path / "left", tmp_path / "python"
    file = shlex.quote(str(left))
    first = f"[ ! -s {file} ] || {{ truncate -s -1 {file}; {trouble}; }}"
    python.write_text(f'#!/bin/sh\n{first}\nexec {PYTHON} "$@"\n')
    python.chmod(0o755)
    bench = a_bench(tmp_path)
    settings = replace(bench.settings["base"], python=str(python))
    bench.settings = {"base": settings, "candidate": settings}
    plan = RoundPlan(stage="screen", cells=(0,), slowed=None)

    def server(*args: Any) -> process.Server:
        patience_s = limit_s if left.stat().st_size else 120.0
        monkeypatch.setattr(process, "_START_TIMEOUT_S", patience_s)
        return process.Server(*args)

    monkeypatch.setattr("attnbench.gate.run.processes.Server", server)
    left.write_text("x")
    assert set(measuring._measure_twice(bench, plan, 0).samples[0]) == {"base", "candidate", "null"}
    left.write_text("xx")
    with pytest.raises(WorkerError) as caught:
        measuring._measure_twice(bench, plan, 0)
    assert caught.value.exit_code == ExitCode.ENVIRONMENT
    assert f"({python}: {why})" in str(caught.value)


def test_both_environments_run_the_same_code_unless_a_base_is_named(tmp_path, monkeypatch, cli):
    """Without a repository; the built-in implementations, all of them timed."""
    requests = []

    def answer(request):
        requests.append(request)
        return yielding(replace(a_run(), base=request.base, candidate=request.candidate))

    monkeypatch.setattr("attnbench.gate.run.measuring.run_gate", answer)
    known = {"naive": "impls/naive.py", "sdpa": "impls/sdpa.py"}
    monkeypatch.setattr("attnbench.gate.run.watched.surveyed", lambda *_: ("cpu", known))
    monkeypatch.setattr("attnbench.report.rounds.draw_all", lambda *_: [])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pyproject.toml").write_text("[tool.attnbench.gate]\nthreshold = '7%'\n")
    old, new = fake(tmp_path, "old"), fake(tmp_path, "new", torch="2.13.0")
    ran = cli("gate", "--python", str(old), "--python", str(new))
    assert ran.exit_code == 0, ran.stderr
    (request,) = requests
    assert (request.base.environment.name, request.candidate.environment.name) == (
        str(old), str(new),
    )  # fmt: skip
    assert (request.base.root, request.base.files) == (
        request.candidate.root, request.candidate.files,
    )  # fmt: skip
    assert [Path(file).name for file in request.base.files] == ["naive.py", "sdpa.py"]
    assert {axes.impls for axes in request.sweeps} == {("naive", "sdpa")}
    assert request.keep_going
    assert request.rules.threshold == 0.07, "the table of pyproject.toml is read"
    assert f"base: torch 2.11.0+cpu, Python 3.11.7 ({old})" in " ".join(ran.stderr.split())


def test_too_few_or_too_many_environments_are_one_line(tmp_path, cli, assert_refused):
    one = ("--python", str(fake(tmp_path)))
    assert_refused(cli("gate", *one), "1 environment given (--python): two are compared")
    assert_refused(cli("gate", *(one * 3)), "3 environments given")
    late = cli("gate", *one, "--python", str(tmp_path / "gone"))
    assert_refused(late, "gone cannot be run here (No such file or directory)")


def test_how_environments_differ_is_said_libraries_first_and_lone_packages_are_counted():
    run = a_run()
    before, after = (
        Environment(name=name, python="", python_version="3.11.7", torch=release, packages=packages)
        for name, release, packages in (
            ("old", "2.11.0", {"numpy": "2.4.6", "torch": "2.11.0", "triton": "3.6.0"}),
            ("new", "2.13.0", {"numpy": "2.5.0", "torch": "2.13.0"}),
        )
    )
    run = replace(
        run,
        base=replace(run.base, environment=before, ref=None),
        candidate=replace(run.candidate, environment=after),
        base_environment={"torch": "2.11.0", "blas": "MKL 2024", "load_1m": 0.1},
        environment={"torch": "2.13.0", "blas": "MKL 2025", "load_1m": 0.2},
    )
    assert gate.document(run, decide(run)).about[:3] == [
        "base: torch 2.11.0, Python 3.11.7 (old)",
        "candidate: torch 2.13.0, Python 3.11.7 (new)",
        "the environments differ: torch 2.11.0 → 2.13.0; blas MKL 2024 → MKL 2025;"
        " numpy 2.4.6 → 2.5.0; only in the base: 1 package",
    ]
    alike = replace(run, base=replace(run.base, environment=after))
    for facts in (alike.environment, {}):  # one interpreter is asked once
        same = replace(alike, base_environment=facts)
        alike_words = "both environments hold the same packages, of the same versions"
        assert gate.document(same, decide(same)).about[2] == alike_words
