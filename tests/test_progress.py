"""What is printed while a sweep runs."""

from types import SimpleNamespace

from attnbench.analysis import times
from attnbench.base import units
from attnbench.cli import progress
from attnbench.schema.case import Case
from attnbench.schema.record import Cell, Record, Sample
from tests import synthetic
from tests.conftest import run_script


def test_the_time_shown_live_is_the_one_of_the_table(monkeypatch):
    samples = tuple(
        Sample(round=i, position=0, calls=1, time_us=v, e2e_us=v)
        for i, v in enumerate((100.0, 200.0, 300.0))
    )
    record = Record(cell=Cell(case=Case(), impl="naive"), status="ok", samples=samples)
    reported_us = times.time_us(record)
    assert reported_us is not None
    assert progress.line(record).strip().startswith(f"{units.time(reported_us)} naive")
    monkeypatch.setattr(times, "time_us", lambda found: 7000.0 if found is record else None)
    assert progress.line(record).strip().startswith("7.00 ms naive")


def test_a_time_is_shown_live_from_when_its_cell_is_measured(monkeypatch):
    shown: list[str] = []
    display = progress.SweepDisplay(quiet=False)
    live = SimpleNamespace(
        advance=lambda *_: None, update=lambda _, description: shown.append(description)
    )
    monkeypatch.setattr(display, "_progress", live)
    display.recorded(synthetic.timed(Case(), "naive", [7000.0] * 7))
    display.working(Case(), "sdpa", "samples")
    assert shown[0] == "7.00 ms naive"
    assert shown[1].startswith("7.00 ms naive, now sdpa")


def test_reported_times_are_had_without_pandas():
    ended = run_script(
        "import sys, attnbench.analysis.times\n"
        "sys.exit(' '.join({'pandas', 'numpy', 'torch'} & set(sys.modules)) or None)"
    )
    assert (ended.returncode, ended.stderr.strip()) == (0, "")
