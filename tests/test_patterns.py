"""Sparse patterns, pair by pair: the papers' rules in words against definitions and tiles."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
import torch
from attnbench_impls.tiles import Tile

from attnbench.api import Case
from attnbench.api.loader import BUILT_IN, load_built_in
from attnbench.schema.case import parse_mask

load_built_in()
bigbird, sliding, strided = (
    import_module(f"{BUILT_IN}.{name}") for name in ("bigbird", "sliding", "strided")
)

LENGTHS = [(8, 4), (23, 9), (40, 3), (9, 23), (3, 40), (1, 17), (17, 1), (16, 16), (150, 90)]
Sees = Callable[..., bool]


def near(place: int, key: int, *, window: int, dilation: int = 1, global_tokens: int = 0) -> bool:
    """Half the window on either side, every `dilation`-th key; first tokens see and are seen.

    A query before the first key, at a place below 0, is no token that there is a key of.
    """
    steps = range(-(window // 2), window // 2 + 1)
    is_global = key < global_tokens or 0 <= place < global_tokens
    return is_global or key in [place + dilation * step for step in steps]


def strided_sees(place: int, key: int, *, keys: int, stride: int) -> bool:
    """Nearer than the stride, or a multiple of it away."""
    step = stride or math.isqrt(keys)
    return -step < place - key < step or (place - key) % step == 0


def fixed_sees(place: int, key: int, *, keys: int, stride: int, summary: int) -> bool:
    """In the block of the query, or one of the last in its own."""
    step = stride or math.isqrt(keys)
    block = next(start for start in range(0, keys, step) if start <= key < start + step)
    return block <= place < block + step or key >= block + step - summary


RULES: list[tuple[Any, Any, Sees, dict[str, int]]] = [
    *(
        (sliding.cover, sliding.definition, near, values)
        for values in (
            {"window": 0}, {"window": 2}, {"window": 6}, {"window": 200},
            {"window": 2, "dilation": 3}, {"window": 8, "dilation": 2},
            {"window": 0, "global_tokens": 2}, {"window": 4, "global_tokens": 5},
            {"window": 2, "global_tokens": 60},
        )
    ),
    *(
        (strided.cover_strided, strided.define_strided, strided_sees, {"stride": stride})
        for stride in (0, 1, 5, 64)
    ),
    *(
        (strided.cover_fixed, strided.define_fixed, fixed_sees, values)
        for values in (
            {"stride": 0, "summary": 1}, {"stride": 7, "summary": 3}, {"stride": 4, "summary": 9},
        )
    ),
]  # fmt: skip


def case_of(mask: str, queries: int, keys: int, **more: Any) -> Case:
    small: dict[str, Any] = {"batch": 1, "heads": 1, "head_dim": 4, "dtype": "float64"}
    return Case(**small | more, seq_len=queries, kv_len=keys, mask=parse_mask(mask))


def times_admitted(case: Case, tiles: list[Tile]) -> list[list[int]]:
    """How often the tiles admit each query to each key."""
    found = torch.zeros(case.seq_len, case.kv_len, dtype=torch.int)
    for tile in tiles:
        queries = torch.tensor(tile.queries, dtype=torch.long).unsqueeze(1)
        keys = torch.tensor([key for part in tile.keys for key in part], dtype=torch.long)
        seen = torch.ones(len(queries), len(keys), dtype=torch.bool)
        if tile.admits is not None:
            seen = tile.admits(queries + (case.kv_len - case.seq_len), keys)
        found[queries, keys] += seen.int()
    counts: list[list[int]] = found.tolist()
    return counts


@pytest.mark.parametrize("mask", ["full", "causal"])
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"{rule[2].__name__} {rule[3]}")
def test_definition_and_tiles_admit_the_pairs_of_the_rule_once_each(rule, mask):
    cover, define, sees, values = rule
    for queries, keys in LENGTHS:
        case = case_of(mask, queries, keys)
        more = values if sees is near else values | {"keys": keys}
        expected = [
            [
                int(sees(place, key, **more) and (mask == "full" or key <= place))
                for key in range(keys)
            ]
            for place in range(keys - queries, keys)
        ]
        assert define(case, **values).admitted.int().tolist() == expected, (queries, keys)
        assert times_admitted(case, cover(case, **values)) == expected, (queries, keys)


BLOCKS = list(itertools.product((4, 7), (1, 3), (0, 2), (0, 1, 3)))  # size, window, global, random


def bigbird_pairs(mask: str, queries: int, keys: int, sizes: Any, seed: int = 0) -> torch.Tensor:
    """(queries, keys), what the definition admits, which the tiles do, too."""
    names = ("block", "window", "global_blocks", "random_blocks")
    values = dict(zip(names, sizes, strict=True)) | {"seed": seed}
    case = case_of(mask, queries, keys)
    admitted: torch.Tensor = bigbird.definition(case, **values).admitted
    assert times_admitted(case, bigbird.cover(case, **values)) == admitted.int().tolist()
    return admitted


@pytest.mark.parametrize("mask", ["full", "causal"])
@pytest.mark.parametrize("sizes", BLOCKS, ids=str)
def test_random_blocks_are_drawn_from_those_not_seen_otherwise(sizes, mask):
    """As many as asked for, or all that there are; of causal ones from the earlier alone."""
    size, window, first, count = sizes
    for queries, keys in LENGTHS:
        admitted = bigbird_pairs(mask, queries, keys, sizes).tolist()
        last = (keys - 1) // size
        for row, place in zip(admitted, range(keys - queries, keys), strict=True):
            own = place // size
            ends = range((own if mask == "causal" else last) + 1)
            due = {n for n in ends if abs(n - own) <= window // 2 or n < first}
            due = set(ends) if 0 <= own < first else due
            seen = {key // size for key, admits in enumerate(row) if admits}
            for key in range(keys):  # whole blocks, up to the diagonal
                within = mask == "full" or key <= place
                assert row[key] == (within and key // size in seen)
            assert due <= seen
            left = len(set(ends) - due) if own >= 0 else 0
            assert len(seen - due) == min(count, left)


def test_a_longer_causal_sequence_keeps_the_random_blocks_of_a_shorter_one():
    sizes = (4, 3, 1, 2)
    long = bigbird_pairs("causal", 200, 200, sizes)
    for n in (1, 3, 50, 121):
        assert long[:n, :n].equal(bigbird_pairs("causal", n, n, sizes))
    assert long[-7:].equal(bigbird_pairs("causal", 7, 200, sizes))
    assert not long.equal(bigbird_pairs("causal", 200, 200, sizes, seed=1))
    rows = bigbird_pairs("full", 200, 200, (4, 1, 0, 2))[::4].tolist()
    assert len(set(map(tuple, rows))) > len(rows) / 2  # a row of blocks draws for itself


@pytest.mark.parametrize("mask", ["full", "causal"])
def test_a_pair_of_a_reformer_counts_as_often_as_it_meets(mask):
    """Pair by pair: in one bucket, and there in one chunk of 3 or the one before it."""
    case, values = case_of(mask, 20, 20), {"buckets": 4, "rounds": 3, "chunk": 3, "seed": 2}
    reformer = import_module(f"{BUILT_IN}.reformer")
    q, v = torch.randn(20, 4, dtype=torch.float64), torch.randn(20, 4, dtype=torch.float64)
    rotations = reformer.draw(case, 4, 3, 2)
    places: list[list[tuple[int, int]]] = []  # of each round and token its bucket, its chunk there
    for rotation in rotations:
        buckets = reformer.hashed(q, rotation).tolist()
        places.append([(b, buckets[:i].count(b) // 3) for i, b in enumerate(buckets)])
    expected = []
    for i in range(20):
        weights = []
        for j in range(20):
            meetings = sum(at[i][0] == at[j][0] and 0 <= at[i][1] - at[j][1] <= 1 for at in places)
            hidden = i == j or (mask == "causal" and j > i)
            score = float(q[i] @ q[j] / q[j].norm()) / math.sqrt(4)
            weights.append(0.0 if hidden else meetings * math.exp(score))
        weights = weights if any(weights) else [float(i == j) for j in range(20)]
        expected.append(sum(w * row for w, row in zip(weights, v, strict=True)) / sum(weights))
    rows = torch.stack(expected)
    for attend in (reformer.reformer(case, **values), reformer.definition(case, **values)):
        torch.testing.assert_close(attend(q[None, None], v[None, None], v[None, None])[0, 0], rows)
