"""Models of several terms: shares of the time, and verdicts."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from attnbench.analysis.scaling import model
from attnbench.analysis.scaling.results import ModelFit
from attnbench.analysis.scaling.series import Laws
from attnbench.analysis.scaling.series import measured as cells_of
from attnbench.schema.case import Case
from attnbench.store.runs import Run
from tests import synthetic

Time = Callable[[Case], float]


def run(
    cases: Iterable[Case], time_us: Time, law: str = "n^2 d", seed: int = 0, noise: float = 0.01
) -> Run:
    """Seven samples a cell that scatter by `noise`, at a speed of its own that is as far off."""
    rng, records = np.random.default_rng(seed), []
    for case in cases:
        times = time_us(case) * np.exp(noise * (rng.standard_normal() + rng.standard_normal(7)))
        records.append(synthetic.timed(case, "mine", times.tolist()))
    info = {"run_id": "r", "implementations": [{"name": "mine", "time": law}]}
    return Run(path=Path("r"), info=info, records=records, parts=records)


def layers(widths: Iterable[int] = (256, 512, 1024)) -> list[Case]:
    return [
        Case(workload="layer", projection="fused", heads=4, seq_len=n, width=w, head_dim=w // 4)
        for n, w in product((1, 128, 256, 512, 1024, 2048), widths)
    ]


def layer_us(case: Case) -> float:
    n, width = case.seq_len, case.model_width
    return 20 + 1e-5 * n * width**2 + 1.2e-5 * n**2 * width


def decodes() -> list[Case]:
    return [
        Case(
            workload="decode", cache="static", new_tokens=8, seq_len=n, heads=4, width=width,
            head_dim=width // 4,
        )
        for n, width in product((16, 256, 512, 1024, 2048, 4096), (256, 512, 1024))
    ]  # fmt: skip


def only(made: Run) -> ModelFit:
    (found,) = model.models(cells_of(made), Laws(made))
    return found


def test_shares_are_those_that_the_times_were_made_of() -> None:
    found = only(run(layers(), layer_us))
    square = 1.2e-5 * 2048**2 * 1024
    part = square / layer_us(found.cells[found.at_largest].case)
    assert found.points[found.at_largest] == {
        "n": 2048, "w": 2048, "d": 1024, "heads": 4, "batch": 1
    }  # fmt: skip
    low, high = found.shares["n^2 d"].ends
    assert low <= part <= high
    assert high - low < 0.03
    assert found.held_out < 0.05
    assert found.crossing is not None
    low, high = found.crossing.ends
    assert low <= 1024 / 1.2 <= high < 1.1 * low


def test_a_law_of_one_term_has_no_model() -> None:
    made = run(layers(), layer_us, law="n d^2")
    assert model.models(cells_of(made), Laws(made)) == ()


# Verdicts.


def linear(case: Case) -> float:
    return 20 + 1e-5 * case.seq_len * case.model_width**2


def cached(case: Case) -> float:
    return 30 + 1e-3 * case.model_width**2 + 2e-3 * case.seq_len * case.model_width


FIXED_RATIO = [  # but for four columns
    Case(workload="layer", seq_len=n, width=n + 4, heads=4, head_dim=n // 4 + 1, projection="fused")
    for n in (64, 128, 256, 512, 1024, 2048, 4096)
]
VERDICTS: dict[str, tuple[list[Case], Time, str, str, tuple[str, ...]]] = {
    "a layer's two terms": (
        layers(), layer_us, "n^2 d", "holds", ("n d^2 takes", "n^2 d takes")),
    "no square": (layers(), linear, "n^2 d", "refuted", ("n^2 d takes 0.0 % to",)),
    "no square, a bound": (layers(), linear, "O(n^2 d)", "holds", ()),
    "a square that is denied": (
        layers(), layer_us, "O(n d)", "inconclusive", ("without the largest n",)),
    "a part of the square is the softmax's": (
        layers(), lambda c: layer_us(c) + 4e-4 * c.heads * c.seq_len**2, "n^2 d", "holds", ()),
    "the end of a cache that looks like a square": (
        layers(), lambda c: linear(c) * (1.4 if c.seq_len > 512 else 1), "n^2 d",
        "inconclusive", ()),
    "a cached step": (decodes(), cached, "n^2 d", "holds", ()),
    "a cached step over all tokens": (
        decodes(), lambda c: 30 + 1e-4 * c.seq_len * c.model_width**2, "n^2 d", "inconclusive",
        ("without the largest n",)),
    "a cube beside its terms": (
        layers(), lambda c: layer_us(c) * (1 + c.seq_len / 256), "n^2 d", "inconclusive",
        ("without the largest n",)),
    "terms that are one": (FIXED_RATIO, layer_us, "n^2 d", "inconclusive", ("cannot tell",)),
    "an overhead that outweighs all": (
        layers(), lambda c: 1e6 + layer_us(c) / 1e3, "n^2 d", "inconclusive", ()),
}  # fmt: skip


@pytest.mark.parametrize("row", VERDICTS.values(), ids=VERDICTS)
def test_a_verdict_on_the_terms_says_why(row: Any) -> None:
    cases, time_us, law, expected, says = row
    finding = only(run(cases, time_us, law=law, noise=0.003)).finding
    assert finding is not None
    assert (finding.quantity, finding.axis, finding.verdict) == ("time", None, expected)
    assert {"held_out", "share_floor"} <= finding.figures.keys()
    assert [text for text in says if text not in finding.reason] == []
