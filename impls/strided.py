"""Sparse Transformer: what is near, and every `stride`-th key or the ends of all blocks.

Child, Gray, Radford & Sutskever 2019 (arXiv 1904.10509), section 4.2, with both parts in one
softmax (their merged head). `strided`: the `stride` keys up to a query's own, and those whose
distance is a multiple of it. `strided-fixed`: the keys of the query's own block of `stride` tokens,
and of every block the last `summary`. Without a causal mask both go either way. A stride of 0 is
√n, with which time grows as n^1.5; with a fixed one it grows as n²/stride.

Computed are the near keys of each `stride` queries; and of `strided` all queries and keys that have
the same remainder, so that a query is in two tiles.
"""

import math
from typing import Any

import torch
from attnbench_impls.tiles import Tile, places, tiled, tiled_flops, tiled_workspace

from attnbench.api import (
    AttentionCall,
    Case,
    Patterned,
    attention_builder,
)

ROWS = 256  # most queries of a tile: past the diagonal they are computed in vain


def step_of(case: Case, stride: int) -> int:
    """The stride; where it is 0, the root of the number of keys."""
    return stride or math.isqrt(case.kv_len)


def causal(case: Case) -> bool:
    """Whether later keys are hidden."""
    return case.mask.text == "causal"


def exact_at(case: Case) -> dict[str, int]:
    """Every key is a multiple of 1 away, and at the end of its block."""
    return {"stride": 1}


def row(cover: Any, definition: Any) -> Any:
    """What both patterns declare, each of its own tiles."""
    return {
        "family": "sparse", "time": "O(n^1.5 d)", "flops_law": "n^1.5 d", "memory": "O(n)",
        "definition": definition, "exact_at": exact_at,
        "flops": tiled_flops(cover), "useful": tiled_flops(cover, useful=True),
        "workspace": tiled_workspace(cover),
    }  # fmt: skip


def cover_strided(case: Case, *, stride: int) -> list[Tile]:
    """The near keys of blocks of queries, then the others of each remainder."""
    step, offset, hides = step_of(case, stride), case.kv_len - case.seq_len, causal(case)

    def near(place_I1: torch.Tensor, key_J: torch.Tensor) -> torch.Tensor:
        return (key_J > place_I1 - step) & (key_J < place_I1 + (1 if hides else step))

    def far(place_I1: torch.Tensor, key_J: torch.Tensor) -> torch.Tensor:
        return (key_J < place_I1) | ((key_J > place_I1) & (not hides))

    tiles, rows = [], min(step, ROWS)
    for start in range(0, case.seq_len, rows):
        queries = range(start, min(start + rows, case.seq_len))
        end = queries[-1] + offset + (1 if hides else step)
        keys = range(max(0, start + offset - step + 1), max(0, min(end, case.kv_len)))
        tiles.append(Tile(queries, (keys,), near))
    for remainder in range(step):
        for start in range(remainder, case.seq_len, ROWS * step):
            queries = range(start, min(start + ROWS * step, case.seq_len), step)
            end = max(0, queries[-1] + offset) if hides else case.kv_len
            tiles.append(Tile(queries, (range((start + offset) % step, end, step),), far))
    return tiles


def define_strided(case: Case, *, stride: int) -> Patterned:
    """Softmax attention over the pairs of the strided pattern."""
    place_L1, key_S = places(case)
    distance_LS, step = place_L1 - key_S, step_of(case, stride)
    admitted_LS = (distance_LS.abs() < step) | (distance_LS % step == 0)
    return Patterned(case, admitted_LS & (distance_LS >= 0) if causal(case) else admitted_LS)


@attention_builder("strided", **row(cover_strided, define_strided))
def strided(case: Case, *, stride: int = 0) -> AttentionCall:
    """The nearest √n keys, and every √n-th one beyond."""
    return tiled(case, cover_strided(case, stride=stride))


def cover_fixed(case: Case, *, stride: int, summary: int) -> list[Tile]:
    """Blocks of queries with the keys of their own block, and the last ones of the others."""
    step, offset, tiles = step_of(case, stride), case.kv_len - case.seq_len, []

    def earlier(place_I1: torch.Tensor, key_J: torch.Tensor) -> torch.Tensor:
        return key_J <= place_I1

    for start in range(offset // step * step, case.kv_len, step):
        end = min(start + step, case.kv_len)
        own = range(max(0, start), max(0, end))
        lasts = range(step - min(summary, step), step)
        keys = [own, *(range(last, own.start, step) for last in lasts)]
        if not causal(case):
            keys += [range(max(0, start + step) + last, case.kv_len, step) for last in lasts]
        queries = range(max(start, offset) - offset, end - offset)
        some = tuple(part for part in keys if part)
        tiles.append(Tile(queries, some, earlier if causal(case) else None))
    return tiles


def define_fixed(case: Case, *, stride: int, summary: int) -> Patterned:
    """Softmax attention over the pairs of the fixed pattern."""
    (place_L1, key_S), step = places(case), step_of(case, stride)
    admitted_LS = (place_L1 // step == key_S // step) | (key_S % step >= step - summary)
    return Patterned(case, admitted_LS & (key_S <= place_L1) if causal(case) else admitted_LS)


@attention_builder("strided-fixed", **row(cover_fixed, define_fixed))
def strided_fixed(case: Case, *, stride: int = 0, summary: int = 1) -> AttentionCall:
    """The own block of √n keys, and the last key of each."""
    return tiled(case, cover_fixed(case, stride=stride, summary=summary))
