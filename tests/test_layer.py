"""The layer: three ways to project, one result; its gradients, its costs, and what it catches."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from attnbench.api import IMPLEMENTATIONS, Implementation
from attnbench.schema.case import Case, parse_mask, parse_position
from attnbench.worker.checking import check_item
from attnbench.worker.inputs import Draw
from attnbench.worker.positions import rotated, rotated_squares
from attnbench.worker.reference import plain_attention
from attnbench.worker.workloads import WORKLOADS
from attnbench.worker.workloads import layer as layers
from attnbench.worker.workloads.layer import PROJECTIONS, parts_of
from tests.conftest import probed
from tests.pairwise import ids, pairwise

pytestmark = pytest.mark.usefixtures("one_thread")
LAYER = WORKLOADS.get("layer")
WAYS = ("fused", "separate", "per-head")
PASSES = ("forward", "backward", "both")
SHAPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "grouped, causal": {"kv_heads": 2, "mask": parse_mask("causal")},
    "rope, wider values": {"position": parse_position("rope"), "value_dim": 12},
    "window, one key/value head": {"mask": parse_mask("window:4"), "kv_heads": 1},
    "one token": {"seq_len": 1, "width": 20},
    "one head": {"heads": 1},
}


def case_of(**fields: Any) -> Case:
    small: dict[str, Any] = {
        "batch": 2,
        "heads": 4,
        "seq_len": 13,
        "head_dim": 8,
        "width": 24,
        "projection": "fused",
    }
    return Case(workload="layer", **(small | fields))


def drawn(case: Case, draw: Draw | None = None) -> dict[str, torch.Tensor]:
    tensors = LAYER.tensors(case)
    LAYER.fill(case, tensors, draw or Draw(seed=3))
    return tensors


def by_definition(case: Case) -> dict[str, torch.Tensor]:
    """In float64 with autograd, straight from the formula, around torch's own attention."""
    tensors = {name: x.detach().double() for name, x in drawn(case).items()}
    names = list(PROJECTIONS.get(case.projection or "").rows(case))
    wqkv = torch.cat([tensors[name] for name in names]).requires_grad_()
    x, wo = tensors["x"].requires_grad_(), tensors["wo"].requires_grad_()
    n, places = case.seq_len, torch.arange(case.seq_len)
    query, key = places.unsqueeze(1), places
    seen = torch.ones(n, n, dtype=torch.bool)
    if case.mask.after is not None:
        seen &= key <= query + case.mask.after
    if case.mask.before is not None:
        seen &= key >= query - case.mask.before
    rows = [case.heads * case.head_dim, case.kv_heads * case.head_dim]
    of_q, of_k, of_v = torch.tensor_split(wqkv, [rows[0], sum(rows)])
    q = (x @ of_q.T).unflatten(-1, (case.heads, -1)).transpose(1, 2)
    k, v = ((x @ of.T).unflatten(-1, (case.kv_heads, -1)).transpose(1, 2) for of in (of_k, of_v))
    q, k = (rotated(y, case.position, places, case.seq_len) for y in (q, k))
    heads = torch.nn.functional.scaled_dot_product_attention(q, k, v, seen, enable_gqa=True)
    o = heads.transpose(1, 2).flatten(2) @ wo.T
    gradients = torch.autograd.grad(o, (x, wqkv, wo), tensors["do"])
    return {"o": o.detach()} | dict(zip(("dx", "dwqkv", "dwo"), gradients, strict=True))


TRUTHS = list(zip(SHAPES, WAYS * 2, strict=True))


@pytest.mark.parametrize(("shape", "projection"), TRUTHS)
def test_the_truth_is_the_formula(shape, projection):
    case = case_of(pass_="both", projection=projection, dtype="float64", **SHAPES[shape])
    truth = LAYER.truth(case, drawn(case))
    expected = by_definition(case)
    assert set(truth.values) == set(expected) == {"o", "dx", "dwqkv", "dwo"}
    for name, value in expected.items():
        torch.testing.assert_close(truth.values[name], value, rtol=1e-9, atol=1e-9)


