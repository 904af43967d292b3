"""Speed of what the gate does beside measuring: `make benchmark`. Nothing asserts on a time.

The decision is asked between rounds and decides again after each; a round takes seconds, so that
milliseconds here are nothing. Resampling thousands of runs, as its self-test does, is not.
"""

import random
from dataclasses import replace

import pytest

from attnbench.base.jsontext import decode, encode
from attnbench.gate.decide.data import Checked, GateRun, Round, Rules, Version
from attnbench.gate.decide.exact import compare
from attnbench.gate.decide.sequential import RoundPlan, SequentialDecision
from attnbench.gate.decide.stored import load_gate, write_gate
from attnbench.gate.decide.verdict import comparable, decide
from attnbench.schema.case import Case
from attnbench.schema.record import Cell

CELLS = tuple(
    Cell(case=Case(seq_len=n), impl=i) for i in ("naive", "sdpa") for n in (128, 256, 512, 1024)
)
SIDES = {name: Version(name=name, root="/tmp", files=()) for name in ("base", "candidate")}
METRICS = {"flops_counted": 1 << 25, "memory_workspace_bytes": 1 << 21, "kernel": "aten::bmm"}
OK = Checked(status="ok", metrics=METRICS)


@pytest.fixture(scope="module")
def full_run() -> GateRun:
    """Eight cells, of which two are slower by 5 %: screening, and confirmation to the last look."""
    run = GateRun(
        rules=Rules(), **SIDES, cells=CELLS, rounds=(), environment={},
        checks={number: {"base": OK, "candidate": OK} for number in range(len(CELLS))},
    )  # fmt: skip
    decision, chance, rounds = (
        SequentialDecision(range(len(CELLS)), run.rules),
        random.Random(1),
        [],
    )
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


@pytest.mark.benchmark(group="gate: a whole run of 8 cells")
def test_deciding_a_whole_run(benchmark, full_run):
    benchmark.extra_info["rounds"] = len(full_run.rounds)
    outcome = benchmark(decide, full_run)
    assert len(outcome.rows) == 8


@pytest.mark.benchmark(group="gate: a whole run of 8 cells")
def test_deciding_round_by_round(benchmark, full_run):
    benchmark.extra_info["rounds"] = len(full_run.rounds)

    def rounds() -> SequentialDecision:
        decision = SequentialDecision(comparable(full_run), full_run.rules)
        for found in full_run.rounds:
            decision.next_round()
            decision.add(found)
        return decision

    assert benchmark(rounds).controls.summary().rounds


@pytest.mark.benchmark(group="gate: a whole run of 8 cells")
def test_replaying_a_stored_run(benchmark, full_run, tmp_path):
    file = write_gate(tmp_path, full_run, decide(full_run))
    benchmark.extra_info["bytes"] = file.stat().st_size
    outcome = benchmark(lambda: decide(load_gate(file, tmp_path)))
    assert outcome == decide(full_run)


@pytest.mark.benchmark(group="gate: one round")
def test_the_log_ratios_of_a_round(benchmark, full_run):
    first = full_run.rounds[0]
    benchmark.extra_info["cells"] = len(first.samples)
    benchmark(lambda: [first.log_ratio(cell, "candidate") for cell in first.samples])


@pytest.mark.benchmark(group="gate: one round")
def test_a_round_to_json_and_back(benchmark, full_run):
    first = full_run.rounds[0]
    benchmark(lambda: decode(encode(first), Round))


@pytest.mark.benchmark(group="gate: one cell")
def test_what_repeats_exactly_in_a_cell(benchmark):
    grown = Checked(status="ok", metrics=METRICS | {"memory_workspace_bytes": 1 << 22})
    assert benchmark(compare, OK, grown, 0.01).failures


@pytest.mark.benchmark(group="gate: loading implementations")
def test_the_loader_on_a_file_of_one_implementation(benchmark, tmp_path):
    from attnbench.api import IMPLEMENTATIONS
    from attnbench.api.loader import load_file

    file = tmp_path / "loaded_for_benchmark.py"
    file.write_text(
        "from attnbench.api import attention\n\n\n"
        '@attention("loaded-for-benchmark")\n'
        "def core(q, k, v, *, causal, scale):\n    return q\n"
    )

    def load() -> list[str]:
        names = load_file(str(file))
        for name in names:
            IMPLEMENTATIONS.remove(name)
        return names

    assert benchmark(load) == ["loaded-for-benchmark"]
