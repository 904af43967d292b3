"""Gate runs as they could have been measured. Deterministic; nothing is measured or started."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from msgspec import structs

from attnbench.gate.decide.data import (
    Checked,
    ExactMetrics,
    Failure,
    GateRun,
    Round,
    Rules,
    Samples,
    Variant,
    Version,
    VersionName,
)
from attnbench.gate.decide.sequential import RoundPlan, SequentialDecision
from attnbench.gate.decide.verdict import comparable
from attnbench.schema.case import Case
from attnbench.schema.record import Cell
from tests import synthetic

CELLS = tuple(
    Cell(case=Case(seq_len=n, heads=4, head_dim=64), impl=impl)
    for impl in ("naive", "sdpa")
    for n in (128, 256, 512, 1024)
)
METRICS: ExactMetrics = {
    "flops_counted": 33_554_432, "flops_counted_source": "dispatched",
    "memory_workspace_bytes": 2_097_152, "memory_prepared_bytes": 0,
    "kernel": "aten::bmm; aten::_softmax", "kernel_count": 3,
}  # fmt: skip
OK = Checked(status="ok", metrics=METRICS)
BASE = Version(
    name="base", root="/tmp/base", files=("/tmp/base/fast.py",), ref="main",
    commit="3f2a91c0d1e5b7a8c9d0e1f2a3b4c5d6e7f8a9b0",
)  # fmt: skip
SEGFAULT = Failure(variant="candidate", code="crashed", reason="killed by signal 11 (SIGSEGV)")
CANDIDATE = Version(
    name="candidate", root="/home/me/repo", files=("/home/me/repo/fast.py",),
    commit="9b01c2d3e4f5a6b7c8d9e0f1a2b3c4d5e6f7a8b9", dirty=True,
)  # fmt: skip


def checks(
    cells: Sequence[Cell], other: Mapping[int, Any] | None = None
) -> dict[int, dict[VersionName, Checked]]:
    """All right on both sides, but for the cells in `other`."""
    return {
        number: {"base": OK, "candidate": OK, **(other or {}).get(number, {})}
        for number in range(len(cells))
    }


def changed(**metrics: Any) -> dict[VersionName, Checked]:
    """The checks of a cell whose metrics differ on the candidate's side."""
    return {"candidate": replace(OK, metrics={**METRICS, **metrics})}  # type: ignore[typeddict-item]


def a_round(
    order: RoundPlan,
    slower: Mapping[int, float],
    rng: random.Random,
    *,
    noise: float = 0.01,
    threshold: float = 0.1,
    null_bias: float = 0.0,
    failing: Mapping[int, Failure] | None = None,
) -> Round:
    """One round as `order` wants it. `slower` holds shares by cell, 0.1 for 10 % slower."""
    samples: dict[int, dict[Variant, Samples]] = {}
    failures = {c: f for c, f in (failing or {}).items() if c in order.cells}
    wanted = [cell for cell in order.cells if cell not in failures]
    for cell in dict.fromkeys([*wanted, *([] if order.slowed is None else [order.slowed])]):
        base_ns = 40_000 * 3 ** (cell % 4) * rng.lognormvariate(0, 0.05)
        factors: dict[Variant, float] = {"base": 1.0}
        if cell in wanted:
            factors |= {"candidate": 1 + slower.get(cell, 0.0), "null": 1 + null_bias}
        if cell == order.slowed:
            factors["planted"] = 1 + threshold
        samples[cell] = {of: _samples(base_ns * f, rng, noise) for of, f in factors.items()}
    return Round(
        stage=order.stage, samples=samples, failures=failures, spent_s=1.5,
        facts={"stolen": round(rng.uniform(0, 0.002), 5)},
    )  # fmt: skip


def _samples(fastest_ns: float, rng: random.Random, noise: float) -> Samples:
    """Two samples of four batches; what a process of a round has in common strays by `noise`."""
    ns = fastest_ns * rng.lognormvariate(0, noise / 2**0.5)
    late = (lambda: rng.expovariate(60)) if noise else (lambda: 0.0)
    return tuple(tuple(round(ns * (1 + late())) for _ in range(4)) for _ in range(2))


def a_run(
    slower: Mapping[int, float] | None = None,
    *,
    cells: Sequence[Cell] = CELLS,
    rules: Rules | None = None,
    noise: float = 0.01,
    seed: int = 0,
    other_checks: Mapping[int, Any] | None = None,
    planted: float | None = None,
    null_bias: float = 0.0,
    discarded: Iterable[int] = (),
    failing: Mapping[int, Failure] | None = None,
    most_rounds: int = 500,
) -> GateRun:
    """A run as the decision would have it go on, until all is decided or `most_rounds` are over.

    `planted` is the slowdown of the control (the threshold unless given); rounds numbered in
    `discarded` (from 0) count for nothing.
    """
    rules = rules or Rules()
    run = GateRun(
        rules=rules, base=BASE, candidate=CANDIDATE, cells=tuple(cells), rounds=(),
        checks=checks(cells, other_checks), environment=synthetic.CPU | {"threads": 1},
        options={"base": "main", "seed": seed}, created="2026-11-21T01:02:03+00:00",
        spent={"checks_s": 12.5},
    )  # fmt: skip
    decision, rng = SequentialDecision(comparable(run), rules, seed), random.Random(seed)
    rounds: list[Round] = []
    while (order := decision.next_round()) is not None and len(rounds) < most_rounds:
        found = a_round(
            order, slower or {}, rng, noise=noise, null_bias=null_bias, failing=failing,
            threshold=rules.threshold if planted is None else planted,
        )  # fmt: skip
        if len(rounds) in set(discarded):
            found = structs.replace(found, discarded="another process used 1.3 CPUs")
        rounds.append(found)
        decision.add(found)
    rounds_s = sum(found.spent_s for found in rounds)
    spent = {"checks_s": 12.5, "rounds_s": rounds_s, "wall_s": 13.1 + rounds_s}
    return replace(run, rounds=tuple(rounds), spent=spent, over_budget=order is not None)


# One run of each kind that a reader may meet, by what it shows.
def the_kinds() -> dict[str, GateRun]:
    """Runs that end in each of the ways there are."""
    wrong = Checked(status="incorrect", reason="o is off by 0.31 at [0, 1, 5, 7], allowed 2e-06")
    absent = Checked(status="absent", reason="there is no such implementation")
    grown = changed(memory_workspace_bytes=4_194_304, kernel="aten::bmm; aten::clone")
    return {
        "clean": a_run(discarded=[2]),
        "regressed": a_run({5: 0.12, 2: -0.2}, seed=1, discarded=[3, 9]),
        "broken": a_run(
            {6: 1.3}, seed=2,
            other_checks={0: {"candidate": wrong}, 1: {"base": absent}, 7: grown},
            failing={2: SEGFAULT},
        ),
        "inconclusive": a_run({3: 0.06}, seed=3, noise=0.06, rules=Rules(looks=(8, 12))),
        "blind": a_run(planted=0.0, seed=4),
        "untrusted": a_run(null_bias=0.06, seed=5),
        "cut short": a_run({1: 0.1}, seed=6, most_rounds=11),
        "nothing": a_run(
            cells=CELLS[:2], other_checks={n: {"base": absent} for n in range(2)}, seed=7
        ),
    }  # fmt: skip
