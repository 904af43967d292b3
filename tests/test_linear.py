"""Linear and low-rank attention: what `attnbench check` cannot see of their definitions."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

from attnbench.api import Case, implementation
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


@pytest.mark.parametrize("row", ROWS, ids=ids(ROWS))
def test_it_is_what_its_definition_says_with_its_gradients(row):
    case = case_of(row["mask"], **SIZES[row["where"]], dtype=row["dtype"], pass_="both")
    result = check_item(case, row["name"], {}, 0)
    assert (result["status"], result["reason"]) == ("ok", None)


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


def by_logarithms(case: Case, log_w_BHLS: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Sums over values by weights that are given as logarithms; queries without a key give 0."""
    place = torch.arange(case.seq_len).unsqueeze(1) + case.kv_len - case.seq_len
    hidden = torch.arange(case.kv_len) > (place + case.seq_len * case.unmasked)
    blind = hidden.all(1, keepdim=True)
    weights = log_w_BHLS.masked_fill(hidden & ~blind, -torch.inf).softmax(-1)
    return weights.masked_fill(blind, 0) @ v


def with_gradients(function: Any, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Output, and gradients of q, k and v."""
    inputs = [x.clone().requires_grad_() for x in inputs]
    o = function(*inputs)
    return [o.detach(), *torch.autograd.grad(o.sin().sum(), inputs)]


@pytest.mark.parametrize("mask", ["full", "causal"])
@pytest.mark.parametrize("shift", [0, -50, -300])
def test_features_far_below_zero_keep_their_digits_and_their_gradients(mask, shift):
    case = case_of(mask, seq_len=9, kv_len=7, dtype="float64")

    def log_feature(x: torch.Tensor) -> torch.Tensor:
        return torch.where(x < 0, x, x.clamp(min=0).log1p())

    def exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        log_w = (log_feature(q).unsqueeze(3) + log_feature(k).unsqueeze(2)).logsumexp(-1)
        return by_logarithms(case, log_w, v)

    q, k, v = normal(case)
    q[..., 0], k[..., 1] = 0, 0  # where the features' two branches meet
    inputs = [q + shift, k + shift, v]
    expected = with_gradients(exact, inputs)
    for name in ("linear:4", "linear-recurrent", "linear-parallel"):
        impl = implementation(name)
        assert impl.definition is not None
        for attend in (impl.definition(case), impl.build(case)):
            for got, right in zip(with_gradients(attend, inputs), expected, strict=True):
                torch.testing.assert_close(got, right, rtol=1e-11, atol=1e-11)


def test_features_of_float32_are_not_denormal_numbers():
    case = case_of(seq_len=16, batch=1)
    q, k, v = (x.float() for x in normal(case))
    impl = implementation("linear")
    assert impl.definition is not None
    o = impl.build(case)(q - 50, k - 50, v)  # exp(-100) has 5 bits in float32
    expected = impl.definition(case)((q - 50).double(), (k - 50).double(), v.double())
    torch.testing.assert_close(o.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("queries", "keys"), [(12, 12), (12, 8), (5, 12), (6, 1)])
def test_keys_that_come_later_cost_no_query_of_the_definition_its_own(queries, keys):
    case = case_of("causal", seq_len=queries, kv_len=keys, head_dim=3, dtype="float64")
    far = torch.ones(keys, 1, dtype=torch.float64)
    far[: keys // 2] = 100
    impl = implementation("performer:features=7:chunk=4")
    assert impl.definition is not None
    omega = sys.modules[impl.build.func.__module__].directions(case, 7, 0)  # type: ignore[attr-defined]

    def exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        of_keys = k @ omega - k.square().sum(-1, keepdim=True) * case.softmax_scale / 2
        log_w = ((q @ omega).unsqueeze(3) + of_keys.unsqueeze(2)).logsumexp(-1)
        return by_logarithms(case, log_w, v)

    q, k, v = normal(case)
    expected = with_gradients(exact, [q, k * far, v])
    for attend in (impl.definition(case), impl.build(case)):
        for got, right in zip(with_gradients(attend, [q, k * far, v]), expected, strict=True):
            # The exponents, 10^4, are rounded to 10^-12; they are multiplied by keys of 10^2.
            torch.testing.assert_close(got, right, rtol=1e-9, atol=1e-9)
