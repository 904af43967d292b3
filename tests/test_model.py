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
from msgspec import structs
from scipy.optimize import nnls

from attnbench.analysis.scaling import model, model_terms
from attnbench.analysis.scaling.model import presence
from attnbench.analysis.scaling.model_fit import Subsets, fit
from attnbench.analysis.scaling.model_terms import ModelCells
from attnbench.analysis.scaling.results import ModelFit, Uncertain
from attnbench.analysis.scaling.series import Laws
from attnbench.analysis.scaling.series import measured as cells_of
from attnbench.execution.store import Run
from attnbench.schema.case import Case, parse_mask
from attnbench.schema.record import Record
from attnbench.theory.law import parse
from tests import synthetic

Time = Callable[[Case], float]
SIZES = (1, 128, 256, 512, 1024, 2048)


def measured(case: Case, time_us: float, rng: np.random.Generator, noise: float = 0.01) -> Record:
    """Seven samples that scatter by `noise`, at a speed of its own that is as far off."""
    times = time_us * np.exp(noise * (rng.standard_normal() + rng.standard_normal(7)))
    return synthetic.timed(case, "mine", times.tolist())


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


def models(made: Run) -> tuple[ModelFit, ...]:
    return model.models(cells_of(made), Laws(made))


def model_cells(made: Run) -> list[ModelCells]:
    return model_terms.model_cells(cells_of(made), Laws(made))


def only(made: Run) -> ModelFit:
    (found,) = models(made)
    return found


def ends(found: Uncertain | None) -> tuple[float, float]:
    assert found is not None
    return found.ends


# The fit.


def test_coefficients_are_per_unit_of_their_term() -> None:
    (made,) = model_cells(run(cores(batch=2), core_us, noise=1e-6))
    found = dict(zip((term.name for term in made.terms), fit(made).coefficients, strict=True))
    assert {name for name, each in found.items() if each} == {"floor", "H n^2", "n^2 d"}
    assert [found[name] for name in ("floor", "H n^2", "n^2 d")] == pytest.approx(
        (16, 1e-3, 4e-5), rel=1e-3
    )


def test_a_term_that_is_absent_gets_no_share() -> None:
    for seed in range(5):
        found = only(run(cores(), core_us, seed=seed))
        assert "n d^2" not in found.terms
        assert found.shares["n d^2"].value == 0.0
        assert ends(found.shares["n d^2"])[1] < 0.02


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
    found, residual = parts.solve(targets)
    for draw in range(3):
        expected, norm = nnls(rows, targets[:, draw])
        best = residual[:, draw].argmin()
        if not math.isfinite(residual[best, draw]):  # all of it negative: nothing is the best
            assert not expected.any()
            continue
        assert found[best, :, draw] / parts.scale == pytest.approx(expected, rel=1e-6, abs=1e-9)
        assert residual[best, draw] == pytest.approx(norm**2)


# What is held out.


def test_the_held_out_error_is_that_of_the_largest_n() -> None:
    def bent(case: Case) -> float:
        return core_us(case) * (1.5 if case.seq_len == 2048 else 1.0)

    assert only(run(cores(), core_us, noise=1e-6)).held_out == pytest.approx(0, abs=1e-4)
    found = only(run(cores(), bent, noise=1e-6))
    assert found.held_out == pytest.approx(1 / 3, abs=1e-3)
    (made,) = model_cells(run(cores(), bent, noise=1e-6))
    assert fit(made).spread == pytest.approx(found.held_out), "no surer of any other cell"


def test_times_that_no_model_describes_widen_the_band() -> None:
    def waves(case: Case) -> float:
        return core_us(case) * (1.3 if int(math.log2(case.seq_len)) % 2 else 1.0)

    shares = (ends(only(run(cores(), of)).shares["n^2 d"]) for of in (core_us, waves))
    smooth, rough = (high - low for low, high in shares)
    assert rough > 3 * smooth


def test_one_process_is_never_surer_than_processes_agree() -> None:
    band = only(run(cores(), core_us, noise=1e-6)).predicted_us[-1]
    assert ends(band)[1] / band.value - 1 >= 1.9 * 0.015


# Layers.


def test_the_crossing_is_where_the_planted_terms_cross() -> None:
    true = 1e-5 * 1024**2 / (4e-4 * 4 + 1.2e-5 * 1024)
    for seed in range(4):
        low, high = ends(only(run(layers(), layer_us, seed=seed)).overtakes_n)
        assert low <= true <= high < 1.3 * low


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


def test_attention_alone_and_windows_cross_nothing() -> None:
    assert only(run(cores(), core_us)).overtakes_n is None
    windowed = only(run(layers(mask=parse_mask("window:64")), layer_us))
    assert (windowed.overtakes_n, windowed.overtakes_theory) == (None, None)


# Verdicts.


def linear(case: Case) -> float:
    return 20 + 1e-5 * case.seq_len * case.model_width**2


def cached(case: Case) -> float:
    return 30 + 1e-3 * case.model_width**2 + 2e-3 * case.seq_len * case.model_width


