"""One training, from a seed to figures."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from tests.validation.perplexity.model import Decoder, Variant
from tests.validation.perplexity.text import Text

BUCKETS = 16  # of places in a window of twice the trained length


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How all are trained: AdamW on windows of `length` bytes, drawn at random with the seed.

    The rate rises over the first tenth of the steps and falls to zero along a cosine. Of 4e-3,
    8e-3 and 1.6e-2 the default served the sinusoidal decoder of 8 heads best, at another seed and
    over 1500 steps.
    """

    width: int = 96
    blocks: int = 2
    length: int = 128
    batch: int = 8
    steps: int = 1000
    rate: float = 8e-3
    judged: int = 256  # windows of twice the length, evenly over the held-out text
    looks: int = 5  # at the held-out text, the last one after the last step

    def model(self, variant: Variant) -> Decoder:
        """One with fresh weights, for windows of up to twice the length."""
        return Decoder(variant, self.width, self.blocks, 2 * self.length)


def train(variant: Variant, seed: int, recipe: Recipe, text: Text) -> dict[str, Any]:
    """Train from `seed`, which gives weights and order of data; losses in nats a byte.

    `loss` is that at the trained length in the end, `curve` on the way, beside the bytes trained
    on. `by_place`: the loss by place in windows of twice that length, BUCKETS of equal width.
    `beyond`: that of their second half, and `cut` that of the same bytes in windows of the
    trained length, so with less context.
    """
    begin, begin_cpu = time.monotonic(), time.process_time()
    torch.manual_seed(seed)
    model = recipe.model(variant)
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.rate, betas=(0.9, 0.99))
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, recipe.rate, recipe.steps, pct_start=0.1, cycle_momentum=False
    )
    order = torch.Generator().manual_seed(seed)
    span = torch.arange(recipe.length + 1)
    long_BL = held_out_windows(text, recipe)
    # Halves that share a byte: what is asked for in the second half is asked for here, too.
    short_BL = torch.cat((long_BL[:, : recipe.length + 1], long_BL[:, recipe.length :]))
    curve = []
    for step in range(1, recipe.steps + 1):
        first = torch.randint(len(text.train) - recipe.length, (recipe.batch, 1), generator=order)
        window_BL = text.train[first + span].long()
        optimizer.zero_grad()
        losses(model, window_BL).mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step * recipe.looks // recipe.steps > (step - 1) * recipe.looks // recipe.steps:
            short = judged(model, short_BL)
            curve.append((step * recipe.batch * recipe.length, short.mean().item()))
    by_place = judged(model, long_BL).mean(0).unflatten(0, (BUCKETS, -1)).mean(1)
    return {
        "position": variant.position,
        "heads": variant.heads,
        "seed": seed,
        "loss": curve[-1][1],
        "curve": curve,
        "by_place": by_place.tolist(),
        "beyond": by_place[BUCKETS // 2 :].mean().item(),
        "cut": short[len(long_BL) :].mean().item(),
        "wall_s": time.monotonic() - begin,
        "cpu_s": time.process_time() - begin_cpu,
    }


def held_out_windows(text: Text, recipe: Recipe) -> torch.Tensor:
    """Windows (windows, 2 × length + 1) of the held-out text, at even distances."""
    width = 2 * recipe.length + 1
    first = torch.linspace(0, len(text.held_out) - width, recipe.judged).long()
    return text.held_out[first[:, None] + torch.arange(width)].long()


def losses(model: Decoder, window_BL: torch.Tensor) -> torch.Tensor:
    """The loss (B, L − 1) on each byte of the windows but the first, in nats."""
    logits_BLV = model(window_BL[:, :-1])
    return cross_entropy(logits_BLV.transpose(1, 2), window_BL[:, 1:], reduction="none")


@torch.no_grad()
def judged(model: Decoder, windows_BL: torch.Tensor) -> torch.Tensor:
    """`losses` of many windows, a few at a time."""
    return torch.cat([losses(model, part_BL) for part_BL in windows_BL.split(16)])
