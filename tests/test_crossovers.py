"""Where one implementation overtakes another."""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from attnbench.analysis.crossovers import Crossover, crossings, crossovers
from attnbench.analysis.scaling.results import Uncertain
from attnbench.execution.store import Run
from attnbench.schema.case import Case
from attnbench.schema.record import Record
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


def test_a_overhead_that_curves_the_ratio_between_two_sizes_does_not_push_the_truth_out():
    laws = {"naive": lambda n: 16 + 2e-3 * n**2, "mine": lambda n: 90 + 1.5e-3 * n**2}
    truth = math.sqrt(74 / 0.5e-3)
    (crossing,) = only(run_of(laws, noise=0.01)).crossings
    assert (crossing.low or 0) <= truth <= (crossing.high or 0)


def test_identical_code_shows_no_difference_whatever_the_values_do():
    found = only(run_of({"naive": square, "mine": square}, noise=0.02, seed=3))
    assert found.outcome == "no difference"
    assert found.text == "no difference shown between 128 and 4,096"
    assert found.crossings == ()


def test_the_faster_throughout_is_named_with_its_factor_at_the_end():
    found = only(run_of({"naive": square, "mine": lambda n: square(n) / 2}, noise=0.001))
    assert found.outcome == "none"
    assert (
        found.text == "none between 128 and 4,096: mine is faster throughout, 2.00 times at 4,096"
    )
    other = only(run_of({"naive": square, "mine": lambda n: square(n) * 2}, noise=0.001))
    assert "naive is faster throughout, 2.00 times at 4,096" in other.text


def test_sizes_where_nothing_is_shown_are_not_called_faster():
    rows = [(0.9, 1.02, 1.1), (0.9, 1.01, 1.1), (1.2, 1.25, 1.3)]
    found = Crossover(
        by="impl", first="naive", second="mine", case=Case(), impl=None, sizes=(128, 256, 512),
        ratios=tuple(Uncertain(value=v, low=low, high=high) for low, v, high in rows),
        crossings=tuple(at(*rows)),
    )  # fmt: skip
    assert found.level == (128, 256)
    assert found.text == (
        "none between 128 and 512: mine is faster, 1.25 times at 512, level at 128, 256"
    )


@pytest.mark.parametrize(
    ("rows", "ends"),
    [
        ([(0.9, 0.98, 1.1), (1.2, 1.3, 1.4), (1.5, 1.6, 1.7)], (True, False)),
        ([(0.6, 0.7, 0.8), (0.7, 0.8, 0.9), (0.9, 1.05, 1.2)], (False, True)),
        ([(0.6, 0.7, 0.8), (0.7, 0.8, 0.9), (1.1, 1.2, 1.3)], (False, False)),
    ],
)
def test_an_interval_is_open_where_the_band_holds_1_at_an_end_already(rows, ends):
    (crossing,) = at(*rows)
    assert (crossing.open_below, crossing.open_above) == ends
    assert ("below 64" in crossing.interval, "above 256" in crossing.interval) == ends


def test_every_crossing_of_several_is_listed_in_order():
    rows = [(0.5, 0.5, 0.5), (2, 2, 2), (0.5, 0.5, 0.5), (2, 2, 2)]
    found = at(*rows, sizes=(64, 256, 1024, 4096))
    assert [c.n for c in found] == pytest.approx([128, 512, 2048])
    assert [c.faster_above for c in found] == ["mine", "naive", "mine"]


def test_wobbles_inside_the_band_are_one_crossing_and_a_return_is_none():
    (crossing,) = at((0.5, 0.5, 0.5), (0.9, 1.02, 1.1), (0.9, 0.98, 1.1), (2, 2, 2))
    assert crossing.low < 128 < crossing.n < 256 < crossing.high
    assert at((0.5, 0.5, 0.5), (0.9, 1.02, 1.1), (0.5, 0.5, 0.5)) == []
    (crossing,) = at((0.5, 0.5, 0.5), (1, 1, 1), (2, 2, 2))  # exactly 1 at a size
    assert (crossing.low, crossing.n, crossing.high) == pytest.approx((128, 128, 128))


