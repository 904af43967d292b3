"""The comparison of timing tools: the schedule, the pages, and what becomes of tools that fail."""

from __future__ import annotations

import json
import random
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from attnbench.errors import StoreError, UsageError
from tests.validation.__main__ import main
from tests.validation.page import markdown
from tests.validation.timer.draw import draw
from tests.validation.timer.experiment import Experiment
from tests.validation.timer.launch import Ended, Launch, Share, environment, run_process
from tests.validation.timer.programs import PROGRAMS, READINGS, Program, Start
from tests.validation.timer.raw import Raw
from tests.validation.timer.session import FEWEST_RUNS, Finished, Request, compare
from tests.validation.timer.summary import factors, summarise
from tests.validation.timer.tables import facts, needed, sentences, tables

READING = {reading.label: reading for reading in READINGS}


# The schedule, with processes that are imagined.

CELLS = [{"name": "naive n=8"}, {"name": "sdpa n=8"}, {"name": "spin"}]
LAUNCH = Launch(device="cpu", threads=1, cells=CELLS, timeout_s=9.0)


class Imagined:
    """Stands for processes: times that vary by run, more for some programs than for others."""

    def __init__(self) -> None:
        self.asked: list[tuple[Program, Share, int]] = []
        self.startup_s = 1.0
        self._draws = random.Random(3)

    def __call__(self, program: Program, launch: Launch, share: Share, seed: int) -> Ended:
        self.asked.append((program, share, seed))
        noise = 0.001 if program.ours else 0.05
        return Ended(
            total_s=3.0,
            startup_s=self.startup_s,
            tail_s=0.5,
            cells={cell["name"]: self._cell(cell["name"], noise) for cell in launch.cells},
            facts={"l2": "warm"} if program.ours else {"version": "1"},
        )

    def _cell(self, name: str, noise: float) -> dict[str, Any]:
        middle = 1000.0 if name == "spin" else 100.0 * self._draws.gauss(1.0, noise)
        times = [middle * factor for factor in (1.0, 0.99, 1.01)]
        own = {"min": min(times), "median": middle}
        return {"times_us": times, "calls": 1, "whole_s": 0.5, "own_us": own}


def experiment(process: Any, **fields: Any) -> Experiment:
    given: dict[str, Any] = {"launch": LAUNCH, "budget_s": 10.0, "runs": 5, **fields}
    return Experiment(run_process=process, **given)


def measured(tmp_path: Path, process: Any = None, **fields: Any) -> Experiment:
    found = experiment(process or Imagined(), **fields)
    found.pilot()
    found.run(tmp_path / "samples.jsonl")
    return found


def test_every_tool_has_its_turn_in_each_run_in_changing_order(tmp_path: Path) -> None:
    found = measured(tmp_path, runs=8)
    turns = [outcome.program for outcome in found.outcomes]
    rounds = [turns[i : i + 4] for i in range(0, len(turns), 4)]
    assert len(rounds) == 8
    assert all(sorted(names) == sorted(found.programs) for names in rounds)
    assert len({tuple(names) for names in rounds}) > 2
    assert "do-bench" not in turns  # there is no GPU


def test_three_processes_share_the_budget_of_one(tmp_path: Path) -> None:
    process = Imagined()
    measured(tmp_path, process, runs=2, programs=("attnbench", "attnbench-3"))
    shares = [share.budget_s for _, share, _ in process.asked[1:]]
    assert sorted(shares) == [pytest.approx(10 / 3)] * 6 + [10.0] * 2
    assert len({seed for *_, seed in process.asked[1:]}) == 8 - 2  # no order of turns twice in one


def test_a_tool_without_a_budget_is_told_seconds_that_use_it(tmp_path: Path) -> None:
    process = Imagined()
    measured(tmp_path, process, runs=2, programs=("pytest-benchmark",))
    told = [share.each_s for _, share, _ in process.asked]
    # 10 − 1.5 s for 3 cells; the second pilot used 1.5 s of 8.5, beyond the most it is stretched.
    assert told[1:3] == pytest.approx([8.5 / 3, 4 * 8.5 / 3])


