"""Sparse attention: right against its dense definition, and no work outside its tiles."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.functional import normalize, scaled_dot_product_attention

from attnbench.api import Case, implementation
from attnbench.api.loader import load_built_in
from attnbench.api.tiles import MOST
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


def test_one_bucket_is_attention_among_queries_but_to_themselves():
    case = case_of(seq_len=40, dtype="float64")
    q, k, v = (torch.randn(2, 4, 40, 8, dtype=torch.float64) for _ in range(3))
    scores = q @ normalize(q, dim=-1).mT * case.softmax_scale
    scores.diagonal(dim1=-2, dim2=-1).fill_(-torch.inf)
    one = implementation("reformer:buckets=1:rounds=1:chunk=40").build(case)
    torch.testing.assert_close(one(q, k, v), scores.softmax(-1) @ v)


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

    monkeypatch.setattr("attnbench.api.tiles.scaled_dot_product_attention", spied)
    case = case_of("causal", seq_len=200, dtype="bfloat16")
    q, k, v = (torch.randn(2, 4, 200, 8, dtype=torch.bfloat16) for _ in range(3))
    for name in ("sliding-window:64", "bigbird:block=16", "strided-fixed"):
        implementation(name).build(case)(q, k, v)
    assert any(mask is not None for mask in masks)
