"""The timing tools in their processes: what they are asked, what they leave, what they cost."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from attnbench.measure.sampling import StoppingRule
from attnbench.measure.selfcheck import Spin
from attnbench.schema.case import Case
from tests.validation.timer.launch import Launch, Share, run_process
from tests.validation.timer.programs import PROGRAMS
from tests.validation.timer.raw import Raw, read_own
from tests.validation.timer.session import SPIN, SPIN_US
from tests.validation.timer.tools import autorange, dobench, ours
from tests.validation.timer.tools.job import Job
from tests.validation.timer.tools.ours import Account, ShareRule

CELLS: list[dict[str, Any]] = [
    {"name": "naive n=8", "impl": "naive", "case": Case(seq_len=8, head_dim=8).to_json()},
    {"name": SPIN, "spin_us": SPIN_US},
]


@pytest.fixture(autouse=True)
def settings_of_torch() -> Any:
    threads, grad = torch.get_num_threads(), torch.is_grad_enabled()
    yield
    torch.set_num_threads(threads)
    torch.set_grad_enabled(grad)


def job_in(tmp_path: Path, **fields: Any) -> Job:
    given = {"device": "cpu", "threads": 1, "seed": 0, "budget_s": 0.0, "tail_s": 0.0}
    given |= {"spawned_s": 0.0, "cells": CELLS, "result": str(tmp_path / "result.json")}
    return Job.from_text(json.dumps(given | fields))


def test_a_job_calls_the_bound_implementation_and_waits_for_the_spin(tmp_path: Path) -> None:
    calls = job_in(tmp_path).prepare()
    assert calls["naive n=8"]().shape == (1, 4, 8, 8)
    spin = calls[SPIN]
    assert isinstance(spin, Spin)
    spin()
    assert spin.lasted_us >= SPIN_US


def test_what_is_left_of_the_budget_is_counted_from_the_start_of_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.monotonic", lambda: 103.0)
    assert job_in(tmp_path, spawned_s=100.0, budget_s=10.0, tail_s=0.5).left_s() == 6.5
    assert job_in(tmp_path, spawned_s=90.0, budget_s=10.0).left_s() == 0.0


def test_cells_share_what_is_left_and_one_that_raises_costs_itself_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    job = job_in(tmp_path, spawned_s=100.0, budget_s=9.0)
    shares = []

    def tool(call: Any, share_s: float) -> dict[str, Any]:
        shares.append(share_s)
        now[0] += 1.0  # less than its share: the others have more
        if call is None:
            raise RuntimeError("no\nsuch call")
        return {"times_us": [1.0]}

    job.time_each({"a": abs, "b": None, "c": abs}, tool)  # type: ignore[dict-item]
    assert shares == [3.0, 4.0, 7.0]
    assert job.found["b"]["error"] == "RuntimeError: no such call"
    assert job.found["c"] == {"times_us": [1.0], "whole_s": 1.0}


# Ours.


def test_the_account_charges_each_cell_for_its_own_turns_and_warm_up() -> None:
    now = [0.0]
    account = Account(["a", "b"], lambda: 10.0, lambda: now[0])
    for name, stage, cost in (
        ("a", "warm-up", 3.0), ("b", "warm-up", 1.0), ("b", "samples", 0.5), ("a", "samples", 0.25),
        ("a", "samples", 0.25),
    ):  # fmt: skip
        account.turn(name, stage)
        now[0] += cost
    account.close()
    account.close()
    assert account.ended_s == {"a": [3.25, 3.5], "b": [1.5]}
    assert account.share_s == pytest.approx(ours.ROOM * 10.0 / 2)


def test_a_share_ends_a_cell_however_precise_it_is() -> None:
    left = [5.0]
    rule = ShareRule(share_s=lambda: 1.0, left_s=lambda: left[0])
    same = [10.0] * 50
    assert StoppingRule(min_time_s=0.0).done(same, 0.5)
    assert not rule.done(same, 0.5)
    assert rule.done(same, 1.0)
    assert not rule.done(same[:3], 2.0)
    left[0] = 0.0
    assert rule.done(same[:3], 2.0)  # the budget is spent: no fewest samples any more
    assert not rule.done([], 2.0)


def test_our_engine_leaves_every_turn_with_its_blocks_and_when_it_ended(tmp_path: Path) -> None:
    job = job_in(tmp_path, spawned_s=time.monotonic(), budget_s=0.5)
    setup = ours.measure(job)
    job.write(l2=setup.clock.l2)
    found = read_own(tmp_path / "result.json")
    assert found.facts == {"l2": "warm"}
    for name in ("naive n=8", SPIN):
        row = found.cells[name]
        assert len(row["times_us"]) == len(row["ended_s"]) >= 1
        assert row["ended_s"] == sorted(row["ended_s"])
        blocks = zip(row["times_us"], row["turns_us"], strict=True)
        assert all(time_us in turn for time_us, turn in blocks)  # the fastest that was left alone
        assert Raw.of(row | {"startup_s": 0.0}).times_us


def test_an_implementation_that_raises_is_an_error_of_its_cell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = job_in(tmp_path)

    def prepared() -> dict[str, Any]:
        return {"bad": lambda: 1 / 0, "good": lambda: None}

    monkeypatch.setattr(job, "prepare", prepared)
    ours.measure(job)
    assert "ZeroDivisionError" in job.found["bad"]["error"]
    assert "times_us" in job.found["good"]


# The others.


def test_autorange_reports_the_median_of_its_blocks_with_the_threads_asked_for(
    tmp_path: Path,
) -> None:
    seen = []
    job = job_in(tmp_path, cells=[])
    job.prepare = lambda: {"one": lambda: seen.append(torch.get_num_threads())}  # type: ignore
    autorange.measure(job)
    row = job.found["one"]
    one = Raw.of(row | {"startup_s": 0.0})
    assert one.own_us["median"] == pytest.approx(
        sorted(one.times_us)[len(one.times_us) // 2], rel=0.5
    )
    assert set(seen) == {1}
    assert not torch.is_grad_enabled()


def test_do_bench_is_asked_for_all_times_within_the_share(tmp_path: Path) -> None:
    asked: list[dict[str, Any]] = []

    def do_bench(call: Any, **options: Any) -> list[float]:
        asked.append(options)
        return [0.3, 0.1, 0.2]

    job = job_in(tmp_path)
    dobench.measure(job, do_bench)
    assert all(options["return_mode"] == "all" for options in asked)
    assert asked[0]["warmup"] == dobench.WARM_UP_MS
    row = job.found["naive n=8"]
    assert row["times_us"] == pytest.approx([300, 100, 200])
    assert row["own_us"]["median"] == pytest.approx(200)
    assert PROGRAMS.get("do-bench").devices == ("cuda",)


@pytest.mark.slow
def test_pytest_benchmark_runs_the_cells_whatever_the_users_own_options(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("pytest_benchmark")
    monkeypatch.setenv("PYTEST_ADDOPTS", "--benchmark-skip --no-such-option")
    launch = Launch(device="cpu", threads=1, cells=CELLS, timeout_s=60.0)
    ended = run_process(PROGRAMS.get("pytest-benchmark"), launch, Share(budget_s=0, each_s=0.01), 0)
    assert ended.failure is None
    assert ended.facts.get("ended") is None
    assert list(ended.cells) == ["naive n=8", SPIN]
    spin = Raw.of(ended.cells[SPIN] | {"startup_s": 0.0})
    assert spin.own_us["min"] == min(spin.times_us) >= SPIN_US * 0.999
