"""Tests with the fixture `benchmark` in real processes: what happens in them, never how fast."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from attnbench.execution.events import follow
from attnbench.execution.process import Settings
from attnbench.gate.decide.data import Benchmark, Checked, Rules, Version
from attnbench.gate.decide.exact import verdict_of
from attnbench.gate.decide.sequential import RoundPlan
from attnbench.gate.protocol import Suite, TakeSample
from attnbench.gate.run.benchmarks import TestProcesses, check_tests
from attnbench.gate.run.measuring import GateRequest
from attnbench.gate.run.rounds import Bench, measure_round
from attnbench.gate.server import sampling


@pytest.fixture(autouse=True)
def _no_worker(monkeypatch):
    """pytest-benchmark, which these processes load, believes itself in a worker of pytest-xdist."""
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)


CONFTEST = """
from pathlib import Path
import pytest

HERE = Path(__file__).parent

def pytest_addoption(parser):
    parser.addoption("--size", type=int, default=0)

@pytest.fixture(scope="session")
def shared():
    yield
    with (HERE / "torn-down").open("a") as file:
        file.write("x")
"""
# All that pytest-benchmark's users write; each test says whether it was called as it should be.
RIGHT = """
from pathlib import Path
import shapes

def test_plain(benchmark, shared, request):
    assert request.config.getoption("--size") == 7
    assert Path(shapes.__file__).parent == Path(__file__).parent
    assert benchmark(shapes.area, n=10) == 45
    assert benchmark.stats is None

def test_decorated(benchmark, shared):
    benchmark.extra_info["n"] = 10

    @benchmark
    def result():
        return shapes.area(10)

    assert result == 45

