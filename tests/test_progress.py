"""What is printed while a sweep runs."""

from attnbench.analysis import times
from attnbench.base import units
from attnbench.cli import progress
from attnbench.schema.case import Case
from attnbench.schema.record import Cell, Record, Sample
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


def test_reported_times_are_had_without_pandas():
    ended = run_script(
        "import sys, attnbench.analysis.times\n"
        "sys.exit(' '.join({'pandas', 'numpy', 'torch'} & set(sys.modules)) or None)"
    )
    assert (ended.returncode, ended.stderr.strip()) == (0, "")
