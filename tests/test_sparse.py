"""Sparse attention: right against its dense definition, and no work outside its tiles."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from attnbench_impls.tiles import MOST
from torch.nn.functional import scaled_dot_product_attention

from attnbench.api import Case, implementation
from attnbench.api.loader import load_built_in
from attnbench.schema.case import parse_mask
from attnbench.worker.catalogue import reasons_against
from attnbench.worker.checking import check_item
from tests.conftest import probed
from tests.pairwise import ids, pairwise

load_built_in()
pytestmark = pytest.mark.usefixtures("one_thread")

NAMES = (
    "sliding-window:10", "dilated-window:window=6:dilation=3",
    "window-global:window=8:global_tokens=5",
    "strided:7", "strided-fixed:stride=9:summary=3", "strided", "strided-fixed",
    "bigbird:block=8", "bigbird:block=16:window=1:global_blocks=2:random_blocks=2:seed=3",
    "reformer:buckets=4:rounds=3:chunk=8", "reformer:buckets=1:chunk=16",
)  # fmt: skip
SIZES: dict[str, dict[str, Any]] = {
    "several tiles": {"seq_len": 150},
    "more keys": {"seq_len": 37, "kv_len": 150, "kv_heads": 1},
    "blind rows": {"seq_len": 150, "kv_len": 37},
    "grouped, wide values": {"seq_len": 131, "kv_heads": 2, "value_dim": 11},
    "one query": {"seq_len": 1, "kv_len": 99},
    "few slices at a time": {"seq_len": 150, "batch": 3},
}
ROWS = pairwise(
    {
        "name": NAMES,
        "sizes": list(SIZES),
        "mask": ("full", "causal"),
        "dtype": ("float32", "bfloat16", "float64"),
        "pass_": ("forward", "both"),
    }
)


def case_of(mask: str = "full", **fields: Any) -> Case:
    small: dict[str, Any] = {"batch": 2, "heads": 4, "head_dim": 8}
    return Case(**small | fields, mask=parse_mask(mask))


@pytest.mark.parametrize("row", ROWS, ids=ids(ROWS))
def test_it_is_what_its_definition_says(row, monkeypatch):
    if row["sizes"] == "few slices at a time":
        monkeypatch.setitem(MOST, "cpu", 2**13)
    sizes = SIZES[row["sizes"]]
    case = case_of(row["mask"], **sizes, dtype=row["dtype"], pass_=row["pass_"])
    reason = reasons_against([case], [row["name"]])[row["name"]][0]
    if row["name"].startswith("reformer") and case.seq_len != case.kv_len:
        assert (reason or "").startswith("queries are the keys")
        return
    assert reason is None
    result = check_item(case, row["name"], {}, 0)
    assert (result["status"], result["reason"]) == ("ok", None)


@pytest.mark.parametrize(
    "name", ["strided:64", "window-global:window=4:global_tokens=3", "bigbird:block=8"]
)
@pytest.mark.parametrize("mask", ["full", "causal"])
@pytest.mark.parametrize("pass_", ["forward", "both"])
def test_many_queries_before_the_first_key_change_nothing(pass_, mask, name):
    """Their tiles are empty; that a query has keys in several is asked query by query."""
    result = check_item(case_of(mask, seq_len=512, kv_len=16, pass_=pass_), name, {}, 0)
    assert (result["status"], result["reason"]) == ("ok", None)


# One of each method.
WIDE = [name for at, name in enumerate(NAMES) if name.split(":")[0] not in " ".join(NAMES[:at])]
WORKSPACES = pairwise({
    "name": (*WIDE, "sliding-window:200"), "mask": ("full", "causal"),
    "more": ({"kv_heads": 1}, {"batch": 3}, {"value_dim": 40}),
    "dtype": ("float32", "bfloat16", "float64"), "pass_": ("forward", "backward", "both"),
})  # fmt: skip


@pytest.mark.parametrize("row", WORKSPACES, ids=ids(WORKSPACES))
def test_the_workspace_is_estimated_within_a_factor_of_two(row):
    sizes = {"seq_len": 600, "head_dim": 64} | row["more"]
    case = case_of(row["mask"], **sizes, dtype=row["dtype"], pass_=row["pass_"])
    metrics = probed(case, row["name"])
    assert metrics["memory_predicted_bytes"] is None
    ratio = metrics["memory_bound_bytes"] / metrics["memory_workspace_bytes"]
    assert 0.5 <= ratio <= 2


PATTERNS = [name for name in NAMES if not name.startswith("reformer")] + ["bigbird-flex:block=16"]


@pytest.mark.parametrize("name", PATTERNS)
def test_useful_flops_are_those_of_the_pairs_that_the_definition_admits(name):
    for mask, sizes in itertools.product(("full", "causal"), ((150, 150), (37, 150))):
        case = case_of(mask, seq_len=sizes[0], kv_len=sizes[1], pass_="both", value_dim=5)
        if reasons_against([case], [name])[name][0] and case.seq_len != case.kv_len:
            continue  # FlexAttention
        impl = implementation(name)
        assert impl.definition is not None
        assert impl.useful is not None
        pairs = int(impl.definition(case).admitted.sum())  # type: ignore[attr-defined]
        assert impl.useful(case) == 2 * 2 * 4 * pairs * (8 + 5 + 3 * 8 + 2 * 5)


@pytest.mark.parametrize("mask", ["full", "causal"])
def test_useful_flops_of_hashing_are_those_of_buckets_of_one_size_and_whole_chunks(mask):
    useful = implementation("reformer:buckets=4:rounds=3:chunk=8").useful
    assert useful is not None
    for tokens, whole in ((96, 24), (111, 24), (20, 5)):  # of a bucket
        case, met = case_of(mask, seq_len=tokens), 0
        for query, key in itertools.product(range(whole), repeat=2):
            chunks_behind = query // 8 - key // 8
            met += chunks_behind in (0, 1) and (mask == "full" or key <= query)
        hashes = 2 * 4 * tokens * 2 * 8 * 3 * 2
        assert useful(case) == 2 * 2 * 4 * 3 * 4 * met * (8 + 8) + hashes


LAWS = {
    "sliding-window:64": 8, "dilated-window:64": 8, "window-global:64": 8, "bigbird": 8,
    "reformer:rounds=1": 8, "strided": 8**1.5, "strided-fixed": 8**1.5,
}  # fmt: skip


@pytest.mark.parametrize(("name", "law"), LAWS.items())
def test_what_torch_counts_is_declared_and_grows_with_n_by_the_law(name, law):
    case = case_of("causal", seq_len=200, batch=1, heads=2, pass_="both")  # all plain products
    metrics = probed(case, name)
    assert metrics["flops_counted"] == metrics["flops_executed"]
    impl, (short, long) = implementation(name), (case_of(seq_len=n) for n in (4096, 32768))
    assert impl.flops is not None
    assert impl.workspace is not None
    assert impl.flops(long) / impl.flops(short) == pytest.approx(law, rel=0.1)
    assert (impl.workspace(long) or 0) <= 8.1 * (impl.workspace(short) or 0)


def test_the_numbers_of_a_mask_that_sdpa_is_given_are_of_the_dtype_of_queries(monkeypatch):
    """Its efficient kernel on CUDA raises where they are of another."""
    masks = []

    def spied(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, attn_mask: Any, **more: Any):
        masks.append(attn_mask)
        assert attn_mask is None or attn_mask.dtype == q.dtype
        return scaled_dot_product_attention(q, k, v, attn_mask=attn_mask, **more)

    monkeypatch.setattr("attnbench_impls.tiles.scaled_dot_product_attention", spied)
    case = case_of("causal", seq_len=200, dtype="bfloat16")
    q, k, v = (torch.randn(2, 4, 200, 8, dtype=torch.bfloat16) for _ in range(3))
    for name in ("sliding-window:64", "bigbird:block=16", "strided-fixed"):
        implementation(name).build(case)(q, k, v)
    assert any(mask is not None for mask in masks)
