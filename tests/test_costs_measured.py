"""Predicted workspace and executed FLOPs against measured ones, through the whole trial."""

import dataclasses
from typing import Any

import pytest
import torch

from attnbench.api import IMPLEMENTATIONS, implementation
from attnbench.api.loader import load_built_in
from attnbench.schema.case import Case, parse_mask, parse_position
from attnbench.theory.caches import CACHES
from attnbench.theory.traits import impossible
from attnbench.worker.catalogue import reasons_against
from attnbench.worker.trial import Trial
from tests.conftest import probed
from tests.pairwise import ids, pairwise

load_built_in()


CAUSAL = parse_mask("causal")
LAYER = {"workload": "layer", "seq_len": 13, "head_dim": 8, "width": 24, "projection": "fused"}
NETWORK = {"workload": "recurrent", "seq_len": 9, "width": 16, "mask": CAUSAL}
UNSURE: list[tuple[str, dict[str, Any]]] = [
    ("naive", {"seq_len": 64, "pass_": "both", "position": parse_position("rope")}),
    ("naive", LAYER),
    ("naive", {"workload": "decode", "seq_len": 32, "mask": CAUSAL}),
    ("sdpa-math", {"seq_len": 40}),
    ("gru", NETWORK | {"pass_": "both"}),
    ("gru", NETWORK | {"dtype": "bfloat16"}),
    ("gru", NETWORK | {"device": "cuda"}),
]


@pytest.mark.parametrize(("name", "fields"), UNSURE)
def test_a_prediction_that_is_not_had_is_null_and_no_guess(name, fields):
    """Neither autograd nor packing, nor what is copied on the way, follows from sizes."""
    case = Case(**fields)
    costs = Trial(impl=IMPLEMENTATIONS.get(name), case=case, tensors={}).costs()
    assert costs["memory_predicted_bytes"] is None
    assert (costs["memory_bound_bytes"] is None) == (name == "gru")


BOUNDED = pairwise({
    "name": (
        "naive", "naive-heads", "chunked", "sdpa", "sdpa-math", "sdpa-grouped", "split-kv",
        "sdpa-expanded", "reformer",
    ),
    "where": ("attention", "layer", "layer:2", "decode", "decode:2"),
    "cache": (*(name for name in CACHES.names() if name not in ("latent", "sliding")), "latent:16"),
    "dtype": ("float32", "float64", "bfloat16"), "pass_": ("forward", "backward", "both"),
    "mask": ("causal", "full", "padding:200+80"), "kv_heads": (4, 2, 1),
    "position": ("none", "rope", "alibi", "shaw:8", "sinusoidal"), "value_dim": (32, 48),
    "projection": ("fused", "separate", "per-head", "mla:16"),
})  # fmt: skip


@pytest.mark.parametrize("row", BOUNDED, ids=ids(BOUNDED))
def test_what_no_formula_says_exactly_is_bounded_from_above_for_admission(row, monkeypatch):
    """Of what a library keeps inside, as oneDNN's operands, nothing is said: it is switched off."""
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
    workload, _, layers = row["where"].partition(":")
    fields: dict[str, Any] = {name: row[name] for name in ("dtype", "kv_heads", "value_dim")}
    if workload != "attention":
        fields |= {"width": 64, "layers": int(layers or 1)}
    own = {"decode": {"cache": row["cache"], "new_tokens": 4}, "layer": {
        "projection": row["projection"]}}  # fmt: skip
    case = Case(
        workload=workload, seq_len=300, head_dim=32, batch=2, mask=parse_mask(row["mask"]),
        position=parse_position(row["position"]), **fields, **own.get(workload, {}),
        pass_="forward" if workload == "decode" else row["pass_"],
    )  # fmt: skip
    if impossible(case) or reasons_against([case], [row["name"]])[row["name"]][0]:
        return
    metrics = probed(case, row["name"])
    measured = metrics["memory_workspace_bytes"]
    assert metrics["memory_predicted_bytes"] in (None, measured)
    most = metrics["memory_bound_bytes"]
    assert measured <= 1.05 * most + 2**18
    assert workload != "layer" or row["pass_"] != "forward" or most < 5 * measured


