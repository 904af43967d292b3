"""The deliberately broken variants fit the code. Whether tests notice them: `make mutants`."""

from tests.mutants.__main__ import all_mutants


def test_every_variant_can_be_applied_and_names_tests_that_there_are():
    assert [mutant.stale for mutant in all_mutants() if mutant.stale] == []