def test_a_budget_below_the_start_up_is_refused_with_the_seconds_seen() -> None:
    process = Imagined()
    process.startup_s = 12.0
    with pytest.raises(UsageError, match=r"--budget 10 .* took 12\.50 s"):
        experiment(process).pilot()


def test_a_budget_too_small_for_three_processes_costs_that_row_alone(tmp_path: Path) -> None:
    process = Imagined()
    process.startup_s = 4.0
    found = measured(tmp_path, process, runs=2)
    assert "3 of them" in found.refused["attnbench-3"]
    summary = summarise(found, ("spin", 1000.0))
    row = next(row for row in summary["rows"] if row["program"] == "attnbench-3")
    assert (row["runs"], row["spread"]["median"]) == (0, None)
    assert any("3 of them" in sentence for sentence in sentences(summary))


def test_a_tool_that_fails_is_a_row_with_the_reason_and_the_others_go_on(tmp_path: Path) -> None:
    real = Imagined()

    def process(program: Program, launch: Launch, share: Share, seed: int) -> Ended:
        if program is PROGRAMS.get("pytest-benchmark"):
            return Ended(total_s=0.1, failure="exit code 1: No module named pytest")
        return real(program, launch, share, seed)

    found = measured(tmp_path, process)
    rows = {row["label"]: row for row in summarise(found, None)["rows"]}
    assert rows["pytest-benchmark min"]["problems"] == ["exit code 1: No module named pytest"]
    assert rows["torch blocked_autorange"]["runs"] == 5


def test_a_cell_that_fails_costs_that_cell_alone(tmp_path: Path) -> None:
    real = Imagined()

    def process(program: Program, launch: Launch, share: Share, seed: int) -> Ended:
        ended = real(program, launch, share, seed)
        ended.cells["naive n=8"] = {"error": "RuntimeError: no"}
        return ended

    summary = summarise(measured(tmp_path, process), ("spin", 1000.0))
    row = summary["rows"][0]
    assert row["cells"]["naive n=8"]["cv"] is None
    assert row["cells"]["sdpa n=8"]["cv"] is not None
    assert row["problems"] == ["naive n=8: RuntimeError: no (in 5 of 5 runs)"]


def test_an_interrupt_keeps_the_runs_that_were_made(tmp_path: Path) -> None:
    real = Imagined()

    def process(*args: Any) -> Ended:
        if len(real.asked) == 20:
            raise KeyboardInterrupt
        return real(*args)

    found = measured(tmp_path, process)
    assert found.interrupted
    assert 0 < len(found.outcomes) < 20
    lines = (tmp_path / "samples.jsonl").read_text().splitlines()
    assert len(lines) == len(found.outcomes) * len(CELLS)
    assert summarise(found, None)["interrupted"]


def test_the_raw_data_give_the_reported_times_again(tmp_path: Path) -> None:
    measured(tmp_path, runs=2)
    for line in map(json.loads, (tmp_path / "samples.jsonl").read_text().splitlines()):
        raws = [Raw.of(row) for row in line["processes"]]
        assert len(raws) == PROGRAMS.get(line["program"]).processes
        for label, reported in line["reported_us"].items():
            assert READING[label].reported_us(raws) == pytest.approx(reported)


# Summary, pages and picture.


def test_the_summary_tells_a_steady_tool_from_a_noisy_one(tmp_path: Path) -> None:
    summary = summarise(measured(tmp_path, runs=20), ("spin", 1000.0))
    assert summary["cells"] == ["naive n=8", "sdpa n=8"]  # the spin takes no part
    (ours, three) = summary["factors"]
    assert ours["spread_median"]["factor"] < 0.2
    assert three["label"] == "attnbench --processes 3"
    biases = {row["label"]: row["bias"]["median"] for row in summary["rows"]}
    assert biases["attnbench"] == 0.0
    assert biases["pytest-benchmark min"] == pytest.approx(-0.01)
    assert json.loads(json.dumps(summary, allow_nan=False)) == summary