DISPATCHED = ("naive", "naive-heads", "sdpa-math", "chunked")
SMALL = {
    "linear": ":16", "performer": ":features=8:chunk=16", "retention": ":16", "linformer": ":8",
    "nystrom": ":8", "reformer": ":buckets=4:rounds=3:chunk=8", "sliding-window": ":10",
    "dilated-window": ":window=6:dilation=3", "window-global": ":window=8:global_tokens=5",
    "strided": ":7", "strided-fixed": ":stride=9:summary=3", "bigbird": ":block=8",
}  # fmt: skip
AROUND: dict[str, dict[str, Any]] = {
    "several chunks": {"seq_len": 37},
    "more keys than a block of chunked holds": {"seq_len": 37, "kv_len": 600, "batch": 2},
    "blind queries, grouped, V != D": {
        "seq_len": 37, "kv_len": 21, "kv_heads": 2, "value_dim": 5, "batch": 2,
    },
    "two layers": {"workload": "layer", "seq_len": 24, "width": 24, "kv_heads": 2, "layers": 2},
    **{
        way: {"workload": "layer", "seq_len": 24, "width": 24, "layers": 3, "projection": way}
        for way in ("separate", "per-head", "mla:16", "pruned:2", "tied-layers")
    },
    "decoding": {"workload": "decode", "seq_len": 40, "new_tokens": 3, "width": 24},
    "without a cache": {
        "workload": "decode", "seq_len": 20, "new_tokens": 2, "width": 24, "cache": "rerun",
    },
    "a network": {"workload": "recurrent", "seq_len": 9, "width": 16, "heads": 1},
}  # fmt: skip
EVERYONE = [
    name + SMALL.get(name, "")
    for name, impl in IMPLEMENTATIONS.items()
    if "cpu" in impl.devices and not impl.compiles  # nothing is counted of compiled code
]
CELLS = pairwise({
    "name": EVERYONE, "around": list(AROUND), "position": ("none", "rope"),
    "mask": ("full", "causal", "window:9", "prefix:11", "document:5+13", "padding:7+50"),
    "pass_": ("forward", "backward", "both"),
})  # fmt: skip


@pytest.mark.parametrize("row", CELLS, ids=ids(CELLS))
def test_flops_of_everyone_are_counted_as_executed_and_never_below_the_useful_ones(row):
    shape = {"mask": parse_mask(row["mask"]), "position": parse_position(row["position"])}
    case = Case(**{"heads": 4, "head_dim": 8} | AROUND[row["around"]] | shape)
    if case.workload != "decode":
        case = dataclasses.replace(case, pass_=row["pass_"])
    if impossible(case) or reasons_against([case], [row["name"]])[row["name"]][0]:
        return  # other rows have its name
    metrics, impl = probed(case, row["name"]), implementation(row["name"])
    executed, useful = metrics["flops_executed"], metrics["flops_useful"]
    if metrics["flops_counted_source"] == "dispatched":
        assert metrics["flops_counted"] == executed
        if impl.name in DISPATCHED and case.workload != "decode":  # a reason is given
            assert ("(" in (metrics["flops_note"] or "")) == (executed != useful)
    if executed < useful:  # what is kept needs not be made again, as flash-attention counts it
        assert impl.definition is None
        assert "no scores recomputed" in metrics["flops_note"]


@pytest.mark.parametrize(
    ("cache", "words"),
    [
        ("static", ""),
        ("concat", ""),
        ("latent:24", ""),
        ("none", "(no cache: keys and values recomputed, one query)"),
        ("rerun", "(no cache: the whole layer over all tokens at each step)"),
    ],
)
def test_counted_flops_of_decoding_are_the_executed_ones_and_what_is_done_again_is_said(
    cache, words
):
    for name in DISPATCHED:
        metrics = probed(decoding(cache), name)
        assert metrics["flops_counted"] == metrics["flops_executed"]
        note = metrics["flops_note"] or ""
        assert words in note
        assert bool(note) == bool(words)


def decoding(cache: str, **more: Any) -> Case:
    case = Case(
        workload="decode", seq_len=70, new_tokens=4, head_dim=16, width=64,
        mask=parse_mask("causal"),
    )  # fmt: skip
    return dataclasses.replace(case, cache=cache, **more)


def test_blocks_at_the_edge_of_a_mask_are_said():
    causal = Case(seq_len=1024, mask=parse_mask("causal"))
    assert probed(causal, "chunked")["flops_note"] == (
        "executes 1.5 x the useful FLOPs"
        " (whole blocks where the mask cuts through: 1.5 x the useful pairs)"
    )
    note = probed(causal, "sdpa")["flops_note"]
    assert note.startswith("executes 1.5 x the useful FLOPs (whole blocks")
    # SDPA on a CPU is counted by a formula, which knows no blocks; that is said too.
    assert note.endswith("; torch's formula for the opaque op: 0.667 x the executed FLOPs")


def test_a_mask_that_is_held_is_prepared_memory():
    causal = Case(seq_len=128, kv_len=256, mask=parse_mask("causal"))
    assert probed(causal, "sdpa")["memory_prepared_bytes"] == 128 * 256
    assert probed(Case(seq_len=128), "sdpa")["memory_prepared_bytes"] == 0


@pytest.mark.parametrize(
    ("impl", "keys"),
    [("sliding-window:window=64", 33), ("dilated-window:window=64:dilation=2", 33), ("sdpa", 4096)],
)
def test_a_sparse_method_reads_the_keys_of_its_pattern(impl, keys):
    """Of the window half lies before the only query, and the query's own key."""
    case = Case(heads=4, kv_heads=2, batch=3, seq_len=1, kv_len=4096, head_dim=64)
    least = Trial(impl=implementation(impl), case=case, tensors={}).costs()["bytes_min"]
    assert least == 4 * 3 * (4 * 2 * 64 + 2 * keys * 2 * 64)
