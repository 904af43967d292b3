"""From a run to verdicts: which cells make a series, exact checks, liars, and runs of no use."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from attnbench.analysis.scaling import scaling
from attnbench.analysis.scaling.results import ExactFit, Scaling
from attnbench.analysis.scaling.series import Laws, all_series, measured
from attnbench.api import IMPLEMENTATIONS, attention, core_flops
from attnbench.schema.case import Case
from attnbench.schema.finding import COSTS
from attnbench.schema.record import Record, Sample, merged
from attnbench.store.runs import Run
from tests import synthetic
from tests.conftest import probed

SIZES = (128, 256, 512, 1024, 2048)
TimeOf = Callable[[Case], float]


def quadratic(case: Case) -> float:
    return 16 + 5e-5 * case.batch * case.heads * case.seq_len**2 * case.head_dim


def cell(case: Case, impl: str, time: TimeOf = quadratic, **metrics: Any) -> Record:
    record = synthetic.ok(case, impl, **metrics)
    return replace(record, samples=synthetic.samples(time(case), f"{case.case_id}{impl}", 9))


def run_of(records: list[Record], **laws: dict[str, Any]) -> Run:
    info = synthetic.run_info("it", records)
    ceilings = {"launch_us": 0.5, "cache_bytes": 2**25, "matmul_tflops": {"float32": 0.1}}
    info["environment"] = synthetic.CPU | {"ceilings": ceilings}
    for row in info["implementations"]:
        row.update(laws.get(row["name"].replace("-", "_"), {}))
    return Run(path=Path("it"), info=info, records=records)


def along(found: Scaling, quantity: str, axis: str = "n") -> ExactFit:
    (fit,) = [f for f in found.exact if f.quantity == quantity and f.axis == axis]
    return fit


def exact_verdict(fit: ExactFit) -> str:
    assert fit.finding is not None
    return fit.finding.verdict


def layer(n: int, width: int, heads: int = 4) -> Case:
    return Case(
        workload="layer", seq_len=n, width=width, heads=heads, head_dim=width // heads,
        projection="fused",
    )  # fmt: skip


# Which cells make a series.


def test_the_least_overhead_of_cold_times_has_a_pair_of_events_in_it():
    run = run_of([cell(Case(seq_len=n, heads=2), "naive", l2="cold") for n in SIZES])
    run.info["environment"]["ceilings"]["launch_cold_us"] = 2.5
    (series,) = all_series(run, Laws(run), measured(run))
    assert series.least_overhead_us == pytest.approx(5 * 0.5 + 2.0)


def on_cpu(n: int, process: int, samples: list[tuple[float, float, float]]) -> Record:
    """A record of wall times, processor times and what the probe of a fast core, 26 µs, took."""
    rows = [
        Sample(round=i, position=0, calls=1, time_us=t, e2e_us=t, cpu_us=cpu, probe_us=probe)
        for i, (t, cpu, probe) in enumerate(samples)
    ]
    done = cell(Case(seq_len=n), "naive", probe_us=26.0)
    return replace(done, samples=tuple(rows), process=process)


SLOW, TAKEN, FAST = ((170, 170, 45),) * 5, ((400, 60, 26), (300, 50, 26)) * 3, ((100, 99, 26),) * 5


@pytest.mark.parametrize(("processes", "time_us", "least", "most"), [
    ((FAST,), 100, 100, 100),
    ((SLOW,), 170, 170 * 26 / 45, 170),  # a slow core: no faster than the probe says
    (((*SLOW, *((171, 171, 26),) * 2),), 170, 170, 170),  # which a fast core is not either
    ((TAKEN,), 50, 50, 300),  # between processor and wall time
    ((SLOW, FAST), 100, 100, 100),  # what a process bounds holds of all
    ((TAKEN, FAST, TAKEN), 100, 100, 100),
    (((*TAKEN, (100, 99, 26)),), 50, 50, 100),  # no longer than one that was left alone
])  # fmt: skip
def test_a_time_lies_where_every_process_allows_it(processes, time_us, least, most):
    record = merged([on_cpu(32, i, list(samples)) for i, samples in enumerate(processes)])
    (found,) = measured(run_of([record]))
    assert found.times_us == pytest.approx((time_us,))
    assert found.allowed_us == pytest.approx((least, most))


# The whole verdict.


def test_an_honest_run_holds_in_every_exact_and_timed_question():
    records = [cell(Case(seq_len=n), "naive") for n in (1, *SIZES)]
    found = scaling(run_of(records, naive={"memory": "n^2"}))
    verdicts = {(f.impl, f.workload, f.quantity, f.axis): f.verdict for f in found.findings}
    assert verdicts == {("naive", "attention", cost, "n"): "holds" for cost in COSTS}
    assert found.problems == ()


STEPS = dict(zip(SIZES, (25856, 84480, 85000, 86000, 600064), strict=True))
# A layer's both pass around SDPA (E = 512, H = 8, one CPU thread), whose blocks grow with n.
BLOCKS = dict(zip(SIZES, (262144, 524288, 1048576, 4473088, 12616704), strict=True))
GROWTHS: dict[str, tuple[str, Callable[[int], float | None], str]] = {
    "n with buffers": ("O(n)", lambda n: 2.6e6 + 8 * n, "holds"),
    "exactly n with buffers": ("n", lambda n: 2.6e6 + 8 * n, "holds"),
    "buffers alone": ("O(n)", lambda n: 2.6e6, "holds"),
    "a step of the block size": ("O(n)", lambda n: 6e5 if n > 600 else 1e5 + n, "holds"),
    "scores under buffers": ("O(n)", lambda n: 1e7 + 8 * n**2, "refuted"),
    "n^1.5": ("O(n)", lambda n: 1000 * n**1.5, "refuted"),
    "less than declared": ("n^2", lambda n: 64 * n, "refuted"),
    "more than declared": ("n^2", lambda n: n**3, "refuted"),
    "n^2 with terms below": ("n^2", lambda n: 8 * n**2 + 4096 * n, "holds"),
    "an upper bound": ("O(n^2)", lambda n: 64 * n, "holds"),
    "a step at the largest size": ("O(n)", STEPS.__getitem__, "inconclusive"),
    "two steps in a row": ("O(n)", BLOCKS.__getitem__, "inconclusive"),
    "the first of them": ("O(n)", {n: BLOCKS[n] for n in SIZES[:4]}.get, "inconclusive"),
}


@pytest.mark.parametrize(("law", "of", "expected"), GROWTHS.values(), ids=GROWTHS)
def test_workspace_is_judged_by_the_law_without_noise(law, of, expected):
    records = [
        cell(Case(seq_len=n), "it", memory_workspace_bytes=of(n), memory_predicted_bytes=None)
        for n in SIZES
    ]
    fit = along(scaling(run_of(records, it={"memory": law})), "workspace")
    assert exact_verdict(fit) == expected, fit.finding


@pytest.mark.parametrize(
    ("law", "powers"), [("d + n", (0, 1)), ("n^2 + n", (1, 2)), ("n^2 + n + d", (0, 1, 2))]
)
def test_the_largest_of_declared_terms_is_never_refuted_and_a_steeper_one_is(law, powers):
    draw, most = random.Random(law), max(powers)
    for _ in range(60):
        count = draw.choice((3, 4, 5))
        of = [2.0 ** draw.uniform(10, 24) / 4096.0**p for p in powers]
        values = [round(max(c * n**p for p, c in zip(powers, of, strict=True))) for n in SIZES_UP]
        assert _verdict(law, values[-count:]) != "refuted", (of, count)
    for fixed in (1e5, 1e7):
        values = [fixed + n ** (most + 1) for n in SIZES_UP]
        steep = math.log2(values[-1] / values[-2]) > most + 0.15
        assert (_verdict(law, values) == "refuted") == steep
    assert _verdict("d + n", [592128, 724960, 1314784]) == "inconclusive"  # a layer's, decoding


SIZES_UP = (512, 1024, 2048, 4096, 8192)


def _verdict(law: str, values: list[float]) -> str:
    sizes = SIZES_UP[-len(values) :]
    records = [
        cell(Case(seq_len=n), "it", memory_workspace_bytes=value, memory_predicted_bytes=None)
        for n, value in zip(sizes, values, strict=True)
    ]
    fit = along(scaling(run_of(records, it={"memory": law})), "workspace")
    return exact_verdict(fit)


def test_flops_have_to_equal_the_formula_to_the_last_one():
    honest = [cell(Case(seq_len=n), "naive") for n in SIZES]
    counted = honest[-1].metrics["flops_executed"] + 2
    off = [*honest[:-1], cell(Case(seq_len=SIZES[-1]), "naive", flops_counted=counted)]
    assert exact_verdict(along(scaling(run_of(honest)), "flops")) == "holds"
    fit = along(scaling(run_of(off)), "flops")
    assert exact_verdict(fit) == "refuted"
    assert fit.finding is not None
    assert "n = 2048" in fit.finding.reason


@pytest.mark.parametrize(("flops", "expected"), [
    (lambda n: 8 * n * 512**2 + 4 * n**2 * 512, "holds"),
    (lambda n: n * 512**2 + 40 * n**2 * 512, "holds"),
    (lambda n: 8 * n * 512**2, "refuted"),
    (lambda n: 4 * n**2 * 512, "refuted"),
    (lambda n: n**1.5, "refuted"),
])  # fmt: skip
def test_flops_of_several_terms_are_a_sum_of_just_these(flops, expected):
    records = [
        cell(layer(n, 512, 8), "naive", flops_counted=round(flops(n)), flops_executed=None)
        for n in SIZES
    ]
    fit = along(scaling(run_of(records)), "flops")
    assert exact_verdict(fit) == expected, fit.finding
    assert fit.finding is not None
    assert fit.finding.law == "n d^2 + n^2 d"


# Runs of no use.


def test_laws_that_cannot_be_read_or_are_not_known_judge_nothing():
    run = run_of([cell(Case(seq_len=n), "naive") for n in SIZES], naive={"memory": None})
    for law, info in (("fast", None), (5, None), (None, {"run_id": "old"})):
        run.info["implementations"][0]["time"] = law
        found = scaling(replace(run, info=info or run.info))
        assert found.exponents[0].exponent is not None
        assert found.exponents[0].finding is None
        unread = [p for p in found.problems if f"'{law}' is not a law" in p.reason]
        assert [(p.impl, p.quantity) for p in unread] == [("naive", "time")] * bool(law)


# On real tensors.


def liar(q_BHLD: Any, k_BGSD: Any, v_BGSV: Any, *, causal: bool, scale: float) -> Any:
    return ((q_BHLD @ k_BGSD.mT) * scale).softmax(-1) @ v_BGSV


def test_a_liar_on_real_tensors_is_refuted_and_naive_holds():
    attention("liar", flops=lambda case: core_flops(case, case.seq_len),
              workspace=lambda case: 64 * case.seq_len)(liar)  # fmt: skip
    try:
        cases = [Case(seq_len=n, heads=2, head_dim=16) for n in (64, 128, 256)]
        records = [
            replace(cell(case, impl), metrics=probed(case, impl))
            for case, impl in product(cases, ("naive", "liar"))
        ]
    finally:
        IMPLEMENTATIONS.remove("liar")
    laws = {"liar": {"time": "O(n d)", "memory": "O(n)"}, "naive": {"memory": "n^2"}}
    found = {(fit.impl, fit.quantity): fit for fit in scaling(run_of(records, **laws)).exact}
    for quantity in ("flops", "workspace"):
        assert exact_verdict(found["naive", quantity]) == "holds"
        assert exact_verdict(found["liar", quantity]) == "refuted"
        assert found["liar", quantity].growth == pytest.approx(2, abs=0.05)
