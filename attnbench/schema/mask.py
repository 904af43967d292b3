"""Masks: which keys each query sees. Of every query it is one contiguous range."""

from __future__ import annotations

import itertools
import re
from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial

from attnbench.base.parameters import Parameter, base_name, read_name
from attnbench.base.registry import Registry
from attnbench.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class Mask:
    """Bounds on the keys of a query, all of which hold; `text` is as on the command line.

    With L queries and S keys the place of query i among the keys is i + S - L (bottom-right: the
    last query stands where the last key does). It sees keys place-before … place+after, None being
    no bound on that side, and beside them the first `prefix` keys. `documents` are the lengths of
    packed sequences, in turn until all keys have one: it sees its own alone. Batch item b has the
    first `lengths`[b mod count] keys alone.

    Neither end of a query's range lies before that of the query before, and the ranges of queries
    in a row leave no gap: what a block of queries sees follows from its first and its last one.
    """

    text: str = "full"
    before: int | None = None
    after: int | None = None
    prefix: int = 0
    documents: tuple[int, ...] = ()
    lengths: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        """Its kind: `window` of `window:256`."""
        return base_name(self.text)

    @property
    def items(self) -> int:
        """How many batch items differ: item b is masked as item b mod `items`."""
        return len(self.lengths) or 1

    def span(self, query: int, queries: int, keys: int, item: int = 0) -> tuple[int, int]:
        """Half-open range of keys that `query` of batch item `item` sees; empty where it is blind.

        `api.helpers.mask_spans` has those of many queries.
        """
        place = query + keys - queries
        first = 0 if self.before is None else max(0, place - self.before)
        last = keys if self.after is None else max(self.prefix, place + self.after + 1)
        if self.documents:
            starts = self.document_starts
            inside = max(0, place) % starts[-1]
            own, cycle = bisect_right(starts, inside), max(0, place) - inside
            first, last = max(first, cycle + starts[own - 1]), min(last, cycle + starts[own])
        last = min(last, self.length(keys, item))
        return first, max(first, last)

    @property
    def document_starts(self) -> list[int]:
        """Where each document begins, and where the first begins again."""
        return list(itertools.accumulate(self.documents, initial=0))

    def length(self, keys: int, item: int = 0) -> int:
        """How many of the keys batch item `item` has."""
        return min(keys, self.lengths[item % self.items]) if self.lengths else keys

    def scaled(self, factor: int) -> Mask:
        """A mask of this kind whose sizes are `factor` times smaller, rounded up."""
        smaller = re.sub(r"(?<=[:+])\d+", lambda size: str(-(-int(size[0]) // factor)), self.text)
        return parse_mask(smaller)

    def admits_all(self, queries: int, keys: int) -> bool:
        """True where every query sees every key, so that no mask is needed at all."""
        return all(
            self.span(0, queries, keys, item)[1] == keys
            and self.span(queries - 1, queries, keys, item)[0] == 0
            for item in range(self.items)
        )


FULL = Mask()


@dataclass(frozen=True, kw_only=True)
class MaskKind:
    """What makes a mask of its parameters; `doc` is a line for people."""

    doc: str
    make: Callable[..., Mask]
    parameters: Mapping[str, Parameter] = field(default_factory=dict)


_FLAG = partial(Parameter, least=0, most=1)
_MASKS = {
    "full": MaskKind(doc="every query sees every key", make=Mask),
    "causal": MaskKind(
        doc="each query sees keys up to its own position; the last query's is the last key",
        make=lambda: Mask(after=0),
    ),
    # The query's own position counts as one of the keys, as in Mistral's sliding window.
    "window": MaskKind(
        doc="window:256: a causal sliding window of the last 256 keys",
        make=lambda width: Mask(before=width - 1, after=0),
        parameters={"width": Parameter()},
    ),
    # A prefix language model: Raffel et al. 2020 (arXiv 1910.10683), figure 4.
    "prefix": MaskKind(
        doc="prefix:128: causal, but the first 128 keys are seen by all (prefix LM)",
        make=lambda keys: Mask(after=0, prefix=keys),
        parameters={"keys": Parameter()},
    ),
    "document": MaskKind(
        doc="document:64+128: packed sequences of these lengths in turn, each causal, or causal=0",
        make=lambda lengths, causal: Mask(after=0 if causal else None, documents=lengths),
        parameters={"lengths": Parameter(many=True), "causal": _FLAG(default=1)},
    ),
    "padding": MaskKind(
        doc="padding:300+512: batch items of these lengths in turn; other keys are padding",
        make=lambda lengths, causal: Mask(after=0 if causal else None, lengths=lengths),
        parameters={"lengths": Parameter(many=True, least=0), "causal": _FLAG(default=0)},
    ),
}
MASKS: Registry[MaskKind] = Registry("mask", "--masks", _MASKS)


@lru_cache(1024)
def parse_mask(text: str) -> Mask:
    """Read a mask as on the command line, such as `causal`, `window:256`, `document:64+128`.

    Raises:
        UsageError: unknown mask, or a parameter that is missing or out of range.
    """
    name, kind, values = read_name(text, MASKS)
    if values.get("lengths") and not any(values["lengths"]):  # type: ignore[arg-type]
        raise UsageError(f"mask '{text}' leaves no key to anyone; give one length of 1 or more")
    return replace(kind.make(**values), text=name)
