"""The layer: three ways to project, one result; its gradients, its costs, and what it catches."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves

from attnbench.api import IMPLEMENTATIONS, Implementation
from attnbench.schema.case import Case, parse_mask, parse_position
from attnbench.theory.traits import impossible
from attnbench.worker.checking import check_item
from attnbench.worker.inputs import Draw
from attnbench.worker.positions import rotated
from attnbench.worker.reference import Size
from attnbench.worker.workloads import WORKLOADS
from attnbench.worker.workloads import layer as layers
from attnbench.worker.workloads.layer import weight_names
from attnbench.worker.workloads.projections import WAYS, projection_of
from tests.pairwise import ids, pairwise

pytestmark = pytest.mark.usefixtures("one_thread")
LAYER = WORKLOADS.get("layer")
CUTS = ("fused", "separate", "per-head")
OTHERS = ("mla:12", "pruned:2", "tied", "tied-layers")
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
        "batch": 2, "heads": 4, "seq_len": 13, "head_dim": 8, "width": 24, "projection": "fused",
    }  # fmt: skip
    return Case(workload="layer", **(small | fields))


def drawn(case: Case, draw: Draw | None = None) -> dict[str, torch.Tensor]:
    tensors = LAYER.tensors(case)
    LAYER.fill(case, tensors, draw or Draw(seed=3))
    return tensors


def heads_of(case: Case, x: torch.Tensor, w: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """q, k and v of one layer, straight from the formula of each projection."""
    way, groups, heads = (case.projection or "").partition(":")[0], case.kv_heads, case.heads
    if way == "tied":
        q = torch.einsum("ble,de,hd->bhld", x, w["wq"], w["mixing"])
        return [q, (x @ w["wk"].T).unsqueeze(1), (x @ w["wv"].T).unsqueeze(1)]
    if way == "mla":
        latent = x @ w["wdown"].T
        parts = [x @ w["wq"].T, latent @ w["wupk"].T, latent @ w["wupv"].T]
    elif way == "pruned":
        parts = [x @ w[name].T for name in ("wq", "wk", "wv")]
        heads, groups = 2, 2 * groups // heads
    else:
        wqkv = torch.cat([y for name, y in w.items() if name != "wo"])
        rows = [heads * case.head_dim, (heads + groups) * case.head_dim]
        parts = [x @ of.T for of in torch.tensor_split(wqkv, rows)]
    counts = heads, groups, groups
    return [y.unflatten(-1, (h, -1)).transpose(1, 2) for y, h in zip(parts, counts, strict=True)]


def by_definition(case: Case) -> dict[str, torch.Tensor]:
    """In float64 with autograd, straight from the formula, around torch's own attention."""
    tensors = {name: x.detach().double().requires_grad_() for name, x in drawn(case).items()}
    n, places, sets = case.seq_len, torch.arange(case.seq_len), weight_names(case)
    query, key = places.unsqueeze(1), places
    seen = torch.ones(n, n, dtype=torch.bool)
    if case.mask.after is not None:
        seen &= key <= query + case.mask.after
    if case.mask.before is not None:
        seen &= key >= query - case.mask.before
    x = tensors["x"]
    for number in range(case.layers):
        names = sets[number % len(sets)]
        w = {name.partition(".")[0]: tensors[name] for name in names}
        q, k, v = heads_of(case, x, w)
        q, k = (rotated(y, case.position, places, n) for y in (q, k))
        heads = torch.nn.functional.scaled_dot_product_attention(q, k, v, seen, enable_gqa=True)
        o = heads.transpose(1, 2).flatten(2) @ w["wo"].T
        x = x + o
    inputs = [tensors["x"], *(tensors[name] for names in sets for name in names)]
    dx, *left = torch.autograd.grad(o, inputs, tensors["do"])
    found = {"o": o.detach(), "dx": dx}
    for names in sets:
        found |= layers._named(case, names, [left.pop(0) for _ in names])
    return found


