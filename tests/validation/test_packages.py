"""The table of other packages tells what agrees from what does not."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from tests.validation.packages import ROWS, Pairs, Row, compared


def row(pairs: Iterator[tuple[torch.Tensor, torch.Tensor]]) -> Row:
    return Row(package="torch", function="", ours="", tolerance=0.0, pairs=lambda: pairs)


def test_the_largest_difference_of_all_cases_is_told_as_a_part_of_their_largest_number() -> None:
    ones = torch.ones(3)
    found = compared(row(iter([(ones, ones), (ones * 4.1, ones * 4), (ones, ones)])))
    assert found["cases"] == 3
    assert abs(found["apart"] - 0.025) < 1e-6


def test_what_is_no_number_and_what_raises_lies_beyond_any_tolerance() -> None:
    nan = torch.tensor([1.0, float("nan")])
    assert compared(row(iter([(nan, torch.ones(2))])))["apart"] == float("inf")

    def raises() -> Pairs:
        raise ValueError("no such function")
        yield nan, nan

    assert compared(row(raises()))["error"] == "ValueError: no such function"
    assert "apart" not in compared(row(iter([])))


def test_each_row_is_of_another_function_or_of_another_thing_of_ours() -> None:
    named = [(one.package, one.function, one.ours) for one in ROWS]
    assert len(set(named)) == len(named) >= 25
