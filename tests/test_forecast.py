"""How long a sweep will take, and `--max-total-time`: what is measured until then is balanced."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from attnbench.execution.runner import LocalRunner
from attnbench.planning.forecast import Forecast, balanced
from attnbench.schema.case import Case
from attnbench.schema.record import Cell, Record
from attnbench.store.runs import INFO, RECORDS, load_run
from tests import synthetic
from tests.conftest import TINY, Cli

PREFILL = Case(batch=1, heads=32, seq_len=2048, head_dim=128)
SPENT_S = {"reference": 6.0, "build": 0.1, "check": 2.0, "probe": 1.0, "samples": 7.0}


def record(case: Case, call_us: float, impl: str = "naive", **metrics: str) -> Record:
    return replace(synthetic.timed(case, impl, [call_us] * 7, **metrics), spent_s=SPENT_S)


def test_what_was_measured_takes_what_it_took():
    forecast = Forecast((0.1, 1.0))
    forecast.learn(record(PREFILL, 5e5))
    assert forecast.seconds([Cell(case=PREFILL, impl="naive")]) == pytest.approx(16.1, rel=0.1)


def test_a_slow_decode_says_little_of_a_prefill():
    """Its calls are bound by traffic, those of a prefill by arithmetic."""
    cell, forecast = Cell(case=PREFILL, impl="naive"), Forecast((0.1, 1.0))
    before_s = forecast.seconds([cell])
    step = replace(PREFILL, workload="decode", new_tokens=8)
    forecast.learn(replace(record(step, 1e6), spent_s=dict.fromkeys(SPENT_S, 60.0)))
    assert 0.5 < forecast.seconds([cell]) / before_s < 2
    # Seen at one size, the same is known better at another than what was never seen.
    low, high = forecast.of(cell)[1:]
    forecast.learn(record(replace(PREFILL, seq_len=512, kv_len=512), 3e4))
    seen_low, seen_high = forecast.of(cell)[1:]
    assert seen_high / seen_low < high / low


def test_implementations_of_a_case_share_its_reference():
    forecast = Forecast((0.1, 1.0))
    names = ("naive", "sdpa", "chunked")
    for name in names:
        forecast.learn(record(PREFILL, 5e5, name, group="a"))
    alone_s = forecast.seconds([Cell(case=PREFILL, impl="naive")])
    all_s = forecast.seconds(Cell(case=PREFILL, impl=name) for name in names)
    assert alone_s == pytest.approx(16.1 + 12, rel=0.1)
    assert all_s == pytest.approx(3 * 16.1, rel=0.1)


def test_what_is_not_sure_is_calibrated_and_one_that_fails_ends_nothing(
    cli: Cli, tmp_path: Path
) -> None:
    file = tmp_path / "bad.py"
    file.write_text(
        "from attnbench.api import attention\n\n\n@attention('bad')\n"
        "def bad(q, k, v, *, causal, scale):\n    raise RuntimeError('not today')\n"
    )
    where = ("--seq-lens", 2048, "--heads", 8, "--output", tmp_path / "runs", "--dry-run")
    found = cli("sweep", *where, "--impls", "naive")
    assert found.exit_code == 0, found.stderr
    assert re.search(
        r"by [12] cells? measured on machines like this one, calibrated in", found.stdout
    )
    found = cli("sweep", *where, "--impl", file, "--impls", "bad")
    assert found.exit_code == 0, found.stderr
    assert found.stdout.rstrip().endswith("by sizes alone")
    assert not (tmp_path / "runs").exists()


@pytest.mark.usefixtures("imagined_worker")
class TestLimited:
    AXES = ("--seq-lens", "16..128", "--impls", "naive,sdpa", *TINY)

    def test_a_sweep_that_ran_out_of_time_says_so_and_is_gone_on_with(
        self, cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        ends = [9.0, 9.0]
        monkeypatch.setattr(
            "attnbench.execution.schedule.balanced",
            lambda jobs, forecast, _: balanced(jobs, forecast, lambda: ends.pop() if ends else 0.0),
        )
        where = ("--output", tmp_path, "--name", "r")
        result = cli("sweep", *self.AXES, *where, "--max-total-time", "1h")
        assert result.exit_code == 0, result.stderr
        assert "only 4 of 8 planned cells measured" in result.stdout.replace("\n", " ")
        assert len(load_run(tmp_path / "r").records) == 4
        ends += [9.0] * 4
        result = cli("sweep", "--resume", tmp_path / "r", "--max-total-time", "1h")
        assert result.exit_code == 0
        assert not load_run(tmp_path / "r").unfinished

    def test_a_dry_run_says_what_it_will_take_and_by_what_it_knows(
        self, cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def needs(runner: LocalRunner, cells: list[Cell]) -> object:
            return {c.key: c.case.seq_len << 20 for c in cells}, 100 << 20

        monkeypatch.setattr(LocalRunner, "needs", needs)
        where = ("--output", tmp_path)
        first = cli("sweep", *self.AXES, *where, "--dry-run").stdout
        assert "6 cells to measure, 2 unsupported or skipped" in first
        assert re.search(r"n=64 B=1 H=2 D=8 float32 \(0\.\d+ s, 64\.0 MiB\): naive, sdpa", first)
        assert re.search(
            r"n=128 .*float32: skipped: naive: needs 128\.0 MiB, 100\.0", " ".join(first.split())
        )
        assert "by sizes alone" in first.replace("\n", " ")
        assert not list(tmp_path.iterdir())
        assert cli("sweep", *self.AXES, *where, "--name", "r").exit_code == 0
        records = tmp_path / "r" / RECORDS
        parts = [replace(p, spent_s={"check": 60.0}) for p in load_run(tmp_path / "r").parts]
        records.write_text("".join(part.to_line() + "\n" for part in parts))
        second = cli("sweep", *self.AXES, *where, "--dry-run").stdout.replace("\n", " ")
        assert re.search(r"about 6 min \d+ s \(3 min .*\), by 8 cells measured on machines", second)
        info = tmp_path / "r" / INFO  # another machine has a processor of this name
        info.write_text(re.sub(r'("cores": )\d+', r"\g<1>97", info.read_text()))
        assert "by sizes alone" in cli("sweep", *self.AXES, *where, "--dry-run").stdout

    def test_a_sweep_says_what_it_will_take_before_it_begins(
        self, cli: Cli, tmp_path: Path
    ) -> None:
        first = cli("sweep", *self.AXES, "--output", tmp_path, "--name", "a").stderr.splitlines()
        assert re.fullmatch(r"takes about [\d.]+ s \([\d.]+ s to [\d.]+ s\)", first[0])
        assert "takes" not in cli("sweep", *self.AXES, "--output", tmp_path, "--quiet").stderr

    def test_a_dry_run_shows_what_a_limit_will_leave_out(self, cli: Cli, tmp_path: Path) -> None:
        where = ("--output", tmp_path, "--dry-run", "--max-total-time")
        found = cli("sweep", *self.AXES, *where, "4.6s").stdout
        assert "naive" in found
        assert re.search(
            r"\n[1-7] cells? to measure, 0 unsupported or skipped; [1-7] more, for", found
        )
        assert "more, for" not in cli("sweep", *self.AXES, *where, "1h").stdout
