"""Speed of the three places where users wait for our own code: `make benchmark`.

Records are stored and loaded, laws are fitted over a run, and the gate decides from rounds.
Nothing here asserts on a time.
"""

import random
from dataclasses import replace
from itertools import product

import pytest

from attnbench.analysis.scaling import scaling
from attnbench.gate.decide.data import Checked, GateRun, Round, Rules, Version
from attnbench.gate.decide.sequential import RoundPlan, SequentialDecision
from attnbench.gate.decide.stored import load_gate, write_gate
from attnbench.gate.decide.verdict import decide
from attnbench.schema.case import Case, parse_mask
from attnbench.schema.record import Cell, Record
from attnbench.store.runs import load_run, new_run
from tests import synthetic

SIZES = (1, 128, 256, 512, 1024, 2048, 4096, 8192)
IMPLS = tuple(f"impl-{i}" for i in range(27))


@pytest.fixture(scope="module")
def records() -> list[Record]:
    """Some 10,000 cells of known laws: passes, masks, batches, heads and head dims by n."""
    grid = product(
        IMPLS, ("forward", "both"), ("full", "causal"), (1, 2), (1, 4, 8), (32, 64), SIZES
    )
    like, found = synthetic.ok(Case(seq_len=64), "naive"), []
    for impl, pass_, mask, batch, heads, d, n in grid:
        case = Case(
            pass_=pass_, mask=parse_mask(mask), batch=batch, heads=heads, head_dim=d, seq_len=n
        )
        time_us = 20 + batch * heads * n**2 * (1e-3 + 4e-5 * d)
        samples = synthetic.samples(time_us, f"{impl} {case.case_id}", 15)
        found.append(replace(like, cell=Cell(case=case, impl=impl), samples=samples))
    return found


@pytest.fixture(scope="module")
def folder(records, tmp_path_factory):
    return synthetic.write_run(tmp_path_factory.mktemp("runs"), "large", records)


def test_storing_a_record(benchmark, records, tmp_path):
    with new_run(tmp_path, "stored", {}) as made:
        benchmark(lambda: made.append(records[0].to_line()))


def test_loading_a_run(benchmark, folder):
    benchmark.pedantic(load_run, args=(folder,), rounds=3)


def test_fitting_laws_over_a_run(benchmark, folder):
    laws = [{"name": impl, "time": "n^2 d", "memory": "n^2"} for impl in IMPLS]
    run = load_run(folder)
    run = replace(run, info=run.info | {"implementations": laws})
    found = benchmark.pedantic(scaling, args=(run,), rounds=3)
    benchmark.extra_info["findings"] = len(found.findings)


CELLS = tuple(
    Cell(case=Case(seq_len=n), impl=i) for i in ("naive", "sdpa") for n in (128, 256, 512, 1024)
)


@pytest.fixture(scope="module")
def gate_run() -> GateRun:
    """Eight cells, of which two are slower by 5 %: from screening to the last look."""
    base, candidate = (Version(name=x, root="/tmp", files=()) for x in ("base", "candidate"))
    ok = Checked(status="ok", metrics={"flops_counted": 1 << 25, "kernel": "aten::bmm"})
    checks = {number: {"base": ok, "candidate": ok} for number in range(len(CELLS))}
    run = GateRun(
        rules=Rules(), base=base, candidate=candidate, cells=CELLS, rounds=(), environment={},
        checks=checks,
    )  # fmt: skip
    decision, chance, rounds = (
        SequentialDecision(range(len(CELLS)), run.rules), random.Random(1), [],
    )  # fmt: skip
    while (order := decision.next_round()) is not None:
        rounds.append(_round(order, chance))
        decision.add(rounds[-1])
    return replace(run, rounds=tuple(rounds))


def _round(order: RoundPlan, chance: random.Random) -> Round:
    samples = {}
    for cell in dict.fromkeys([*order.cells, *([] if order.slowed is None else [order.slowed])]):
        slower = {"base": 1.0, "candidate": 1.05 if cell in (0, 5) else 1.0, "null": 1.0}
        slower |= {"planted": 1.1} if cell == order.slowed else {}
        samples[cell] = {of: _samples(factor, chance) for of, factor in slower.items()}
    return Round(stage=order.stage, samples=samples, spent_s=1.0)


def _samples(factor: float, chance: random.Random) -> tuple[tuple[int, ...], ...]:
    ns = 100_000 * factor * chance.lognormvariate(0, 0.03)
    return tuple(tuple(round(ns * (1 + chance.random())) for _ in range(4)) for _ in range(8))


def test_deciding_from_stored_rounds(benchmark, gate_run, tmp_path):
    outcome = decide(gate_run)
    file = write_gate(tmp_path, gate_run, outcome)
    benchmark.extra_info["rounds"] = len(gate_run.rounds)
    assert benchmark(lambda: decide(load_gate(file, tmp_path))) == outcome
