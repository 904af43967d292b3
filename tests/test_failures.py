"""Failed checks by kind, and what they have in common that the others have not."""

import itertools
from typing import Any

import pytest

from attnbench.analysis.failures import failures, pattern
from attnbench.planning.battery import battery
from attnbench.report.documents.check import headline, lines
from attnbench.schema.case import Case
from attnbench.schema.check import CheckResult, Item

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


@pytest.mark.parametrize(("fails", "found"), [
    (masked, ("causal",)),
    (lambda item: masked(item) and item.case.seq_len != item.case.kv_len, ("causal", "L != S")),
    (lambda item: item.case.dtype == "bfloat16", ("in bfloat16",)),
    (lambda item: item.case.kv_heads < item.case.heads, ("grouped heads",)),
    (lambda item: "query_amplitude" in item.draw, ("with large scores",)),
    (lambda item: item.case.layout == "BLHD", ("with BLHD inputs",)),
    (lambda item: True, ()),
])  # fmt: skip
def test_the_pattern_is_what_all_failed_and_none_that_passed_have(fails, found):
    failed, passed = [x for x in ITEMS if fails(x)], [x for x in ITEMS if not fails(x)]
    assert pattern(failed, passed) == (found, len(passed) * (not found))


def crossed(**values: Any) -> list[Item]:
    """An item for each combination of values of the case's fields."""
    rows = [dict(zip(values, row, strict=True)) for row in itertools.product(*values.values())]
    return [Item(name="crossed", case=Case.from_json(row)) for row in rows]


@pytest.mark.parametrize(
    ("items", "fails", "found"),
    [
        (
            crossed(heads=[2, 3, 4, 6], position=["none", "alibi", "t5"], seq_len=[8, 80]),
            lambda case: case.position.name == "alibi" and case.heads in (3, 6),
            ("with alibi", "H not a power of two"),
        ),
        (
            crossed(
                workload=["decode"], mask=["causal"], new_tokens=[4], head_dim=[8, 16],
                seq_len=[8, 40], cache=["static", "paged:64", "paged:4"],
            ),
            lambda case: case.cache == "paged:4",
            ("where the cache holds more than one page",),
        ),
        (
            crossed(scale=[None, 0.3], head_dim=[8, 16, 64], seq_len=[8, 80]),
            lambda case: case.scale is not None,
            ("with a scale of its own",),
        ),
    ],
)  # fmt: skip
def test_the_options_that_tell_failed_checks_from_others_are_named(items, fails, found):
    failed = [item for item in items if fails(item.case)]
    passed = [item for item in items if not fails(item.case)]
    assert pattern(failed, passed) == (found, 0)


def test_what_not_all_failed_checks_have_is_no_pattern_nor_what_many_passed_ones_have():
    failed = [item for item in ITEMS if masked(item)]
    other = next(item for item in ITEMS if item.case.unmasked and item.case.seq_len > 48)
    passed = [item for item in ITEMS if item not in failed and item is not other]
    assert pattern([*failed, other], passed) == ((), len(passed))
    assert pattern(failed[::3], [*passed, *failed[1::3], *failed[2::3]])[0] != ("causal",)


def test_what_two_values_tell_alike_is_said_as_both():
    items = crossed(batch=[1, 2], heads=[4], kv_heads=[2, 4], seq_len=list(range(8, 200, 8)))
    items = [item for item in items if (item.case.batch > 1) == (item.case.kv_heads == 2)]
    failed = [item for item in items if item.case.batch > 1]
    passed = [item for item in items if item not in failed]
    assert pattern(failed, passed) == (("grouped heads or batch > 1",), 0)


def test_of_few_checks_nothing_is_said_that_one_feature_tells_by_chance():
    few = [item for item in ITEMS if masked(item)][:1] + [x for x in ITEMS if not masked(x)][:30]
    assert pattern(few[:1], few[1:])[0] == ()
    assert pattern([x for x in ITEMS if masked(x)], few[1:])[0] == ("causal",)


