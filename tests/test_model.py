"""Models of several terms: coefficients, shares, what is held out, crossings, and verdicts."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from attnbench.analysis.scaling import model, model_terms
from attnbench.analysis.scaling.model import presence
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


# What is held out.


# Layers.


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


# Which cells.


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