def test_the_factor_is_against_the_best_peer_and_unknown_without_one() -> None:
    def row(label: str, ours: bool, spread: float | None) -> dict[str, Any]:
        figure = {"median": spread, "worst": spread}
        return {"label": label, "ours": ours, "spread": figure, "p95": figure}

    rows = [
        row("us", True, 0.01),
        row("a", False, 0.04),
        row("b", False, 0.02),
        row("c", False, None),
    ]
    assert factors(rows)[0]["spread_median"] == {"factor": 0.5, "peer": "b"}
    assert factors(rows[:1])[0]["spread_median"] == {"factor": None, "peer": None}
    assert factors([rows[0], row("d", False, 0.0)])[0]["spread_median"]["factor"] is None


def shown(tmp_path: Path) -> dict[str, Any]:
    env = {
        "torch": "2.13.0", "python": "3.11.2", "device_name": "a|b", "cores": 2, "platform": "Linux"
    }  # fmt: skip
    facts = {"created": "2026-11-21T05:00:00+00:00", "attnbench": "0.1", "environment": env}
    return facts | {"threads": 1} | summarise(measured(tmp_path), ("spin", 1000.0))


def test_the_page_has_every_table_and_says_how_it_was_done(tmp_path: Path) -> None:
    summary = shown(tmp_path)
    page = markdown("a title", tables(summary), facts(summary), sentences(summary))
    assert [table.title for table in tables(summary)] == [
        line.removeprefix("## ") for line in page.splitlines() if line.startswith("## ")
    ]
    for wanted in (
        "5 runs of 10 s",
        "without its checks",
        "| attnbench | 5 of 5 |",
        "a\\|b",
        "+0.000 %",
    ):
        assert wanted in page
    assert all(len(row) == len(table.header) for table in tables(summary) for row in table.rows)


def test_what_is_not_reached_in_time_says_so() -> None:
    assert needed(None, 3.21) == "not within 3.21 s"
    assert needed(2.5, 3.21) == "2.50 s"
    assert needed(None, None) == "–"


def test_the_picture_has_a_dot_for_every_cell_and_none_without_figures(tmp_path: Path) -> None:
    summary = shown(tmp_path)
    impls = {"naive n=8": "naive", "sdpa n=8": "sdpa"}
    assert draw(summary, impls, tmp_path).endswith("](spread.png)")
    assert all((tmp_path / f"spread.{kind}").stat().st_size > 5000 for kind in ("png", "svg"))
    assert draw(summary | {"rows": []}, impls, tmp_path) == ""


# Processes.


def fake(script: str) -> Program:
    return Program(
        start=lambda job, folder, each_s: Start(command=[sys.executable, "-c", script, job])
    )


WRITES = """
import json, sys, time
job = json.loads(sys.argv[1])
cells = {c["name"]: {"times_us": [1.0, 2.0], "calls": 1, "whole_s": 0.1} for c in job["cells"]}
now = time.monotonic()
open(job["result"], "w").write(json.dumps({"ready_s": now, "end_s": now, "cells": cells}))
"""


def test_a_process_leaves_its_samples_and_its_seconds() -> None:
    ended = run_process(fake(WRITES), LAUNCH, Share(budget_s=1.0), 0)
    assert ended.failure is None
    assert set(ended.cells) == {cell["name"] for cell in CELLS}
    assert ended.total_s == pytest.approx(ended.startup_s + ended.tail_s + ended.timing_s)
    assert ended.startup_s > 0


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("import sys; sys.exit('it is broken')", "exit code 1: it is broken"),
        ("pass", "left no result"),
        ("import time; time.sleep(60)", "not done after 0 s"),
        (WRITES.replace("json.dumps({", "'{' or ({"), "left no result"),
    ],
)  # fmt: skip
def test_a_process_that_leaves_nothing_has_a_reason(script: str, reason: str) -> None:
    limit = 0.3 if "sleep" in script else 30.0
    launch = Launch(device="cpu", threads=1, cells=CELLS, timeout_s=limit)
    assert reason in (run_process(fake(script), launch, Share(budget_s=1.0), 0).failure or "")


