"""Failed checks by kind, and what they have in common that the others have not."""

from typing import Any

import pytest

from attnbench.cli.faults import lines
from attnbench.execution.checks import CheckResult
from attnbench.execution.failures import failures, pattern
from attnbench.planning.battery import Item, battery

ITEMS = [
    item
    for item in [item for item in battery("cpu", ("float32", "bfloat16")) if item.case.needs_grad]
    if "property" not in item.draw
]


def results(fails: Any, fault: Any = lambda item: {}) -> list[CheckResult]:
    """The battery, in which those items fail that `fails` picks, with a fault each."""
    return [
        CheckResult(
            item=item, impl="mine", status="incorrect" if fails(item) else "ok", reason="why",
            metrics={"fault": fault(item)} if fails(item) else {},
        )
        for item in ITEMS
    ]  # fmt: skip


def masked(item: Item) -> bool:
    return not item.case.unmasked and item.case.mask.text == "causal"


@pytest.mark.parametrize(
    ("fails", "found"),
    [
        (masked, ("causal",)),
        (lambda item: masked(item) and item.case.seq_len != item.case.kv_len, ("causal", "L != S")),
        (lambda item: item.case.dtype == "bfloat16", ("bfloat16",)),
        (lambda item: item.case.kv_heads < item.case.heads, ("grouped heads",)),
        (lambda item: "query_amplitude" in item.draw, ("large logits",)),
        (lambda item: bool(item.draw.get("strided")), ("strided inputs",)),
        (lambda item: True, ()),
    ],
)
def test_the_pattern_is_what_all_failed_and_none_that_passed_have(fails, found):
    failed, passed = [x for x in ITEMS if fails(x)], [x for x in ITEMS if not fails(x)]
    assert pattern(failed, passed) == (found, 0)


def test_those_that_passed_with_the_same_pattern_are_counted():
    failed = [item for item in ITEMS if masked(item)]
    assert pattern(failed[1:], [*failed[:1], *(x for x in ITEMS if not masked(x))]) == (
        ("causal",), 1,
    )  # fmt: skip


def test_what_others_may_follow_from_comes_first_and_what_was_not_tried_last():
    codes = iter(["shape", "skipped", "wrong", "kept-result"] * len(ITEMS))
    found = failures(results(lambda item: True, lambda item: {"code": next(codes)}))
    assert [kind.first.code for kind in found] == ["kept-result", "shape", "wrong", "skipped"]
    assert sum(len(kind.results) for kind in found) == len(ITEMS)


def test_of_several_explanations_the_one_that_serves_most_counts():
    def fault(item: Item) -> dict[str, Any]:
        single = item.case.seq_len == 1
        codes = ["scale-missing", "mask-ignored"] if single else ["mask-ignored"]
        around = item.case.workload != "attention"
        return {"code": "wrong", "tensor": "o", "explained": None if around else codes}

    (kind,) = failures(results(lambda item: True, fault))
    assert (kind.explained, len(kind.results)) == ("mask-ignored", len(ITEMS))
    assert kind.first.item.case.workload == "attention"


def test_a_constant_ratio_is_named_where_it_is_a_known_factor():
    def fault(item: Item) -> dict[str, Any]:
        return {"code": "wrong", "explained": ["ratio"], "ratio": item.case.head_dim**0.5}

    (kind,) = failures(results(lambda item: True, fault))
    assert kind.factors == ("sqrt(D)",)
    assert kind.ratios is not None
    assert kind.ratios == pytest.approx((4.0, 128**0.5))


def test_a_kind_of_failure_reads_as_sentences():
    fault = {
        "code": "wrong", "tensor": "o", "explained": ["one-key-more"], "got": -1.5,
        "expected": 0.25, "allowed": 1e-6, "error": 1.75,
        "at": {"batch": 0, "head": 2, "query": 17, "dim": 5},
        "touched": {"batch": [1, 1, 0, 0], "head": [4, 4, 0, 3], "query": [63, 64, 0, 62]},
        "keys": {"query": 17, "seen": [18, 18], "span": [0, 17]},
    }  # fmt: skip
    (kind,) = failures(results(masked, lambda item: fault))
    what, why, case, where, key, touched = lines(kind, 1)
    assert what == f"1. o is wrong: {len(kind.results)} checks, only causal"
    assert "off by one" in why
    assert "float32 causal" in case
    assert (
        where
        == "   batch 0, head 2, query 17, dim 5: expected 0.25, got -1.5; the error may be 1e-06"
    )
    assert key == "   query 17 sees key 18; it should see 0 … 17"
    assert touched == "   wrong in all 4 heads, 63 of 64 queries (0 … 62)"
