"""How long a sweep will take, and `--max-total-time`: what is measured until then is balanced."""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from attnbench.execution.runner import LocalRunner
from attnbench.execution.store import RECORDS, RunWriter, load_run
from attnbench.planning.forecast import Forecast, balanced
from attnbench.planning.plan import Job, jobs_of, work
from attnbench.schema.case import Case, parse_mask
from attnbench.schema.messages import Catalogue
from attnbench.schema.record import Cell
from tests import synthetic
from tests.conftest import TINY, Cli

TIMING = (0.1, 1.0)


def cell(n: int, impl: str = "naive", **fields: object) -> Cell:
    return Cell(case=Case(seq_len=n, **fields), impl=impl)  # type: ignore[arg-type]


def took(what: Cell, seconds: float) -> object:
    return replace(synthetic.ok(what.case, what.impl), spent_s={"check": seconds})


def jobs(*cells: Cell) -> list[Job]:
    return list(jobs_of(cells))


def test_a_cell_takes_what_it_took_and_others_of_its_implementation_are_scaled_by_it() -> None:
    forecast = Forecast(TIMING)
    by_sizes, off = forecast.of(cell(4096))
    forecast.learn(took(cell(1024), 20.0))  # type: ignore[arg-type]
    again_s, off_again = forecast.of(cell(1024))
    assert again_s == pytest.approx(20.0)
    assert off_again == 0.0
    larger_s, of_sizes = forecast.of(cell(4096))
    factor = 20.0 / Forecast(TIMING).of(cell(1024))[0]
    assert larger_s == pytest.approx(by_sizes * factor)
    _, of_others = forecast.of(cell(4096, "sdpa"))
    assert 0.0 < of_sizes < of_others < off


def test_a_total_has_ends_that_move_together_with_what_is_known() -> None:
    forecast, cells = Forecast(TIMING), [cell(n) for n in (512, 1024, 2048)]
    before = forecast.total(cells)
    for one in cells:
        forecast.learn(took(one, 7.0))  # type: ignore[arg-type]
    after = forecast.total(cells)
    assert 21.0 < after.seconds < 26.0
    assert before.low < before.seconds < before.high
    assert after.high / after.low < before.high / before.low
    assert str(after).startswith("about 2")


def test_failed_cells_teach_nothing() -> None:
    forecast = Forecast(TIMING)
    record = synthetic.failed(Case(seq_len=64), "naive", "timeout", "hangs")
    forecast.learn(replace(record, spent_s={"check": 300.0}))
    assert forecast.learned == 0
    assert forecast.of(cell(64)) == Forecast(TIMING).of(cell(64))


def test_a_backward_pass_and_a_step_without_cache_are_more_work() -> None:
    assert work(Case(seq_len=512, pass_="both")) == 3.5 * work(Case(seq_len=512))
    decode = Case(seq_len=512, workload="decode", cache="static", new_tokens=8, width=256)
    steps = {kind: work(replace(decode, cache=kind)) for kind in ("static", "none", "rerun")}
    assert steps["static"] * 10 < steps["none"] < steps["rerun"]


def test_wherever_a_balanced_sweep_ends_each_kind_had_its_share_of_time_and_sizes() -> None:
    sizes = [64 * 2**i for i in range(8)]
    kinds: list[dict[str, Any]] = [
        {},
        {"pass_": "both"},
        {"dtype": "bfloat16"},
        {"mask": parse_mask("causal")},
    ]
    cells = [cell(n, **kind) for kind in kinds for n in sizes]
    forecast = Forecast(TIMING)
    order = [job.cells()[0] for job in balanced(jobs(*cells), forecast, lambda: math.inf)]
    assert Counter(c.key for c in order) == Counter(c.key for c in cells)
    assert [c.case.seq_len for c in order if c.case.dtype == "bfloat16"][:3] == [64, 1024, 256]
    for end in range(1, len(order)):
        spent: Counter[tuple[str, ...]] = Counter()
        for c in order[:end]:
            spent[c.case.pass_, c.case.dtype, c.case.mask.text] += math.ceil(
                forecast.of(c)[0] * 1e6
            )  # type: ignore[assignment]
        largest_us = max(forecast.of(c)[0] for c in cells) * 1e6 + 1
        assert (
            max(spent.values()) - min([*spent.values(), *([0] * (4 - len(spent)))])
            < 1.01 * largest_us
        )


def test_what_would_not_end_in_time_is_left_and_taken_up_again_once_it_proves_short() -> None:
    forecast, cells = Forecast(TIMING), [cell(n) for n in (64, 512, 16384)]
    left_s = 0.8 * forecast.of(cells[-1])[0]
    handed_out = []
    for job in balanced(jobs(*cells), forecast, lambda: left_s):
        (one,) = job.cells()
        handed_out.append(one.case.seq_len)
        share = 1 if one.case.seq_len == 64 else 50  # the second of which seems too long at first
        forecast.learn(took(one, forecast.of(one)[0] / share))  # type: ignore[arg-type]
    whenever = balanced(jobs(*cells), forecast, lambda: math.inf)
    assert [job.cells()[0].case.seq_len for job in whenever] == [64, 16384, 512]
    assert handed_out == [64, 512, 16384]
    left_s = 0.01
    assert not list(balanced(jobs(*cells), Forecast(TIMING), lambda: left_s))


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
        assert "about 6 min 3 s (4 min 3 s to 9 min 2 s), by 8 cells measured here" in second

    def test_runs_that_no_sweep_has_made_teach_nothing_and_do_no_harm(
        self, cli: Cli, tmp_path: Path, recorded_catalogue: Catalogue
    ) -> None:
        synthetic.write_run(tmp_path, "a", [synthetic.ok(Case(seq_len=16), "naive")])
        RunWriter.create(tmp_path, "b", {}).close()
        here = {"environment": recorded_catalogue.environment}
        RunWriter.create(tmp_path, "c", here).close()
        result = cli("sweep", *self.AXES, "--output", tmp_path, "--dry-run")
        assert result.exit_code == 0, result.stderr

    def test_a_dry_run_shows_what_a_limit_will_leave_out(self, cli: Cli, tmp_path: Path) -> None:
        where = ("--output", tmp_path, "--dry-run", "--max-total-time")
        found = cli("sweep", *self.AXES, *where, "3.25s").stdout
        assert "naive" in found
        assert re.search(
            r"\n[1-7] cells? to measure, 0 unsupported or skipped\n[1-7] more, for", found
        )
        assert "more, for" not in cli("sweep", *self.AXES, *where, "1h").stdout

    def test_a_limit_that_is_no_time_is_refused(
        self, cli: Cli, tmp_path: Path, assert_refused: object
    ) -> None:
        for text in ("soon", "0"):
            result = cli("sweep", *self.AXES, "--output", tmp_path, "--max-total-time", text)
            assert result.exit_code == 2
            assert "--max-total-time takes a time such as 90s" in result.stderr


def test_every_record_teaches_while_time_is_limited(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, imagined_worker: None
) -> None:
    learned: list[str] = []
    monkeypatch.setattr(
        Forecast, "learn", lambda self, record, timing=None: learned.append(record.cell.impl)
    )
    where = ("--output", tmp_path, "--name", "r")
    assert cli("sweep", *TestLimited.AXES, *where, "--max-total-time", "1h").exit_code == 0
    assert Counter(learned) == {"naive": 4, "sdpa": 4}
