"""Where one implementation overtakes another."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from attnbench.analysis.crossovers import Crossover, crossings, crossovers
from attnbench.analysis.scaling.results import Uncertain
from attnbench.schema.case import Case
from attnbench.schema.record import Record
from attnbench.store.runs import Run
from tests import synthetic

SIZES = (128, 256, 512, 1024, 2048, 4096)
NAMES = ("naive", "mine")


def record(case: Case, impl: str, time_us: float, noise: float, rng: random.Random) -> Record:
    times = [time_us * rng.lognormvariate(0, noise) for _ in range(15)]
    return synthetic.timed(case, impl, times)


def run_of(
    laws: dict[str, Callable[[float], float]], *, sizes: Sequence[int] = SIZES, noise: float = 0.02,
    seed: int = 0, **fields: Any,
) -> Run:  # fmt: skip
    rng = random.Random(seed)
    records = [
        record(Case(seq_len=n, **fields), impl, law(n), noise, rng)
        for n in sizes for impl, law in laws.items()
    ]  # fmt: skip
    return Run(path=Path(), info={"run_id": "x"}, records=records)


def only(run: Run) -> Crossover:
    (found,) = crossovers(run)
    return found


def square(n: float) -> float:
    return 0.01 * n**2


def passing(at: float, power: float = 1.5) -> Callable[[float], float]:
    """A law that is square's at n = `at`, and below it beyond."""
    return lambda n: 0.01 * at**2 * (n / at) ** power


def at(*rows: tuple[float, float, float], sizes: Sequence[int] = (64, 128, 256, 512)) -> Any:
    """The crossings of these ratios (low, value, high) at as many sizes."""
    found = [Uncertain(value=v, low=low, high=high) for low, v, high in rows]
    return list(crossings(dict(zip(sizes, found, strict=False)), NAMES))


@pytest.mark.parametrize("planted", [150.0, 1024.0, 3800.0])
def test_a_planted_crossing_is_found_within_its_noise(planted):
    (crossing,) = only(run_of({"naive": square, "mine": passing(planted)}, noise=0.005)).crossings
    assert crossing.n == pytest.approx(planted, rel=0.05)
    assert (crossing.faster_below, crossing.faster_above) == NAMES


def test_the_faster_throughout_is_named_with_its_factor_at_the_end():
    found = only(run_of({"naive": square, "mine": lambda n: square(n) / 2}, noise=0.001))
    assert found.outcome == "none"
    assert (
        found.text == "none between 128 and 4,096: mine is faster throughout, 2.00 times at 4,096"
    )
    other = only(run_of({"naive": square, "mine": lambda n: square(n) * 2}, noise=0.001))
    assert "naive is faster throughout, 2.00 times at 4,096" in other.text


def test_a_crossing_between_sizes_far_apart_may_lie_anywhere_between_them():
    (far,) = at((0.5, 0.5, 0.5), (2, 2, 2), sizes=(1, 128))
    (close,) = at((0.5, 0.5, 0.5), (2, 2, 2), sizes=(32, 128))
    assert (far.low, far.high) == pytest.approx((1, 128))
    assert (far.open_below, far.open_above) == (False, False)
    assert (close.low, close.high) == pytest.approx((64, 64))


def test_layouts_of_one_implementation_are_compared():
    run, other = run_of({"sdpa": square}), run_of({"sdpa": passing(700.0)}, layout="BLHD")
    run.records.extend(other.records)
    found = only(run)
    assert (found.by, found.impl, found.first, found.second) == ("layout", "sdpa", "BHLD", "BLHD")
    assert "layout" not in found.same
    assert found.text.startswith("BLHD overtakes BHLD")


def test_several_processes_are_compared_process_by_process():
    run = run_of({"naive": square, "mine": passing(700.0)}, noise=0.001)
    drift = (1.0, 1.5, 0.7, 2.0)  # a process that is slow is so for both
    records = [
        replace(r, samples=tuple(
            structs.replace(s, time_us=s.time_us * drift[s.round % 4], process=s.round % 4)
            for s in r.samples
        ))
        for r in run.records
    ]  # fmt: skip
    (crossing,) = only(replace(run, records=records)).crossings
    assert (crossing.high or 0) < 1.02 * (crossing.low or 0)
