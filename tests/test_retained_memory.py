"""Memory held on to after the first call: found, once, and never where there is none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from attnbench.api import IMPLEMENTATIONS, attention_builder
from attnbench.schema.case import Case, parse_position
from attnbench.schema.record import Record
from attnbench.worker.checking import Entry
from attnbench.worker.measuring import prepare
from attnbench.worker.trial import Trial
from attnbench.worker.workloads import WORKLOADS
from tests.conftest import collector

pytestmark = pytest.mark.usefixtures("one_thread")
N = 64
CASE = Case(heads=2, seq_len=N, head_dim=8)
Build = Callable[[Case], Any]


def prepared(case: Case, *names: str) -> tuple[dict[str, Trial], list[Record]]:
    records: list[Record] = []
    trials = prepare(Entry(index=0, case=case, impls=names), 0, collector(records))
    return trials, records


@pytest.fixture
def registered() -> Iterator[Callable[..., str]]:
    """Register a builder for as long as a test lasts; returns its name."""
    added: list[str] = []

    def add(build: Build, **declared: Any) -> str:
        name = f"held-{len(added)}"
        attention_builder(name, **declared)(build)
        added.append(name)
        return name

    yield add
    for name in added:
        IMPLEMENTATIONS.remove(name)


def is_profiled() -> bool:
    return bool(vars(torch.autograd)["_profiler_enabled"]())


def scores(case: Case, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return (q * case.softmax_scale) @ k.mT


def keeps(keep: Callable[[list[Any], torch.Tensor], None]) -> Build:
    """A core that puts its scores somewhere."""

    def build(case: Case) -> Any:
        kept: list[Any] = []

        def call(q, k, v):
            made = scores(case, q, k)
            keep(kept, made)
            return made.softmax(-1) @ v

        return call

    return build


@pytest.mark.parametrize("compiles", [True, False])
def test_what_compiles_is_never_profiled_and_no_call_that_sets_the_pace_is(registered, compiles):
    profiled: list[bool] = []
    notes = keeps(lambda kept, made: profiled.append(is_profiled()))
    name = registered(notes, compiles=compiles)
    trials, _ = prepared(CASE, name)
    assert ("memory_retained_bytes" in trials[name].metrics) != compiles
    # The check and the call again, the second check, the last that is timed; FLOPs, and the probe.
    assert profiled[:3] == [False] * 3 if compiles else profiled == [True, *[False] * 3, True]


ATTENTION: dict[str, Any] = {"heads": 4, "seq_len": 48, "head_dim": 16}
LAYER = ATTENTION | {"workload": "layer", "width": 64, "projection": "fused"}
DECODE = LAYER | {"workload": "decode", "projection": "separate", "new_tokens": 4}
CASES: dict[str, dict[str, Any]] = {
    "grouped, rope": {"kv_heads": 2, "position": parse_position("rope"), **ATTENTION},
    "layer, both": {"pass_": "both", **LAYER},
    "decode": {"cache": "static", **DECODE},
    "network, both": {"workload": "recurrent", "seq_len": 16, "width": 32, "pass_": "both"},
}


@pytest.mark.parametrize("which", CASES)
def test_no_built_in_implementation_holds_on_to_anything(which):
    case = Case(**CASES[which])
    workload = WORKLOADS.get(case.workload)
    names = [
        name
        for name, impl in IMPLEMENTATIONS.items()
        if not impl.compiles
        and impl.reason_against_workload(case.workload) is None
        and workload.reason_against(case, impl) is None
    ]
    trials, _ = prepared(case, *names)
    held = {name: trial.metrics["memory_retained_bytes"] for name, trial in trials.items()}
    assert held == dict.fromkeys(names, 0)
