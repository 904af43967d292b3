"""Of a large case a part is checked: drawn rows of it, and all of a smaller one."""

from dataclasses import replace

import pytest
import torch

from attnbench.analysis.notes import notes
from attnbench.api import (
    ALL_MASKS,
    IMPLEMENTATIONS,
    attention_builder,
    hidden_and_blind,
    implementation,
)
from attnbench.api.loader import load_built_in
from attnbench.measure.clock import clock_for
from attnbench.measure.sampling import StoppingRule
from attnbench.measure.watch import Watch
from attnbench.schema.case import Case, parse_mask, parse_position
from attnbench.schema.record import Record
from attnbench.worker import drawn
from attnbench.worker.checking import Entry
from attnbench.worker.inputs import Draw
from attnbench.worker.measuring import Instruments, measure_group
from attnbench.worker.reference import Drawn, plain_attention
from attnbench.worker.workloads import WORKLOADS
from tests.conftest import collector

load_built_in()
CAUSAL = parse_mask("causal")
RULE = StoppingRule(precision=0.5, min_time_s=0.001, max_time_s=0.01)
CASE = Case(batch=2, heads=4, kv_heads=2, seq_len=1024, head_dim=16, mask=CAUSAL)


def measured(case: Case, *names: str, reference_s: float):
    instruments = Instruments(
        rule=RULE, clock=clock_for("cpu"), watch=Watch(), reference_s=reference_s
    )
    records: list[Record] = []
    measure_group([Entry(index=0, case=case, impls=names)], instruments, collector(records))
    return {record.cell.impl: record for record in records}


@pytest.fixture
def built():
    """Register a builder under a temporary name."""
    added = []

    def add(name, build):
        attention_builder(name, masks=ALL_MASKS)(build)
        added.append(name)

    yield add
    for name in added:
        IMPLEMENTATIONS.remove(name)


@pytest.fixture
def second_a_row(monkeypatch):
    """A row of a head takes the reference a second: half for float64, half for the baseline."""
    now = [0.0]

    def slow(case, tensors, *, drawn, **options):
        now[0] += len(drawn.row_R) * len(drawn.slice_P) / 2
        return plain_attention(case, tensors, drawn=drawn, **options)

    monkeypatch.setattr(drawn, "perf_counter", lambda: now[0])
    monkeypatch.setattr(drawn, "plain_attention", slow)


@pytest.mark.parametrize("position", ["none", "rope", "alibi", "shaw:clip=3"])
@pytest.mark.parametrize("mask", ["full", "window:5", "document:7+11", "padding:20+0:causal=1"])
@pytest.mark.parametrize("terms", [False, True])
def test_a_drawn_reference_is_that_part_of_the_whole(mask, position, terms):
    case = replace(
        CASE, seq_len=30, kv_len=33, mask=parse_mask(mask), position=parse_position(position),
        pass_="both", dtype="float64",
    )  # fmt: skip
    attention = WORKLOADS.get("attention")
    tensors = attention.tensors(case)
    attention.fill(case, tensors, Draw(seed=3))
    whole = plain_attention(case, tensors, terms=terms)
    for rows in (torch.tensor([0, 3, 29]), torch.arange(30)):
        part = Drawn(case=case, row_R=rows, slice_P=torch.tensor([0, 1, 3]))
        inputs = {name: part.of(name, x) for name, x in tensors.items()}
        found = plain_attention(case, inputs, terms=terms, drawn=part)
        names = ["o", "dq"] + ["dk", "dv"] * (len(rows) == 30)  # sums over all rows
        for kind in ("values", "terms"):
            of_whole = getattr(whole, kind)
            for name in names if of_whole else ():
                expected = part.of(name, of_whole[name])
                torch.testing.assert_close(getattr(found, kind)[name], expected)