def test_a_program_that_does_not_exist_is_a_reason_too() -> None:
    program = Program(start=lambda job, folder, each_s: Start(command=["/no/such/tool"]))
    failure = run_process(program, LAUNCH, Share(budget_s=1.0), 0).failure
    assert failure is not None
    assert "does not start" in failure


def test_only_our_own_processes_get_the_settings_of_workers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    for name in ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    assert "MALLOC_TRIM_THRESHOLD_" in environment(ours=True, user_threads=1)
    assert environment(ours=True, user_threads=1)["OMP_NUM_THREADS"] == "1"
    assert "OMP_NUM_THREADS" not in environment(ours=True)
    peers = environment(ours=False, user_threads=1)
    assert not [name for name in peers if name.startswith(("MALLOC_", "OMP_"))]


# The command.


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (["--runs", "1"], "--runs 1"),
        (["--budget", "0"], "--budget"),
        (["--name", "../x"], "../x"),
        (["--seq-lens", "0"], "--seq-lens"),
        (["--name", "taken"], "taken"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_2(tmp_path: Path, args: list[str], told: str) -> None:
    (tmp_path / "taken").mkdir()
    result = CliRunner().invoke(main, ["tools", "--output", str(tmp_path), *args])
    assert result.exit_code == 2
    assert told in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]


@pytest.mark.usefixtures("imagined_worker")
@pytest.mark.parametrize(("impl", "told"), [("naiv", "did you mean 'naive'"), ("what", "unknown")])
def test_an_unknown_implementation_is_refused_with_the_nearest(
    tmp_path: Path, impl: str, told: str
) -> None:
    result = CliRunner().invoke(main, ["tools", "--impls", impl, "--output", str(tmp_path)])
    assert result.exit_code == 2
    assert told in result.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("own", "interrupted", "code"), [(2, False, 0), (1, False, 3), (5, True, 130)]
)
def test_the_exit_code_says_whether_there_was_a_comparison(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: int, interrupted: bool, code: int
) -> None:
    summary = shown(tmp_path)
    summary["rows"][0]["runs"] = own
    finished = Finished(path=tmp_path, summary=summary, interrupted=interrupted)
    monkeypatch.setattr("tests.validation.timer.session.compare", lambda request, tell: finished)
    result = CliRunner().invoke(main, ["tools"])
    assert result.exit_code == code
    assert "Repeatability" in result.stdout


def test_the_timer_and_each_of_its_options_have_help() -> None:
    timer: Any = main.commands["tools"]  # type: ignore[attr-defined]
    assert timer.help
    assert [option.opts for option in timer.params if not option.help] == []
    assert FEWEST_RUNS == 2


@pytest.mark.slow
def test_a_small_comparison_from_end_to_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PROGRAMS, "names", lambda: ["attnbench", "blocked-autorange"])
    request = Request(
        seq_lens=(16,), threads=1, device="cpu", budget_s=3.0, runs=2, output=tmp_path, name="one"
    )
    told: list[str] = []
    finished = None
    while finished is None:  # how long a process takes to start is the machine's affair
        try:
            finished = compare(request, told.append)
        except UsageError:
            assert request.budget_s < 100, "a budget that is too small is all that may be refused"
            request = replace(request, budget_s=2 * request.budget_s)
    assert finished.own_runs == 2
    assert any(line.startswith("run 2 of 2") for line in told)
    assert sorted(path.name for path in finished.path.iterdir()) == [
        "samples.jsonl", "spread.png", "spread.svg", "summary.json", "timer.md",
    ]  # fmt: skip
    assert finished.summary["rows"][0]["bias"] is not None
    with pytest.raises(StoreError, match="exists already"):
        compare(request, told.append)
