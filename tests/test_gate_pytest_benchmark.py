"""pytest-benchmark's files: read, compared exactly, and said what they cannot prove."""

from __future__ import annotations

import itertools
import json
import math
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from scipy.stats import mannwhitneyu

from attnbench.errors import ExitCode, UsageError
from attnbench.gate.decide.benchmark_files import files_of
from attnbench.gate.decide.pytest_benchmark import FileOutcome, as_text, compare_files
from attnbench.gate.decide.ranks import least_p, p_greater, shift_interval
from attnbench.gate.decide.replicates import judge
from attnbench.gate.decide.rules import Rules

RULES = Rules()
CPU = {"brand_raw": "EPYC", "count": 2, "arch": "X86_64", "hz_actual_friendly": "2.9 GHz"}


def written(
    path: Path, minute: int, times: dict[str, float], machine: dict[str, Any] | None = None
) -> Path:
    """A file as pytest-benchmark writes it, with one round a benchmark."""
    rows = [
        {
            "group": None, "name": name, "fullname": f"bench.py::{name}", "extra_info": {},
            "options": {"timer": "perf_counter", "disable_gc": False},
            "stats": {"min": s, "median": 1.1 * s, "rounds": 1, "data": [s], "iterations": 1},
        }
        for name, s in times.items()
    ]  # fmt: skip
    found = {
        "machine_info": {"node": "host", "system": "Linux", "cpu": CPU} | (machine or {}),
        "commit_info": {},
        "benchmarks": rows,
        "datetime": f"2026-01-01T10:{minute:02}:00.000000+00:00",
        "version": "5.1.0",
    }
    path.write_text(json.dumps(found))
    return path


def compared(
    folder: Path, count: int, factor: float, *, turns: bool, noise: float = 0.01, names: int = 1
) -> FileOutcome:
    chance = random.Random(5)
    sides: tuple[list[Path], list[Path]] = ([], [])
    for i, side in itertools.product(range(count), (0, 1)):
        minute = 2 * i + (side ^ (i % 2)) if turns else count * side + i  # ABBA, or AA…BB…
        times = {
            f"test_{n}": 1e-3 * (factor if side and not n else 1) * chance.lognormvariate(0, noise)
            for n in range(names)
        }
        sides[side].append(written(folder / f"{side}{i}.json", minute, times))
    return compare_files(*sides, RULES)


@pytest.mark.parametrize("turns", [True, False])
@pytest.mark.parametrize(
    ("factor", "verdict", "exit_code"),
    [
        (1.0, "ok", ExitCode.OK),
        (1.5, "regressed", ExitCode.FINDING),
        (0.6, "improved", ExitCode.OK),
    ],
)
def test_several_files_a_side_decide(tmp_path, factor, verdict, exit_code, turns):
    outcome = compared(tmp_path, 8, factor, turns=turns)
    (row,) = outcome.rows
    assert (row.verdict, outcome.exit_code) == (verdict, exit_code), row
    assert row.low is not None
    assert row.high is not None
    assert row.low <= (row.ratio or 0) <= row.high
    assert bool(outcome.caveats) == (not turns)


def test_in_turns_a_slowdown_of_the_threshold_is_found_and_in_batches_it_is_not(tmp_path):
    (tmp_path / "turns").mkdir()
    (tmp_path / "batches").mkdir()
    assert compared(tmp_path / "turns", 8, 1.1, turns=True).rows[0].verdict == "regressed"
    outcome = compared(tmp_path / "batches", 8, 1.1, turns=False)
    assert outcome.rows[0].verdict == "inconclusive"
    assert "not written in turns" in outcome.caveats[0]


@pytest.mark.parametrize("factor", [1.0, 1.02, 1.5, 0.5])
def test_single_files_never_decide_and_say_why(tmp_path, factor):
    outcome = compared(tmp_path, 1, factor, turns=True, noise=0)
    (row,) = outcome.rows
    assert (row.verdict, outcome.exit_code) == ("inconclusive", ExitCode.INCONCLUSIVE)
    assert row.ratio == pytest.approx(factor)
    assert "one process a side" in outcome.caveats[0]


