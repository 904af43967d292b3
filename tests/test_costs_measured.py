"""Predicted workspace and executed FLOPs against measured ones, through the whole trial."""

import dataclasses
from typing import Any

import pytest
import torch

from attnbench.api import IMPLEMENTATIONS
from attnbench.api.loader import load_built_in
from attnbench.schema.case import Case, parse_mask, parse_position
from attnbench.theory.traits import case_label
from attnbench.worker.inputs import Draw
from attnbench.worker.trial import Trial
from attnbench.worker.workloads import WORKLOADS

load_built_in()


def tried(case: Case, name: str) -> Trial:
    workload = WORKLOADS.get(case.workload)
    tensors = workload.tensors(case)
    workload.fill(case, tensors, Draw(seed=1))
    trial = Trial(impl=IMPLEMENTATIONS.get(name), case=case, tensors=tensors)
    trial.build()
    assert trial.bound is not None
    with torch.set_grad_enabled(trial.bound.grad):
        trial.probe()
    return trial


def probed(case: Case, name: str) -> dict[str, Any]:
    return tried(case, name).metrics


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


SHAPES = [
    {"seq_len": 512},
    {"seq_len": 640, "head_dim": 40, "batch": 2, "kv_heads": 2},
    {"seq_len": 512, "kv_len": 700, "head_dim": 24, "value_dim": 40, "kv_heads": 1},
    {"seq_len": 700, "kv_len": 512, "heads": 2},
]


@pytest.mark.parametrize("pass_", ["forward", "both"])
@pytest.mark.parametrize("mask", ["full", "causal"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["naive", "naive-heads", "sdpa", "sdpa-math", "chunked"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.usefixtures("one_thread")  # on some processors oneDNN gives each further thread of a
# bfloat16 product L × D float32 numbers of its own, where there are as many products as threads
def test_the_prediction_misses_by_two_percent_at_most(name, shape, dtype, mask, pass_):
    case = Case(pass_=pass_, dtype=dtype, mask=parse_mask(mask), **shape)
    metrics = probed(case, name)
    miss = metrics["memory_workspace_bytes"] / metrics["memory_predicted_bytes"] - 1
    assert metrics["memory_predicted_miss"] == pytest.approx(miss)
    if metrics["sdpa_backend"] == "flash" and dtype == "bfloat16" and pass_ == "both":
        # oneDNN packs the operands of bfloat16 products, on some processors, backward alone:
        # about 2 KiB for each of D. That the impl leaves out; at n = 512 it is up to a quarter.
        assert -0.02 <= miss <= 0.25
    else:
        assert abs(miss) <= 0.02


@pytest.mark.parametrize("name", ["naive", "naive-heads", "sdpa", "sdpa-math", "chunked"])
@pytest.mark.parametrize("cache", ["static", "concat"])
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"kv_heads": 2, "batch": 2, "width": 40, "dtype": "float64"},
        {"position": parse_position("rope"), "value_dim": 24, "mask": parse_mask("window:100")},
    ],
    ids=["plain", "grouped, in a batch", "rope, V != D, window"],
)
def test_the_workspace_of_a_generation_is_predicted_to_the_byte(name, cache, more):
    metrics = probed(decoding(cache, seq_len=512, **more), name)
    assert metrics["memory_predicted_bytes"] == metrics["memory_workspace_bytes"]


@pytest.mark.parametrize("queries", [1, 8, 64])
def test_few_queries_against_many_keys_are_predicted_too(queries):
    # sdpa-math scales all of k for a few rows of scores.
    metrics = probed(Case(seq_len=queries, kv_len=1024), "sdpa-math")
    assert abs(metrics["memory_predicted_miss"]) <= 0.02


@pytest.mark.parametrize(
    "case",
    [
        Case(seq_len=64, pass_="both", position=parse_position("rope")),
        Case(workload="decode", seq_len=32, new_tokens=2, mask=parse_mask("causal"), cache="none"),
        Case(workload="decode", seq_len=32, mask=parse_mask("causal"), dtype="bfloat16"),
    ],
    ids=case_label,
)
def test_a_prediction_that_is_not_had_is_null_and_no_guess(case):
    metrics = probed(case, "naive")
    assert metrics["memory_predicted_bytes"] is None
    assert metrics["memory_predicted_miss"] is None


DISPATCHED = ["naive", "naive-heads", "sdpa-math", "chunked"]


