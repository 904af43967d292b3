"""What a probe names, how often it calls, and that it leaves nothing behind for the timing."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils import flop_counter

from attnbench.api import IMPLEMENTATIONS, attention_builder
from attnbench.measure.probes import Saved
from attnbench.schema.case import PASSES, Case
from tests.conftest import probed, tried


@pytest.mark.parametrize(
    ("name", "more", "backend", "kernel"),
    [
        ("sdpa", {}, "flash", "aten::_scaled_dot_product_flash_attention_for_cpu"),
        ("sdpa-mask", {}, "flash", "aten::_scaled_dot_product_flash_attention_for_cpu"),
        ("sdpa-math", {}, "math", "aten::bmm"),
        # No fused kernel on CPU takes it, so torch falls to math; the row must not hide that.
        ("sdpa", {"value_dim": 32}, "math", "aten::bmm"),
        ("chunked", {}, None, "aten::bmm"),
        ("naive", {}, None, "aten::bmm"),
    ],
)
@pytest.mark.parametrize("pass_", ["forward", "both"])
def test_the_kernel_that_ran_is_named(name, more, backend, kernel, pass_):
    metrics = probed(Case(seq_len=64, pass_=pass_, **more), name)
    names = metrics["kernel"].split("; ")
    assert metrics["sdpa_backend"] == backend
    assert kernel in names
    assert ("flash" in metrics["kernel"]) == (backend == "flash")
    if backend == "flash":
        assert (kernel + "_backward" in names) == (pass_ == "both")
        assert names[0] == kernel
    assert len(names) <= metrics["kernel_count"]


def test_a_formula_that_refuses_its_arguments_costs_the_count_alone(monkeypatch):
    def refuse(*args: Any, **_: Any) -> int:
        raise AssertionError("shapes are incompatible")

    monkeypatch.setitem(flop_counter.flop_registry, torch.ops.aten.bmm, refuse)
    metrics = probed(Case(seq_len=16, pass_="both"), "naive")
    assert (metrics["flops_counted"], metrics["memory_saved_bytes"]) == (None, None)
    assert "not counted: AssertionError: shapes are incompatible" in metrics["flops_note"]
    assert "aten::bmm" in metrics["kernel"]


def test_probing_makes_two_calls_and_a_forward_pass_where_only_the_backward_one_is_timed():
    calls: Counter[str] = Counter()
    naive = IMPLEMENTATIONS.get("naive")

    def build(case: Case) -> Any:
        core = naive.build(case)

        def count(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, /) -> torch.Tensor:
            calls[case.pass_] += 1
            return core(q, k, v)

        return count

    attention_builder("counts-calls")(build)
    try:
        for pass_ in PASSES:
            probed(Case(seq_len=16, pass_=pass_), "counts-calls")
    finally:
        IMPLEMENTATIONS.remove("counts-calls")
    # For `backward` the calls are forward passes: one to build, one watched, one to be timed.
    assert calls == {"forward": 2, "both": 2, "backward": 3}


def test_a_graph_that_was_watched_is_not_the_one_that_is_timed(monkeypatch):
    asked: list[torch.Tensor] = []
    unpack = Saved.unpack

    def spy(self: Saved, x: torch.Tensor) -> torch.Tensor:
        asked.append(x)
        return unpack(self, x)

    monkeypatch.setattr(Saved, "unpack", spy)
    trial = tried(Case(seq_len=16, pass_="backward"), "naive")
    assert asked
    asked.clear()
    assert trial.bound is not None
    trial.bound.call()
    assert not asked
