"""Ceilings that a sweep keeps for later ones: who believes them, and what becomes of bad ones."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from attnbench.base.jsontext import sealed
from attnbench.errors import StoreError
from attnbench.execution import ceilings, runner
from attnbench.execution.events import Warned, follow
from attnbench.execution.process import Settings
from attnbench.execution.runner import LocalRunner
from attnbench.planning.plan import Job
from attnbench.schema.case import Case
from attnbench.schema.messages import CellMeasured
from attnbench.schema.record import Record
from tests import synthetic

CASE = Case(seq_len=256)
ASKED = (["float32"], [1]), "90%"
# A large matmul at so many TFLOP/s, where cells are at 1: beyond 1.5 times what was kept.
SLOW, NEAR, FAST = 0.6, 0.7, 100.0


def measured(tflops: float, days_ago: float = 0.0) -> dict[str, Any]:
    when = datetime.now(UTC) - timedelta(days=days_ago)
    return {
        "matmul_tflops": {"float32": tflops}, "read_gbps": 10.0, "cache_bytes": 2**30,
        "measured": when.isoformat(timespec="seconds"),
    }  # fmt: skip


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "attnbench" / "ceilings"


@pytest.fixture
def sweep(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """Two jobs of a cell each at 1 TFLOP/s, with a cache: what is known of the machine after it."""

    class Supervised:
        def __init__(self, runner: object, cases: list[Case], *_: object, **__: object) -> None:
            self.cases, self.retried = cases, dict[Any, str]()

        def run(self, keys: list[Any]) -> Iterator[Any]:
            for index, impl in keys:
                record = synthetic.timed(self.cases[index], impl, [100.0] * 9, flops_executed=10**8)
                yield (index, impl), CellMeasured(index, record)

    monkeypatch.setattr(runner, "Supervision", Supervised)

    def swept(tflops: float = FAST, facts: Any = synthetic.CPU, **settings: Any) -> dict[str, Any]:
        done, warned = list[object](), list[str]()

        def found(*_: object) -> dict[str, Any]:
            done.append("ceilings")
            return measured(tflops)

        monkeypatch.setattr(LocalRunner, "ceilings", found)
        running = LocalRunner(Settings(device="cpu", **settings))
        running.environments = {"a": facts}
        running.limits = ASKED[0]
        for event in running.run([Job(groups=(((CASE, (name,)),),)) for name in ("x", "y")]):
            if isinstance(event, Record):
                done.append(event.cell.impl)
            elif isinstance(event, Warned):
                warned.append(event.message)
        return {"done": done, "warned": warned, **running.environments["a"].get("ceilings", {})}

    return swept


def test_a_time_beyond_kept_ceilings_has_them_measured_again_before_it_is_suspect(sweep):
    assert sweep(SLOW)["done"] == ["x", "ceilings", "y"]
    facts = follow(ceilings.recalled(dict(synthetic.CPU), ASKED))
    record = synthetic.timed(CASE, "x", [100.0] * 9, flops_executed=10**8)
    assert ceilings.exceeded(record, facts)
    found = sweep(FAST)
    assert found["done"] == ["x", "ceilings", "y"], "once, and then they are this run's own"
    assert found["1"]["matmul_tflops"]["float32"] == FAST
    assert "cached" not in found
    assert sweep()["1"]["matmul_tflops"]["float32"] == FAST, "kept in place of the others"


def rewritten(**changes: Any) -> Callable[[bytes], str]:
    def change(data: bytes) -> str:
        return sealed(json.dumps({"ceilings": json.loads(data)["ceilings"]} | changes))

    return change


SPOILT: dict[str, tuple[Callable[[bytes], Any], str]] = {
    "garbage": (lambda data: b"\x00\xff{", "is not used, the machine's ceilings are measured"),
    "empty": (lambda data: b"", "is not used"),
    "cut off": (lambda data: data[:-9], "is not used"),
    "a changed byte": (lambda data: data.replace(b"10.0", b"99.0"), "is not used"),
    "nothing": (rewritten(ceilings={}), "is not used"),
    "no table": (rewritten(ceilings={"1": 3}), "is not used"),
    "no date": (rewritten(ceilings={"1": measured(1.0) | {"measured": "soon"}}), "is not used"),
    "the future": (rewritten(ceilings={"1": measured(1.0, days_ago=-1)}), ""),
    "old": (rewritten(ceilings={"1": measured(1.0, days_ago=1.01)}), ""),
}


@pytest.mark.parametrize(("spoil", "says"), SPOILT.values(), ids=SPOILT)
def test_a_file_that_cannot_be_right_costs_a_line_and_the_measurement(sweep, cache, spoil, says):
    first = sweep()
    (file,) = cache.iterdir()
    changed = spoil(file.read_bytes())
    file.write_bytes(changed if isinstance(changed, bytes) else changed.encode())
    found = sweep()
    assert (found["done"].count("ceilings"), found["1"]) == (1, first["1"] | found["1"])
    assert len(found["warned"]) == bool(says)
    assert says in "".join(found["warned"])
    assert sweep()["done"] == ["x", "y"], "it was replaced"


NO_SPACE = StoreError("cannot write it (No space left on device)")
NO_HOME = RuntimeError("Could not determine home directory.")


@pytest.mark.parametrize(
    ("target", "fault", "says"),
    [
        ("attnbench.execution.ceilings.write_whole", NO_SPACE, "No space left on device"),
        ("pathlib.Path.mkdir", PermissionError(13, "Permission denied"), "Permission denied"),
        ("pathlib.Path.home", NO_HOME, "home directory"),
    ],
)
def test_where_nothing_can_be_kept_a_line_says_so_and_the_run_goes_on(
    sweep, monkeypatch, target, fault, says
):
    if fault is NO_HOME:
        monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(target, Mock(side_effect=fault))
    for _ in range(2):
        found = sweep()
        assert found["done"] == ["x", "ceilings", "y"]
        (line,) = found["warned"]
        assert line.startswith("the machine's ceilings are not kept for later sweeps: ")
        assert says in line


def test_what_could_not_be_measured_is_not_kept(cache, monkeypatch):
    found = {"1": measured(1.0) | {"read_gbps": None}}
    assert list(ceilings.keep(found, dict(synthetic.CPU), ASKED)) == []
    assert not os.path.exists(cache)
