"""A decoder-only transformer over bytes, small enough to train in a minute on one core.

Pre-norm blocks of attention and a GELU MLP of 4 E, tied embeddings. Every variant has the same
parameters in the same order, so that one seed gives all of them the same initial weights: heads
only cut the width differently, and neither encoding has weights. Axes: `B` batch, `L` tokens,
`E` width, `H` heads, `D` head dim.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.functional import gelu, linear

import attnbench
from attnbench.schema.case import Case
from attnbench.schema.position import parse_position
from attnbench.worker.positions import Rotation, addition, rotation

VOCABULARY = 256  # bytes


@dataclass(frozen=True, kw_only=True)
class Variant:
    """What the models differ in."""

    position: str  # as on the command line: one that turns q and k, or is added to x
    heads: int

    @property
    def name(self) -> str:
        """`rope, 8 heads`."""
        return f"{self.position}, {self.heads} head{'s' if self.heads > 1 else ''}"


class Block(nn.Module):
    """Attention and an MLP, each added to what came in."""

    def __init__(self, width: int, heads: int, rotate: Rotation | None) -> None:
        super().__init__()
        self.heads, self.rotate = heads, rotate
        self.attend = attnbench.get("sdpa")
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x_BLE: torch.Tensor) -> torch.Tensor:
        """x_BLE to x_BLE."""
        qkv_BLE = self.qkv(self.before_attention(x_BLE)).chunk(3, dim=-1)
        q_BHLD, k_BHLD, v_BHLD = (
            x.unflatten(-1, (self.heads, -1)).transpose(1, 2) for x in qkv_BLE
        )
        if self.rotate is not None:
            rotate = self.rotate.window(0, x_BLE.shape[1])
            q_BHLD, k_BHLD = rotate(q_BHLD), rotate(k_BHLD)
        o_BHLD = self.attend(q_BHLD, k_BHLD, v_BHLD, causal=True)
        x_BLE = x_BLE + self.out(o_BHLD.transpose(1, 2).flatten(2))
        added_BLE: torch.Tensor = self.down(gelu(self.up(self.before_mlp(x_BLE))))
        return x_BLE + added_BLE


class Decoder(nn.Module):
    """Logits (B, L, 256) of the next byte from bytes (B, L), of which there may be `places`."""

    def __init__(self, variant: Variant, width: int, blocks: int, places: int) -> None:
        super().__init__()
        heads, position = variant.heads, parse_position(variant.position)
        case = Case(heads=heads, head_dim=width // heads, position=position)
        rotate, self.added_LE = rotation(case, 0, places, places), addition(case, places)
        self.embed = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width, heads, rotate) for _ in range(blocks))
        self.last = nn.LayerNorm(width)
        nn.init.normal_(self.embed.weight, std=width**-0.5)

    def forward(self, bytes_BL: torch.Tensor) -> torch.Tensor:
        """The logits at place i are of byte i + 1."""
        # Scaled to unit variance as in Vaswani et al., or the sinusoids would drown the bytes.
        x_BLE = self.embed(bytes_BL) * self.embed.embedding_dim**0.5
        if self.added_LE is not None:
            x_BLE = x_BLE + self.added_LE[: x_BLE.shape[1]]
        for block in self.blocks:
            x_BLE = block(x_BLE)
        return linear(self.last(x_BLE), self.embed.weight)