def test_too_few_files_say_how_many_it_takes(tmp_path):
    outcome = compared(tmp_path, 6, 1.5, turns=True, names=4)
    row = next(row for row in outcome.rows if row.name == "bench.py::test_0")
    assert row.verdict == "inconclusive"
    assert "it takes 9 a side in turns" in row.reason  # 2^-9 < 0.01 / 4 < 2^-8


def test_identical_code_is_called_regressed_in_one_comparison_of_a_hundred_at_most():
    chance, names, false_alarms = random.Random(0), 10, 0
    for run in range(300):
        for _ in range(names):
            below, above = ([chance.gauss(0, 0.3) for _ in range(11)] for _ in range(2))
            order = ("pairs", "turns")[run % 2]
            found = judge(below, above, RULES, RULES.alpha / names, order)  # type: ignore[arg-type]
            false_alarms += found.verdict == "regressed"
    assert false_alarms <= 9  # 3 expected at most, and more than 9 in one of a thousand trials


def test_a_drift_below_the_threshold_between_batches_is_never_a_regression():
    base = [0.001 * i for i in range(20)]
    drifted = [x + math.log(1.07) for x in base]
    assert judge(base, drifted, RULES, 0.01, "batches").verdict != "regressed"
    assert judge(base, drifted, RULES, 0.01, "turns").verdict == "regressed"


def test_the_exact_test_agrees_with_scipys_and_ties_speak_against_it():
    chance = random.Random(3)
    for n, m in ((1, 1), (3, 5), (7, 4), (8, 8), (12, 9)):
        above = [chance.gauss(0.5, 1) for _ in range(n)]
        below = [chance.gauss(0, 1) for _ in range(m)]
        expected = mannwhitneyu(above, below, alternative="greater", method="exact").pvalue
        assert float(p_greater(above, below)) == pytest.approx(expected, abs=1e-12)
        assert least_p(n, m) <= p_greater(above, below) <= 1
    assert p_greater([1.0, 1.0], [1.0, 1.0]) == 1


def test_the_interval_of_a_shift_holds_exactly_those_that_the_test_does_not_reject():
    chance = random.Random(4)
    above, below = ([chance.gauss(m, 1) for _ in range(7)] for m in (1, 0))
    low, high = shift_interval(above, below) or (0.0, 0.0)
    for shift, inside in ((low - 1e-9, False), (low + 1e-9, True), (high - 1e-9, True),
                          (high + 1e-9, False)):  # fmt: skip
        moved = [x + shift for x in below]
        tails = p_greater(above, moved), p_greater(moved, above)
        assert (min(tails) > 0.025) == inside
    assert shift_interval([1, 2], [3, 4]) is None


def test_benchmarks_of_one_side_are_listed(tmp_path):
    base = written(tmp_path / "a.json", 0, {"old": 1e-3, "both": 1e-3})
    now = written(tmp_path / "b.json", 1, {"new": 1e-3, "both": 1e-3})
    outcome = compare_files([base], [now], RULES)
    reasons = {row.name: row.reason for row in outcome.rows if row.verdict == "not comparable"}
    assert reasons == {
        "bench.py::old": "in files of the base alone",
        "bench.py::new": "in files of the candidate alone",
    }
    only = written(tmp_path / "c.json", 1, {"new": 1e-3})
    assert compare_files([base], [only], RULES).exit_code == ExitCode.USAGE


