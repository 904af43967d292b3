"""What one round says of a cell: ratios of samples taken together, less what others took."""

from __future__ import annotations

import math
import random

import pytest

from attnbench.gate.decide.data import Round, Samples


def a_round(base: Samples, candidate: Samples, cpu: dict[str, Samples] | None = None) -> Round:
    of = {"base": base, "candidate": candidate}
    return Round(stage="screen", samples={0: of}, cpu={0: cpu} if cpu else {})  # type: ignore[dict-item,arg-type]


def observed(found: Round) -> float:
    log = found.log_ratio(0, "candidate")
    assert log is not None
    return math.exp(log)


def test_a_machine_of_two_speeds_shows_no_change_where_there_is_none():
    """One version happens to have a sample while nobody computes beside it, the other none."""
    slow, fast = (2000, 2010), (1000, 1005)
    found = a_round((slow,) * 7 + (fast,), (slow,) * 8)
    assert observed(found) == 1


def test_what_other_work_took_from_a_batch_is_no_part_of_its_time():
    rng = random.Random(0)
    ms = 1_000_000

    def samples(each: int) -> tuple[Samples, Samples]:
        cpu = [(each, each) for _ in range(6)]
        wall = [tuple(ns + rng.randrange(3, 30) * ms for ns in sample) for sample in cpu]
        return tuple(wall), tuple(cpu)

    (base, base_cpu), (candidate, candidate_cpu) = samples(20 * ms), samples(22 * ms)
    found = a_round(base, candidate, {"base": base_cpu, "candidate": candidate_cpu})
    assert observed(found) == pytest.approx(1.1)
    assert math.exp(found.mean_log_ratio(0, "candidate")) == pytest.approx(1.1)
    assert observed(a_round(base, candidate)) != pytest.approx(1.1, rel=0.02)


def test_cpu_time_makes_no_batch_longer_than_it_was():
    """Several threads, or a flush of the caches beside each call, use more than the calls take."""
    base, more = ((1000, 1000),) * 4, ((5000, 9000),) * 4
    found = a_round(base, base, {"base": base, "candidate": more})
    assert observed(found) == 1