def attend(case: Case, q, k, v, mask=None, scale=None):
    """Attention as anyone writes it."""
    hidden, _ = hidden_and_blind(case if mask is None else replace(case, mask=parse_mask(mask)))
    k, v = (x.repeat_interleave(case.heads // case.kv_heads, dim=1) for x in (k, v))
    scores = (q.float() @ k.float().mT) * (scale or case.softmax_scale)
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    return (weights @ v.float()).to(q.dtype)


def changed(change):
    """A kernel that is right, but for `change(o, case)`."""

    def build(case: Case):
        def call(q, k, v):
            o = attend(case, q, k, v).clone()
            with torch.no_grad():
                change(o, case)
            return o

        return call

    return build


def lose_last_key(case: Case):
    def call(q, k, v):
        unseen = v.clone()
        unseen[:, :, -1] = 0
        return attend(case, q, k, unseen)

    return call


WRONG = {
    "last-key": lose_last_key,
    "scale": lambda case: lambda q, k, v: attend(case, q, k, v, scale=1.1 * case.softmax_scale),
    "mask": lambda case: lambda q, k, v: attend(case, q, k, v, mask="window:512"),
    "one-head": changed(lambda o, case: o[1, 3].mul_(1.1)),
    "first-row": changed(lambda o, case: o[:, :, 0].zero_()),
    "small-too": changed(lambda o, case: o[0, 0, case.seq_len // 2].add_(1)),
    "not-finite": changed(lambda o, case: o[0, 0, 513:514].fill_(torch.nan)),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_wrong_in_some_rows_is_incorrect(built, second_a_row, dtype):
    for name, build in WRONG.items():
        built(name, build)
    built("right", changed(lambda o, case: None))
    records = measured(replace(CASE, dtype=dtype), "right", *WRONG, reference_s=1200)
    found = {name: record.status for name, record in records.items()}
    assert found == dict.fromkeys(WRONG, "incorrect") | {"right": "ok"}
    assert records["small-too"].reason.endswith("(at n = 128)")
    assert "not finite" in records["not-finite"].reason
    assert records["right"].metrics["checked"] == "1 in 10.2 rows, all at n = 128"
    assert "checked on 1 in 10.2 rows, all at n = 128" in (notes(records["right"]) or "")


@pytest.mark.parametrize(
    ("mask", "smaller"),
    [
        ("window:400", "window:50"),
        ("padding:1000+0:causal=1", "padding:125+0:causal=1"),
        ("document:3+500:causal=0", "document:1+63:causal=0"),
        ("prefix:80", "prefix:10"),
    ],
)
def test_the_smaller_case_has_the_mask_in_proportion(built, second_a_row, mask, smaller):
    cases = []

    def build(case: Case):
        cases.append(case)
        return implementation("naive").build(case)

    built("seen", build)
    case = replace(CASE, mask=parse_mask(mask))
    assert measured(case, "seen", reference_s=1200)["seen"].status == "ok"
    small = replace(case, seq_len=128, kv_len=128, mask=parse_mask(smaller))
    assert set(cases) == {case, small}


def test_a_single_query_stays_one_over_a_shorter_cache(built, second_a_row):
    cases = []

    def build(case: Case):
        cases.append(case)
        return implementation("naive").build(case)

    built("seen", build)
    case = replace(CASE, batch=8, seq_len=1, kv_len=1024)
    record = measured(case, "seen", reference_s=12)["seen"]
    assert record.metrics["checked"] == "1 in 4 rows, all at n = 128"
    assert set(cases) == {case, replace(case, kv_len=128)}


def test_gradients_are_checked_of_whole_heads_or_not_at_all(built, second_a_row):
    def wrong(case: Case):
        return lambda q, k, v: attend(case, q, k, v * 1.0 + 0.1 * (v - v.detach()))

    built("wrong", wrong)
    case = replace(CASE, pass_="both")
    records = measured(case, "naive", "wrong", reference_s=3500)
    assert records["naive"].metrics["checked"] == "1 in 4 rows, all at n = 256"
    assert records["wrong"].status == "incorrect"
    assert "dv" in records["wrong"].reason
    record = measured(case, "naive", reference_s=1200)["naive"]
    assert record.status == "skipped"
    assert record.reason.startswith("its check takes too long")