TRUTHS = [
    *zip(SHAPES, CUTS * 2, strict=True), ("plain", "mla:12"), ("rope, wider values", "mla:12"),
    ("grouped, causal", "pruned:2"), ("plain", "pruned:2"), ("window, one key/value head", "tied"),
]  # fmt: skip


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize(("shape", "projection"), [*TRUTHS, ("grouped, causal", "tied-layers")])
def test_the_truth_is_the_formula(shape, projection, count):
    fields: dict[str, Any] = {"projection": projection, "layers": count, "dtype": "float64"}
    case = case_of(pass_="both", **fields, **SHAPES[shape])
    truth = LAYER.truth(case, drawn(case))
    expected = by_definition(case)
    assert set(truth.values) == set(expected) >= {"o", "dx", "dwo"}
    for name, value in expected.items():
        torch.testing.assert_close(truth.values[name], value, rtol=1e-9, atol=1e-9)


RIGHT = pairwise(
    {
        "shape": list(SHAPES),
        "core": ("naive", "sdpa", "chunked"),
        "dtype": ("float32", "bfloat16", "float64"),
        "projection": (*CUTS, *OTHERS),
        "layers": (1, 2),
    }
)


@pytest.mark.parametrize("row", RIGHT, ids=ids(RIGHT))
def test_cores_are_right_in_a_layer(row):
    row = dict(row)
    core, case = row.pop("core"), case_of(pass_="both", **SHAPES[row.pop("shape")], **row)
    if reason := impossible(case):
        assert row["projection"] in reason
        return
    result = check_item(case, core, {}, 0)
    assert (result["status"], result["reason"]) == ("ok", None)


def test_needle_tokens_are_what_their_queries_look_at():
    sizes: dict[str, Any] = {"batch": 1, "seq_len": 400, "kv_heads": 2, "width": 64}
    case = case_of(**sizes, position=parse_position("rope"))
    looks = []
    for needles in (True, False):
        tensors = drawn(case, Draw(seed=1, needles=needles))
        q, k, _ = projection_of(case).heads(case)(tensors["x"], [tensors["wqkv"]])
        assert needles or abs(float(q.std()) - 1) < 0.05
        q, k = (rotated(y, case.position, torch.arange(400), 400) for y in (q, k))
        weights = (q[:, ::2] @ k.mT * case.softmax_scale).softmax(-1)
        looks.append(int((weights.amax(-1) > 0.9).sum()))
    assert looks[0] >= looks[1] + 10


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


DEEP: dict[str, Any] = {"layers": 8, "mask": parse_mask("causal"), "seq_len": 64, "batch": 1}


@pytest.mark.parametrize(("core", "dtype"), [("sdpa", "float32"), ("chunked", "float64")])
def test_right_cores_are_right_in_deep_stacks(core, dtype):
    case = case_of(pass_="both", dtype=dtype, **DEEP)
    assert [check_item(case, core, {}, seed)["reason"] for seed in range(2)] == [None] * 2


def in_one_layer(core: Any) -> Any:
    """The scale is off by a tenth of a percent in the fifth of eight layers."""
    calls = itertools.count()
    return lambda q, k, v: core(q * (1.001 if next(calls) % 8 == 4 else 1), k, v)


def test_a_wrong_core_is_found_in_a_layer_and_in_one_of_many():
    assert checked_with(lambda core: core) == "ok"
    found = {name: checked_with(change) for name, change in WRONG_CORES.items()}
    assert found == dict.fromkeys(WRONG_CORES, "incorrect")
    assert checked_with(in_one_layer, **DEEP) == "incorrect"


def test_the_next_order_counts_where_rounding_changes_more_than_there_is(monkeypatch):
    # Logits 200 times as large: in bfloat16 weights flip from one key to another.
    steep = parse_position("rope-longrope:attention_factor=14.6")
    grown = {}
    for dtype in ("bfloat16", "float64"):
        case = case_of(pass_="both", layers=4, dtype=dtype, position=steep)
        wide = {name: x.detach().double() for name, x in drawn(case).items()}
        terms = LAYER.plain(case, wide, terms=True).terms["dx"].norm()
        monkeypatch.setattr(layers, "Size", SimpleNamespace(of=lambda x: Size(max=0.0, rms=0.0)))
        grown[dtype] = float(terms / LAYER.plain(case, wide, terms=True).terms["dx"].norm())
        monkeypatch.undo()
    assert grown["bfloat16"] > 2
    assert 1 <= grown["float64"] < 1.05