def test_projections_cut_the_same_draw_and_say_how_they_lay_out_its_result():
    whole = drawn(case_of(kv_heads=2, value_dim=12))["wqkv"]
    for way, projection in PROJECTIONS.items():
        case = case_of(kv_heads=2, value_dim=12, projection=way)
        tensors = drawn(case)
        weights = [tensors[name] for name in projection.rows(case)]
        assert len(weights) == {"fused": 1, "separate": 3, "per-head": 4 + 2 + 2}[way]
        assert torch.equal(torch.cat(weights), whole)
        q, k, v = projection.heads(case)(tensors["x"], weights)
        assert q.is_contiguous() != projection.strided
        same = q.untyped_storage().data_ptr() == v.untyped_storage().data_ptr()
        assert same == (way == "fused")
        assert [x.shape[1::2] for x in (q, k, v)] == [*map(torch.Size, parts_of(case).values())]


RIGHT = pairwise(
    {
        "shape": list(SHAPES),
        "core": ("naive", "sdpa", "chunked"),
        "dtype": ("float32", "bfloat16", "float64"),
        "projection": WAYS,
    }
)


@pytest.mark.parametrize("row", RIGHT, ids=ids(RIGHT))
def test_cores_are_right_in_a_layer(row):
    row = dict(row)
    core, shape = row.pop("core"), SHAPES[row.pop("shape")]
    result = check_item(case_of(pass_="both", **row, **shape), core, {}, 0)
    assert (result["status"], result["reason"]) == ("ok", None)


def test_a_matrix_for_each_of_many_heads_is_right_in_bfloat16():
    # dx is then a sum of 64 parts, rounded after each.
    many: dict[str, Any] = {"heads": 32, "kv_heads": 16, "seq_len": 7, "width": 64}
    case = case_of(pass_="backward", projection="per-head", dtype="bfloat16", **many)
    assert check_item(case, "naive", {}, 0)["status"] == "ok"


def test_needle_tokens_are_what_their_queries_look_at():
    sizes: dict[str, Any] = {"batch": 1, "seq_len": 400, "kv_heads": 2, "width": 64}
    case = case_of(**sizes, position=parse_position("rope"))
    looks = []
    for needles in (True, False):
        tensors = drawn(case, Draw(seed=1, needles=needles))
        q, k, _ = PROJECTIONS.get("fused").heads(case)(tensors["x"], [tensors["wqkv"]])
        assert needles or abs(float(q.std()) - 1) < 0.05
        q, k = (rotated(y, case.position, torch.arange(400), 400) for y in (q, k))
        weights = (q[:, ::2] @ k.mT * case.softmax_scale).softmax(-1)
        looks.append(int((weights.amax(-1) > 0.9).sum()))
    assert looks[0] >= looks[1] + 10


def test_a_sum_that_cancels_has_a_floor_of_its_terms():
    # With one token the weights are 1 whatever q and k are: their gradients are 0.
    case = case_of(pass_="both", seq_len=1, batch=1, position=parse_position("rope"))
    tensors = {name: x.detach().double() for name, x in drawn(case).items()}
    plain = layers._plain_layer(case, tensors, plain_attention, terms=True)
    assert {name: x.shape for name, x in plain.terms.items()} == {
        name: x.shape for name, x in plain.values.items()
    }
    of_queries_and_keys = slice(0, 2 * 4 * 8)
    assert plain.values["dwqkv"][of_queries_and_keys].abs().max() < 1e-15
    assert (plain.terms["dwqkv"][of_queries_and_keys] > 0).all()
    assert layers._plain_layer(case, tensors, plain_attention, terms=False).terms == {}


def test_errors_are_turned_with_what_they_are_errors_of():
    # Errors of one dimension alone: rotated, their squares are the squares of what they become.
    position, places = parse_position("rope"), torch.arange(7)
    errors = torch.zeros(8, 7, 8, dtype=torch.float64)
    errors[range(8), :, range(8)] = torch.rand(8, 7, dtype=torch.float64)
    expected = rotated(errors, position, places, 7).square()
    torch.testing.assert_close(rotated_squares(errors.square(), position, places, 7), expected)


def checked_with(change: Callable[[Any], Any], **fields: Any) -> str:
    """The status of `naive` in a layer whose core is changed."""
    naive = IMPLEMENTATIONS.get("naive")

    def build(case: Case) -> Any:
        return change(naive.build(case))

    IMPLEMENTATIONS.add("wrong", Implementation(name="wrong", build=build))
    try:
        return str(check_item(case_of(pass_="both", **fields), "wrong", {}, 0)["status"])
    finally:
        IMPLEMENTATIONS.remove("wrong")


