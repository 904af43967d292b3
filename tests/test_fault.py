"""What a check says of a wrong result, in values: where it is wrong, and what would explain it."""

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from attnbench.api import IMPLEMENTATIONS, attention
from attnbench.schema.case import Case, parse_mask
from attnbench.worker import checking
from attnbench.worker.checking import check_item
from attnbench.worker.fault import fault_of
from attnbench.worker.inputs import Draw
from attnbench.worker.workloads import WORKLOADS

ATTENTION = WORKLOADS.get("attention")
CAUSAL = parse_mask("causal")
SQUARE = Case(heads=4, kv_heads=2, seq_len=40, head_dim=16, mask=CAUSAL)
UNEQUAL = Case(heads=2, seq_len=20, kv_len=33, head_dim=16, mask=CAUSAL)
FULL = Case(heads=4, kv_heads=2, seq_len=24, kv_len=70, head_dim=16)
BLIND = Case(heads=2, seq_len=33, kv_len=20, head_dim=16, mask=CAUSAL)
PREFIX = dataclasses.replace(UNEQUAL, mask=parse_mask("prefix:24"))
DOCUMENTS = dataclasses.replace(SQUARE, mask=parse_mask("document:11+6"))
PADDED = Case(batch=3, heads=2, seq_len=20, head_dim=16, mask=parse_mask("padding:8+20+13"))


def attend(q, k, v, *, scale, diagonal=None, tiled=False, hidden=()):
    """Attention in which a query sees the keys up to a diagonal, less those that are hidden."""
    share = q.shape[1] // k.shape[1]
    k, v = (
        x.repeat(1, share, 1, 1) if tiled else x.repeat_interleave(share, dim=1) for x in (k, v)
    )
    scores = (q * scale) @ k.mT
    if diagonal is not None:
        scores = scores + torch.full(scores.shape[-2:], -math.inf).triu(diagonal + 1)
    scores[..., list(hidden)] = -math.inf
    return scores.softmax(-1) @ v


def fault(case: Case, wrong: Callable[..., torch.Tensor], **draw: Any) -> dict[str, Any]:
    tensors = ATTENTION.tensors(case)
    ATTENTION.fill(case, tensors, Draw(seed=5, needles=True, **draw))
    o = wrong(*(tensors[name] for name in "qkv"), scale=case.softmax_scale)
    return fault_of(case, tensors, {"o": o}, ATTENTION.truth(case, tensors))


def at(diagonal: int | None, **more: Any) -> Callable[..., torch.Tensor]:
    return lambda q, k, v, scale: attend(q, k, v, scale=scale, diagonal=diagonal, **more)


EXPLAINED: dict[str, tuple[Case, Callable[..., torch.Tensor]]] = {
    "one-key-more": (SQUARE, at(1)),
    "one-key-less": (SQUARE, at(-1)),
    "mask-ignored": (UNEQUAL, at(None)),
    "top-left": (UNEQUAL, at(0)),
    "always-causal": (FULL, at(46)),
    "prefix-ignored": (PREFIX, at(13)),
    "documents-ignored": (DOCUMENTS, at(0)),
    "first-length": (PADDED, at(None, hidden=range(8, 20))),
    "heads-tiled": (SQUARE, at(0, tiled=True)),
    "scale-missing": (FULL, lambda q, k, v, scale: attend(q, k, v, scale=1.0)),
    "scale-log2(e)": (FULL, lambda q, k, v, scale: attend(q, k, v, scale=scale / math.log(2))),
    "rows-without-keys": (BLIND, at(-13)),
    "keys": (FULL, at(None, hidden=range(64, 70))),
    "ratio": (FULL, lambda q, k, v, scale: 1.25 * attend(q, k, v, scale=scale)),
    "precision": (
        FULL,
        lambda q, k, v, scale: attend(*(x.bfloat16() for x in (q, k, v)), scale=scale).float(),
    ),
    "heads-and-rows-mixed": (
        UNEQUAL,
        lambda q, k, v, scale: (
            attend(q, k, v, scale=scale, diagonal=13).transpose(1, 2).reshape(q.shape)
        ),
    ),
}


