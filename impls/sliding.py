"""Attention to what is near: sliding window, dilated window, and window with global tokens.

Beltagy, Peters & Cohan 2020, "Longformer" (arXiv 2004.05150), section 3.1. Of a window half lies
before a query and half after it, beside its own key; under the mask `causal` the half after it is
left out. Dilated, a query sees every `dilation`-th key of a reach as many times as wide. Global
tokens, the first ones, see all and are seen by all; under `causal` they are what Xiao et al. 2023
(arXiv 2309.17453) call attention sinks. A query before the first key, of which there are some where
L > S, has its window as every other and is no global token.

Computed are blocks of queries (of a dilated window: of the same remainder) with the keys from the
first that one of them sees to the last, and the global tokens beside those.
"""

import itertools
from typing import Any

import torch
from attnbench_impls.tiles import Tile, places, tiled, tiled_flops, tiled_workspace

from attnbench.api import (
    AttentionCall,
    Case,
    Patterned,
    attention_builder,
)


def cover(case: Case, *, window: int, dilation: int = 1, global_tokens: int = 0) -> list[Tile]:
    """Blocks of queries, a quarter of the window long: in longer ones more pairs are hidden."""
    reach, rows = window // 2 * dilation, max(64, window // 4)
    hides, offset = case.mask.text == "causal", case.kv_len - case.seq_len

    def admits(place_I1: torch.Tensor, key_J: torch.Tensor) -> torch.Tensor:
        near_IJ = (key_J >= place_I1 - reach) & (key_J <= place_I1 + reach)
        seen_IJ = near_IJ | (key_J < global_tokens)
        seen_IJ |= (place_I1 >= 0) & (place_I1 < global_tokens)
        return seen_IJ & (key_J <= place_I1) if hides else seen_IJ

    seen_by_all, before = range(min(global_tokens, case.kv_len)), max(0, -offset)
    last = max(before, min(global_tokens - offset, case.seq_len))  # global: from `before` to here
    tiles = [Tile(range(before, last), (range(last + offset if hides else case.kv_len),), admits)]
    others = [range(before), range(last, case.seq_len)]
    for part, remainder in itertools.product(others[hides:], range(dilation)):
        for start in range(part.start + remainder, part.stop, rows * dilation):
            queries = range(start, min(start + rows * dilation, part.stop), dilation)
            low, high = queries[0] + offset - reach, queries[-1] + offset + reach * (not hides)
            low = max(low, low % dilation, global_tokens)
            near = range(low, max(low, min(high + 1, case.kv_len)), dilation)
            tiles.append(Tile(queries, (seen_by_all, near) if seen_by_all else (near,), admits))
    return [tile for tile in tiles if tile.queries]


def definition(case: Case, *, window: int, dilation: int = 1, global_tokens: int = 0) -> Patterned:
    """Softmax attention over the pairs that Longformer's patterns admit."""
    place_L1, key_S = places(case)
    steps_LS, rest_LS = (key_S - place_L1) // dilation, (key_S - place_L1) % dilation
    admitted_LS = (rest_LS == 0) & (steps_LS.abs() <= window // 2)
    admitted_LS |= (key_S < global_tokens) | ((place_L1 >= 0) & (place_L1 < global_tokens))
    if case.mask.text == "causal":
        admitted_LS &= key_S <= place_L1
    return Patterned(case, admitted_LS)


def supports(case: Case, *, window: int) -> str | None:
    """Why the window is impossible, or None."""
    return "window must be even: half of it lies on either side" if window % 2 else None


def exact_at(case: Case) -> dict[str, int]:
    """A window that holds all keys wherever its query stands."""
    return {"window": 2 * max(case.seq_len, case.kv_len)}


ROW: Any = {
    "family": "sparse", "time": "n d", "memory": "O(n)", "definition": definition,
    "flops": tiled_flops(cover), "useful": tiled_flops(cover, useful=True),
    "workspace": tiled_workspace(cover), "supports": supports,
}  # fmt: skip


@attention_builder("sliding-window", **ROW, exact_at=exact_at)
def sliding_window(case: Case, *, window: int = 256) -> AttentionCall:
    """Its own key, and half a window on either side."""
    return tiled(case, cover(case, window=window))


@attention_builder("dilated-window", **ROW, exact_at=lambda case: exact_at(case) | {"dilation": 1})
def dilated_window(case: Case, *, window: int = 256, dilation: int = 2) -> AttentionCall:
    """Every `dilation`-th key of a wider window."""
    return tiled(case, cover(case, window=window, dilation=dilation))


@attention_builder("window-global", **ROW, exact_at=exact_at)
def window_global(case: Case, *, window: int = 256, global_tokens: int = 16) -> AttentionCall:
    """A window, and first tokens that see and are seen."""
    return tiled(case, cover(case, window=window, global_tokens=global_tokens))
