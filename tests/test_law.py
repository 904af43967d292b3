"""Laws are parsed, printed and taken apart; a text that is none is one clear line."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attnbench.errors import UsageError
from attnbench.theory.law import VARIABLES, Law, Term, parse

POWERS = st.dictionaries(
    st.sampled_from(VARIABLES),
    st.sampled_from([Fraction(1), Fraction(2), Fraction(3), Fraction(3, 2), Fraction(1, 3)]),
)
TERMS = st.builds(Term.of, POWERS, POWERS)
LAWS = st.builds(
    Law, st.lists(TERMS, min_size=1, max_size=3, unique=True).map(tuple), st.booleans()
)


@settings(max_examples=50, deadline=None)
@given(LAWS)
def test_a_printed_law_reads_back_as_the_same(law):
    assert parse(str(law)) == law


@pytest.mark.parametrize(
    ("text", "printed", "degree"),
    [
        ("n^2 d", "n^2 d", 2), ("d n^2", "n^2 d", 2), ("n d^2 + n^2 d", "n d^2 + n^2 d", 2),
        ("n*w*d", "n d w", 1), ("O(n)", "O(n)", 1), ("1", "1", 0), ("n log n", "n log n", 1),
        ("n^1.5", "n^1.5", Fraction(3, 2)), (" n n ", "n^2", 2),
    ],
)  # fmt: skip
def test_a_law_has_one_way_to_be_written_and_a_degree(text, printed, degree):
    law = parse(text)
    assert (str(law), law.degree("n")) == (printed, degree)


@pytest.mark.parametrize(
    "text", ["", "n^", "x^2", "n^2 +", "O(n", "n - d", "2 n", "n^-1", "nd", "quadratic", "n^1/0"]
)
def test_a_text_that_is_no_law_is_refused_with_examples(text):
    with pytest.raises(UsageError, match="not a law") as caught:
        parse(text)
    assert "'n^2 d'" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["n^10", "n^9 n", "n + d^400", "n^" + "9" * 400])
def test_a_power_that_no_size_could_bear_is_refused(text):
    with pytest.raises(UsageError, match="a power above 9"):
        parse(text)
    assert parse("n^9").degree("n") == 9
