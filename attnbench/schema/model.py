"""Sizes of a model that no case has: of the MLP in each layer, and of the head."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct


class ModelSizes(Struct, frozen=True, kw_only=True):
    """What stands around attention in a model, as its config.json has it.

    `inner` is how many features an MLP has inside, or each of its `experts`, of which every token
    gets `chosen`; `vocab` how many logits the head gives. Either is 0 where it is not timed, and
    `notes` say why.
    """

    layers: int
    inner: int = 0
    gated: bool = True
    activation: Literal["silu", "gelu", "gelu-tanh", "relu"] = "silu"
    experts: int = 1
    chosen: int = 1
    vocab: int = 0
    notes: tuple[str, ...] = ()
