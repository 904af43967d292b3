"""Runs that were measured on several machines: what is refused, recorded, compared and said."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from attnbench.analysis.table import load
from attnbench.execution.runner import LocalRunner
from attnbench.schema.record import Cell, Record
from attnbench.store.runs import INFO, RECORDS, Run, load_run
from tests import synthetic
from tests.conftest import Cli

pytestmark = pytest.mark.usefixtures("imagined_worker")


@pytest.fixture
def elsewhere(cli: Cli, tmp_path: Path) -> Path:
    """Three of four cells, measured on another machine: both of one case, `naive` of the other."""
    args = ("--impls", "naive,sdpa", "--seq-lens", "64,128", "--output", tmp_path, "--name", "r")
    assert cli("sweep", *args).exit_code == 0
    path = tmp_path / "r"
    lines = {r.cell.key: r.to_line() + "\n" for r in load_run(path).records}
    (last,) = [k for k in lines if k[1] == "sdpa" and k[0] == list(lines)[-1][0]]
    (path / RECORDS).write_text("".join(line for key, line in lines.items() if key != last))
    return path


def changed(path: Path, **facts: object) -> None:
    def change(info):
        return info | {"environment": info["environment"] | facts}

    synthetic.edit(path / INFO, change)


@pytest.fixture
def mixed(cli: Cli, elsewhere: Path) -> Run:
    changed(elsewhere, device_name="another CPU")
    result = cli("sweep", "--resume", elsewhere, "--mixed")
    assert result.exit_code == 0, result.stderr
    return load_run(elsewhere)


@pytest.mark.parametrize("known", ["another CPU", None])
def test_what_ran_out_of_memory_elsewhere_implies_nothing_here(cli, elsewhere, known, monkeypatch):
    first, *others = load_run(elsewhere).records
    lost = replace(first, status="oom", reason="it", samples=())
    (elsewhere / RECORDS).write_text("".join(r.to_line() + "\n" for r in (lost, *others)))
    if known:
        changed(elsewhere, device_name=known)
    implied: list[Cell] = []

    def run(runner: LocalRunner, jobs: object) -> list[Record]:
        implied.extend(runner.pruning.oom)
        return []

    monkeypatch.setattr(LocalRunner, "run", run)
    cli("sweep", "--resume", elsewhere, "--mixed")
    assert implied == ([] if known else [first.cell])


def test_no_ratio_is_taken_across_device_models(mixed):
    frame = load(mixed)
    split = frame.groupby("case_id")["device_name"].transform("nunique") > 1
    assert frame[~split]["speedup"].notna().all()
    other = split & (frame["impl"] == "sdpa")
    assert frame[other][["speedup", "speedup_low"]].isna().all(axis=None)
    assert (frame[split]["behind"] == 1).all()  # each leads on its own device


def test_table_and_report_say_that_there_are_two_models(cli, mixed):
    here = mixed.environments[mixed.records[-1].environment]["device_name"]
    sentence = (
        f"Measured on 2 device models: another CPU (3 cells), {here} (1 cell); rows of different"
        " ones are not compared."
    )
    assert sentence in cli("sweep", "--resume", mixed.path).stdout
    assert cli("report", mixed.path).exit_code == 0
    page = (mixed.path / "report.html").read_text()
    assert sentence in page
    assert f"another CPU and {here}" in page or f"{here} and another CPU" in page