@pytest.mark.parametrize("code", EXPLAINED)
def test_a_computation_that_gives_the_same_explains_it(code):
    case, wrong = EXPLAINED[code]
    assert fault(case, wrong)["explained"][:1] == [code]


def test_the_keys_that_a_row_has_lost_or_seen_are_named():
    lost = fault(FULL, at(None, hidden=range(64, 70)))["keys"]
    assert (lost["lost"], lost["span"]) == ([64, 69], [0, 69])
    more = fault(UNEQUAL, at(14))["keys"]
    assert more["seen"] == [more["query"] + 14] * 2
    assert more["span"] == [0, more["query"] + 13]


def test_the_place_of_the_largest_error_and_what_is_touched_are_figures():
    def wrong(q, k, v, scale):
        o = attend(q, k, v, scale=scale)
        o[0, 2, 11, 3] += 1.0
        o[0, 3, 7, 5] += 0.5
        return o

    found = fault(FULL, wrong)
    assert found["at"] == {"batch": 0, "head": 2, "query": 11, "dim": 3}
    assert found["got"] - found["expected"] == pytest.approx(1.0, abs=1e-5)
    assert found["touched"] == {
        "batch": [1, 1, 0, 0],
        "head": [2, 4, 2, 3],
        "query": [2, 24, 7, 11],
    }
    assert found["explained"] == []


def test_figures_that_json_lacks_are_texts():
    found = fault(BLIND, at(-13))
    assert (found["code"], found["got"], found["error"]) == ("not-finite", "nan", "inf")


@pytest.fixture
def checked():
    """Check a function as an implementation in a case; the fault that was found."""

    def run(function: Callable[..., Any], case: Case = FULL) -> dict[str, Any]:
        attention("wrong")(function)
        try:
            found = check_item(case, "wrong", {}, 0)
        finally:
            IMPLEMENTATIONS.remove("wrong")
        assert found["status"] != "ok"
        return dict(found["metrics"]["fault"], status=found["status"])

    return run


def test_who_changes_its_input_is_told_so_although_the_result_is_wrong_too(checked):
    def writes(q, k, v, *, causal, scale):
        k.mul_(2)
        return attend(q, k, v, scale=scale)

    assert (checked(writes)["code"], checked(writes)["tensor"]) == ("wrote-input", "k")


@pytest.mark.parametrize("copied", [True, False])
def test_a_result_that_was_kept_is_told_from_one_that_is_wrong(checked, copied):
    kept: list[torch.Tensor] = []

    def keeps(q, k, v, *, causal, scale):
        kept.append(attend(q, k, v, scale=scale))
        return kept[0].clone() if copied else kept[0]

    assert checked(keeps)["code"] == "kept-result"


def test_inputs_of_an_earlier_call_are_named(checked):
    kept: list[torch.Tensor] = []

    def keeps_keys(q, k, v, *, causal, scale):
        kept.append(k.clone())
        return attend(q, kept[0], v, scale=scale)

    assert checked(keeps_keys)["explained"] == ["kept-k"]


def test_what_is_raised_is_named_with_the_line_of_the_authors_file(checked):
    def raises(q, k, v, *, causal, scale):
        raise ValueError("not a multiple of 16")

    found = checked(raises)
    assert (found["status"], found["code"], found["type"]) == ("error", "raised", "ValueError")
    assert "raise ValueError" in Path(found["file"]).read_text().splitlines()[found["line"] - 1]


@pytest.mark.usefixtures("one_thread")
def test_one_reference_serves_all_implementations_and_both_passes_of_the_same_inputs(monkeypatch):
    made: list[Case] = []
    workload = WORKLOADS.get("attention")

    def truth(case, tensors):
        made.append(case)
        return type(workload).truth(workload, case, tensors)

    monkeypatch.setattr(workload, "truth", truth, raising=False)
    checking._recent.clear()
    same: Any = {"heads": 2, "seq_len": 12, "head_dim": 8}
    both, forward = (Case(**same, pass_=pass_) for pass_ in ("both", "forward"))
    for case in (both, both, forward):
        assert check_item(case, "naive", {}, 0)["status"] == "ok"
    assert made == [both, both]  # one for each draw
    assert check_item(Case(**same, mask=CAUSAL), "naive", {}, 0)["status"] == "ok"
    assert len(made) == 4
