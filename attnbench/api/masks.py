"""Dense boolean masks from the band that a case describes."""

from __future__ import annotations

import torch

from attnbench.schema.case import Case, Mask


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


def mask_for(case: Case) -> torch.Tensor | None:
    """The case's boolean (L, S) mask on its device, or None where every pair is admitted."""
    if case.unmasked:
        return None
    return dense_mask(case.mask, case.seq_len, case.kv_len, case.device)


def hidden_and_blind(case: Case) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """(L, S) mask of the pairs to hide, and (L, 1) mask of the queries that see no key.

    A row of hidden pairs alone would make softmax NaN, so blind queries are left to see every
    key; they must lose their output, and with it their gradient, afterwards.
    """
    admitted_LS = mask_for(case)
    if admitted_LS is None:
        return None, None
    blind_L1 = ~admitted_LS.any(dim=1, keepdim=True)
    return ~(admitted_LS | blind_L1), blind_L1 if bool(blind_L1.any()) else None
