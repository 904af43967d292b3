"""The validation of the gate: which runs it makes, how it keeps them, the command. Nothing runs."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from attnbench.errors import StoreError, UsageError
from attnbench.gate.decide.data import GateRun
from attnbench.gate.decide.stored import load_gate
from tests import synthetic
from tests.gate_runs import CELLS as CELLS_OF_A_RUN
from tests.gate_runs import a_run
from tests.validation.gate import live as live_module
from tests.validation.gate import session
from tests.validation.gate.pool import INFO, RUNS, Live, Pool, counted
from tests.validation.gate.schedule import CELLS, Kind, Todo, kinds_of, missing

AA, TEN, FIVE = kinds_of((10.0, 5.0))
ENVIRONMENT = synthetic.CPU | {"threads": 1}
Measure = Callable[[Any, Any], GateRun]


def imagined(request: Any, listener: Any) -> GateRun:
    """What `run_gate` would return, had the machine a noise of 1 %."""
    cells = [cell for cell in CELLS_OF_A_RUN if cell.case.seq_len in request.sweeps[0].seq_lens]
    run = a_run(
        dict(request.injected), rules=request.rules, seed=request.settings.seed, cells=cells
    )
    listener.planned(run.cells)
    return run


@pytest.fixture(autouse=True)
def no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attnbench.gate.run.measuring.run_gate", imagined)
    monkeypatch.setattr(session, "surroundings", lambda: ENVIRONMENT)


def a_live(todo: Todo) -> Live:
    return live_module.measured(todo, imagined, pytest.fail)


def silent(message: str) -> None: ...


def sat(folder: Path, **options: Any) -> session.Finished:
    small: dict[str, Any] = {"aa": 2, "each": 1, "resamples": 0, "output": folder, "name": "a"}
    return session.examine(session.Request(**(small | options)), silent)


def kept(folder: Path) -> list[Live]:
    return Pool.open(folder / "a").runs


# Which runs.


def test_the_threshold_is_the_planted_slowdown_where_that_is_less() -> None:
    (twenty,) = kinds_of((20.0,))[1:]
    assert [kind.threshold for kind in (AA, TEN, FIVE, twenty)] == [0.1, 0.1, 0.05, 0.1]
    assert [kind.label for kind in (AA, TEN, FIVE)] == ["A/A", "+10 %", "+5 %"]


@pytest.mark.parametrize("percent", [0.0, 0.5, 101.0, float("nan")])
def test_a_slowdown_that_cannot_be_planted_is_refused_by_its_flag(percent: float) -> None:
    with pytest.raises(UsageError, match="--inject"):
        kinds_of((percent,))


def test_the_slowed_cell_rotates_over_all_cells_and_every_run_has_a_seed_of_its_own() -> None:
    assert {TEN.cell(number) for number in range(CELLS)} == set(range(CELLS))
    assert AA.cell(3) is None
    seeds = {kind.seed(number) for kind in (AA, TEN, FIVE) for number in range(100)}
    assert len(seeds) == 300
    assert max(seeds) < 2**32


def test_only_what_is_missing_is_run_and_any_beginning_has_all_kinds_in_proportion() -> None:
    todo = missing({AA: 40, TEN: 12, FIVE: 12}, {AA: 10, TEN: 3})
    assert len(todo) == 30 + 9 + 12
    assert [each.kind for each in todo[:3]] == [FIVE, FIVE, FIVE]
    assert {each.number for each in todo if each.kind == AA} == set(range(10, 40))
    for end in range(3, len(todo)):
        have = {kind: sum(each.kind == kind for each in todo[:end]) for kind in (AA, TEN, FIVE)}
        shares = [(10 + have[AA]) / 40, (3 + have[TEN]) / 12, have[FIVE] / 12]
        assert max(shares) - min(shares) <= 1 / 12 + 1e-9


def test_more_runs_than_wanted_are_no_reason_to_run_others() -> None:
    assert missing({AA: 2, TEN: 1}, {AA: 5, TEN: 1}) == []


def test_the_candidate_is_slowed_in_one_cell_and_is_otherwise_the_same_file() -> None:
    request = live_module.request(Todo(kind=FIVE, number=9))
    assert request.injected == {1: 0.05}
    assert request.rules.threshold == 0.05
    assert request.base.files == request.candidate.files
    assert [Path(file).name for file in request.base.files] == ["naive.py", "sdpa.py"]
    assert request.settings.threads == 1
    assert not live_module.request(Todo(kind=AA, number=9)).injected


# How they are kept.


def test_a_run_is_read_as_it_was_written_but_for_where_its_files_lay(tmp_path) -> None:
    live = a_live(Todo(kind=TEN, number=3))
    pool = Pool.open(tmp_path / "a")
    pool.begin(ENVIRONMENT)
    pool.append(live)
    (read,) = kept(tmp_path)
    assert read.run.rounds == live.run.rounds
    assert read.run.checks == live.run.checks
    assert (read.kind, read.number, read.cell, read.exit_code) == (TEN, 3, 3, 1)
    assert read.run.base.root == Path(live.run.base.root).name
    assert "/home" not in gzip.decompress((tmp_path / "a" / RUNS).read_bytes()).decode()


def test_a_line_is_a_gate_json_that_can_be_decided_again(tmp_path) -> None:
    sat(tmp_path, aa=1, each=0)
    line = gzip.decompress((tmp_path / "a" / RUNS).read_bytes()).splitlines()[0]
    (tmp_path / "one.json").write_bytes(line)
    assert load_gate(tmp_path / "one.json").rounds == kept(tmp_path)[0].run.rounds


def test_damage_in_the_middle_is_refused_and_nothing_is_overwritten(tmp_path) -> None:
    sat(tmp_path)
    file = tmp_path / "a" / RUNS
    damaged = b"no gzip" + file.read_bytes()
    file.write_bytes(damaged)
    with pytest.raises(StoreError, match="damaged"):
        sat(tmp_path)
    assert file.read_bytes() == damaged


def test_runs_of_another_machine_or_by_other_rules_do_not_join(tmp_path, monkeypatch) -> None:
    sat(tmp_path)
    info = tmp_path / "a" / INFO
    old = info.read_text()
    for name, value in (("device_name", "another"), ("looks", [8, 99]), ("schema", 0)):
        row = json.loads(old)
        row["identity"][name] = value
        info.write_text(json.dumps(row))
        with pytest.raises(StoreError, match=f"{name} .* there, .* here.*--name"):
            sat(tmp_path, aa=9)
    info.write_text(old)
    assert len(kept(tmp_path)) == 4


def test_a_folder_of_something_else_is_left_alone(tmp_path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "run.json").write_text("{}")
    with pytest.raises(StoreError, match="is no gate validation"):
        sat(tmp_path)


def test_a_gate_that_fails_in_a_run_loses_no_other(tmp_path, monkeypatch) -> None:
    done: list[Any] = []

    def fails_third(request: Any, listener: Any) -> GateRun:
        if len(done) == 2:
            raise KeyboardInterrupt
        done.append(request)
        return imagined(request, listener)

    monkeypatch.setattr("attnbench.gate.run.measuring.run_gate", fails_third)
    assert sat(tmp_path).interrupted
    assert counted(kept(tmp_path)) == {AA: 1, TEN: 1}


# The command.


def test_the_command_accumulates_and_then_reports_without_running(cli, tmp_path) -> None:
    asked = ("gate", "--aa", 2, "--each", 1, "--resamples", 20, "--output", tmp_path)
    first = cli(*asked, "--at-most", 3)
    assert first.exit_code == 0, first.output
    assert "1 more, about" not in first.stdout
    assert "Resampled gate runs" not in first.stdout
    second = cli(*asked)
    assert second.exit_code == 0, second.output
    assert len(second.stderr.splitlines()) < len(first.stderr.splitlines()) + 3
    folder = tmp_path / "selftest-gate"
    summary = json.loads((folder / "summary.json").read_text())
    assert [row["runs"] for row in summary["live"]] == [2, 1, 1]
    assert "A/A" in (folder / "gate.md").read_text()
    assert (folder / "ratios.png").stat().st_size > 1000
    size = (folder / RUNS).stat().st_size
    again = cli(*asked, "--report-only")
    assert again.exit_code == 0, again.output
    assert (folder / RUNS).stat().st_size == size
    for text in ("Goals", "Live gate runs", "Other tools' rules", "too few runs"):
        assert text in again.stdout


def test_runs_beside_neighbours_are_of_a_folder_of_their_own_and_have_goals_of_their_own(
    tmp_path, monkeypatch
) -> None:
    begun: list[int] = []

    @contextmanager
    def beside(count: int, seed: int) -> Iterator[None]:
        begun.append(count)
        yield

    monkeypatch.setattr(session, "neighbours", beside)
    asked: dict[str, Any] = {"inject": (10.0,), "neighbours": 2, "seq_lens": (128, 1024)}
    summary = sat(tmp_path, **asked, resamples=5).summary
    assert begun == [2]
    assert (summary["environment"]["neighbours"], len(summary["cells"])) == (2, 4)
    assert {row["goal"] for row in summary["goals"]} == {
        "no false alarm beside neighbours", "undecided ≤ 10 % beside neighbours",
        "found ≥ 90 % beside neighbours",
    }  # fmt: skip
    with pytest.raises(StoreError, match="neighbours 2 there, None here"):
        sat(tmp_path, aa=9)


def test_a_false_alarm_ends_a_whole_report_with_exit_1(cli, tmp_path, monkeypatch) -> None:
    def slower(request: Any, listener: Any) -> GateRun:
        return a_run({5: 0.2}, rules=request.rules, seed=request.settings.seed)

    monkeypatch.setattr("attnbench.gate.run.measuring.run_gate", slower)
    asked = ("gate", "--aa", 1, "--each", 0, "--resamples", 0, "--output", tmp_path)
    result = cli(*asked)
    assert result.exit_code == 1, result.output
    assert "MISSED" in result.stdout


def test_nothing_to_report_and_bad_slowdowns_are_refused(cli, tmp_path, assert_refused) -> None:
    asked = ("gate", "--output", tmp_path)
    assert_refused(cli(*asked, "--report-only"), "holds no runs", "--report-only")
    assert_refused(cli(*asked, "--inject", "ten"), "--inject", "numbers above 0")
    assert_refused(cli(*asked, "--inject", "0.2"), "--inject 0.2")
    assert not any(tmp_path.iterdir())


def test_the_kind_of_a_run_survives_its_share_as_text() -> None:
    for percent in (5.0, 10.0, 2.5, 33.0):
        kind = kinds_of((percent,))[1]
        assert Kind(share=json.loads(json.dumps(kind.share))) == kind
