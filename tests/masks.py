"""Each mask in words, pair by pair, and what to draw them from."""

import functools
import itertools

import numpy as np
from hypothesis import strategies as st

sizes = st.integers(1, 14)
masks = st.sampled_from([
    "full", "causal", "window:1", "window:3", "window:40", "prefix:1", "prefix:5", "prefix:40",
    "document:1", "document:4", "document:3+5", "document:40", "padding:1", "padding:40",
    "padding:4+9+1", "document:3+5:causal=0", "document:4:causal=0", "padding:4+9+1:causal=1",
])  # fmt: skip


@functools.cache
def admitted(mask: str, queries: int, keys: int, item: int = 0) -> np.ndarray:
    """(queries, keys), True where the query sees the key."""
    sees = [[_sees(mask, i, j, queries, keys, item) for j in range(keys)] for i in range(queries)]
    return np.array(sees)


def _sees(mask: str, query: int, key: int, queries: int, keys: int, item: int) -> bool:
    place = query + keys - queries  # the last query stands where the last key does
    name, text, causal = [*mask.split(":"), "", ""][:3]
    numbers = [int(number) for number in text.split("+")] if text else [0]
    packed = [
        d for d, n in enumerate(itertools.islice(itertools.cycle(numbers), 50)) for _ in range(n)
    ]
    return {
        "full": True,
        "causal": key <= place,
        "window": place - numbers[0] < key <= place,
        "prefix": key <= place or key < numbers[0],
        "document": bool(packed)
        and (key <= place or causal == "causal=0")
        and packed[key] == packed[max(place, 0)],
        "padding": key < numbers[item % len(numbers)] and (key <= place or not causal),
    }[name]
