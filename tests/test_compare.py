"""Runs against runs: what is called changed, what is not, and what other sources become."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from attnbench.analysis import compare as analysis
from attnbench.analysis.apart import EITHER
from attnbench.analysis.compare.same import earlier
from attnbench.analysis.compare.sources import read
from attnbench.errors import ExitCode, StoreError, UsageError
from attnbench.report.documents.compare import document
from attnbench.report.render import rendered, written
from attnbench.schema.case import Case
from tests.synthetic import CPU, timed, write_run

compare: Any = analysis.compare
IMPLS = ("naive", "naive-heads", "sdpa", "chunked")
SIZES = (128, 256, 512, 1024, 2048)
BASE_US = {"naive": 1.0, "naive-heads": 1.1, "sdpa": 0.6, "chunked": 0.8}


def cells(seed=0, slow=1.0, noise=0.01, own=None, groups=None, impls=IMPLS, **metrics):
    """Records of implementations at 5 lengths, in a mood `slow`, with changes of some `own`."""
    draw = random.Random(seed)
    for n in SIZES:
        for impl in impls:
            level = BASE_US[impl] * n**1.8 / 100 * slow * math.exp(draw.gauss(0, noise))
            level *= (own or {}).get((impl, n), 1.0) * (groups or {}).get(n, 1.0)
            times = [level * math.exp(draw.gauss(0, 0.002)) for _ in range(9)]
            values = {"group": f"{seed:04}{n}", "l2": "warm"} | metrics
            yield timed(Case(seq_len=n), impl, times, **values)


def run(folder, name, created="2026-11-21T01:00:00+00:00", environment=None, info=None, **of):
    return write_run(
        folder, name, cells(**of),
        {"created": created, "environment": CPU | (environment or {})} | (info or {}),
    )  # fmt: skip


@pytest.fixture
def runs(tmp_path):
    """A folder with ten earlier runs, of which each met another mood."""
    for n in range(10):
        run(tmp_path, f"old{n}", f"2026-11-20T{n:02}:00:00+00:00", seed=100 + n, slow=1 + n / 30)
    run(tmp_path, "before", seed=1)
    return tmp_path


def verdicts(found) -> dict[tuple[str, int], str]:
    return {(row.impl, row.case.seq_len): row.verdict for row in found.same.rows}


def changed(found) -> dict[tuple[str, int], str]:
    return {cell: v for cell, v in verdicts(found).items() if v != "no change seen"}


@pytest.mark.parametrize(("factors", "load", "named", "code"), [
    ({"naive": 1.5}, 5.0, {("naive", "slower")}, ExitCode.FINDING),
    ({"sdpa": 1 / 1.5}, 5.0, {("sdpa", "faster")}, ExitCode.OK),
    ({"naive": 1.25, "sdpa": 0.8}, 5.0, {("naive", EITHER)}, ExitCode.FINDING),
    ({"naive": 1.5, "sdpa": 1.5}, 5.0, set(), ExitCode.OK),
    ({"naive": 1.15}, 5.0, set(), ExitCode.OK),
    ({"naive": 1.15}, 0.5, {("naive", "slower")}, ExitCode.FINDING),
])  # fmt: skip
def test_of_two_that_took_turns_the_one_whose_time_moved_is_named(
    tmp_path, factors, load, named, code
):
    two = {"impls": ("naive", "sdpa"), "load_1m": load}
    own = {(impl, n): factor for impl, factor in factors.items() for n in SIZES}
    run(tmp_path, "before", seed=1, **two)
    run(tmp_path, "after", seed=2, own=own, **two)
    (found,) = compare(["before", "after"], tmp_path)
    rows = [row for row in found.same.ratios if row.verdict != "no change seen"]
    assert {(row.impl, row.verdict) for row in rows} == named
    assert document([found], fail_slower=True).exit_code == code
    for row in found.same.rows:
        assert row.before_us * row.shift * row.ratio == pytest.approx(row.after_us)
        if code == ExitCode.FINDING and ("naive", "slower") in named:
            expected = factors["naive"] if row.impl == "naive" else 1.0
            assert row.ratio == pytest.approx(expected, rel=0.05)


def test_what_was_timed_otherwise_has_no_ratio(tmp_path):
    run(tmp_path, "before", seed=1, l2="cold")
    run(tmp_path, "after", seed=2, own={("naive", n): 1.8 for n in SIZES})
    (found,) = compare(["before", "after"], tmp_path)
    assert found.same.ratios == ()
    assert {row.reason for row in found.same.rows} == {"l2: warm, was cold"}


def test_when_one_of_many_implementations_slows_the_others_are_not_called_faster(tmp_path):
    run(tmp_path, "before", seed=1)
    run(tmp_path, "after", seed=2, slow=0.8, own={("sdpa", n): 1.6 for n in SIZES})
    (found,) = compare(["before", "after"], tmp_path)
    rows = {row.impl: row.verdict for row in found.same.ratios}
    assert rows.pop("sdpa") == "slower"
    assert set(rows.values()) <= {"no change seen"}
    assert "✗ sdpa slower against" in written.conclusion(document([found]).conclusion)


def test_earlier_runs_of_another_kernel_file_are_not_runs_of_equal_code(tmp_path):
    for n in range(6):
        factor = 1.5 if n % 2 else 1.0
        own = {("naive", size): factor for size in SIZES}
        info = {"files": {"kernel.py": f"digest of {factor}"}}
        run(tmp_path, f"old{n}", seed=100 + n, own=own, info=info, load_1m=1.0)
    run(tmp_path, "before", seed=1, load_1m=1.0)
    run(tmp_path, "after", seed=2, own={("naive", n): 1.5 for n in SIZES}, load_1m=1.0)
    (found,) = compare(["before", "after"], tmp_path)
    assert {row.impl for row in found.same.ratios if row.verdict == "slower"} == {"naive"}


def test_a_cell_whose_history_is_noisy_must_change_by_more(runs, tmp_path):
    for n in range(10):
        draw = random.Random(n).uniform(0.7, 1.4)
        run(tmp_path / "noisy", f"o{n}", seed=200 + n, own={("sdpa", 512): draw})
    run(tmp_path / "noisy", "before", seed=1)
    for folder in (runs, tmp_path / "noisy"):
        run(folder, "after", seed=2, own={("sdpa", 512): 1.25})
    assert changed(compare(["before", "after"], runs)[0]) == {("sdpa", 512): "slower"}
    assert changed(compare(["before", "after"], tmp_path / "noisy")[0]) == {}


def test_a_group_that_was_disturbed_unequally_widens_its_own_intervals_alone(runs):
    own = {("naive", 512): 1.25, ("chunked", 512): 0.85, ("sdpa", 512): 1.12, ("sdpa", 256): 1.12}
    run(runs, "after", seed=2, own=own)
    (found,) = compare(["before", "after"], runs)
    width = {(row.impl, row.case.seq_len): row.high / row.low for row in found.same.rows}
    assert width["sdpa", 512] > 1.3 * width["sdpa", 256]
    assert changed(found).get(("sdpa", 256)) == "slower"
    assert ("sdpa", 512) not in changed(found)


def test_history_is_of_the_same_machine_and_settings_and_never_the_pair_itself(runs):
    run(runs, "other-machine", environment={"cores": 64})
    run(runs, "other-settings", info={"settings": {"min_time_s": 5.0}})
    run(runs, "other-torch", environment={"torch": "2.11.0"})
    (runs / "damaged").mkdir()
    (runs / "damaged" / "run.json").write_text("{")
    run(runs, "after", seed=2)
    sources = [read(name, runs) for name in ("before", "after")]
    found = earlier(sources, [runs, runs])
    assert sorted(map(len, found)) == [1, 10]  # torch's version is other code
    of_pair = [source.times for source in sources]
    assert not any(times in of_pair for sequence in found for times in sequence)


def test_a_cell_most_of_whose_group_was_disturbed_is_not_comparable_either(runs):
    records = []
    for record in cells(seed=2, own={("sdpa", 512): 4.0, ("sdpa", 256): 1.5}):
        if record.cell.impl != "sdpa" and record.cell.case.seq_len == 512:
            slowed = (structs.replace(sample, kept_despite="gpu") for sample in record.samples)
            record = replace(record, samples=tuple(slowed))
        records.append(record)
    write_run(runs, "after", records, {"created": "2026-11-21", "environment": CPU})
    (found,) = compare(["before", "after"], runs)
    assert changed(found).pop(("sdpa", 256)) == "slower"
    reasons = {row.impl: row.reason for row in found.same.rows if row.case.seq_len == 512}
    assert reasons["naive"] == "the error of its time in after has no bound: slowed-gpu"
    assert reasons["sdpa"] == "most cells measured with it in after have an error without a bound"


def test_runs_with_another_allocator_are_not_compared_by_their_times(runs):
    run(runs, "after", environment={"allocator": "keep"})
    (found,) = compare(["before", "after"], runs)
    assert set(verdicts(found).values()) == {"not comparable"}
    assert ("allocator", None, "keep") in found.environment


def test_across_machines_no_times_are_divided_and_a_change_of_order_is_named(runs):
    own = {("sdpa", n): 1.8 for n in (512, 1024)}
    run(runs, "level", seed=1, own={("sdpa", 256): 1.36})  # 2 % behind chunked, which is level
    run(runs, "after", seed=2, slow=0.1, own=own, environment={"device_name": "Other"})
    (found,) = compare(["level", "after"], runs)
    assert found.same is None
    pairs = {(r.ahead, r.behind) for r in found.elsewhere.reversals}
    assert pairs == {("sdpa", "naive"), ("sdpa", "chunked")}  # naive-heads is level
    assert {r.label.split()[2] for r in found.elsewhere.reversals} == {"n=512", "n=1024"}
    standing = next(s for s in found.elsewhere.standings if s.impl == "sdpa" and "n=512" in s.label)
    assert standing.ranks == (1, 3)
    assert standing.speeds == pytest.approx((1 / 0.6, 1 / 1.08), rel=0.05)
    slope = next(s for s in found.elsewhere.slopes if s.impl == "naive")
    assert slope.exponents == pytest.approx((1.8, 1.8), abs=0.05)
    assert slope.sizes == SIZES


def benchmarks(file: Path, seed: int, own: dict[int, float], **machine: Any) -> str:
    draw = random.Random(seed)
    rows = [
        {
            "fullname": f"test_x.py::test[{n}]", "name": f"test[{n}]",
            "stats": {
                "median": 1e-5 * (n + 1) * math.exp(draw.gauss(0, 0.01)) * own.get(n, 1.0),
                "iqr": 1e-7, "rounds": 100, "mean": 0.1,
            },
        }
        for n in range(12)
    ]  # fmt: skip
    cpu = {"brand_raw": "AMD", "count": 2}
    info = {"cpu": cpu, "node": "here", "python_version": "3.11"} | machine
    commit = {"id": "unversioned", "dirty": False}
    data = {"benchmarks": rows, "machine_info": info, "commit_info": commit, "datetime": f"{seed}"}
    file.write_text(json.dumps(data))
    return str(file)


def test_files_of_pytest_benchmark_are_compared_by_test_with_those_beside_as_history(tmp_path):
    for n in range(5):
        benchmarks(tmp_path / f"{n}.json", n, {})
    (tmp_path / "notes.json").write_text("[]")
    new = benchmarks(tmp_path / "new.json", 9, {3: 1.3})
    (found,) = compare([str(tmp_path / "4.json"), new], tmp_path)
    named = [row.label for row in found.same.rows if row.verdict != "no change seen"]
    assert named == ["test_x.py::test[3]"]
    assert found.same.spread.runs == 4
    (tmp_path / "perf.csv").write_text("N,ms\n1,2\n")
    for name in ("notes.json", "perf.csv"):
        with pytest.raises(StoreError, match="or not what compare takes"):
            read(str(tmp_path / name), tmp_path)


def test_a_test_without_an_error_to_trust_costs_that_test_alone(tmp_path):
    base, new = (benchmarks(tmp_path / f"{n}.json", n, {1: 1.5} if n else {}) for n in (0, 1))
    data = json.loads(Path(new).read_text())
    tests = data["benchmarks"]
    tests[1]["stats"]["rounds"], tests[2]["stats"]["median"] = 1, 0
    tests.append(tests[3] | {"stats": tests[3]["stats"] | {"median": 1.0}})
    Path(new).write_text(json.dumps(data))
    (found,) = compare([base, new], tmp_path)
    reasons = [row.reason for row in found.same.rows if row.verdict == "not comparable"]
    assert reasons == [
        "the error of its time in 1.json has no bound: 1 round",
        "no time in 1.json: a median of 0 s",
        "no time in 1.json: 2 tests have this name",
    ]
    assert len(found.same.rows) == 12
    assert document([found], fail_slower=True).exit_code == ExitCode.OK
    for test in tests:
        test["stats"]["rounds"] = 1
    Path(new).write_text(json.dumps(data))
    nothing = document(compare([base, new], tmp_path), fail_slower=True)
    assert nothing.exit_code == ExitCode.INCONCLUSIVE


@pytest.mark.parametrize(("earlier", "factor", "code"), [
    (5, 1.5, ExitCode.INCONCLUSIVE), (5, 1.0, ExitCode.OK), (2, 1.5, ExitCode.OK),
    (5, 0.6, ExitCode.OK),
])  # fmt: skip
def test_a_shift_of_all_cells_that_earlier_runs_never_had_heads_the_comparison(
    tmp_path, earlier, factor, code
):
    for n in range(earlier):
        benchmarks(tmp_path / f"{n}.json", n, {})
    slow = [
        benchmarks(tmp_path / f"slow{n}.json", 20 + n, dict.fromkeys(range(12), factor))
        for n in (1, 2)
    ]  # the second must not become the yardstick
    base = benchmarks(tmp_path / "base.json", 9, {})
    made = document(compare([base, slow[0]], tmp_path), fail_slower=True)
    assert made.exit_code == code
    titles = [section.title for section in made.sections]
    assert (titles[0] == "All cells moved together") == (earlier > 2 and factor != 1.0)


def test_a_test_that_only_the_base_has_is_named_and_fails_where_asked_for(tmp_path):
    base, new = (benchmarks(tmp_path / f"{n}.json", n, {}) for n in (1, 2))
    data = json.loads(Path(new).read_text())
    Path(new).write_text(json.dumps(data | {"benchmarks": data["benchmarks"][1:]}))
    found = compare([base, new], tmp_path)
    assert "Only in 1.json\n– test_x.py::test[0]: removed" in rendered(document(found))
    assert document(found).exit_code == ExitCode.OK
    failed = document(found, fail_removed=True)
    assert failed.exit_code == ExitCode.FINDING
    assert written.conclusion(failed.conclusion) == "✗ 1 removed; 11 no change seen"
    assert 'classname="removed"' in rendered(document(found, fail_removed=True), "junit")


def test_what_shares_no_cell_is_an_error(runs, tmp_path):
    file = benchmarks(tmp_path / "b.json", 1, {})
    with pytest.raises(UsageError, match=r"of different machines, .* and share no case"):
        compare(["before", file], runs)
    with pytest.raises(UsageError, match="two or more"):
        compare(["before"], runs)
