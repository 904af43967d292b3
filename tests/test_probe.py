"""What a probe names, how often it calls, and that it leaves nothing behind for the timing."""

from typing import Any

import pytest
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


@pytest.mark.parametrize(
    ("impl", "value_dim", "backend", "reason"),
    [
        ("sdpa", 8, "math", "same last dimension. Got Query.size(-1): 16"),
        ("sdpa", 16, "flash", None),
        ("sdpa-math", 8, "math", None),  # it asks for that
    ],
)
def test_where_sdpa_takes_its_math_path_unasked_torch_says_why(impl, value_dim, backend, reason):
    metrics = probed(Case(seq_len=16, head_dim=16, value_dim=value_dim), impl)
    assert metrics["sdpa_backend"] == backend
    why = metrics.get("sdpa_reason")
    assert bool(why) == bool(reason)
    assert (reason or "") in (why or "")
