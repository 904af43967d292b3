"""Predicted workspace and executed FLOPs against measured ones, through the whole trial."""

from typing import Any

import pytest
import torch

from attnbench.api import IMPLEMENTATIONS
from attnbench.case import Case, parse_mask, parse_position
from attnbench.inputs import Draw
from attnbench.loader import load_built_in
from attnbench.worker.trial import Trial
from attnbench.workloads import WORKLOADS

load_built_in()


def probed(case: Case, name: str) -> dict[str, Any]:
    workload = WORKLOADS.get(case.workload)
    tensors = workload.tensors(case)
    workload.fill(case, tensors, Draw(seed=1))
    trial = Trial(impl=IMPLEMENTATIONS.get(name), case=case, tensors=tensors)
    trial.build()
    assert trial.bound is not None
    with torch.set_grad_enabled(trial.bound.grad):
        trial.probe()
    return trial.metrics


@pytest.mark.parametrize("position", ["none", "rope", "rope-interleaved"])
@pytest.mark.parametrize("name", ["naive", "naive-heads", "sdpa", "sdpa-math", "chunked"])
@pytest.mark.parametrize(
    "sizes",
    [
        {"seq_len": 512, "head_dim": 64},
        {"seq_len": 640, "head_dim": 40, "batch": 2, "kv_heads": 2},
        {"seq_len": 384, "kv_len": 768, "mask": parse_mask("causal"), "dtype": "float64"},
    ],
    ids=str,
)
def test_predicted_workspace_is_what_is_measured(name, sizes, position):
    metrics = probed(Case(position=parse_position(position), **sizes), name)
    measured = metrics["memory_workspace_bytes"]
    assert metrics["memory_predicted_bytes"] == pytest.approx(measured, rel=0.02)


def test_a_prediction_that_is_not_had_is_null_and_no_guess():
    case = Case(seq_len=64, pass_="both", position=parse_position("rope"))
    assert probed(case, "naive")["memory_predicted_bytes"] is None


@pytest.mark.parametrize("pass_", ["forward", "backward", "both"])
@pytest.mark.parametrize("name", ["naive", "naive-heads", "sdpa-math", "chunked"])
def test_counted_flops_are_the_executed_ones_where_they_were_dispatched(name, pass_):
    metrics = probed(Case(seq_len=96, kv_len=130, head_dim=24, pass_=pass_), name)
    assert metrics["flops_counted"] == metrics["flops_executed"]
    assert metrics["flops_counted_source"] == "dispatched"


def test_sdpa_on_cpu_is_not_counted_as_nothing():
    metrics = probed(Case(seq_len=96), "sdpa")
    assert metrics["flops_counted"] == metrics["flops_useful"]
    assert metrics["flops_counted_source"] == "formula"


def test_what_causal_wastes_is_said():
    causal = Case(seq_len=256, mask=parse_mask("causal"))
    assert "executes 1.99 x the useful FLOPs" in probed(causal, "naive")["flops_note"]


def test_a_mask_that_is_held_is_prepared_memory():
    causal = Case(seq_len=128, kv_len=256, mask=parse_mask("causal"))
    assert probed(causal, "sdpa")["memory_prepared_bytes"] == 128 * 256
    assert probed(Case(seq_len=128), "sdpa")["memory_prepared_bytes"] == 0


def test_the_order_of_implementations_does_not_change_their_bytes():
    names = ["naive", "sdpa", "chunked", "sdpa-math"]
    case = Case(seq_len=256)
    forwards = {name: probed(case, name)["memory_workspace_bytes"] for name in names}
    backwards = {name: probed(case, name)["memory_workspace_bytes"] for name in reversed(names)}
    assert forwards == backwards


def test_the_kernel_that_ran_is_named():
    fused = probed(Case(seq_len=64), "sdpa")
    assert fused["kernel"] == "aten::_scaled_dot_product_flash_attention_for_cpu"
    assert "bmm" in probed(Case(seq_len=64), "sdpa-math")["kernel"]
    assert "scaled_dot_product" not in probed(Case(seq_len=64), "chunked")["kernel"]