@pytest.mark.parametrize(("mutant", "way"), list(zip(WRONG_PROJECTIONS, CUTS, strict=True)))
def test_a_wrong_projection_is_found(mutant, way, monkeypatch):
    change, right = WRONG_PROJECTIONS[mutant], WAYS[way]

    def heads(case: Case) -> Any:
        project = right.heads(case)
        return lambda x, weights: change(*project(x, weights))

    monkeypatch.setattr(
        layers, "projection_of", lambda case: dataclasses.replace(right, heads=heads)
    )
    result = check_item(case_of(pass_="both", projection=way), "naive", {}, 0)
    assert result["status"] == "incorrect"


def test_useful_flops_are_the_formulas():
    case = case_of(batch=3, kv_heads=2, value_dim=12, mask=parse_mask("causal"))
    n, e, pairs = 13, 24, 13 * 14 // 2
    forward = 2 * 3 * n * e * (4 * (8 + 12) + 2 * (8 + 12))
    costs = LAYER.costs(case, IMPLEMENTATIONS.get("naive"))
    assert costs["flops_useful"] == forward + 2 * 3 * 4 * pairs * (8 + 12)
    backward = dataclasses.replace(case, pass_="backward")
    costs = LAYER.costs(backward, IMPLEMENTATIONS.get("naive"))
    assert costs["flops_useful"] == 2 * forward + 2 * 3 * 4 * pairs * (3 * 8 + 2 * 12)
    why = LAYER.why_flops(case, forward + 2 * 3 * 4 * n * n * 20)
    assert "the full square of pairs" in why[0]


SMALL: dict[str, Any] = {"batch": 3, "kv_heads": 2, "value_dim": 12}
# Numbers of one layer's weights (E = 24, H = 4, D = 8), and the heads that its core computes.
WEIGHTS = {
    "fused": (24 * (32 + 16 + 24 + 48), 4), "mla:5": (24 * (32 + 5 + 48) + 5 * (16 + 24), 4),
    "pruned:2": (24 * (16 + 8 + 12 + 24), 2), "tied-layers": (24 * (32 + 16 + 24 + 48), 4),
}  # fmt: skip


@pytest.mark.parametrize("way", WEIGHTS)
def test_costs_of_several_layers_are_those_of_the_weights_that_each_has(way):
    (weights, heads), count = WEIGHTS[way], 1 if way == "tied-layers" else 3
    case = case_of(**SMALL, projection=way, layers=3)
    costs = LAYER.costs(case, IMPLEMENTATIONS.get("naive"))
    assert costs["flops_useful"] == 3 * 2 * 3 * (13 * weights + heads * 13 * 13 * (8 + 12))
    assert costs["flops_executed"] == costs["flops_useful"]
    tensors = LAYER.tensors(case)
    assert sum(x.numel() for x in tensors.values()) == count * weights + 3 * 13 * 24
    assert costs["bytes_min"] == 4 * (count * weights + 2 * 3 * 13 * 24)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"projection": "mla:25"}, "a latent of rank 25 is wider than the model, E = 24"),
        ({"projection": "pruned:4"}, "4 of 4 heads cannot be pruned"),
        ({"projection": "pruned", "kv_heads": 2}, "1 of 4 heads cannot be pruned in whole groups"),
        ({"projection": "tied", "kv_heads": 2}, "share one key/value head (--kv-heads 1)"),
    ],
)
def test_a_projection_that_makes_no_sense_is_a_reason(fields, words):
    assert words in (impossible(case_of(**fields)) or "")


@pytest.mark.parametrize("way", [*CUTS, *OTHERS])
def test_least_traffic_is_every_tensor_that_is_given_and_every_one_that_comes_out(way):
    for pass_, count, dtype in (("forward", 3, "float64"), ("backward", 1, "bfloat16"),
                                ("both", 2, "float32")):  # fmt: skip
        varied: dict[str, Any] = {"pass_": pass_, "layers": count, "dtype": dtype}
        case = case_of(width=32, projection=way, **varied)
        tensors, impl = drawn(case), IMPLEMENTATIONS.get("naive")
        with torch.set_grad_enabled(case.needs_grad):
            results = tree_leaves(LAYER.bind(case, impl, tensors).call())
        moved = sum(x.nbytes for x in [*tensors.values(), *results])
        assert LAYER.costs(case, impl)["bytes_min"] == moved
