"""How long a sweep will take, and `--max-total-time`: what is measured until then is balanced."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from attnbench.execution.runner import LocalRunner
from attnbench.planning.forecast import balanced
from attnbench.schema.record import Cell
from attnbench.store.runs import INFO, RECORDS, load_run
from tests.conftest import TINY, Cli


@pytest.mark.usefixtures("imagined_worker")
class TestLimited:
    AXES = ("--seq-lens", "16..128", "--impls", "naive,sdpa", *TINY)

    def test_a_sweep_that_ran_out_of_time_says_so_and_is_gone_on_with(
        self, cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        ends = [9.0, 9.0]
        monkeypatch.setattr(
            "attnbench.execution.session.balanced",
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
        assert re.search(r"n=128 .*float32\n\s+skipped: naive: needs 128\.0 MiB, 100\.0", first)
        assert "by sizes alone" in first.replace("\n", " ")
        assert not list(tmp_path.iterdir())
        assert cli("sweep", *self.AXES, *where, "--name", "r").exit_code == 0
        records = tmp_path / "r" / RECORDS
        parts = [replace(p, spent_s={"check": 60.0}) for p in load_run(tmp_path / "r").parts]
        records.write_text("".join(part.to_line() + "\n" for part in parts))
        second = cli("sweep", *self.AXES, *where, "--dry-run").stdout.replace("\n", " ")
        assert "(4 min 3 s to 9 min 2 s), by 8 cells measured on machines like this" in second
        info = tmp_path / "r" / INFO  # another machine has a processor of this name
        info.write_text(re.sub(r'("cores": )\d+', r"\g<1>97", info.read_text()))
        assert "by sizes alone" in cli("sweep", *self.AXES, *where, "--dry-run").stdout

    def test_a_dry_run_shows_what_a_limit_will_leave_out(self, cli: Cli, tmp_path: Path) -> None:
        where = ("--output", tmp_path, "--dry-run", "--max-total-time")
        found = cli("sweep", *self.AXES, *where, "3.25s").stdout
        assert "naive" in found
        assert re.search(
            r"\n[1-7] cells? to measure, 0 unsupported or skipped\n[1-7] more, for", found
        )
        assert "more, for" not in cli("sweep", *self.AXES, *where, "1h").stdout