WRONG_CORES: dict[str, Any] = {
    "scale": lambda core: lambda q, k, v: core(q * 1.01, k, v),
    "a key lost": lambda core: lambda q, k, v: core(q, k[:, :, 1:], v[:, :, 1:]),
    "heads mixed up": lambda core: lambda q, k, v: core(q, k.flip(1), v),
    "no gradient of k": lambda core: lambda q, k, v: core(q, k.detach(), v),
}
WRONG_PROJECTIONS: dict[str, Any] = {
    "value heads exchanged": lambda q, k, v: (q, k, v.flip(1)),
    "keys from the query weights": lambda q, k, v: (q, q, v),
    "values without gradient": lambda q, k, v: (q, k, v.detach()),
}


def test_a_wrong_core_is_found_in_a_layer():
    assert checked_with(lambda core: core) == "ok"
    assert {name: checked_with(change) for name, change in WRONG_CORES.items()} == dict.fromkeys(
        WRONG_CORES, "incorrect"
    )


@pytest.mark.parametrize(("mutant", "way"), list(zip(WRONG_PROJECTIONS, WAYS, strict=True)))
def test_a_wrong_projection_is_found(mutant, way, monkeypatch):
    change, right = WRONG_PROJECTIONS[mutant], PROJECTIONS.get(way)

    def heads(case: Case) -> Any:
        project = right.heads(case)
        return lambda x, weights: change(*project(x, weights))

    monkeypatch.setattr(
        layers, "projection_of", lambda case: dataclasses.replace(right, heads=heads)
    )
    result = check_item(case_of(pass_="both", projection=way), "naive", {}, 0)
    assert result["status"] == "incorrect"


def test_a_key_lost_among_many_is_found_in_bfloat16():
    def lose(core: Any) -> Any:
        def losing(q: Any, k: Any, v: Any) -> Any:
            worst = int((q[:, ::2] @ k.mT).softmax(-1).amax((0, 1, 2)).argmax())
            kept = [i for i in range(k.shape[2]) if i != worst]
            return core(q, k[:, :, kept], v[:, :, kept])

        return losing

    sizes: dict[str, Any] = {"dtype": "bfloat16", "seq_len": 600, "batch": 1, "kv_heads": 2}
    assert checked_with(lambda core: core, **sizes) == "ok"
    assert checked_with(lose, **sizes) == "incorrect"


def test_useful_flops_and_least_bytes_are_the_formulas():
    case = case_of(batch=3, kv_heads=2, value_dim=12, mask=parse_mask("causal"))
    n, e, pairs = 13, 24, 13 * 14 // 2
    forward = 2 * 3 * n * e * (4 * (8 + 12) + 2 * (8 + 12))
    costs = LAYER.costs(case, IMPLEMENTATIONS.get("naive"))
    assert costs["flops_useful"] == forward + 2 * 3 * 4 * pairs * (8 + 12)
    backward = dataclasses.replace(case, pass_="backward")
    costs = LAYER.costs(backward, IMPLEMENTATIONS.get("naive"))
    assert costs["flops_useful"] == 2 * forward + 2 * 3 * 4 * pairs * (3 * 8 + 2 * 12)
    tensors = drawn(case)  # every input is read once, every output written once
    inputs, output = sum(x.numel() for x in tensors.values()), tensors["x"].numel()
    assert costs["bytes_min"] == 4 * (2 * inputs + output)
    why = LAYER.why_flops(case, forward + 2 * 3 * 4 * n * n * 20)
    assert "the full square of pairs" in why[0]


MEMORY = pairwise(
    {
        "shape": ("plain", "grouped, causal", "rope, wider values", "one head"),
        "core": ("naive", "naive-heads", "sdpa", "chunked"),
        "projection": WAYS,
        "seq_len": (40, 300),
    }
)


@pytest.mark.parametrize("row", MEMORY, ids=ids(MEMORY))
def test_forward_workspace_is_what_sizes_say(row):
    core, way, seq_len = row["core"], row["projection"], row["seq_len"]
    sizes: dict[str, Any] = {"width": 32, "projection": way, "seq_len": seq_len}
    sizes["batch"] = 3 if way == "per-head" else 1  # whose heads are stacked, and not strided
    case = case_of(**sizes | SHAPES[row["shape"]])
    metrics = probed(case, core)
    predicted, measured = metrics["memory_predicted_bytes"], metrics["memory_workspace_bytes"]
    exact = case.position.name == "none"
    assert metrics["memory_predicted_source"] == ("formula" if exact else "estimate")
    assert predicted == measured if exact else 0.4 < predicted / measured < 2.5
