"""How often intervals cover, and how often identical code raises an alarm: Monte Carlo."""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from attnbench.analysis import notes, pairs, times
from attnbench.analysis.scaling.exponents import fit_many
from attnbench.analysis.scaling.model import predicted
from attnbench.analysis.scaling.model_fit import fit
from attnbench.analysis.scaling.model_terms import ModelCells, design
from attnbench.analysis.scaling.slopes import Replicates
from attnbench.base.stats import median, processes_interval
from attnbench.schema.case import Case
from attnbench.schema.record import merged
from tests import test_crossovers as crossing
from tests import test_model as model
from tests.test_scaling import power, replayed, verdict
from tests.test_times import noise, record

# Times.


def measured(rng, factor, processes):
    """A cell of 100 samples in one process, or of several processes that differ by 2 %."""
    if processes == 1:
        return record([factor * v for v in noise(rng, 100, 0.05)])
    levels = [math.exp(rng.gauss(0, 0.02)) for _ in range(processes)]
    return merged([record([100 * factor * v] * 7, process=i) for i, v in enumerate(levels)])


@pytest.mark.parametrize(("processes", "least"), [(1, 0.65), (3, 0.5), (5, 0.65), (12, 0.65)])
def test_a_difference_of_the_detectable_size_is_found_four_times_in_five(processes, least):
    """By the very ratio that is shown, whose interval then excludes 1; less often by three."""
    rng = random.Random(3)
    widths = sorted(pairs.detectable(measured(rng, 1.0, processes)) or 0 for _ in range(60))
    smallest = widths[30]
    found = 0
    for _ in range(300):
        slow, fast = (measured(rng, f, processes) for f in (1 + smallest, 1.0))
        interval = pairs.ratio(slow, fast)[1] or (0.0, 0.0)
        found += interval[0] > 1
    assert least <= found / 300 <= 0.97


def test_small_sets_cover_their_median_as_often_as_they_say():
    rng = random.Random(2)
    hits = 0
    for _ in range(2000):
        low, high = processes_interval([math.exp(rng.gauss(0, 0.1)) for _ in range(4)]) or (0, 0)
        hits += low <= 1.0 <= high
    assert 0.93 <= hits / 2000 <= 0.97


@pytest.mark.parametrize("kind", ["normal", "uniform", "skewed"])
def test_independent_times_are_left_in_peace(kind):
    rng = random.Random(4)
    draw = {
        "normal": lambda: rng.gauss(100, 3),
        "uniform": lambda: rng.uniform(80, 120),
        "skewed": lambda: 100 + rng.expovariate(1 / 8),
    }[kind]
    alarms = {"drift": 0, "dependence": 0}
    for _ in range(200):
        values = [draw() for _ in range(60)]
        alarms["drift"] += notes.drift(values) is not None
        alarms["dependence"] += notes.dependence(values) is not None
    assert alarms["drift"] <= 1
    assert alarms["dependence"] <= 1


def test_the_window_does_not_depend_on_how_many_samples_there_are():
    rng = random.Random(2)
    draw = [100.0 + rng.expovariate(1 / 10.0) for _ in range(7000)]
    many = times.time_us(record(draw, window=5)) or 0
    few = [times.time_us(record(draw[i : i + 35], window=5)) or 0 for i in range(0, 7000, 35)]
    assert sum(few) / len(few) == pytest.approx(many, rel=0.01)


# Exponents, models and crossovers.


def test_the_truth_is_never_refuted_where_it_is_allowed() -> None:
    """Each time of n^2 too long by up to what is known, at random or all at the large sizes."""
    random = np.random.default_rng(1)
    many = []
    for seed in range(200):
        clean = replayed(power(2), "n^2", seed=seed)
        most = float(random.uniform(1, 8))
        factors = random.uniform(1, most, 5) if seed % 2 else np.linspace(1, most, 5)
        times = tuple(
            tuple(t * f for t in ts) for ts, f in zip(clean.times_us, factors, strict=True)
        )
        allowed = tuple((median(ts) / most, median(ts)) for ts in times)
        many.append(replace(clean, times_us=times, allowed_us=allowed))
    assert Counter(verdict(fit) for fit in fit_many(many, draws=200))["refuted"] == 0


def test_the_interval_covers_the_true_exponent_nineteen_times_of_twenty() -> None:
    many = [replayed(power(2), scatter=0.02, seed=seed) for seed in range(300)]
    inside = [
        fit.exponent is not None
        and fit.exponent.low is not None
        and fit.exponent.high is not None
        and fit.exponent.low <= 2 <= fit.exponent.high
        for fit in fit_many(many, draws=200)
    ]
    assert 0.93 <= sum(inside) / len(inside) <= 0.995


def test_what_is_planted_lies_within_the_intervals() -> None:
    terms = ("floor", "d^2", "n d", "n d^2", "H n^2", "n^2 d")
    largest = Case(workload="layer", seq_len=2048, width=1024, heads=4, head_dim=256)
    whole = model.layer_us(largest)
    true = dict.fromkeys(terms, 0.0) | {
        "floor": 20 / whole,
        "n d^2": 1e-5 * 2048 * 1024**2 / whole,
        "H n^2": 4e-4 * 4 * 2048**2 / whole,
        "n^2 d": 1.2e-5 * 2048**2 * 1024 / whole,
    }
    inside = []
    for seed in range(12):
        shares = model.only(model.run(model.layers(), model.layer_us, seed=seed)).shares
        assert tuple(shares) == terms
        for name, share in shares.items():
            assert share.low is not None
            assert share.high is not None
            assert share.low <= share.value <= share.high
            inside.append(share.low - 1e-9 <= true[name] <= share.high + 1e-9)
    assert np.mean(inside) >= 0.9


def test_the_band_contains_what_was_held_out() -> None:
    inside: list[bool] = []
    for seed in range(10):
        (cells,) = model.model_cells(model.run(model.cores(), model.core_us, seed=seed, noise=0.02))
        known = cells.sizes["n"] < 2048
        ((_, replicates),) = cells.replicates_us.alike.values()
        part = ModelCells(
            impl="mine", cases=cells.cases, between=False, law=None, terms=cells.terms,
            sizes={name: values[known] for name, values in cells.sizes.items()},
            replicates_us=Replicates([tuple(times) for times in replicates[known].tolist()]),
            times_us=cells.times_us[known], interval_us=cells.interval_us[:, known],
            beyond=cells.beyond[:, known],
        )  # fmt: skip
        bands = predicted(fit(part), design(cells.terms, cells.sizes)[~known])
        for band, time_us in zip(bands, cells.times_us[~known].tolist(), strict=True):
            assert band.low is not None
            assert band.high is not None
            inside.append(band.low <= time_us <= band.high)
    assert np.mean(inside) >= 0.9


def test_the_interval_of_a_planted_crossing_contains_it_in_nearly_all_draws():
    hits, widths = 0, []
    for seed in range(60):
        at = 300.0 * 1.03**seed
        run = crossing.run_of(
            {"naive": crossing.square, "mine": crossing.passing(at)}, noise=0.03, seed=seed
        )
        (found,) = crossing.only(run).crossings
        assert found.low is not None
        assert found.high is not None
        hits += found.low <= at <= found.high
        widths.append(found.high / found.low)
    assert hits >= 56
    assert max(widths) < 1.6
