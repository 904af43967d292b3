"""Implementations that compute something other than attention: parameters, definition, distance."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from attnbench.api import IMPLEMENTATIONS, Case, Mask, Patterned, attention_builder, dense_mask
from attnbench.api import implementation as named
from attnbench.api.loader import load_built_in
from attnbench.schema.record import Record
from attnbench.worker.checking import Entry, Reporter, check_item, check_twice, measure_distances
from attnbench.worker.inputs import Draw
from attnbench.worker.measuring import prepare
from attnbench.worker.trial import Trial
from attnbench.worker.workloads import WORKLOADS
from tests.conftest import collector

Call = Callable[..., torch.Tensor]


def near(case: Case, reach: int) -> Call:
    """Attention to keys at most `reach` places away, dense."""
    sizes = case.seq_len, case.kv_len, case.device
    band = dense_mask(Mask(before=reach, after=reach), *sizes)
    return Patterned(case, dense_mask(case.mask, *sizes) & band)


@pytest.fixture
def windowed() -> Iterator[list[int]]:
    """`near` as an implementation; the list holds what is added to the reach that is built."""
    wrong = [0]

    @attention_builder(
        "near",
        family="sparse",
        definition=lambda case, *, reach: near(case, reach),
        exact_at=lambda case: {"reach": case.kv_len},
        flops=lambda case, *, reach: 1000 * reach,
        supports=lambda case, *, reach: "an odd reach" if reach % 2 else None,
    )
    def build(case: Case, *, reach: int = 8, seed: int = 0) -> Call:
        return near(case, reach + wrong[0])

    yield wrong
    IMPLEMENTATIONS.remove("near")


@pytest.mark.parametrize("workload", ["attention", "layer", "decode"])
def test_a_definition_takes_the_place_of_attention(windowed, workload):
    row = {
        "workload": workload, "pass": "both", "batch": 2, "heads": 2, "kv_heads": 1,
        "seq_len": 40, "head_dim": 8, "mask": "causal",
    }  # fmt: skip
    more: dict[str, dict[str, Any]] = {
        "layer": {"width": 16},
        "decode": {"pass": "forward", "width": 16, "cache": "concat", "new_tokens": 2},
    }
    case = Case.from_json(row | more.get(workload, {}))
    assert check_item(case, "near:4", {}, 0)["status"] == "ok"
    windowed[0] = 1
    assert check_item(case, "near:4", {}, 0)["status"] == "incorrect"


@pytest.mark.parametrize(("dtype", "status"), [("float16", "unsupported"), ("bfloat16", "ok")])
def test_where_exact_results_are_too_large_for_the_dtype_nothing_can_be_right(dtype, status):
    load_built_in()
    row = {
        "workload": "layer", "projection": "separate", "layers": 2, "width": 48, "batch": 2,
        "heads": 4, "seq_len": 37, "head_dim": 16, "mask": "causal", "dtype": dtype,
    }  # fmt: skip
    found = check_item(Case.from_json(row), "retention", {}, 0)
    assert found["status"] == status, found
    assert status == "ok" or "float16 6.55e+04 at most" in found["reason"]


def test_distances_are_from_exact_attention_and_smaller_where_attention_is_local(windowed):
    case = Case(heads=2, seq_len=256, head_dim=16)
    workload = WORKLOADS.get("attention")
    tensors = workload.tensors(case)

    def distances(name: str) -> dict[str, Any]:
        trial = Trial(impl=named(name), case=case, tensors=tensors)
        entry = Entry(index=0, case=case, impls=(name,))
        reporter = Reporter(at=lambda *_: None, record=lambda *_: None)
        check_twice(entry, {name: trial}, (Draw(seed=1), Draw(seed=2)), reporter)
        measure_distances(entry, {name: trial}, 2, reporter)
        return trial.metrics

    some, all_keys = distances("near:64"), distances("near:256")
    assert 0.3 < some["approx_error"] < 3
    assert 0 < some["approx_error_local"] < some["approx_error"] / 5
    assert max(all_keys["approx_error"], all_keys["approx_error_local"]) < 1e-5
    workload.fill(case, tensors, Draw(seed=2))
    o = near(case, 64)(*(tensors[name] for name in "qkv")).double()
    exact = workload.exact_output(case, tensors)
    expected = float((o - exact).norm() / exact.norm())
    assert some["approx_error"] == pytest.approx(expected, rel=1e-5)


def test_a_definition_that_fails_costs_its_own_cell_alone():
    load_built_in()

    def broken(case: Case) -> Call:
        raise ValueError("no definition today")

    attention_builder("undefined", family="linear", definition=broken)(lambda case: near(case, 1))
    try:
        failed: list[Record] = []
        entry = Entry(index=0, case=Case(seq_len=16), impls=("naive", "undefined"))
        trials = prepare(entry, 0, collector(failed))
    finally:
        IMPLEMENTATIONS.remove("undefined")
    assert [(record.cell.impl, record.status) for record in failed] == [("undefined", "error")]
    assert trials["naive"].metrics["error_ratio"] <= 1


def test_what_a_definition_needs_is_unknown_where_it_is_not_declared(windowed):
    trial = Trial(impl=named("near"), case=Case(seq_len=16), tensors={})
    assert (trial.costs()["flops_useful"], trial.costs()["flops_executed"]) == (None, 8000)


@pytest.mark.parametrize("count", [-1, 2.5, "many"])
def test_a_count_of_flops_that_is_none_costs_its_own_cell_alone(count):
    attention_builder("miscounted", flops=lambda case: count)(lambda case: near(case, 1))
    try:
        case = Case(seq_len=16)
        tensors = WORKLOADS.get("attention").tensors(case)
        trial = Trial(impl=named("miscounted"), case=case, tensors=tensors)
        with trial.stage("check"):
            trial.costs()
        assert trial.status == "error"
    finally:
        IMPLEMENTATIONS.remove("miscounted")
