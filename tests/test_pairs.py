"""How two cells compare: ratios within rounds, and what their intervals decide."""

import random
from dataclasses import replace

import pytest

from attnbench.analysis.pairs import decided, ratio
from attnbench.schema.case import parse_position
from attnbench.schema.record import Record
from tests.test_times import CELL, processes, record

OTHER_CASE = replace(CELL, case=replace(CELL.case, position=parse_position("rope")))


def slowed(values: list[float], seed: int) -> list[float]:
    """The values beside other work that slows whole rounds up to four times."""
    rng = random.Random(seed)
    return [value * rng.choice([1.0, 1.0, 2.0, 4.0]) for value in values]


def width(above: Record, below: Record) -> float:
    low, high = ratio(above, below)[1] or (0.0, 0.0)
    return high / low - 1


def test_cells_are_pairs_where_they_were_interleaved_and_else_their_times_are_divided():
    above, below = (record(slowed([100.0] * 15, 3)) for _ in range(2))
    paired = ratio(above, below)
    assert ratio(*(replace(r, metrics={"group": "a"}) for r in (above, below))) == paired
    rope = replace(below, cell=OTHER_CASE)  # in an old run, in a process of its own for all we know
    for alone in (replace(below, metrics={"group": "b"}), rope):
        assert ratio(above, alone)[0] == 1.0
        assert width(above, alone) > 1.0 > width(above, below)
    grouped = [replace(r, metrics={"group": "a"}) for r in (above, rope)]
    assert ratio(*grouped) == paired


def test_one_process_cannot_tell_apart_what_two_of_the_same_code_differ_by():
    """Several can: the interval is over them, and nothing is added to it."""
    two = [record([us] * 9) for us in (102.0, 100.0)]
    assert decided(*(ratio(*two)[1] or (None, None))) == 0
    four = processes(102.0, 132.6, 91.8), processes(100.0, 130.0, 90.0)
    assert ratio(*four)[1] == pytest.approx((1.02, 1.02))
    assert decided(*(ratio(*four)[1] or (None, None))) == 1


@pytest.mark.parametrize(
    ("low", "high", "found"),
    [(1.01, 1.2, 1), (0.8, 0.99, -1), (0.9, 1.1, 0), (1.0, 1.1, 0), (None, None, 0)],
)
def test_what_holds_1_or_has_no_interval_is_not_decided(low, high, found):
    assert decided(low, high) == found
