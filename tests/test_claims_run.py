"""Claims that take a run: they follow what was counted and timed, and turn round where it lies."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from attnbench.claims.claim import CLAIMS
from attnbench.claims.evidence import Comparison, Evidence
from attnbench.claims.ledger import exit_code, ledger
from attnbench.execution.store import Run
from attnbench.schema.record import Record
from tests import synthetic
from tests.claimed import (
    OF_RUN,
    ask,
    attention_cells,
    changed,
    decode_cells,
    layer_cells,
    metric,
    run_of,
    slower,
)


@pytest.fixture(scope="module")
def whole_run() -> Run:
    return run_of(attention_cells() + layer_cells() + decode_cells())


def test_a_run_as_theory_has_it_contradicts_no_claim_and_answers_most(whole_run):
    found = ledger(whole_run, OF_RUN)
    assert [claim.id for claim, finding in found if not claim.agrees(finding)] == []
    open_ = {claim.id for claim, finding in found if finding.verdict == "inconclusive"}
    assert open_ <= {"recurrent-100x", "fused-projection", "total-time"}
    assert exit_code(found) == 0


LIES: list[tuple[str, Callable[[], list[Record]], Any, str]] = [
    ("total-flops", layer_cells, metric("flops_counted", lambda c, v: v + c.seq_len**3), "refuted"),
    ("heads-flops", attention_cells, metric("flops_counted", lambda c, v: v + c.heads), "refuted"),
    ("heads-memory", attention_cells,
     metric("memory_workspace_bytes", lambda c, v: 8 * c.seq_len**2), "refuted"),
    ("heads-time", attention_cells, slower(lambda c: 1 / c.heads), "refuted"),
    ("heads-parallel", attention_cells, slower(lambda c: 3, impl="naive-heads"), "holds"),
    ("scores-memory", attention_cells,
     metric("memory_workspace_bytes", lambda c, v: 64 * c.seq_len), "refuted"),
    ("scores-needed", attention_cells,
     metric("memory_workspace_bytes", lambda c, v: 8 * c.heads * c.seq_len**2), "holds"),
    ("fused-memory", attention_cells,
     metric("memory_workspace_bytes", lambda c, v: 8 * c.heads * c.seq_len**2), "refuted"),
    ("rope-overhead", attention_cells, slower(lambda c: 2, position="rope"), "refuted"),
    ("fused-projection", layer_cells, slower(lambda c: 1.3, projection="separate"), "holds"),
    ("per-head-projection", layer_cells, slower(lambda c: 0.5, projection="per-head"), "refuted"),
    ("cached-flops", decode_cells,
     metric("flops_counted", lambda c, v: v + c.seq_len**2), "refuted"),
    ("recomputed-flops", decode_cells,
     metric("flops_counted", lambda c, v: v + c.seq_len**2 * 256), "refuted"),
    ("rerun-flops", decode_cells, metric("flops_counted", lambda c, v: 2**19 * c.seq_len), "holds"),
    ("cached-time", decode_cells, slower(lambda c: c.seq_len**1.5, cache="static"), "refuted"),
    ("rerun-time", decode_cells, slower(lambda c: 1 / c.seq_len, cache="rerun"), "holds"),
    ("cache-speed", decode_cells, slower(lambda c: 1e-3, cache="none"), "refuted"),
    ("cache-grows", decode_cells,
     metric("memory_prepared_bytes", lambda c, v: c.seq_len**2), "refuted"),
    ("cache-concatenated", decode_cells,
     metric("memory_workspace_bytes", lambda c, v: 4096), "holds"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "cells", "change", "verdict"), LIES, ids=[row[0] for row in LIES])
def test_a_run_that_says_otherwise_turns_the_verdict_round(name, cells, change, verdict):
    finding = ask(name, changed(cells(), change))
    assert finding.verdict == verdict, finding.reason
    claim = CLAIMS.get(name)
    assert claim.agrees(finding) == claim.machine


def test_times_that_grow_faster_refute_the_quadratic_time():
    lying = changed(attention_cells()[:30], slower(lambda c: c.seq_len))
    assert ask("attention-time", lying).verdict == "refuted"


def test_a_cpu_says_nothing_about_gpus_but_shows_its_own_factor(whole_run):
    finding = ask("recurrent-100x", whole_run)
    assert finding.verdict == "inconclusive"
    assert "GPUs" in finding.reason
    assert finding.figures["least_ratio"]


FACTORS = {
    "short ones alone": (lambda case: 1 if case.seq_len == 64 else 1e4, "refuted"),
    "all": (lambda case: 1e-2, "refuted"),
    "none": (lambda case: 1e4, "holds"),
}


@pytest.mark.parametrize(("factor", "verdict"), FACTORS.values(), ids=FACTORS)
def test_one_length_on_a_gpu_below_a_hundredfold_refutes_it(factor, verdict):
    run = changed(layer_cells("cuda"), slower(factor, impl="gru"))
    assert ask("recurrent-100x", run).verdict == verdict


def test_comparisons_that_contradict_each_other_decide_nothing():
    mixed = changed(layer_cells(), slower(lambda c: 1.3 if c.seq_len == 64 else 0.7,
                                          projection="separate"))  # fmt: skip
    assert ask("fused-projection", mixed).verdict == "inconclusive"


def test_a_rerun_that_is_short_beside_its_width_is_not_judged():
    finding = ask("rerun-time", run_of(decode_cells(first=5, last=9)))
    assert finding.verdict == "inconclusive"
    assert "2 widths" in finding.reason


def test_an_interval_that_holds_the_limit_is_neither_above_nor_below_it():
    wide = Comparison(label="", value=1.2, low=0.9, high=1.5)
    assert not wide.above(1.0)
    assert not wide.below(1.0)
    assert wide.above(0.8)
    assert wide.below(1.6)


def test_a_ratio_of_too_few_samples_has_no_interval_and_decides_nothing():
    few = [replace(r, samples=r.samples[:4]) for r in decode_cells()]
    finding = ask("cache-speed", run_of(few))
    assert finding.verdict == "inconclusive"
    assert "no interval" in finding.reason
    assert finding.figures["ratio_low"] is None


def test_cells_with_fewer_key_value_heads_do_not_spoil_the_terms_of_the_others():
    def grouped(record: Record) -> Record:
        cell = replace(record.cell, case=replace(record.cell.case, kv_heads=2))
        flops = record.metrics["flops_counted"] // 2
        return replace(record, cell=cell, metrics=record.metrics | {"flops_counted": flops})

    cells = decode_cells()
    assert ask("cached-flops", run_of(cells + [grouped(r) for r in cells[:8]])).verdict == "holds"


def test_what_is_asked_of_the_largest_n_does_not_look_at_smaller_ones():
    slow_when_short = slower(lambda c: 2 if c.seq_len < 4096 else 1, position="rope")
    finding = ask("rope-overhead", changed(attention_cells(), slow_when_short))
    assert finding.verdict == "holds"
    assert "n=4096" in str(finding.figures["at"])


def test_pairs_differ_in_what_was_asked_alone():
    pairs = Evidence(run_of(layer_cells())).pairs({"projection": "separate"},
                                                  {"projection": "fused"})  # fmt: skip
    assert len(pairs) == 16
    for above, below in pairs:
        assert above.cell.impl == below.cell.impl
        assert replace(above.cell.case, projection="fused") == below.cell.case


HOSTILE = {
    "empty": list,
    "failed": synthetic.failed_records,
    "bare": synthetic.bare_records,
    "one size": lambda: [r for r in decode_cells() if r.cell.case.seq_len == 256],
    "zero times": lambda: [slower(lambda c: 0)(r) for r in decode_cells()],
    "nan times": lambda: [slower(lambda c: math.nan)(r) for r in attention_cells()],
    "zero counts": lambda: [metric("flops_counted", lambda c, v: 0)(r) for r in layer_cells()],
    "no counts": lambda: [replace(r, metrics={}) for r in attention_cells() + decode_cells()],
}


ONE_SIZE_IS_ENOUGH = (
    "cache-speed cache-concatenated cache-grows fused-projection per-head-projection".split()
)


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_run_that_says_little_gives_no_verdict_and_no_traceback(kind):
    kinds = ("counted",) if "counts" in kind else ("counted", "timed")
    names = [name for name in OF_RUN if CLAIMS.get(name).kind in kinds]
    names = [name for name in names if name not in ONE_SIZE_IS_ENOUGH]
    found = ledger(run_of(HOSTILE[kind]()), names)
    assert {finding.verdict for _, finding in found} == {"inconclusive"}