def test_another_machine_is_refused_with_the_facts_that_differ(tmp_path):
    base = written(tmp_path / "a.json", 0, {"x": 1e-3})
    cpu = {"cpu": CPU | {"brand_raw": "Xeon", "hz_actual_friendly": "3.1 GHz"}}
    now = written(tmp_path / "b.json", 1, {"x": 1e-3}, cpu)
    with pytest.raises(UsageError) as refused:
        compare_files([base], [now], RULES)
    said = str(refused.value)
    assert "cpu brand_raw is EPYC in" in said
    assert "hz_actual" not in said
    outcome = compare_files([base], [now], RULES, advisory=True)
    assert "different machines: cpu brand_raw" in outcome.caveats[0]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "is no JSON"),
        ("\xff", "is no JSON"),
        ("[" * 100_000, "is no JSON"),
        ("[]", "not written by pytest-benchmark"),
        ('{"a": 1}', "it lacks 'machine_info'"),
        ('{"machine_info": {}, "benchmarks": []}', "it holds no benchmark"),
        ('{"machine_info": {}, "benchmarks": [{"fullname": "x"}]}', "it lacks 'stats'"),
        ('{"machine_info": {}, "benchmarks": [{"fullname": "x", "stats":'
         ' {"min": -1, "median": 1, "rounds": 1}}]}', "a time of x is no time"),
        ('{"machine_info": {}, "benchmarks": [{"fullname": "x", "stats":'
         ' {"min": NaN, "median": 1, "rounds": 1}}]}', "a time of x is no time"),
    ],
)  # fmt: skip
def test_what_is_no_such_file_is_refused_in_one_line(tmp_path, text, says):
    good, bad = written(tmp_path / "a.json", 0, {"x": 1e-3}), tmp_path / "b.json"
    bad.write_text(text, encoding="latin-1")
    with pytest.raises(UsageError) as refused:
        compare_files([good], [bad], RULES)
    assert says in str(refused.value)
    assert "\n" not in str(refused.value)
    with pytest.raises(UsageError, match="cannot be read"):
        compare_files([good], [tmp_path / "none.json"], RULES)


def test_a_copy_of_a_file_is_no_second_process(tmp_path):
    one = written(tmp_path / "a.json", 0, {"x": 1e-3})
    copy = written(tmp_path / "b.json", 0, {"x": 1e-3})
    with pytest.raises(UsageError, match="hold the same run"):
        compare_files([one, copy], [one], RULES)
    assert compare_files([one], [copy], RULES).rows[0].ratio == 1


def test_a_side_is_a_file_a_list_or_a_folder(tmp_path):
    inside = tmp_path / "runs" / "Linux"
    inside.mkdir(parents=True)
    files = [written(inside / f"{i}.json", i, {"x": 1e-3}) for i in range(2)]
    assert files_of(str(tmp_path / "runs")) == files
    assert files_of(f"{files[0]}, {files[1]}") == files
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match=r"no \.json file"):
        files_of(str(tmp_path / "empty"))


def test_the_table_shows_every_benchmark_and_what_is_not_proven(tmp_path):
    text = as_text(compared(tmp_path, 1, 1.5, turns=True, noise=0, names=2))
    lines = text.splitlines()
    assert lines[0].split()[:2] == ["benchmark", "ratio"]
    assert any("test_0" in line and "1.50×" in line for line in lines)
    assert "2 inconclusive" in text
    assert "Note: one file a side is one process a side" in text


def test_a_file_that_pytest_benchmark_writes_is_read(tmp_path):
    (tmp_path / "test_it.py").write_text("def test_it(benchmark):\n    benchmark(sum, [1, 2])\n")
    command = [sys.executable, "-m", "pytest", "-q", "-c", "/dev/null", "--rootdir", str(tmp_path),
               "--benchmark-max-time=0.01", "--benchmark-json=a.json", "test_it.py"]  # fmt: skip
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, timeout=120)
    outcome = compare_files([tmp_path / "a.json"], [tmp_path / "a.json"], RULES)
    assert [(row.name, row.ratio) for row in outcome.rows] == [("test_it.py::test_it", 1.0)]
