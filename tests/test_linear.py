"""Linear and low-rank attention: what `attnbench check` cannot see of their definitions."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attnbench.api import Case, chunk_sizes, implementation
from attnbench.schema.case import parse_mask
from attnbench.worker.checking import check_item
from tests.pairwise import ids, pairwise

CAUSAL = (
    "linear:16",
    "linear-recurrent",
    "linear-parallel",
    "performer:32:chunk=16",
    "retention:16",
)
FULL = ("linear", "performer:32:chunk=16", "linformer:8", "nystrom:8")
SIZES: dict[str, dict[str, Any]] = {
    "several chunks": {"seq_len": 53},
    "more keys": {"seq_len": 21, "kv_len": 53, "kv_heads": 2},
    "more queries": {"seq_len": 53, "kv_len": 21, "value_dim": 5},
}
ROWS = [
    {"mask": mask} | row
    for mask, names in (("causal", CAUSAL), ("full", FULL))
    for row in pairwise(
        {"name": names, "where": list(SIZES), "dtype": ("float32", "bfloat16", "float64")}
    )
]

pytestmark = pytest.mark.usefixtures("one_thread")


def case_of(mask: str = "full", **sizes: Any) -> Case:
    small: dict[str, Any] = {"batch": 2, "heads": 4, "head_dim": 8}
    return Case(**(small | sizes), mask=parse_mask(mask))


def normal(case: Case, seed: int = 0, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    """q, k, v."""
    generator = torch.Generator().manual_seed(seed)
    b, h, d = case.batch, case.heads, case.head_dim
    shapes = (b, h, case.seq_len, d), (b, h, case.kv_len, d), (b, h, case.kv_len, case.value_dim)
    return [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in shapes]


def distance(case: Case, name: str, seed: int = 0) -> float:
    """Of the output from exact attention, relative, in the root mean square."""
    q, k, v = normal(case, seed)
    exact = torch.softmax(q @ k.mT * case.softmax_scale, -1) @ v
    o = implementation(name).build(case)(q, k, v)
    return float((o - exact).norm() / exact.norm())


@pytest.mark.parametrize("row", ROWS, ids=ids(ROWS))
def test_it_is_what_its_definition_says_with_its_gradients(row):
    case = case_of(row["mask"], **SIZES[row["where"]], dtype=row["dtype"], pass_="both")
    result = check_item(case, row["name"], {}, 0)
    assert (result["status"], result["reason"]) == ("ok", None)


@pytest.mark.parametrize("mask", ["full", "causal"])
@pytest.mark.parametrize(("queries", "keys"), [(7, 20), (20, 7), (20, 20), (1, 9)])
def test_chunks_show_each_query_the_keys_of_its_mask(mask, queries, keys):
    case, seen = case_of(mask, seq_len=queries, kv_len=keys), []
    before = 0
    for own_queries, own_keys in chunk_sizes(case, 3):
        seen += [before + (i + 1 if own_keys else 0) for i in range(own_queries)]
        before += own_keys
    assert before == keys
    assert seen == [case.mask.span(i, queries, keys)[1] for i in range(queries)]


def test_random_features_estimate_the_exponential_without_bias():
    # One query and two keys: the two weights' ratio is what the directions estimate.
    case = case_of(batch=1, heads=1, seq_len=1, kv_len=2, head_dim=4, dtype="float64")
    q, k, _ = (0.5 * x for x in normal(case))
    ratio = (q @ (k[:, :, :1] - k[:, :, 1:]).mT * case.softmax_scale).exp().item()
    v = torch.eye(2, dtype=torch.float64).view(1, 1, 2, 2)
    case = case_of(batch=1, heads=1, seq_len=1, kv_len=2, head_dim=4, value_dim=2, dtype="float64")
    weights = implementation("performer:features=65536").build(case)(q, k, v).flatten()
    assert float(weights[0] / weights[1]) == pytest.approx(ratio, rel=0.01)


def test_the_error_of_random_features_falls_by_their_square_root():
    # Small scores: the docstring says from which size of q + k on features are never enough.
    case = case_of(batch=1, seq_len=128, head_dim=16, scale=0.02, dtype="float64")
    few, many = (
        sum(distance(case, f"performer:features={f}:seed={seed}") ** 2 for seed in range(4)) ** 0.5
        for f in (256, 4096)
    )
    assert 3 < few / many < 5.3  # 4 ± what four draws leave


def test_orthogonal_directions_err_less_than_independent_ones(monkeypatch):
    case = case_of(batch=1, seq_len=64, head_dim=8, scale=0.1, dtype="float64")

    def error() -> float:
        return sum(distance(case, f"performer:features=8:seed={seed}") ** 2 for seed in range(40))

    orthogonal = error()
    monkeypatch.setattr(
        torch.linalg, "qr", lambda x: (x / x.norm(dim=-2, keepdim=True), torch.ones(1, 8, 8))
    )
    assert orthogonal < error()


def test_keys_that_are_far_apart_cost_no_query_its_own():
    # Within one chunk the last key outweighs the first by e^200 in every feature.
    case = case_of("causal", batch=1, heads=1, seq_len=8, head_dim=8)
    q, k, v = normal(case, dtype=torch.float32)
    k[:, :, :4] *= 20
    impl = implementation("performer")
    assert impl.definition is not None
    o, expected = (
        impl.build(case)(q, k, v),
        impl.definition(case)(q.double(), k.double(), v.double()),
    )
    torch.testing.assert_close(o.double(), expected, rtol=1e-3, atol=1e-3)


def test_projections_that_are_drawn_leave_the_error_that_the_docstring_states():
    case = case_of(seq_len=512, head_dim=16, dtype="float64")
    for rank in (16, 64, 512):
        expected = (1 + case.kv_len / rank) ** 0.5
        assert distance(case, f"linformer:{rank}") == pytest.approx(expected, rel=0.2)


def test_landmarks_err_less_where_tokens_are_like_their_neighbours():
    case = case_of(seq_len=128, head_dim=8, dtype="float64")
    q, k, v = (x[:, :, ::16].repeat_interleave(16, dim=2) for x in normal(case))
    exact = torch.softmax(q @ k.mT * case.softmax_scale, -1) @ v
    call = implementation("nystrom:landmarks=8:iterations=40").build(case)
    torch.testing.assert_close(call(q, k, v), exact)  # a landmark for each different token
    assert distance(case, "nystrom:landmarks=8:iterations=40") > 0.3