def test_two_cases_in_four_dtypes_are_two_and_say_nothing_of_their_scale():
    dtypes = ["float32", "bfloat16", "float16", "float64"]
    items = crossed(
        dtype=dtypes, position=["none", "alibi"], scale=[None, 0.5], seq_len=[8, 40, 72]
    )
    failed = [x for x in items if x.case.scale and x.case.position.name == "alibi"
              and x.case.seq_len > 8]  # fmt: skip
    assert len(failed) == 8
    assert pattern(failed, [x for x in items if x not in failed])[0] == ()


@pytest.mark.parametrize(("spread", "explained"), [(0.2, None), (0.01, "scale-factor")])
def test_a_factor_is_one_where_checks_agree_and_half_precision_is_explained_by_wider_dtypes(
    spread, explained
):
    def fault(item: Item) -> dict[str, Any]:
        if item.case.dtype == "bfloat16":
            return {"code": "wrong", "tensor": "o", "explained": ["precision"]}
        off = 1.3 + spread * (item.case.seq_len > 40)
        return {"code": "wrong", "tensor": "o", "explained": ["scale-factor"], "scale-factor": off}

    (kind,) = failures(results(masked, fault))
    assert kind.explained == explained
    assert len(kind.results) == sum(map(masked, ITEMS))


def test_inputs_that_are_not_contiguous_are_named_and_not_the_batch():
    def strided(item: Item) -> bool:
        case = item.case
        tokens = case.batch > 1 or (case.seq_len > 1 and case.layout == "packed")
        return case.layout != "BHLD" and tokens and not (case.heads == 1 and case.layout == "BLHD")

    failed = [item for item in ITEMS if strided(item)]
    named = pattern(failed, [item for item in ITEMS if item not in failed])[0]
    assert "contiguous" in " ".join(named)


def test_what_others_may_follow_from_comes_first_and_what_was_not_tried_last():
    codes = iter(["shape", "skipped", "wrong", "kept-result"] * len(ITEMS))
    found = failures(results(lambda item: True, lambda item: {"code": next(codes)}))
    assert [kind.first.code for kind in found] == ["kept-result", "shape", "wrong", "skipped"]
    assert sum(len(kind.results) for kind in found) == len(ITEMS)


@pytest.mark.parametrize(
    ("name", "factor"),
    [
        ("sqrt(D)", lambda case: case.head_dim**0.5),
        ("scale", lambda case: case.softmax_scale),
        ("1/scale", lambda case: 1 / case.softmax_scale),
    ],
)
def test_a_constant_ratio_is_named_where_it_is_a_known_factor(name, factor):
    def fault(item: Item) -> dict[str, Any]:
        return {"code": "wrong", "explained": ["ratio"], "ratio": factor(item.case)}

    (kind,) = failures(results(lambda item: True, fault))
    assert kind.factors == (name,)
    assert kind.ratios is not None
    ratios = [factor(item.case) for item in ITEMS]
    assert kind.ratios == pytest.approx((min(ratios), max(ratios)))


def test_a_kind_of_failure_reads_as_sentences():
    fault = {
        "code": "wrong", "tensor": "o", "explained": ["one-key-more"], "got": -1.5,
        "expected": 0.25, "allowed": 1e-6, "error": 1.75,
        "at": {"batch": 0, "head": 2, "query": 17, "dim": 5},
        "touched": {"batch": [1, 1, 0, 0], "head": [4, 4, 0, 3], "query": [63, 64, 0, 62]},
        "keys": {"query": 17, "seen": [18, 18], "span": [0, 17]},
    }  # fmt: skip
    (kind,) = failures(results(masked, lambda item: fault))
    why, case, where, key, touched = lines(kind)
    assert headline(kind) == f"o is wrong: {len(kind.results)} checks, only causal"
    assert "off by one" in why
    assert "float32 causal" in case
    assert where == "batch 0, head 2, query 17, dim 5: expected 0.25, got -1.5; allowed error 1e-06"
    assert key == "query 17 also sees key 18; it should see 0 … 17"
    assert touched == "wrong in all 4 heads, 63 of 64 queries (0 … 62)"
    # Of what is wrong in the root mean square alone that is said.
    said = "in the root mean square it is off by 0.03, where 0.01 is allowed"
    for error in (5e-7, 1.75):
        fault |= {"error": error, "rms": 0.03, "rms_allowed": 0.01}
        (kind,) = failures(results(masked, lambda _, fault=fault: fault))
        assert (said in list(lines(kind))) == (error < 1e-6)
