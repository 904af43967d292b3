"""Whoever reads or watches may go away or fail: the run goes on, and the verdict is its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from attnbench.cli import options, progress
from attnbench.execution.events import Total, Warned, Working, follow
from attnbench.execution.request import SweepRequest
from attnbench.execution.session import resume, sweep
from attnbench.gate.decide.verdict import decide
from attnbench.planning.plan import Axes
from attnbench.report import files
from attnbench.schema.case import Case
from attnbench.schema.record import Record
from attnbench.store.folder import SWEEP, RunFolder
from attnbench.store.runs import INFO, RECORDS, load_info, load_run
from tests import synthetic
from tests.conftest import COMMAND, TINY, environment, yielding
from tests.gate_runs import a_run

CELLS = ("--impls", "naive,sdpa", "--seq-lens", "8", "--threads", "1", "--ceilings", "none")


@pytest.fixture
def unread() -> Iterator[int]:
    """The end of a pipe whose reader has gone."""
    read, write = os.pipe()
    os.close(read)
    yield write
    os.close(write)


@pytest.mark.parametrize(
    ("both", "code"), [(False, 0), pytest.param(True, 141, marks=pytest.mark.slow)]
)
def test_a_sweep_whose_progress_nobody_reads_ends_as_it_would_with_its_table_whole(
    unread, both, code, tmp_path
):
    """`2> >(head -1)`; and `2>&1 | head -1`, by which no verdict was given."""
    ended = subprocess.run(
        [*COMMAND, "sweep", *CELLS, *TINY, "--name", "r"], cwd=tmp_path, env=environment(),
        stdout=unread if both else subprocess.PIPE, stderr=unread, text=True, check=False,
    )  # fmt: skip
    assert ended.returncode == code
    assert [r.status for r in load_run(tmp_path / "results" / "r").records] == ["ok", "ok"]
    if not both:
        assert ended.stdout.splitlines()[-1].startswith("report: attnbench report")


def pipe() -> tuple[Any, Callable[[], None]]:
    read, write = os.pipe()
    return os.fdopen(write, "w"), lambda: os.close(read)


def terminal() -> tuple[Any, Callable[[], None]]:
    controller, user = os.openpty()
    return os.fdopen(user, "w"), lambda: os.close(controller)


def full_disk() -> tuple[Any, Callable[[], None]]:
    return open("/dev/full", "w"), lambda: None


@pytest.mark.parametrize("where", [pipe, terminal, full_disk])
def test_displays_outlive_whoever_reads_standard_error(where, monkeypatch, capsys):
    stream, goes_away = where()
    monkeypatch.setattr(sys, "stderr", stream)
    record = synthetic.timed(Case(), "naive", [7000.0] * 7)
    with (
        progress.SweepDisplay(quiet=False) as sweeping,
        progress.GateDisplay(quiet=False) as gating,
        progress.CheckDisplay(quiet=False) as checking,
    ):
        sweeping.show(record)
        goes_away()
        for _ in range(3):
            sweeping.show(record)
            sweeping.show(Warned("beware"))
            gating.show(Working("timing"))
            gating.say("a line")
            checking.show(Total(3))
            options.say("a line", err=True)
    options.say("the table")
    stream.close()
    assert capsys.readouterr().out == "the table\n", "standard output is another matter"


@pytest.mark.parametrize("even_warned", [False, True])
def test_a_display_that_raises_ends_nothing_and_is_reported_once_at_the_end(even_warned, recwarn):
    shown: list[str] = []

    def show(event: object) -> None:
        if isinstance(event, Warned) and not even_warned:
            shown.append(event.message)
        else:
            raise KeyError(event)

    assert follow(yielding("the result", 1, 2, 3), show) == "the result"
    (text,) = shown or [str(warning.message) for warning in recwarn]
    assert text.startswith("progress was not shown to the end (KeyError: 1)")


@pytest.mark.usefixtures("imagined_worker")
def test_a_record_is_on_disk_before_it_is_shown_and_who_stops_there_can_go_on(tmp_path):
    request = SweepRequest(sweeps=(Axes(impls=("naive", "sdpa")),), output=tmp_path, name="r")
    events = sweep(request)
    first = next(event for event in events if isinstance(event, Record))
    assert load_run(tmp_path / "r").records == [first]
    events.close()
    follow(resume(RunFolder(SWEEP, tmp_path / "r")))
    records = load_run(tmp_path / "r").records
    assert [record.status for record in records] == ["ok", "ok"]


@pytest.mark.usefixtures("imagined_worker")
def test_what_another_process_wrote_until_it_ended_is_kept_by_the_one_that_goes_on(
    tmp_path, monkeypatch
):
    """It ends when this one is about to begin: what it did is neither lost nor done again."""
    request = SweepRequest(sweeps=(Axes(impls=("naive", "sdpa")),), output=tmp_path, name="r")
    path, events = follow(sweep(request)), list[object]()
    assert path is not None
    *first, last = (path / RECORDS).read_text().splitlines(keepends=True)
    (path / RECORDS).write_text("".join(first))
    lock = RunFolder.lock

    def ends_now(folder: RunFolder) -> RunFolder:
        with (path / RECORDS).open("a") as records:
            records.write(last)
        synthetic.edit(path / INFO, lambda i: i | {"spent": {**i["spent"], "samples": 77.0}})
        return lock(folder)

    monkeypatch.setattr(RunFolder, "lock", ends_now)
    follow(resume(RunFolder(SWEEP, path)), events.append)
    assert not [event for event in events if isinstance(event, Record)]
    assert load_info(path)["spent"]["samples"] == 77.0


def test_a_plot_that_cannot_be_drawn_hides_no_verdict(monkeypatch, tmp_path):
    def broken(*_: object) -> None:
        raise RuntimeError("no font")

    monkeypatch.setattr("attnbench.report.rounds.draw_all", broken)
    run = a_run()
    (tmp_path / "g").mkdir()
    _, warnings = files.write_gate_files(tmp_path / "g", run, decide(run))
    assert warnings == ["A dot for every round: cannot be drawn (RuntimeError: no font)"]
    page = (tmp_path / "g" / "gate.html").read_text(encoding="utf-8")
    assert warnings[0] in page
    assert "</html>" in page
