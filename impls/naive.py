"""The baselines: softmax(QKᵀ·scale)V with the whole score matrix, all heads at once or in a loop."""

import torch

from attnbench.api import Case, attention_builder, mask_for

MASKS = ("full", "causal", "window")


def expand_heads(x_BGSD: torch.Tensor, heads: int) -> torch.Tensor:
    """Repeat each key/value head for the query heads that share it: (B, G, S, D) to (B, H, S, D)."""
    groups = x_BGSD.shape[1]
    return x_BGSD if groups == heads else x_BGSD.repeat_interleave(heads // groups, dim=1)


def hidden_and_blind(case: Case) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """(L, S) mask of the pairs to hide, and (L, 1) mask of the queries that see no key."""
    admitted_LS = mask_for(case)
    if admitted_LS is None:
        return None, None
    blind_L1 = ~admitted_LS.any(dim=1, keepdim=True)
    return ~admitted_LS, blind_L1 if bool(blind_L1.any()) else None
