"""From a run to verdicts: which cells make a series, exact checks, liars, and runs of no use."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from attnbench.analysis.scaling import scaling
from attnbench.analysis.scaling.results import ExactFit, Scaling, Series
from attnbench.analysis.scaling.series import Laws, all_series, measured
from attnbench.api import IMPLEMENTATIONS, attention, core_flops
from attnbench.execution.store import Run
from attnbench.schema.case import Case, Device, parse_mask
from attnbench.schema.finding import COSTS
from attnbench.schema.record import Record, Sample, merged
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


def series_of(run: Run) -> list[Series]:
    return [group.series for group in all_series(run, Laws(run), measured(run))]


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


def test_cells_that_differ_in_n_alone_are_a_series_with_its_overhead() -> None:
    records = [cell(Case(seq_len=n, heads=2), "naive") for n in (1, *SIZES)]
    records += [cell(Case(seq_len=n, heads=2, dtype="float64"), "naive") for n in SIZES]
    first, second = series_of(run_of(records))
    assert first.sizes == tuple(map(float, SIZES)), "the floor is no size"
    assert first.overhead_us is not None
    assert second.overhead_us is None, "another dtype is another floor"
    assert second.least_overhead_us == pytest.approx(5 * 0.5)
    assert first.same == "attention forward B=1 H=2 D=64 float32"
    assert str(first.law) == "n^2 d"


def test_the_least_overhead_of_cold_times_has_a_pair_of_events_in_it() -> None:
    run = run_of([cell(Case(seq_len=n, heads=2), "naive", l2="cold") for n in SIZES])
    run.info["environment"]["ceilings"]["launch_cold_us"] = 2.5
    (series,) = series_of(run)
    assert series.least_overhead_us == pytest.approx(5 * 0.5 + 2.0)


def test_one_query_of_many_keys_and_one_token_of_a_wider_layer_are_no_overhead() -> None:
    many_keys = cell(Case(seq_len=1, kv_len=65536), "naive", lambda case: 400.0)
    plain = [many_keys, *(cell(Case(seq_len=n), "naive") for n in SIZES)]
    layers = [cell(layer(n, 512), "naive") for n in SIZES]
    for records, small in (
        (plain, []),
        (plain, [cell(Case(seq_len=1), "naive")]),
        (layers, [cell(layer(1, 1024), "naive")]),
        (layers, [cell(layer(1, 256), "naive")]),
    ):
        (series,) = series_of(run_of([*small, *records]))
        right = bool(small) and (small[0].cell.case.width or 0) < 512
        assert (series.overhead_us is not None) == right
        assert max(series.overhead_us or [0]) < 20


def test_each_axis_varies_alone_and_what_follows_it_follows() -> None:
    records = [
        cell(Case(seq_len=n, heads=h, head_dim=d), "naive")
        for n, h, d in product((256, 512, 1024), (1, 2, 4), (32, 64, 128))
    ]
    found = {(s.axis, s.same): s for s in series_of(run_of(records))}
    axes = [axis for axis, _ in found]
    assert {axis: axes.count(axis) for axis in set(axes)} == {
        "n": 9, "d": 3, "heads": 3, "heads at fixed width": 1,
    }  # fmt: skip
    (fixed,) = [s for (axis, _), s in found.items() if axis == "heads at fixed width"]
    assert fixed.sizes == (1, 2, 4)
    assert "H·D=128" in fixed.same
    others = [s for (axis, _), s in found.items() if axis != "n"]
    assert all("n=1024" in s.same for s in others), "a small problem shows its floor"
    assert series_of(run_of([cell(Case(seq_len=n, kv_len=512), "naive") for n in SIZES])) == []


def test_layers_that_widen_at_fixed_heads_vary_d_and_at_fixed_head_dim_heads() -> None:
    (d,) = series_of(run_of([cell(layer(512, width), "naive") for width in (256, 512, 1024)]))
    assert (d.axis, d.sizes, str(d.law)) == ("d", (256, 512, 1024), "n d^2 + n^2 d")
    more = [cell(layer(512, 64 * heads, heads), "naive") for heads in (4, 8, 16)]
    (heads,) = series_of(run_of(more))
    assert (heads.axis, heads.sizes) == ("heads", (4, 8, 16))


def test_decoding_and_windows_are_judged_by_laws_of_their_own() -> None:
    records = [
        cell(synthetic.decode_case(n, cache), "naive")
        for n, cache in product((8, *SIZES), ("rerun", "static"))
    ]
    found = series_of(run_of(records))
    laws = {s.same.split()[-2]: str(s.law) for s in found}
    assert laws == {"rerun": "n d^2 + n^2 d", "static": "d^2 + n d"}
    assert all(s.overhead_us for s in found), "8 tokens are a floor"
    window = parse_mask("window:64")
    (series,) = series_of(run_of([cell(Case(seq_len=n, mask=window), "chunked") for n in SIZES]))
    assert str(series.law) == "O(n^2 d)"


def test_failed_and_suspect_cells_keep_their_place_with_the_reason() -> None:
    records = [cell(Case(seq_len=n), "naive") for n in SIZES[:3]]
    records.append(cell(Case(seq_len=1024), "naive", flops_executed=10**18))
    records.append(synthetic.failed(Case(seq_len=2048), "naive", "oom", "9.0 GiB wanted"))
    (fit,) = scaling(run_of(records)).exponents
    assert len(fit.series.sizes) == 5
    assert fit.left_out[4] == "oom: 9.0 GiB wanted"
    assert "suspect" in str(fit.left_out[3])
    assert fit.finding is not None
    assert fit.finding.verdict == "inconclusive"
    assert "9.0 GiB wanted" in fit.finding.reason


def test_what_never_ran_is_not_asked() -> None:
    records = [cell(Case(seq_len=n), "naive") for n in SIZES]
    records += [synthetic.failed(Case(seq_len=n), "flex", "unsupported", "no CPU") for n in SIZES]
    found = scaling(run_of(records))
    assert {fit.series.impl for fit in found.exponents} == {"naive"}
    (problem,) = found.problems
    assert (problem.impl, problem.workload, problem.quantity) == ("flex", "attention", "time")
    assert "5 unsupported: no CPU" in problem.reason


def on_cpu(n: int, process: int, samples: list[tuple[float, float, float]]) -> Record:
    """A record of wall times, processor times and what the probe of a fast core, 26 µs, took."""
    rows = [
        Sample(round=i, position=0, calls=1, time_us=t, e2e_us=t, cpu_us=cpu, probe_us=probe)
        for i, (t, cpu, probe) in enumerate(samples)
    ]
    done = cell(Case(seq_len=n), "naive", probe_us=26.0)
    return replace(done, samples=tuple(rows), process=process)


SLOW, TAKEN, FAST = ((170, 170, 45),) * 5, ((400, 60, 26), (300, 50, 26)) * 3, ((100, 99, 26),) * 5


@pytest.mark.parametrize(
    ("processes", "time_us", "least", "most"),
    [
        ((FAST,), 100, 100, 100),
        ((SLOW,), 170, 170 * 26 / 45, 170),  # a slow core: no faster than the probe says
        (((*SLOW, *((171, 171, 26),) * 2),), 170, 170, 170),  # which a fast core is not either
        ((TAKEN,), 50, 50, 300),  # between processor and wall time
        ((SLOW, FAST), 100, 100, 100),  # what a process bounds holds of all
        ((TAKEN, FAST, TAKEN), 100, 100, 100),
        (((*TAKEN, (100, 99, 26)),), 50, 50, 100),  # no longer than one that was left alone
    ],
)
def test_a_time_lies_where_every_process_allows_it(
    processes: Any, time_us: float, least: float, most: float
) -> None:
    record = merged([on_cpu(32, i, list(samples)) for i, samples in enumerate(processes)])
    (found,) = measured(run_of([record]))
    assert found.times_us == pytest.approx((time_us,))
    assert found.allowed_us == pytest.approx((least, most))


# The whole verdict.


def test_an_honest_run_holds_in_every_exact_and_timed_question() -> None:
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
def test_workspace_is_judged_by_the_law_without_noise(
    law: str, of: Callable[[int], float | None], expected: str
) -> None:
    records = [
        cell(Case(seq_len=n), "it", memory_workspace_bytes=of(n), memory_predicted_bytes=None)
        for n in SIZES
    ]
    fit = along(scaling(run_of(records, it={"memory": law})), "workspace")
    assert exact_verdict(fit) == expected, fit.finding


def test_flops_have_to_equal_the_formula_to_the_last_one() -> None:
    honest = [cell(Case(seq_len=n), "naive") for n in SIZES]
    counted = honest[-1].metrics["flops_executed"] + 2
    off = [*honest[:-1], cell(Case(seq_len=SIZES[-1]), "naive", flops_counted=counted)]
    assert exact_verdict(along(scaling(run_of(honest)), "flops")) == "holds"
    fit = along(scaling(run_of(off)), "flops")
    assert exact_verdict(fit) == "refuted"
    assert fit.finding is not None
    assert "n = 2048" in fit.finding.reason


def test_a_price_of_an_opaque_op_refutes_no_formula() -> None:
    records = [
        cell(
            Case(seq_len=n), "sdpa", flops_counted=8 * n * n * 64, flops_executed=4 * n * n * 64,
            flops_counted_source="formula",
        )
        for n in SIZES
    ]  # fmt: skip
    fit = along(scaling(run_of(records)), "flops")
    assert exact_verdict(fit) == "holds", "it grows as declared"
    assert fit.finding is not None
    assert "price of an opaque op" in fit.finding.reason


@pytest.mark.parametrize(
    ("workspace", "more", "expected"),
    [
        (lambda n: 32 * n * n * 1.015, {}, "holds"),  # within two percent of the formula
        (lambda n: 32 * n * n * 1.03, {}, "refuted"),
        # What is not predicted refutes nothing, though the law may.
        (lambda n: 64 * n * n, {"memory_predicted_bytes": None}, "holds"),
        (lambda n: 64 * n**3, {"memory_predicted_bytes": None}, "refuted"),
    ],
)
def test_workspace_is_held_against_its_formula(workspace: Any, more: Any, expected: str) -> None:
    records = [
        cell(Case(seq_len=n), "naive", memory_workspace_bytes=round(workspace(n)),
             **{"memory_predicted_bytes": 32 * n * n} | more)
        for n in SIZES
    ]  # fmt: skip
    fit = along(scaling(run_of(records, naive={"memory": "n^2"})), "workspace")
    assert exact_verdict(fit) == expected
    assert fit.finding is not None
    miss = None if more else max(workspace(n) / (32 * n * n) - 1 for n in SIZES)
    assert fit.finding.figures["largest_miss"] == pytest.approx(miss, abs=1e-4)


@pytest.mark.parametrize(
    ("flops", "expected"),
    [
        (lambda n: 8 * n * 512**2 + 4 * n**2 * 512, "holds"),
        (lambda n: n * 512**2 + 40 * n**2 * 512, "holds"),
        (lambda n: 8 * n * 512**2, "refuted"),
        (lambda n: 4 * n**2 * 512, "refuted"),
        (lambda n: n**1.5, "refuted"),
    ],
)
def test_flops_of_several_terms_are_a_sum_of_just_these(flops: Any, expected: str) -> None:
    records = [
        cell(layer(n, 512, 8), "naive", flops_counted=round(flops(n)), flops_executed=None)
        for n in SIZES
    ]
    fit = along(scaling(run_of(records)), "flops")
    assert exact_verdict(fit) == expected, fit.finding
    assert fit.finding is not None
    assert fit.finding.law == "n d^2 + n^2 d"


def test_flops_do_not_grow_with_heads_at_a_fixed_width() -> None:
    records = [cell(Case(seq_len=512, heads=h, head_dim=256 // h), "naive") for h in (1, 2, 4, 8)]
    fit = along(scaling(run_of(records)), "flops", "heads at fixed width")
    assert fit.growth == 0
    assert exact_verdict(fit) == "holds"


def test_without_formula_and_law_growth_is_shown_and_nothing_judged() -> None:
    records = [cell(Case(seq_len=n), "it", memory_predicted_bytes=None) for n in SIZES]
    fit = along(scaling(run_of(records)), "workspace")
    assert fit.finding is None
    assert fit.growth == pytest.approx(2, abs=0.01)


# Runs of no use.


def no_times() -> list[Record]:
    records = [cell(Case(seq_len=n), "naive") for n in SIZES]
    samples = tuple(structs.replace(sample, time_us=math.nan) for sample in records[0].samples)
    return [replace(record, samples=samples) for record in records]


USELESS: dict[str, tuple[list[Record], str]] = {
    "empty": ([], "no record in this run"),
    "one size": (synthetic.single_n_records(), "one size of n only (512)"),
    "failures": (synthetic.failed_records(), "no cell was measured (1 oom: 9.0 GiB wanted)"),
    "times that are no numbers": (no_times(), "no two sizes of n"),
    "floors alone": ([cell(Case(seq_len=1), "naive")], "one size of n only (1)"),
}


@pytest.mark.parametrize(("records", "says"), USELESS.values(), ids=USELESS)
def test_a_run_of_no_use_says_why_in_one_line(records: list[Record], says: str) -> None:
    found = scaling(run_of(records))
    reasons = [problem.reason for problem in found.problems]
    assert [text for text in reasons if says in text], reasons
    assert all("\n" not in text for text in reasons)
    timed = [f.finding for f in found.exponents if f.finding]
    assert "holds" not in {f.verdict for f in (*timed, *found.problems)}


def test_devices_are_fitted_apart_and_that_is_said() -> None:
    devices: tuple[Device, ...] = ("cpu", "cuda")
    found = scaling(
        run_of([cell(Case(seq_len=n, device=d), "naive") for n in SIZES for d in devices])
    )
    assert "records of 2 devices (cpu, cuda)" in found.problems[-1].reason
    assert len(found.exponents) == 2


@pytest.mark.parametrize("name", ["quick", "bare", "hostile", "one"])
def test_no_run_is_too_odd_for_an_answer(name: str) -> None:
    assert scaling(run_of(synthetic.RUNS[name]())).findings


def test_laws_that_cannot_be_read_or_are_not_known_judge_nothing() -> None:
    run = run_of([cell(Case(seq_len=n), "naive") for n in SIZES], naive={"memory": None})
    for law, info in (("fast", None), (5, None), (None, {"run_id": "old"})):
        run.info["implementations"][0]["time"] = law
        found = scaling(replace(run, info=info or run.info))
        assert found.exponents[0].exponent is not None
        assert found.exponents[0].finding is None
        unread = [p for p in found.problems if f"'{law}' is no law" in p.reason]
        assert [(p.impl, p.quantity) for p in unread] == [("naive", "time")] * bool(law)


# On real tensors.


def liar(q_BHLD: Any, k_BGSD: Any, v_BGSV: Any, *, causal: bool, scale: float) -> Any:
    return ((q_BHLD @ k_BGSD.mT) * scale).softmax(-1) @ v_BGSV


def test_a_liar_on_real_tensors_is_refuted_and_naive_holds() -> None:
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
