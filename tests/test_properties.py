"""Each property of `attnbench check` is missed by an implementation that was made to lack it."""

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from attnbench.api import IMPLEMENTATIONS, Case, Patterned, attention, attention_builder, dense_mask
from attnbench.planning.battery import battery
from attnbench.worker.checking import check_item
from attnbench.worker.properties import HIDDEN_NAN, PROPERTIES

Call = Callable[..., torch.Tensor]
ITEMS = [item for item in battery("cpu", ("float32",)) if "property" in item.draw]


def method(case: Case, reach: int, lack: str, block: int) -> Call:
    """Attention to keys at most `reach` places away, less what it is to lack."""
    sizes = case.seq_len, case.kv_len, case.device
    place = torch.arange(case.kv_len)
    near = (place[:, None] - place).abs() <= reach
    mask = dense_mask(case.mask, *sizes)
    if lack == "no-look-ahead":
        mask = mask | (place == case.kv_len - 1)
    exact, latest = Patterned(case, mask & near), {}

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if lack == "two-calls-in-flight":
            latest["size"] = size = k.detach().abs().mean()
            q = q.clone()
            if q.requires_grad:
                q.register_hook(lambda gradient: gradient * latest["size"] / size)
        o = exact(q, k, v)
        if lack == "batch-and-heads-apart":
            return o + v.mean(dim=(0, 1, 2))
        if lack == "any-order-of-keys":
            return o + v[:, :, :1]
        if lack == "any-block-size":
            return o * (1 + block / 100)
        if lack == "exact-in-its-limit":
            return o * 1.01
        if lack == "gradcheck":
            return o + (v - v.detach()).sum() * 3
        return o

    return call


@pytest.fixture
def lacking(request: pytest.FixtureRequest) -> Iterator[str]:
    """An implementation that lacks a property, as its definition does; the name of the property."""
    lack: str = request.param
    own = ("any-order-of-keys", "any-block-size", "gradcheck", "two-calls-in-flight")
    shared = "" if lack in own else lack

    @attention_builder(
        "lacking",
        family="sparse",
        definition=lambda case, *, reach: method(case, reach, shared, 1),
        exact_at=lambda case: {"reach": case.kv_len},
        gqa=False,
    )
    def build(case: Case, *, reach: int = 1000, block: int = 16) -> Call:
        return method(case, reach, lack, block)

    yield lack
    IMPLEMENTATIONS.remove("lacking")


def verdicts() -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for item in ITEMS:
        result: dict[str, Any] = check_item(item.case, "lacking", item.draw, 0)
        found.setdefault(item.draw["property"], set()).add(result["status"])
    return found


@pytest.mark.parametrize("lacking", sorted({*PROPERTIES.names()} - {HIDDEN_NAN}), indirect=True)
def test_what_lacks_a_property_fails_for_it(lacking: str) -> None:
    assert "incorrect" in verdicts()[lacking]


@pytest.mark.parametrize("lacking", ["gradcheck"], indirect=True)
def test_a_gradient_that_is_not_the_outputs_is_named_with_its_place_and_both_values(
    lacking: str,
) -> None:
    item = next(x for x in ITEMS if x.draw["property"] == lacking)
    result: dict[str, Any] = check_item(item.case, "lacking", item.draw, 0)
    assert re.search(
        r"dv\[0, \d, \d, \d\] is \S+, by finite differences \S+ \(off by", result["reason"]
    )


@pytest.mark.parametrize("lacking", ["exact-in-its-limit"], indirect=True)
def test_a_definition_may_share_the_fault_of_its_implementation(lacking: str) -> None:
    plain = next(item for item in battery("cpu", ("float32",)) if item.name == "causal")
    assert check_item(plain.case, "lacking", {}, 0)["status"] == "ok"


@pytest.mark.parametrize(("declared", "kept_out", "status", "seen"), [
    (False, False, "ok", "shows"), (False, True, "ok", "kept out"),
    (True, False, "incorrect", None), (True, True, "ok", "kept out"),
])  # fmt: skip
def test_nan_in_hidden_keys_is_a_fact_and_wrong_where_it_is_declared(
    declared, kept_out, status, seen
):
    @attention("masked", hidden_may_be_nan=declared)
    def masked(q, k, v, *, causal, scale):
        place = torch.arange(k.shape[2])
        scores = (q @ k.mT * scale).masked_fill(place > place[:, None], -torch.inf)
        if not kept_out:
            return scores.softmax(-1) @ v
        return torch.cat([scores[:, :, i, : i + 1].softmax(-1)[:, :, None] @ v[:, :, : i + 1]
                          for i in place], 2)  # fmt: skip

    item = next(x for x in ITEMS if x.draw["property"] == HIDDEN_NAN)
    found = check_item(item.case, "masked", item.draw, 0)
    IMPLEMENTATIONS.remove("masked")
    assert (found["status"], found["metrics"].get("hidden_nan")) == (status, seen)


def test_a_method_that_takes_its_keys_from_the_queries_keeps_its_gradients_in_flight() -> None:
    """Nothing depends on k, whose gradient is 0 and no error; hashing does that."""

    @attention("of-queries")
    def of_queries(q, k, v, *, causal, scale):
        scores = (q @ q.mT * scale).masked_fill(
            torch.ones(*[q.shape[2]] * 2).triu(1) > 0, -torch.inf
        )
        return (scores if causal else q @ q.mT * scale).softmax(-1) @ v

    item = next(x for x in ITEMS if x.draw["property"] == "two-calls-in-flight")
    found = check_item(item.case, "of-queries", item.draw, 0)
    IMPLEMENTATIONS.remove("of-queries")
    assert found["status"] == "ok"