FIXED_RATIO = [
    Case(workload="layer", seq_len=n, width=n, heads=4, head_dim=n // 4, projection="fused")
    for n in (64, 128, 256, 512, 1024, 2048, 4096)
]
TWO_SIZES = [case for case in layers() if case.seq_len in (512, 1024)]
VERDICTS: dict[str, tuple[list[Case], Time, str, str, tuple[str, ...]]] = {
    "a layer's two terms": (
        layers(), layer_us, "n^2 d", "holds", ("n d^2 takes", "n^2 d takes")),
    "no square": (layers(), linear, "n^2 d", "refuted", ("n^2 d takes 0.0 % to",)),
    "no square, a bound": (layers(), linear, "O(n^2 d)", "holds", ()),
    "a square that is denied": (layers(), layer_us, "n d", "refuted", ("terms above the law",)),
    "and of a bound": (layers(), layer_us, "O(n d)", "refuted", ("n^2",)),
    "the softmax may carry the square": (
        layers(), lambda c: linear(c) + 2e-2 * c.seq_len**2, "n^2 d", "holds", ()),
    "a cached step": (decodes(), cached, "n^2 d", "holds", ()),
    "a cached step over all tokens": (
        decodes(), lambda c: 30 + 1e-4 * c.seq_len * c.model_width**2, "n^2 d", "refuted",
        ("n d^2",)),
    "what it cannot predict": (
        layers(), lambda c: layer_us(c) * (1 + c.seq_len / 256), "n^2 d", "inconclusive",
        ("n = 2048",)),
    "terms that are one": (FIXED_RATIO, layer_us, "n^2 d", "inconclusive", ("cannot tell",)),
    "two sizes of n": (TWO_SIZES, layer_us, "n^2 d", "inconclusive", ("2 sizes of n",)),
    "an overhead that outweighs all": (
        layers(), lambda c: 1e6 + layer_us(c) / 1e3, "n^2 d", "inconclusive", ()),
}  # fmt: skip


@pytest.mark.parametrize("row", VERDICTS.values(), ids=VERDICTS)
def test_a_verdict_on_the_terms_says_why(row: Any) -> None:
    cases, time_us, law, expected, says = row
    finding = only(run(cases, time_us, law=law)).finding
    assert finding is not None
    assert (finding.quantity, finding.axis, finding.verdict) == ("time", None, expected)
    assert {"spread", "share_floor"} <= finding.figures.keys()
    assert [text for text in says if text not in finding.reason] == []


@pytest.mark.parametrize("law", ["n^2 d", "O(n^2 d)", None, "n ^^ 2"])
def test_a_law_of_one_term_or_none_has_shares_and_no_verdict(law: str | None) -> None:
    found = only(run(cores(), core_us, law=law))
    assert found.finding is None
    assert found.shares["H n^2"].value > 0


# Which cells.


def test_where_n_and_d_do_not_vary_together_there_is_no_model() -> None:
    assert models(run([c for c in cores() if c.heads == 4], core_us)) == ()  # one d
    assert models(run([c for c in cores() if c.seq_len == 512], core_us)) == ()  # one n
    assert models(run(cores()[:5], core_us)) == ()
    assert models(run_of([])) == ()


def test_cells_that_differ_in_anything_else_are_models_of_their_own() -> None:
    cases = [*cores(), *cores(pass_="both"), *cores(dtype="bfloat16"), *layers()]
    found = models(run(cases, lambda c: core_us(c) if c.workload == "attention" else layer_us(c)))
    assert [(m.same, len(m.points)) for m in found] == [
        ("attention forward float32", len(cores())),
        ("attention both float32", len(cores())),
        ("attention forward bfloat16", len(cores())),
        ("layer forward float32 fused", len(layers())),
    ]


def test_a_time_that_is_none_leaves_its_cell_out() -> None:
    good = run(cores(), core_us).records
    middle = [r.cell.case.seq_len == 512 and r.cell.case.heads == 2 for r in good]
    bad = [replace(r, samples=(structs.replace(r.samples[0], time_us=math.nan),)) for r in good]
    some = [b if is_bad else r for r, b, is_bad in zip(good, bad, middle, strict=True)]
    rest = [r for r, is_bad in zip(good, middle, strict=True) if not is_bad]
    assert only(run_of(some)) == only(run_of(rest))
    assert models(run_of(bad)) == ()


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


def test_failed_and_suspect_cells_and_keys_of_another_number_make_no_model() -> None:
    good = run(cores(), core_us)
    failed = [Record(cell=r.cell, status="oom", reason="too large") for r in good.records]
    assert models(run_of(failed)) == ()
    assert models(run([replace(case, kv_len=4096) for case in cores()], core_us)) == ()
    info = good.info | {
        "environment": {"device": "cpu", "ceilings": {"matmul_tflops": {"float32": 0.1}}}
    }
    impossible = [replace(r, metrics={"flops_executed": 10**18}) for r in good.records]
    assert models(replace(good, info=info, records=impossible)) == ()


def test_a_window_has_a_term_of_its_own() -> None:
    def banded(case: Case) -> float:
        pairs = case.seq_len * min(case.seq_len, 256) * case.heads
        return 16 + 1e-3 * pairs + 4e-5 * pairs * case.head_dim

    found = only(run(cores(mask=parse_mask("window:256")), banded, law="n w d", noise=1e-4))
    assert {"H n w", "n w d"} <= set(found.terms)
    assert found.shares["n^2 d"].value < 0.01
    assert "n d" not in found.shares