@pytest.mark.parametrize("pass_", ["forward", "backward", "both"])
@pytest.mark.parametrize("mask", ["full", "causal", "window:20"])
@pytest.mark.parametrize("name", DISPATCHED)
@pytest.mark.parametrize(
    "more",
    [{}, {"kv_heads": 2, "value_dim": 40}, {"position": parse_position("rope")}],
    ids=["plain", "grouped, V != D", "rope"],
)
def test_counted_flops_are_the_executed_ones_where_they_were_dispatched(name, mask, pass_, more):
    # More keys than one block of `chunked` holds, and fewer queries than keys.
    case = Case(
        seq_len=96, kv_len=600, head_dim=24, pass_=pass_, mask=parse_mask(mask), batch=2, **more
    )
    metrics = probed(case, name)
    assert metrics["flops_counted"] == metrics["flops_executed"]
    assert metrics["flops_counted_source"] == "dispatched"
    differs = metrics["flops_executed"] != metrics["flops_useful"]
    assert ("(" in (metrics["flops_note"] or "")) == differs  # a reason is given


@pytest.mark.parametrize("cache", ["static", "concat", "none", "rerun"])
@pytest.mark.parametrize("name", DISPATCHED)
def test_counted_flops_of_decoding_are_the_executed_ones(name, cache):
    metrics = probed(decoding(cache), name)
    assert metrics["flops_counted"] == metrics["flops_executed"]


def decoding(cache: str, **more: Any) -> Case:
    case = Case(
        workload="decode",
        seq_len=70,
        new_tokens=4,
        head_dim=16,
        width=64,
        mask=parse_mask("causal"),
    )
    return dataclasses.replace(case, cache=cache, **more)


def test_sdpa_on_cpu_is_not_counted_as_nothing():
    metrics = probed(Case(seq_len=96), "sdpa")
    assert metrics["flops_counted"] == metrics["flops_useful"]
    assert metrics["flops_counted_source"] == "formula"


@pytest.mark.parametrize(
    ("name", "mask", "pass_", "note"),
    [
        ("chunked", "full", "both", None),
        (
            "naive",
            "causal",
            "forward",
            "executes 1.99 x the useful FLOPs"
            " (the full square of pairs, of which the mask admits 50.2 %)",
        ),
        (
            "naive",
            "full",
            "backward",
            "executes 0.8 x the useful FLOPs (no scores recomputed in the backward pass)",
        ),
        (
            "sdpa-math",
            "causal",
            "both",
            "executes 1.71 x the useful FLOPs (the full square of pairs, of which the mask admits"
            " 50.2 %, no scores recomputed in the backward pass)",
        ),
        (
            "chunked",
            "window:20",
            "both",
            "executes 13.3 x the useful FLOPs (the full square of pairs, of which the mask admits"
            " 7.52 %)",
        ),
    ],
)
def test_what_is_wasted_is_said(name, mask, pass_, note):
    case = Case(seq_len=256, mask=parse_mask(mask), pass_=pass_)
    assert probed(case, name)["flops_note"] == note


def test_blocks_at_the_edge_of_a_mask_are_said():
    causal = Case(seq_len=1024, mask=parse_mask("causal"))
    assert probed(causal, "chunked")["flops_note"] == (
        "executes 1.5 x the useful FLOPs"
        " (whole blocks where the mask cuts through: 1.5 x the admitted pairs)"
    )
    note = probed(causal, "sdpa")["flops_note"]
    assert note.startswith("executes 1.5 x the useful FLOPs (whole blocks")
    # The formula knows no blocks: counted and executed differ, and that is said too.
    assert "; torch's formula for the opaque op: 1.33 x the executed FLOPs (the full" in note


@pytest.mark.parametrize(
    ("cache", "mask", "words"),
    [
        ("static", "causal", None),
        ("concat", "causal", None),
        ("none", "causal", "(each step makes the keys and values of all tokens again)"),
        ("rerun", "causal", "(each step runs the layer for all tokens, not for the new one alone"),
        (
            "static",
            "window:9",
            "(every pair of the steps is multiplied, hidden by the mask or not)",
        ),
    ],
)
def test_what_decoding_does_again_is_said(cache, mask, words):
    note = probed(decoding(cache, mask=parse_mask(mask)), "naive")["flops_note"]
    assert note is None if words is None else words in note


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
