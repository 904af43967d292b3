"""What is kept of runs, and how the part `compare` counts over it."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from attnbench.analysis.compare.sources import read
from tests.synthetic import write_run
from tests.test_compare import cells, run
from tests.validation.__main__ import main
from tests.validation.compare import LINES, line_of, met, source_of, summarise


def invoke(tmp_path, *more):
    words = ["compare", "--output", str(tmp_path / "out"), *more]
    return CliRunner().invoke(main, words)


def write_series(folder, noise, planted=1.35):
    """Eight runs of each code; in `mine-0.3` half of the groups have a cell that is slower."""
    for n in range(8):
        created = f"2026-11-20T{n:02}:00:00+00:00"
        run(folder, f"quick-{n}", created, seed=50 + n, noise=noise, load_1m=0.5)
        for code, factor in (("mine-0", 1.0), ("mine-0.3", planted)):
            own = {("naive-heads", 512): factor, ("naive-heads", 2048): factor}
            seed = 100 * len(code) + n
            records = [
                r for r in cells(seed=seed, noise=noise, own=own, load_1m=0.5)
                if r.cell.impl != "naive-heads" or r.cell.case.seq_len in (512, 2048)
            ]  # fmt: skip
            write_run(folder, f"{code}-{n}", map(renamed, records), {"created": created})


def renamed(record):
    from dataclasses import replace

    impl = "mine" if record.cell.impl == "naive-heads" else record.cell.impl
    return replace(record, cell=replace(record.cell, impl=impl))


def test_calm_runs_are_told_apart_and_counted_again_from_what_is_kept_alone(tmp_path):
    write_series(tmp_path / "runs", noise=0.005)
    found = invoke(tmp_path, "--runs", str(tmp_path / "runs"))
    folder = tmp_path / "out" / "selftest-compare"
    summary = (folder / "summary.json").read_text()
    known = json.loads(summary)
    assert known["runs"] == {"quick": 8, "mine-0": 8, "mine-0.3": 8}
    disjoint = known["pairs"]["quick: disjoint pairs"]
    assert (disjoint["pairs"], disjoint["cells"]) == (4, 80)
    assert known["real"]["planted"] == known["real"]["named"] == 16
    assert disjoint["named"] == disjoint["planted"] == 80
    assert known["pairs"]["quick: all pairs"]["called"] < 0.02 * 28 * 20
    assert invoke(tmp_path).exit_code == found.exit_code
    assert (folder / "summary.json").read_text() == summary
    assert len((folder / LINES).read_text().splitlines()) == 24


@pytest.mark.parametrize(
    ("called", "named", "real", "goals"),
    [(8, 720, 9, True), (9, 720, 9, False), (8, 719, 9, False), (8, 720, 8, False)],
)
def test_either_goal_can_be_missed(called, named, real, goals):
    pairs = {"cells": 800, "called": called, "planted": 800, "named": named}
    summary = {
        "pairs": {"quick: disjoint pairs": pairs, "quick: all pairs": pairs | {"called": 800}},
        "real": {"cells": 10, "called": 0, "planted": 10, "named": real},
    }
    assert met(summary) == goals


def test_a_line_keeps_what_comparing_needs(tmp_path):
    source = read(str(run(tmp_path, "quick-1", seed=3, load_1m=1.0)), tmp_path)
    again = source_of(json.loads(json.dumps(line_of(source))))
    assert again.times.keys() == source.times.keys()
    for key, time in source.times.items():
        assert again.times[key].time_us == time.time_us
        assert abs(again.times[key].error - time.error) < 1e-4
    groups = {(source.times[k].group, again.times[k].group) for k in source.times}
    assert len(groups) == len({group for group, _ in groups})  # one for one


def test_calling_cells_of_identical_code_changed_is_counted():
    lines = []
    for n in range(8):
        slow = [1.0, 2.0][n == 7]  # in one run a cell that history has never seen so
        own = [[f"c{i}", "x", (slow if i == 3 else 1.0) * (100 + i + 0.1 * n), 0.0, i % 5, None]
               for i in range(20)]  # fmt: skip
        lines.append({"run": f"quick-{n}", "created": str(n), "load_1m": 1.0, "cells": own})
    summary = summarise([source_of(line) for line in lines])
    assert summary["pairs"]["quick: all pairs"]["called"] == 7
    assert summary["real"] is None


def test_runs_of_the_part_timer_are_counted_as_those_of_one_code(tmp_path):
    from tests.validation.compare import of_timer

    folder = tmp_path / "selftest-timer-calm"
    folder.mkdir()
    row = [
        [128, "sdpa", 250.0, [240, 260], None, 0.9, 0.8],
        [128, "naive", 340.0, None, "busy", 1, 1],
    ]
    lines = [{"runs": 0}, *({"neighbours": n, "cells": row} for n in range(4))]
    (folder / "runs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = of_timer(folder / "runs.jsonl")
    assert [source.name for source in found] == [f"timer-calm-{n}" for n in range(4)]
    assert list(found[0].times) == [("128", "sdpa")]  # the other one's error has no bound
    total = summarise(found)["pairs"]["timer-calm: all pairs"]
    assert (total["pairs"], total["cells"], total["comparable"], total["called"]) == (6, 12, 6, 0)
