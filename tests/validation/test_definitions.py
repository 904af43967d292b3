"""Definitions keep their digits, in a few draws; `PART=definitions` makes more."""

from attnbench.api import IMPLEMENTATIONS
from tests.validation.definitions import FORMULAS, worst


def test_definitions_are_their_formulas_to_the_rounding_of_float64():
    assert [row for row in worst(2) if row.of_allowed > 1] == []
    defined = {
        name for name, impl in IMPLEMENTATIONS.items() if impl.definition and "impls" in impl.file
    }
    assert defined - {"bigbird-flex"} == {name.partition(":")[0] for name in FORMULAS}
