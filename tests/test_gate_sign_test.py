"""Exact sign tests with several looks."""

from __future__ import annotations

import itertools
from fractions import Fraction

import pytest

from attnbench.gate.decide.data import Rules
from attnbench.gate.decide.sign_test import boundaries, enough, rejects


def rejected_share(looks: tuple[int, ...], needed: tuple[int | None, ...]) -> Fraction:
    """The probability that fair coins are rejected at any look, over every sequence there is."""
    crossed = sum(
        any(
            wins is not None and sum(tosses[:look]) >= wins
            for look, wins in zip(looks, needed, strict=True)
        )
        for tosses in itertools.product((0, 1), repeat=looks[-1])
    )
    return Fraction(crossed, 2 ** looks[-1])


@pytest.mark.parametrize("level", [0.01, 0.05, 0.2])
@pytest.mark.parametrize("looks", [(8,), (5, 8, 12), (1, 2, 3, 4, 10), (7, 14)])
def test_fair_coins_are_rejected_no_more_often_than_the_level(looks, level):
    assert rejected_share(looks, boundaries(looks, level)) <= level


def test_a_single_look_is_the_ordinary_sign_test():
    assert enough(7, 0.01) == 7  # 1/128
    assert enough(8, 0.01) == 8  # 9/256 would be too many
    assert enough(6, 0.01) is None  # 1/64 is more than 1 %
    assert enough(0, 0.01) is None
    assert enough(20, 0.05) == 15  # P(Bin(20, 1/2) >= 15) = 0.0207, >= 14: 0.0577


def test_the_looks_of_the_gate_decide_a_clear_case_at_the_first_one():
    looks, alpha = Rules().looks, Rules().alpha
    assert rejects(8, 8, looks, alpha)
    assert not rejects(7, 8, looks, alpha)
    assert not rejects(9, 9, looks, alpha), "nobody looks after nine rounds"
    for few, many in itertools.pairwise([1, 2, 4, 8, 16, 40]):  # suspects
        pairs = zip(boundaries(looks, alpha / few), boundaries(looks, alpha / many), strict=True)
        assert all(hard is None or (easy is not None and easy <= hard) for easy, hard in pairs)