def test_pedantic(benchmark, tmp_path):
    log = []

    def setup():
        log.append("setup")
        return (len(log),), {"scale": 2}

    def call(x, scale):
        log.append("call")
        return x * scale

    result = benchmark.pedantic(call, setup=setup, rounds=3, warmup_rounds=1)
    assert log == ["setup", "call"] * (len(log) // 2)
    assert result == 2 * (len(log) - 1)
"""
SHAPES = "def area(n):\n    return sum(range(n))\n"
# What goes wrong, in the candidate alone where it asks for WORSE.
WRONG = """
import pathlib, pytest
from flags import WORSE

def value():
    return 2 if WORSE else 1

def test_wrong_once_it_was_timed(benchmark):
    assert benchmark(value) == 1

def test_wrong_in_both(benchmark):
    assert benchmark(value) == 3

def test_raises(benchmark):
    benchmark(lambda: 1 // (not WORSE))

def test_skipped(benchmark):
    if WORSE:
        pytest.skip("no such thing here")
    benchmark(value)

def test_never_times_anything(benchmark):
    pass

def test_times_twice(benchmark):
    benchmark(value)
    benchmark(value)

def test_recovers(benchmark):
    mark = pathlib.Path(__file__).parent / "failed-once"
    if WORSE and not mark.exists():
        mark.touch()
        raise OSError("not now")
    benchmark(value)
"""


def a_version(folder: Path, name, **files: str) -> Version:
    root = folder / name
    root.mkdir()
    for file, text in files.items():
        (root / f"{file}.py").write_text(text)
    tests = sorted(str(path) for path in root.glob("test_*.py"))
    return Version(name=name, root=str(root), files=tuple(tests))


def a_suite(candidate: Version, *tests: str, arguments: tuple[str, ...] = ()) -> Suite:
    cells, root = tuple(Benchmark(impl=test) for test in tests), candidate.root
    scratch = str(Path(root).parent)
    arguments = (*arguments, f"--rootdir={root}")
    return Suite(tests=cells, folder=root, arguments=arguments, scratch=scratch)


@pytest.mark.slow
def test_a_round_is_in_one_test_at_a_time_as_its_author_meant_it(tmp_path, monkeypatch):
    """Each version imports its own code, though the environment names the candidate's."""
    files = {"conftest": CONFTEST, "test_right": RIGHT, "shapes": SHAPES}
    base, candidate = (a_version(tmp_path, name, **files) for name in ("base", "candidate"))
    monkeypatch.setenv("PYTHONPATH", candidate.root)
    names = [f"test_right.py::test_{name}" for name in ("plain", "decorated", "pedantic")]
    selected = f"{candidate.root}/test_right.py"  # a path of the working tree: the base has its own
    suite = a_suite(candidate, *names, arguments=(selected, "--size=7", "--benchmark-only"))
    settings = Settings(device="cpu", threads=1, timeout_s=60.0)
    bench = Bench(
        base=base, candidate=candidate, cells=suite.tests, rules=Rules(),
        settings={"base": settings, "candidate": settings}, cpus=None,
        rng=random.Random(0), processes=partial(TestProcesses, suite),
    )  # fmt: skip
    found = measure_round(bench, RoundPlan(stage="screen", cells=(0, 1, 2), slowed=2), 0)
    assert found.failures == {}
    variants = {"base", "candidate", "null"}
    assert [set(found.samples[cell]) for cell in range(3)] == [
        variants, variants, variants | {"planted"},
    ]  # fmt: skip
    # In a thread that never waits, CPU time is that of the calls: the slowdown is in it exactly.
    assert set(found.cpu or ()) == {0, 1, 2}
    assert bench.digests["base"] == bench.digests["candidate"]
    assert set(bench.digests["base"]) == {"conftest.py", "shapes.py", "test_right.py"}
    for version, count in ((base, 2), (candidate, 1)):
        assert (Path(version.root) / "torn-down").read_text() == "x" * count
        assert not (Path(version.root) / ".pytest_cache").exists()
        assert not (Path(version.root) / "__pycache__").exists()


@pytest.mark.slow
def test_what_becomes_of_tests_before_they_are_timed(tmp_path):
    """What fails in one version alone is tried once more."""
    broken = "from flags import ONLY_NEW\n\ndef test_broken(benchmark):\n    benchmark(int)\n"
    added = "\n\ndef test_new(benchmark):\n    benchmark(int)\n"
    base = a_version(
        tmp_path, "base", test_a=WRONG + added.replace("new", "old"), test_b=broken,
        test_c=added.replace("new", "alone"), flags="WORSE = False",
    )  # fmt: skip
    base = replace(base, files=tuple(file for file in base.files if "test_c" not in file))
    candidate = a_version(
        tmp_path, "candidate", test_a=WRONG + added, test_b=broken, flags="WORSE = ONLY_NEW = True"
    )
    names = (
        "wrong_once_it_was_timed", "wrong_in_both", "raises", "skipped",
        "never_times_anything", "times_twice", "recovers", "new",
    )  # fmt: skip
    tests = [*(f"test_a.py::test_{name}" for name in names), "test_b.py::test_broken"]
    arguments = ("-k", "not unasked", *map("{}.py".format, ("test_a", "test_c", "test_gone")))
    suite = a_suite(candidate, *tests, arguments=arguments)
    settings = Settings(device="cpu", threads=1, timeout_s=60.0)
    request = GateRequest(base=base, candidate=candidate, sweeps=(), settings=settings)
    run = follow(check_tests(suite, request, {"base": settings, "candidate": settings}))
    checks = {cell.impl.rpartition("test_")[2]: run.checks[n] for n, cell in enumerate(run.cells)}
    verdicts = {}
    for name, of in checks.items():
        decided = verdict_of(of["base"], of["candidate"])
        verdicts[name] = decided and decided[0]
    assert verdicts == {
        "wrong_once_it_was_timed": "incorrect", "raises": "incorrect",
        "skipped": "incorrect", "wrong_in_both": "not comparable",
        "never_times_anything": "not comparable", "times_twice": "not comparable",
        "new": "not comparable", "broken": "not comparable", "recovers": None,
        "old": "not comparable", "alone": "not comparable",
    }  # fmt: skip
    reasons = {name: of["candidate"].reason or "" for name, of in checks.items()}
    starts = {
        "wrong_once_it_was_timed": "call: AssertionError: assert 2 == 1",
        "raises": "call: ZeroDivisionError: ",
        "skipped": "call: Skipped: no such thing here",
        "never_times_anything": "it has ended without calling the fixture benchmark",
        "times_twice": "call: RuntimeError: the fixture benchmark can be called once in a test",
        "recovers": "failed once on the candidate (error: call: OSError: not now)",
        "old": "there is no such test",
        "alone": "there is no such test",
    }
    assert {name: reasons[name][: len(text)] for name, text in starts.items()} == starts
    assert checks["new"]["base"] == Checked(status="absent", reason="there is no such test")
    assert "cannot import name 'ONLY_NEW'" in (checks["broken"]["base"].reason or "")


def test_calls_that_are_set_up_anew_are_timed_alone_and_slowed_once_a_batch(monkeypatch):
    """A call takes 1 µs, what sets it up 50 µs: 20 ms are enough for 392 calls of a batch."""
    now, calls = [0], [0]

    def passes(ns: float) -> None:
        now[0] += round(ns)

    def renew():
        passes(50_000)

        def call():
            passes(1000)
            calls.append(1)

        return call

    def batch(call, times):
        begin = now[0]
        call()
        return SimpleNamespace(time_us=(us := (now[0] - begin) / 1000), cpu_us=us)

    monkeypatch.setattr(sampling, "clock_for", lambda _: SimpleNamespace(batch=batch))
    for name in ("cpu_ns", "now_ns"):
        monkeypatch.setattr(sampling, name, lambda: now[0])
    monkeypatch.setattr(sampling, "busy_wait", lambda ns, _: passes(ns))
    sampler = sampling.Sampler("cpu", 1)
    plain = sampler.take(TakeSample(0, 4, 2, untimed=False), int, renew)
    assert (plain.ns, plain.cpu_ns, len(calls)) == ((1000, 1000), (1000, 1000), 1 + 2 * 4)
    slowed = sampler.take(TakeSample(0, 4, 1, slowdown=0.1), int, renew)
    assert slowed.ns == slowed.cpu_ns == (1100,)
    del calls[1:]
    sampler.take(TakeSample(0, 1000, 1), int, renew)
    assert len(calls) == 1 + math.ceil(20_000_000 / 51_000)
