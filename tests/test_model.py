"""Models of several terms: coefficients, shares, what is held out, crossings, and verdicts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.optimize import nnls

from attnbench.analysis.scaling.model import models, presence
from attnbench.analysis.scaling.model_fit import Subsets, fit
from attnbench.analysis.scaling.model_terms import (
    candidates,
    carriers,
    model_cells,
    surplus,
)
from attnbench.analysis.scaling.results import ModelFit
from attnbench.execution.store import Run
from attnbench.schema.case import Case, parse_mask
from attnbench.schema.record import Cell, Record, Sample
from attnbench.theory.law import parse

Time = Callable[[Case], float]
SIZES = (1, 128, 256, 512, 1024, 2048)


def measured(case: Case, time_us: float, rng: np.random.Generator, noise: float = 0.01) -> Record:
    """Seven samples that scatter by `noise`, at a speed of its own that is as far off."""
    times = time_us * np.exp(noise * (rng.standard_normal() + rng.standard_normal(7)))
    return observed(case, times.tolist())


def observed(case: Case, times_us: Iterable[float]) -> Record:
    samples = tuple(
        Sample(round=i, position=0, calls=1, time_us=t, e2e_us=t) for i, t in enumerate(times_us)
    )
    return Record(cell=Cell(case=case, impl="mine"), status="ok", samples=samples)


def run_of(records: list[Record], law: str | None = "n^2 d") -> Run:
    info = {"run_id": "r", "implementations": [{"name": "mine", "time": law}]}
    return Run(path=Path("r"), info=info, records=records, parts=records)


def run(
    cases: Iterable[Case], time_us: Time, *, law: str | None = "n^2 d", seed: int = 0,
    noise: float = 0.01,
) -> Run:  # fmt: skip
    rng = np.random.default_rng(seed)
    return run_of([measured(case, time_us(case), rng, noise) for case in cases], law)


def layers(widths: Iterable[int] = (256, 512, 1024), **fields: Any) -> list[Case]:
    """Layers of four heads."""
    return [
        Case(
            workload="layer", projection="fused", heads=4, seq_len=n, width=width,
            head_dim=width // 4, **fields,
        )
        for n, width in product(SIZES, widths)
    ]  # fmt: skip


def layer_us(case: Case) -> float:
    n, width = case.seq_len, case.model_width
    return 20 + 1e-5 * n * width**2 + 4e-4 * case.heads * n**2 + 1.2e-5 * n**2 * width


def cores(sizes: Iterable[int] = SIZES, **fields: Any) -> list[Case]:
    """Heads and head dims of several total widths, and sixteen heads beside one of the same."""
    grid = [(2, 16), (2, 32), (2, 64), (2, 128), (1, 256), (4, 64), (16, 16)]
    return [Case(seq_len=n, heads=h, head_dim=d, **fields) for n, (h, d) in product(sizes, grid)]


def core_us(case: Case) -> float:
    n, h, d = case.seq_len, case.batch * case.heads, case.head_dim
    return 16 + 1e-3 * h * n**2 + 4e-5 * h * n**2 * d


def decodes(**fields: Any) -> list[Case]:
    return [
        Case(
            workload="decode", cache="static", new_tokens=8, seq_len=n, heads=4, width=width,
            head_dim=width // 4, **fields,
        )
        for n, width in product((16, 256, 512, 1024, 2048, 4096), (256, 512, 1024))
    ]  # fmt: skip


def only(made: Run) -> ModelFit:
    (found,) = models(made)
    return found


def verdict(found: ModelFit) -> tuple[str, str]:
    assert found.finding is not None
    return found.finding.verdict, found.finding.reason


# The fit.


def test_coefficients_are_per_unit_of_their_term() -> None:
    found = only(run(cores(batch=2), core_us, noise=1e-6))
    assert found.terms == ("floor", "H n^2", "n^2 d")
    assert found.coefficients == pytest.approx((16, 1e-3, 4e-5), rel=1e-3)


def test_a_term_that_is_absent_gets_no_share() -> None:
    for seed in range(5):
        found = only(run(cores(), core_us, seed=seed))
        assert "n d^2" not in found.terms
        share = found.shares["n d^2"]
        assert share.value == 0.0
        assert share.high is not None
        assert share.high < 0.02


def test_shares_along_n_add_up_and_move_from_the_overhead_to_the_square() -> None:
    found = only(run(cores(), core_us))
    assert found.along_n == SIZES
    assert [sum(part.values()) for part in found.shares_along] == pytest.approx([1.0] * len(SIZES))
    assert found.shares_along[0]["floor"] > 0.99
    assert found.shares_along[-1]["floor"] < 0.01
    assert found.shares_along[-1]["n^2 d"] == pytest.approx(found.shares["n^2 d"].value)
    times = [estimate.value for estimate in found.along_predicted_us]
    assert times == sorted(times)


@pytest.mark.parametrize("seed", range(5))
def test_the_parts_hold_the_solution_of_scipys_nnls(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows = rng.random((20, 5)) @ np.diag([1.0, 10.0, 1e3, 1e-3, 5.0])
    targets = rows @ rng.standard_normal((5, 3)) + rng.standard_normal((20, 3))
    parts = Subsets(rows)
    found, misfit = parts.solve(targets)
    for draw in range(3):
        expected, norm = nnls(rows, targets[:, draw])
        best = misfit[:, draw].argmin()
        if not math.isfinite(misfit[best, draw]):  # all of it negative: nothing is the best
            assert not expected.any()
            continue
        assert found[best, :, draw] / parts.scale == pytest.approx(expected, rel=1e-6, abs=1e-9)
        assert misfit[best, draw] == pytest.approx(norm**2)


# What is held out.


def test_the_held_out_error_is_that_of_the_largest_n() -> None:
    def bent(case: Case) -> float:
        return core_us(case) * (1.5 if case.seq_len == 2048 else 1.0)

    assert only(run(cores(), core_us, noise=1e-6)).held_out == pytest.approx(0, abs=1e-4)
    found = only(run(cores(), bent, noise=1e-6))
    assert found.held_out == pytest.approx(1 / 3, abs=1e-3)
    assert found.figures["spread"] == pytest.approx(found.held_out), "no surer of any other cell"


@pytest.mark.parametrize("seed", range(6))
def test_the_terms_chosen_predict_the_largest_n_as_well_as_all_terms_do(seed: int) -> None:
    (cells,) = model_cells(run(layers(), layer_us, seed=seed, noise=0.04))
    relative = cells.design / cells.times_us[:, None]
    held = cells.sizes["n"] == 2048
    scale = relative.max(axis=0)
    every, _ = nnls(relative[~held] / scale, np.ones((~held).sum()))
    error = math.sqrt((((relative[held] / scale) @ every - 1) ** 2).mean())
    found = fit(cells).held_out
    assert found is not None
    assert found <= math.hypot(error, 0.04)


def test_the_choice_is_not_the_one_that_fits_the_small_sizes_best() -> None:
    """The small sizes scatter so that n d^2 helps there; it would miss the largest n."""
    rng = np.random.default_rng(3)
    records = [
        measured(case, core_us(case) * (1 + 0.04 * (case.head_dim >= 128)), rng, 0.003)
        if case.seq_len < 512
        else measured(case, core_us(case), rng, 0.003)
        for case in cores()
    ]
    (cells,) = model_cells(run_of(records))
    relative = cells.design / cells.times_us[:, None]
    small = cells.sizes["n"] < 2048
    scale = relative.max(axis=0)
    in_sample, _ = nnls(relative[small] / scale, np.ones(small.sum()))
    chosen = fit(cells).chosen
    assert (in_sample > 0).sum() > chosen.sum()


def test_times_that_no_model_describes_widen_the_band() -> None:
    def waves(case: Case) -> float:
        return core_us(case) * (1.3 if int(math.log2(case.seq_len)) % 2 else 1.0)

    smooth, rough = (only(run(cores(), time_us)) for time_us in (core_us, waves))
    widths = []
    for found in (smooth, rough):
        share = found.shares["n^2 d"]
        assert share.high is not None
        assert share.low is not None
        widths.append(share.high - share.low)
    assert widths[1] > 3 * widths[0]


def test_one_process_is_never_surer_than_processes_agree() -> None:
    found = only(run(cores(), core_us, noise=1e-6))
    band = found.predicted_us[-1]
    assert band.high is not None
    assert band.high / band.value - 1 >= 1.9 * 0.015


# Heads.


def test_more_heads_cost_more_at_equal_flops_because_of_the_scores() -> None:
    figures = only(run(cores(), core_us)).figures
    few, many = (core_us(Case(seq_len=2048, heads=h, head_dim=256 // h)) for h in (1, 16))
    assert (figures["heads_few"], figures["heads_many"], figures["heads_n"]) == (1, 16, 2048)
    assert figures["heads_width"] == 256
    assert figures["heads_cost_measured"] == pytest.approx(many / few, rel=0.1)
    assert figures["heads_cost_model"] == pytest.approx(many / few, rel=0.1)
    low, high = figures["heads_cost_model_low"], figures["heads_cost_model_high"]
    assert isinstance(low, float)
    assert isinstance(high, float)
    assert low < many / few < high
    assert figures["share_H_n2"] == pytest.approx(only(run(cores(), core_us)).shares["H n^2"].value)


# Layers.


def test_the_crossing_is_where_the_planted_terms_cross() -> None:
    for seed in range(4):
        found = only(run(layers(), layer_us, seed=seed)).overtakes_n
        true = 1e-5 * 1024**2 / (4e-4 * 4 + 1.2e-5 * 1024)
        assert found is not None
        assert found.low is not None
        assert found.high is not None
        assert found.low <= true <= found.high
        assert found.value == pytest.approx(true, rel=0.1)


@pytest.mark.parametrize(
    ("fields", "factor"),
    [
        ({}, 2.0),
        ({"kv_heads": 1}, 1.25),
        ({"mask": parse_mask("causal")}, 4.0),
        ({"pass_": "backward"}, 1.6),
        ({"pass_": "both"}, 2 * 6 / 7),
        ({"mask": parse_mask("causal"), "pass_": "both"}, 4 * 6 / 7),
    ],
)
def test_the_crossing_in_flops_is_the_one_on_paper(fields: dict[str, Any], factor: float) -> None:
    found = only(run(layers(**fields), layer_us))
    assert found.overtakes_theory == pytest.approx(1024 * factor)
    assert found.figures["overtakes_n_theory"] == found.overtakes_theory


def test_the_crossings_differ_by_the_ratio_of_the_flop_rates() -> None:
    found = only(run(layers(), layer_us))
    assert found.overtakes_n is not None
    assert found.overtakes_theory is not None
    ratio = found.overtakes_n.value / found.overtakes_theory
    assert found.figures["rate_ratio"] == pytest.approx(ratio)
    # Useful FLOPs of the projections: 8·n·E² in 1e-5·n·E² µs.
    assert found.figures["projections_gflops"] == pytest.approx(8 / 1e-5 / 1e3, rel=0.1)


def test_attention_alone_and_windows_cross_nothing() -> None:
    assert only(run(cores(), core_us)).overtakes_n is None
    windowed = only(run(layers(mask=parse_mask("window:64")), layer_us))
    assert (windowed.overtakes_n, windowed.overtakes_theory) == (None, None)


# Verdicts.


def test_a_layer_holds_its_two_terms() -> None:
    found = only(run(layers(), layer_us))
    said, reason = verdict(found)
    assert (said, found.finding and found.finding.law) == ("holds", "n d^2 + n^2 d")
    assert "n d^2 takes" in reason
    assert "n^2 d takes" in reason
    assert found.finding is not None
    assert found.finding.question == "terms of time"
    assert found.finding.figures["share_n_d2"] == found.shares["n d^2"].value


def test_a_layer_without_its_square_is_refuted_and_a_bound_is_not() -> None:
    def linear(case: Case) -> float:
        return 20 + 1e-5 * case.seq_len * case.model_width**2

    said, reason = verdict(only(run(layers(), linear)))
    assert said == "refuted"
    assert "n^2 d takes 0.0 % to" in reason
    assert verdict(only(run(layers(), linear, law="O(n^2 d)")))[0] == "holds"


def test_a_layer_that_claims_to_be_linear_is_refuted_by_its_square() -> None:
    said, reason = verdict(only(run(layers(), layer_us, law="n d")))
    assert said == "refuted"
    assert "terms above the law" in reason
    assert "n^2" in reason
    assert verdict(only(run(layers(), layer_us, law="O(n d)")))[0] == "refuted"


def test_the_softmax_may_carry_the_square() -> None:
    def softmax(case: Case) -> float:
        return 20 + 1e-5 * case.seq_len * case.model_width**2 + 2e-2 * case.seq_len**2

    assert verdict(only(run(layers(), softmax)))[0] == "holds"


def test_a_cached_step_that_runs_over_all_tokens_is_refuted() -> None:
    def cached(case: Case) -> float:
        return 30 + 1e-3 * case.model_width**2 + 2e-3 * case.seq_len * case.model_width

    def again(case: Case) -> float:
        return 30 + 1e-4 * case.seq_len * case.model_width**2

    kept = only(run(decodes(), cached))
    assert kept.terms == ("floor", "d^2", "n d")
    assert verdict(kept)[0] == "holds"
    said, reason = verdict(only(run(decodes(), again)))
    assert said == "refuted"
    assert "n d^2" in reason


def test_times_that_the_model_cannot_predict_are_inconclusive() -> None:
    def cubic(case: Case) -> float:
        return layer_us(case) * (1 + case.seq_len / 256)

    said, reason = verdict(only(run(layers(), cubic)))
    assert said == "inconclusive"
    assert "n = 2048" in reason


@pytest.mark.parametrize("law", ["n^2 d", "O(n^2 d)", None, "n ^^ 2"])
def test_a_law_of_one_term_or_none_has_shares_and_no_verdict(law: str | None) -> None:
    found = only(run(cores(), core_us, law=law))
    assert found.finding is None
    assert found.figures["share_H_n2"] == found.shares["H n^2"].value


def test_terms_that_the_sizes_cannot_tell_apart_are_inconclusive() -> None:
    fixed_ratio = [
        Case(workload="layer", seq_len=n, width=n, heads=4, head_dim=n // 4, projection="fused")
        for n in (64, 128, 256, 512, 1024, 2048, 4096)
    ]
    said, reason = verdict(only(run(fixed_ratio, layer_us)))
    assert said == "inconclusive"
    assert "cannot tell" in reason


def test_two_sizes_of_n_are_inconclusive() -> None:
    few = [case for case in layers() if case.seq_len in (512, 1024)]
    found = only(run(few, layer_us))
    assert found.held_out is None
    said, reason = verdict(found)
    assert said == "inconclusive"
    assert "2 sizes of n" in reason


def test_a_overhead_that_outweighs_all_is_inconclusive() -> None:
    found = only(run(layers(), lambda case: 1e6 + layer_us(case) / 1e3))
    assert verdict(found)[0] == "inconclusive"


# Which cells.


def test_where_n_and_d_do_not_vary_together_there_is_no_model() -> None:
    assert models(run([c for c in cores() if c.heads == 4], core_us)) == ()  # one d
    assert models(run([c for c in cores() if c.seq_len == 512], core_us)) == ()  # one n
    assert models(run(cores()[:5], core_us)) == ()
    assert models(run_of([])) == ()


def test_cells_that_differ_in_anything_else_are_models_of_their_own() -> None:
    cases = [*cores(), *cores(pass_="both"), *cores(dtype="bfloat16"), *layers()]
    found = models(run(cases, lambda c: core_us(c) if c.workload == "attention" else layer_us(c)))
    assert [m.same.split()[:3] for m in found] == [
        ["attention", "forward", "float32"],
        ["attention", "both", "float32"],
        ["attention", "forward", "bfloat16"],
        ["layer", "forward", "float32"],
    ]
    assert {len(m.points) for m in found} == {len(cores()), len(layers())}


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_time_that_is_none_leaves_its_cell_out(bad: float) -> None:
    good = run(cores(), core_us).records
    worse = [
        replace(r, samples=(replace(r.samples[0], time_us=bad), *r.samples[1:]))
        if r.cell.case.seq_len == 512 and r.cell.case.heads == 2
        else r
        for r in good
    ]
    found = only(run_of(worse))
    assert len(found.points) == len(good) - 4
    assert all(math.isfinite(value) for value in found.coefficients)
    rest = [r for r in good if not (r.cell.case.seq_len == 512 and r.cell.case.heads == 2)]
    assert found == only(run_of(rest))
    everything = [replace(r, samples=(replace(r.samples[0], time_us=bad),)) for r in good]
    assert models(run_of(everything)) == ()


def test_suspect_times_are_left_out_as_they_are_of_the_series() -> None:
    good = run(cores(), core_us)
    environment = {"device": "cpu", "matmul_tflops": {"float32": 0.1}}
    impossible = [
        replace(r, metrics=r.metrics | {"flops_executed": 10**18})
        if r.cell.case.seq_len == 512 else r
        for r in good.records
    ]  # fmt: skip
    found = only(replace(good, info=good.info | {"environment": environment}, records=impossible))
    assert 512 not in {point["n"] for point in found.points}
    assert len(found.points) < len(good.records)


@pytest.mark.parametrize(
    ("low", "high", "law", "expected"),
    [
        (0.001, 0.015, "n d^2 + n^2 d", "refuted"),
        (0.001, 0.015, "O(n d^2 + n^2 d)", "holds"),
        (0.001, 0.05, "n d^2 + n^2 d", "holds"),
        (0.0, 0.05, "n d^2 + n^2 d", "inconclusive"),
        (0.0, 0.01, "n d^2 + n^2 d", "refuted"),
    ],
)  # fmt: skip
def test_a_term_that_certainly_takes_next_to_nothing_is_not_there(
    low: float, high: float, law: str, expected: str
) -> None:
    (cells,) = model_cells(run(layers(), layer_us))
    points = len(cells.cases)
    draws = np.tile(np.linspace(low, high, 400), (points, 1))
    if low == 0:
        draws[:, :100] = 0.0
    term = parse(law).terms[0]
    expected_share, visible = np.full(points, 0.5), np.ones(points, dtype=bool)
    assert presence(cells, parse(law), term, draws, expected_share, visible)[0] == expected


def test_failed_cells_and_keys_of_another_number_make_no_model() -> None:
    cells = [record.cell for record in run(cores(), core_us).records]
    failed = [Record(cell=cell, status="oom", reason="too large") for cell in cells]
    assert models(run_of(failed)) == ()
    cross = [replace(case, kv_len=4096) for case in cores()]
    assert models(run(cross, core_us)) == ()


def test_a_window_has_a_term_of_its_own() -> None:
    def banded(case: Case) -> float:
        pairs = case.seq_len * min(case.seq_len, 256) * case.heads
        return 16 + 1e-3 * pairs + 4e-5 * pairs * case.head_dim

    found = only(run(cores(mask=parse_mask("window:256")), banded, law="n w d", noise=1e-4))
    assert {"H n w", "n w d"} <= set(found.terms)
    assert found.shares["n^2 d"].value < 0.01
    assert "n d" not in found.shares


def test_terms_of_a_law_are_carried_by_those_of_their_order() -> None:
    terms = candidates("decode", window=False)
    law = parse("d^2 + n d")
    named = {
        str(term): [terms[i].name for i in found] for term, found in carriers(law, terms).items()
    }
    assert named == {"d^2": ["d^2"], "n d": ["n d", "H n"]}
    assert [terms[i].name for i in surplus(law, terms)] == ["n d^2", "H n^2", "n^2 d"]
    both = carriers(parse("n d + n d^2"), terms)
    assert [[terms[i].name for i in found] for found in both.values()] == [
        ["n d", "H n"],
        ["n d^2"],
    ]