def test_an_interval_is_wider_where_the_ratio_is_seen_to_curve():
    (straight,) = at((0.25, 0.25, 0.25), (0.5, 0.5, 0.5), (2, 2, 2), (8, 8, 8))
    (bent,) = at((0.49, 0.49, 0.49), (0.5, 0.5, 0.5), (2, 2, 2), (2.1, 2.1, 2.1))
    assert 1.0 < straight.high / straight.low < bent.high / bent.low


def test_a_crossing_between_sizes_far_apart_may_lie_anywhere_between_them():
    (far,) = at((0.5, 0.5, 0.5), (2, 2, 2), sizes=(1, 128))
    (close,) = at((0.5, 0.5, 0.5), (2, 2, 2), sizes=(32, 128))
    assert (far.low, far.high) == pytest.approx((1, 128))
    assert (far.open_below, far.open_above) == (False, False)
    assert (close.low, close.high) == pytest.approx((64, 64))


def test_a_size_of_too_few_samples_says_nothing():
    run = run_of({"naive": square, "mine": passing(700.0)}, noise=0.001)
    few = [replace(r, samples=r.samples[:3]) for r in run.records]
    assert crossovers(replace(run, records=few)) == ()
    found = only(replace(run, records=[*run.records[:-2], *few[-2:]]))
    assert found.left_out == (4096,)
    assert found.outcome == "crosses"


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_time_that_is_no_number_above_0_is_left_out_and_named(bad):
    run = run_of({"naive": square, "mine": passing(700.0)}, noise=0.001)
    records = list(run.records)
    records[4] = replace(records[4], samples=(structs.replace(records[4].samples[0], time_us=bad),))
    found = only(replace(run, records=records))
    assert found.left_out == (512,)
    assert 512 not in found.sizes
    assert found.outcome == "crosses"


def test_one_size_other_cases_or_failed_cells_give_no_pair():
    failed = [synthetic.failed(Case(seq_len=n), i, "oom", "no room") for n in SIZES for i in NAMES]
    apart = [*run_of({"naive": square}).records, *run_of({"mine": square}, heads=8).records]
    one_size = run_of({"naive": square, "mine": square}, sizes=(128,)).records
    for records in (failed, apart, one_size, []):
        assert crossovers(Run(path=Path(), info={}, records=records)) == ()


def test_caches_of_one_core_are_held_against_each_other_along_the_context():
    laws = {"rerun": lambda n: 0.05 * n**1.5, "static": lambda n: 300.0 + 0.01 * n}
    rng = random.Random(1)
    records = [
        record(synthetic.decode_case(n, cache), "sdpa", law(n), 0.005, rng)
        for n in SIZES for cache, law in laws.items()
    ]  # fmt: skip
    found = only(Run(path=Path(), info={}, records=records))
    assert (found.by, found.first, found.second, found.impl) == ("cache", "rerun", "static", "sdpa")
    assert found.same.startswith("sdpa, decode")
    assert "cache=" not in found.same
    assert found.crossings[0].faster_above == "static"


def test_layers_are_compared_by_core_and_by_projection_but_never_with_attention():
    rng = random.Random(1)
    cases = [
        Case(workload="layer", seq_len=n, width=256, projection=p)
        for n in SIZES for p in ("fused", "separate")
    ]  # fmt: skip
    cases += [Case(seq_len=n) for n in SIZES]
    records = [record(c, impl, square(c.seq_len), 0.01, rng) for c in cases for impl in NAMES]
    found = crossovers(Run(path=Path(), info={}, records=records))
    kinds = [(c.by, c.case.workload, c.case.projection) for c in found]
    assert sorted(kinds, key=str) == [
        ("impl", "attention", None), ("impl", "layer", "fused"), ("impl", "layer", "separate"),
        ("projection", "layer", "fused"), ("projection", "layer", "fused"),
    ]  # fmt: skip


def test_the_baseline_comes_first():
    found = only(run_of({"aaa": passing(700.0), "naive": square}))
    assert (found.first, found.second) == ("naive", "aaa")
    assert (found.outcome, found.case.seq_len) == ("crosses", 4096)
    assert found.crossings[0].faster_above == "aaa"


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
