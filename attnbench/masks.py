"""Dense boolean masks from the band that a case describes."""

from __future__ import annotations

import torch

from attnbench.case import Mask


def dense_mask(
    mask: Mask,
    queries: int,
    keys: int,
    device: str,
    *,
    first_query: int = 0,
    count: int | None = None,
) -> torch.Tensor:
    """Boolean (count, keys) tensor, True where query `first_query`+i of `queries` sees key j.

    `count` rows are made, all of them unless given, so that a caller can work in blocks.
    """
    count = queries - first_query if count is None else count
    query = torch.arange(first_query, first_query + count, device=device).unsqueeze(1)
    offset = torch.arange(keys, device=device) - (query + (keys - queries))
    admitted = torch.ones_like(offset, dtype=torch.bool)
    if mask.before is not None:
        admitted &= offset >= -mask.before
    if mask.after is not None:
        admitted &= offset <= mask.after
    return admitted
