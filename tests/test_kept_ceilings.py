"""Ceilings kept for later sweeps in the user's cache folder, where there is one."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from attnbench.execution.ceilings import keep, recalled

FACTS: dict[str, Any] = {"device": "cpu", "device_name": "Some CPU"}


def found(age: timedelta = timedelta(hours=1)) -> dict[str, Any]:
    measured = (datetime.now(UTC) - age).isoformat()
    return {"1": {"measured": measured, "read_gbps": 9.0, "matmul_tflops": {"float32": 0.1}}}


@pytest.mark.parametrize(("age_h", "recalls"), [(1, True), (25, False), (-1, False)])
def test_ceilings_of_the_last_day_are_recalled_and_say_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, age_h: int, recalls: bool
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "a cache"))
    warnings: list[str] = []
    keep(found(timedelta(hours=age_h)), FACTS, "float32", warnings.append)
    again = recalled(FACTS, "float32", warnings.append)
    assert again.get("ceilings", {}).get("cached", False) == recalls
    assert recalled(FACTS | {"device_name": "another"}, "float32", warnings.append).keys() == {
        *FACTS
    }
    assert [text for text in warnings if "from the future" not in text] == []


def test_a_home_that_cannot_be_written_costs_one_line_and_no_sweep(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/dev/null/none")
    warnings: list[str] = []
    keep(found(), FACTS, "float32", warnings.append)
    assert recalled(FACTS, "float32", warnings.append) == FACTS
    (line,) = warnings
    assert "not kept for later sweeps" in line
    assert "\n" not in line
