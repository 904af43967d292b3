"""What a mask tensor is, by its content: the text of `schema.mask`, or why it has none."""

from __future__ import annotations

import random
import weakref
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from attnbench.errors import UsageError
from attnbench.schema.mask import parse_mask

BLOCKED = -9999.0  # additive masks write -inf, the least finite number, or -10000
_ROWS = 64
_READ_BYTES = 1 << 16


@dataclass(frozen=True)
class Found:
    """`text` as `parse_mask` reads it over the first `keys` keys; `problem` is why it is no case's.

    Keys past `keys` are seen by no query: those of a cache that is not full yet.
    """

    text: str
    keys: int
    problem: str = ""


def classify(mask: torch.Tensor, queries: int, keys: int) -> Found:
    """Tell a mask, broadcastable to (B, H, L, S), from 64 rows of L; 64 random ones must agree.

    True or 0 lets a query see a key; False, -inf and what is below -9999 do not.
    """
    while mask.dim() < 4:
        mask = mask[None]
    if mask.dim() > 4 or (items := mask.shape[0]) * keys * _ROWS > 1 << 26:
        return Found("full", keys, "a mask that is too large to read")
    wide = mask.expand(items, mask.shape[1], queries, keys)
    chosen = [i * (queries - 1) // (_ROWS - 1) for i in range(_ROWS)]
    chosen += sorted(random.Random(queries).sample(range(queries), min(_ROWS, queries)))
    rows = wide[:, :, chosen].detach().cpu()
    if rows.dtype is not torch.bool:
        if not ((rows == 0) | (rows < BLOCKED)).all():
            return Found("full", keys, "a bias")
        rows = rows > BLOCKED
    problem = f"a mask with {rows[:, :, _ROWS:].float().mean():.1%} of pairs"  # of random rows
    if (rows != rows[:, :1]).any():
        return Found("full", keys, f"{problem} that differs between heads")
    counts, firsts = rows[:, 0].sum(-1), rows[:, 0].byte().argmax(-1)
    if queries == 1 and counts.any():  # of a single query the order of keys changes nothing
        lengths = counts[:, 0].tolist()
        return Found(padding(lengths) if min(lengths) < keys else "full", keys)
    lasts = keys - rows[:, 0].flip(-1).byte().argmax(-1)
    if ((counts > 0) & (lasts - firsts != counts)).any() or not counts.any():
        return Found("full", keys, problem)
    spans = {
        (item, row): range(first, first + count)
        for item, starts, sizes in zip(range(items), firsts.tolist(), counts.tolist(), strict=True)
        for row, first, count in zip(chosen, starts, sizes, strict=True)
    }
    for text, seen in _candidates(spans, wide, queries, keys):
        with suppress(UsageError):
            span = parse_mask(text).span
            if all(range(*span(i, queries, seen, b)) == own for (b, i), own in spans.items()):
                return Found(text, seen)
    begins = {(item, span.start) for (item, _), span in spans.items() if span}
    if len(begins) == items and any(start for _, start in begins):
        problem = "padding on the left (a case has it on the right)"
    return Found("full", keys, problem)


def top_left(queries: int, keys: int) -> Found:
    """SDPA's `is_causal`: query i sees keys 0 … i, which is `causal` over the first L keys."""
    if queries > keys:
        return Found("full", keys, "causal from the top left with more queries than keys")
    return Found("full" if queries == 1 else "causal", queries)


def padding(lengths: list[int], causal: bool = False) -> str:
    """The mask of items of these lengths; one stands for all where they are equal."""
    lengths = lengths[:1] if len(set(lengths)) == 1 else lengths
    return f"padding:{'+'.join(map(str, lengths))}" + ":causal=1" * causal


def _candidates(
    spans: dict[tuple[int, int], range], wide: torch.Tensor, queries: int, keys: int
) -> Iterator[tuple[str, int]]:
    """Texts and keys to try, the plainest first."""
    for size in dict.fromkeys((keys, max(span.stop for span in spans.values()))):
        yield "full", size
        yield "causal", size
        yield f"window:{len(spans[0, queries - 1])}", size
        yield f"prefix:{spans[0, 0].stop}", size
    lengths = [0] * wide.shape[0]
    for (item, _), span in spans.items():
        lengths[item] = max(lengths[item], span.stop)
    yield padding(lengths), keys
    yield padding(lengths, causal=True), keys
    if queries == keys:  # where a document begins, its first query does not see the key before
        before = wide[0, 0].diagonal(-1)
        blocked = ~before if before.dtype is torch.bool else before < BLOCKED
        starts = [0, *(blocked.nonzero()[:, 0] + 1).tolist(), keys]
        text = "+".join(str(b - a) for a, b in pairwise(starts))
        yield f"document:{text}", keys
        yield f"document:{text}:causal=0", keys


class Fingerprints:
    """What tells masks apart: their content, read once of a tensor that is not written to.

    Of large masks up to 64 rows are read, or `every` row.
    """

    def __init__(self, *, every: bool = False) -> None:
        self._every = every
        self._of: dict[tuple[Any, ...], tuple[weakref.ref[torch.Tensor], int]] = {}

    def of(self, mask: Any) -> Any:
        """A key that masks of equal content share."""
        if not isinstance(mask, torch.Tensor):
            return type(mask).__name__
        if mask.is_cuda and torch.cuda.is_current_stream_capturing():
            return "unread"
        base = mask if mask._base is None else mask._base
        version = None if mask.is_inference() else mask._version
        place = (id(base), version, mask.data_ptr(), mask.shape, mask.stride(), mask.dtype)
        kept = self._of.get(place)
        if version is not None and kept is not None and kept[0]() is base:
            return kept[1]
        if len(self._of) > 256:
            self._of.clear()
        if mask.nbytes > _READ_BYTES and mask.dim() > 1 and not self._every:
            mask = mask[..., :: -(-mask.shape[-2] // _ROWS), :]
        rows = mask.detach().cpu().contiguous()
        key = hash((rows.shape, rows.dtype, rows.view(torch.uint8).numpy().tobytes()))
        self._of[place] = (weakref.ref(base), key)
        return key
