"""Masks: what they admit, held against each in words; what is read, and what blocks they need."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from attnbench.api import dense_mask, mask_for
from attnbench.schema.case import Case, parse_mask
from attnbench.theory.masks import BLOCK, mask_block_density
from tests.masks import admitted, masks, sizes


@given(text=masks, queries=sizes, keys=sizes, item=st.integers(0, 3))
def test_the_span_of_a_query_holds_exactly_the_keys_that_its_mask_admits(text, queries, keys, item):
    mask, expected = parse_mask(text), admitted(text, queries, keys, item)
    for query in range(queries):
        first, last = mask.span(query, queries, keys, item)
        assert set(range(first, last)) == set(np.flatnonzero(expected[query]))
    whole = all(admitted(text, queries, keys, b).all() for b in range(mask.items))
    assert mask.admits_all(queries, keys) == whole


@given(text=masks, queries=sizes, keys=sizes, batch=st.integers(1, 4), first=sizes, data=st.data())
def test_a_dense_mask_admits_what_its_mask_admits(text, queries, keys, batch, first, data):
    first = data.draw(st.integers(0, queries - 1))
    found = dense_mask(parse_mask(text), queries, keys, "cpu", first_query=first, batch=batch)
    by_item = found.expand(batch, 1, queries - first, keys).squeeze(1).numpy()
    for item in range(batch):
        assert (by_item[item] == admitted(text, queries, keys, item)[first:]).all()
    case = Case(batch=batch, seq_len=queries, kv_len=keys, mask=parse_mask(text))
    assert (mask_for(case) is None) == case.unmasked


def test_the_density_of_blocks_counts_those_of_128_that_are_not_empty():
    def of(text: str, **sizes: int) -> float:
        return mask_block_density(Case(mask=parse_mask(text), **sizes))  # type: ignore[arg-type]

    n = 4 * BLOCK
    assert of("full", seq_len=n) == 1
    assert of("causal", seq_len=n) == 10 / 16
    assert of("causal", seq_len=n - 5) == 10 / 16
    assert of("window:2", seq_len=n) == 7 / 16
    assert of(f"document:{BLOCK}", seq_len=n) == 4 / 16
    assert of("prefix:1", seq_len=n) == 10 / 16
    assert of("padding:1+129", seq_len=n, batch=2) == (4 + 8) / 32
