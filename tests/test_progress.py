"""What is printed while a sweep runs."""

from types import SimpleNamespace

from attnbench.cli import progress
from attnbench.execution.events import Working
from attnbench.schema.case import Case
from tests import synthetic
from tests.conftest import run_script


def test_a_time_is_shown_live_from_when_its_cell_is_measured(monkeypatch):
    shown: list[str] = []
    display = progress.SweepDisplay(quiet=False)
    live = SimpleNamespace(
        advance=lambda *_: None, update=lambda _, description: shown.append(description)
    )
    monkeypatch.setattr(display, "_progress", live)
    display.show(synthetic.timed(Case(), "naive", [7000.0] * 7))
    display.show(Working("samples", Case(), "sdpa"))
    assert shown[0] == "7.00 ms naive"
    assert shown[1].startswith("7.00 ms naive, now sdpa")


def test_reported_times_are_had_without_pandas():
    ended = run_script(
        "import sys, attnbench.analysis.times\n"
        "sys.exit(' '.join({'pandas', 'numpy', 'torch'} & set(sys.modules)) or None)"
    )
    assert (ended.returncode, ended.stderr.strip()) == (0, "")
