"""Memory held on to after the first call: found, once, and never where there is none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from attnbench.api import IMPLEMENTATIONS, attention_builder
from attnbench.measure.probes import call_kept
from attnbench.schema.case import Case, parse_mask, parse_position
from attnbench.schema.record import Record
from attnbench.worker.measuring import Entry, prepare
from attnbench.worker.trial import Trial
from attnbench.worker.workloads import WORKLOADS
from tests.conftest import Collector

pytestmark = pytest.mark.usefixtures("one_thread")
N = 64
SQUARE = 2 * N * N * 4
CASE = Case(heads=2, seq_len=N, head_dim=8)
Build = Callable[[Case], Any]


def prepared(case: Case, *names: str) -> tuple[dict[str, Trial], list[Record]]:
    collector = Collector()
    trials = prepare(Entry(index=0, case=case, impls=names), 0, collector)
    return trials, collector.records


def retained(case: Case, name: str) -> Any:
    trials, _ = prepared(case, name)
    return trials[name].metrics["memory_retained_bytes"]


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


def keeps_what_it_made_first(case: Case) -> Any:
    kept: list[torch.Tensor] = []

    def call(q, k, v):
        if not kept:
            kept.append(torch.empty(1, 2, N, N))
        return torch.matmul(q * case.softmax_scale, k.mT, out=kept[0]).softmax(-1) @ v

    return call


def keeps_the_last(case: Case) -> Any:
    kept: dict[str, torch.Tensor] = {}

    def call(q, k, v):
        kept["scores"] = scores(case, q, k)
        return kept["scores"].softmax(-1) @ v

    return call


def keeps_every_one(case: Case) -> Any:
    kept: list[torch.Tensor] = []

    def call(q, k, v):
        kept.append(scores(case, q, k))
        return kept[-1].softmax(-1) @ v

    return call


def leaves_a_dead_cycle(case: Case) -> Any:
    def call(q, k, v):
        cycle: list[Any] = [scores(case, q, k)]
        cycle.append(cycle)
        return cycle[0].softmax(-1) @ v

    return call


def keeps_nothing(case: Case) -> Any:
    return lambda q, k, v: scores(case, q, k).softmax(-1) @ v


@pytest.mark.parametrize(
    ("build", "expected"),
    [
        (keeps_what_it_made_first, SQUARE),
        (keeps_the_last, SQUARE),
        (keeps_every_one, SQUARE),
        (leaves_a_dead_cycle, 0),
        (keeps_nothing, 0),
    ],
)
def test_what_outlives_the_first_call_is_counted_once(registered, build, expected):
    assert retained(CASE, registered(build)) == expected


@pytest.mark.parametrize("pass_", ["backward", "both"])
def test_gradients_and_their_graph_are_not_held_on_to(registered, pass_):
    case = Case(heads=2, seq_len=N, head_dim=8, pass_=pass_)
    assert retained(case, registered(keeps_nothing)) == 0


def test_a_view_of_something_larger_lives_only_as_long_as_the_result(registered):
    def build(case: Case) -> Any:
        def call(q, k, v):
            padded = torch.cat([scores(case, q, k).softmax(-1) @ v] * 4, dim=-1)
            return padded[..., : v.shape[-1]]

        return call

    assert retained(CASE, registered(build)) == 0


def test_what_compiles_is_never_profiled_and_unknown(registered):
    profiled: list[bool] = []

    def build(case: Case) -> Any:
        def call(q, k, v):
            profiled.append(is_profiled())
            return scores(case, q, k).softmax(-1) @ v

        return call

    name = registered(build, compiles=True)
    trials, _ = prepared(CASE, name)
    assert "memory_retained_bytes" not in trials[name].metrics
    assert profiled[:2] == [False, False]


def test_the_call_that_sets_the_pace_is_not_profiled(registered):
    profiled: list[bool] = []

    def build(case: Case) -> Any:
        def call(q, k, v):
            profiled.append(is_profiled())
            return scores(case, q, k).softmax(-1) @ v

        return call

    prepared(CASE, registered(build))
    # The two checks, of which the second is the last that is timed; then FLOPs, and the probe.
    assert profiled == [True, False, False, True]


def test_a_kernel_that_never_runs_finds_no_right_answer_though_it_is_profiled(registered):
    name = registered(lambda case: lambda q, k, v: torch.empty_like(q))
    trials, ended = prepared(CASE, name)
    assert trials == {}
    assert [record.status for record in ended] == ["incorrect"]


def test_an_error_in_the_first_call_is_reported_as_before(registered):
    def build(case: Case) -> Any:
        def call(q, k, v):
            raise RuntimeError("no kernel here")

        return call

    _, ended = prepared(CASE, registered(build))
    assert [(r.status, r.reason) for r in ended] == [
        ("error", "check: RuntimeError: no kernel here")
    ]


def test_what_a_cycle_held_from_before_is_not_taken_off():
    cycle: list[Any] = [torch.ones(1024)]
    cycle.append(cycle)
    del cycle
    kept: list[torch.Tensor] = []

    def call() -> torch.Tensor:
        kept.append(torch.ones(256))
        return torch.ones(64)

    result, bytes_ = call_kept(call, "cpu")
    assert bytes_ == 4 * (256 + 64)
    assert result.shape == (64,)


ATTENTION: dict[str, Any] = {"heads": 4, "seq_len": 48, "head_dim": 16}
LAYER: dict[str, Any] = {"workload": "layer", "width": 64, "projection": "fused", **ATTENTION}
DECODE: dict[str, Any] = {
    "workload": "decode",
    "width": 64,
    "projection": "separate",
    "new_tokens": 4,
}
DECODE |= ATTENTION
CASES: dict[str, dict[str, Any]] = {
    "causal": {"mask": parse_mask("causal"), **ATTENTION},
    "grouped, rope": {"kv_heads": 2, "position": parse_position("rope"), **ATTENTION},
    "half": {"dtype": "bfloat16", **ATTENTION},
    "backward": {"pass_": "backward", **ATTENTION},
    "both": {"pass_": "both", **ATTENTION},
    "layer": LAYER,
    "layer, both": {"pass_": "both", **LAYER},
    "decode": {"cache": "static", **DECODE},
    "decode, grown": {"cache": "concat", **DECODE},
    "decode, uncached": {"cache": "none", **DECODE},
    "network": {"workload": "recurrent", "seq_len": 16, "width": 32},
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
    for order in (names, names[::-1]):
        trials, _ = prepared(case, *order)
        held = {name: trial.metrics["memory_retained_bytes"] for name, trial in trials.items()}
        assert held == dict.fromkeys(order, 0)
