"""Settings that cannot be right are refused before anything runs, in the words of Python."""

from typing import Any

import pytest

import attnbench
from attnbench.errors import UsageError

NAN, INF = float("nan"), float("inf")
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "device": ({"device": "tpu"}, "device='tpu': one of auto, cpu, cuda"),
    "l2": ({"l2": "tepid"}, "l2='tepid': one of cold, warm"),
    "ceilings": ({"ceilings": "stale"}, "ceilings='stale': one of fresh, cached, none"),
    "timer": ({"timer": "sundial"}, "timer='sundial': one of events, graph"),
    "no process": ({"processes": 0}, "processes=0: expected"),
    "no threads": ({"threads": 0}, "threads=0: expected"),
    "threads as text": ({"threads": "2"}, "threads='2': expected"),
    "no precision": ({"precision": 0.0}, "precision=0.0: expected"),
    "no number": ({"precision": NAN}, "precision=nan: expected"),
    "upside down": ({"min_time_s": 2.0}, "min_time_s=2 is above max_time_s=1"),
    "no time": ({"max_time_s": 0.0, "min_time_s": 0.0}, "max_time_s=0.0: expected"),
    "endless": ({"max_time_s": INF}, "max_time_s=inf: expected"),
    "no patience": ({"timeout_s": 0}, "timeout_s=0: expected"),
    "negative seed": ({"seed": -1}, "seed=-1: expected"),
    "seed beyond torch's": ({"seed": 2**32}, "seed=4294967296: expected"),
}


@pytest.mark.parametrize(("settings", "says"), WRONG.values(), ids=WRONG)
def test_a_setting_that_cannot_be_right_is_refused_and_nothing_is_written(
    tmp_path, monkeypatch, settings, says
):
    monkeypatch.setattr("sys.executable", "/no/such/python")  # nothing may be started either
    with pytest.raises(UsageError, match=r"^\w+=") as caught:
        attnbench.sweep(output=tmp_path / "runs", settings=settings)
    assert says in str(caught.value)
    assert list(tmp_path.iterdir()) == []
