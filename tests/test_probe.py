"""What a probe names, how often it calls, and that it leaves nothing behind for the timing."""

from typing import Any

import torch
from torch.utils import flop_counter

from attnbench.schema.case import Case
from tests.conftest import probed


def test_a_formula_that_refuses_its_arguments_costs_the_count_alone(monkeypatch):
    def refuse(*args: Any, **_: Any) -> int:
        raise AssertionError("shapes are incompatible")

    monkeypatch.setitem(flop_counter.flop_registry, torch.ops.aten.bmm, refuse)
    metrics = probed(Case(seq_len=16, pass_="both"), "naive")
    assert (metrics["flops_counted"], metrics["memory_saved_bytes"]) == (None, None)
    assert "not counted: AssertionError: shapes are incompatible" in metrics["flops_note"]
    assert "aten::bmm" in metrics["kernel"]
