"""The pairs of queries and keys that a mask admits: their number, and the blocks that hold them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from functools import partial

from attnbench.schema.case import Case, Mask

BLOCK = 128  # queries and keys of a block in `mask_block_density`, FlexAttention's default


def admitted_pairs(mask: Mask, queries: int, keys: int, item: int = 0) -> int:
    """Exact number P of (query, key) pairs that the mask admits in batch item `item`."""
    if mask.documents:
        ahead = 0 if mask.after == 0 else max(0, queries - keys) * min(mask.documents[0], keys)
        before = _pairs_before(mask, max(0, keys - queries), keys)
        return ahead + _pairs_before(mask, keys, keys) - before
    length = mask.length(keys, item)  # the keys from here on are padding
    prefix, diagonal = min(mask.prefix, length), keys - queries
    above, below = queries * length, 0
    if mask.after is not None:
        rising = _clipped_sum(diagonal + mask.after + 1 - prefix, queries, length - prefix)
        above = queries * prefix + rising
    if mask.before is not None:
        below = _clipped_sum(diagonal - mask.before, queries, length)
    return above - below


def _pairs_before(mask: Mask, place: int, keys: int) -> int:
    """Pairs of queries that stand before `place` with the keys of their documents.

    A document of n tokens has n², or n·(n + 1) / 2 where it is causal.
    """
    cycles, rest = divmod(place, sum(mask.documents))
    found, start = 0, place - rest
    for length in mask.documents:
        begun = min(length, rest)
        whole, part = length * length, begun * min(length, keys - start)
        if mask.after == 0:
            whole, part = length * (length + 1) // 2, begun * (begun + 1) // 2
        found += cycles * whole + part
        rest, start = rest - begun, start + length
    return found


def _clipped_sum(start: int, count: int, limit: int) -> int:
    """Sum over i < count of min(limit, max(0, start + i))."""
    first = max(0, -start)  # first i with a positive term
    last = min(count, max(first, limit - start))  # from here on the term is `limit`
    rising = (last - first) * (2 * start + first + last - 1) // 2 if last > first else 0
    return rising + (count - max(last, first) if first < count else 0) * limit


def batch_pairs(case: Case) -> int:
    """Pairs that the case's mask admits in all batch items together."""
    return sum(
        count * admitted_pairs(case.mask, case.seq_len, case.kv_len, item)
        for item, count in _items(case)
    )


def useful_pairs(case: Case) -> int:
    """As `batch_pairs`; where L = S the queries of padding are padding, too, and have none."""
    if case.seq_len != case.kv_len:
        return batch_pairs(case)
    sizes = ((item, case.mask.length(case.kv_len, item), count) for item, count in _items(case))
    return sum(count * admitted_pairs(case.mask, n, n, item) for item, n, count in sizes)


def unread_tokens(case: Case) -> tuple[int, int]:
    """Queries that see no key, and keys that no query sees, in all batch items together.

    The ranges of all queries leave no gap, and blind queries are the first ones.
    """
    blind = unseen = 0
    for item, count in _items(case):
        span = partial(case.mask.span, queries=case.seq_len, keys=case.kv_len, item=item)
        blind += count * bisect_left(range(case.seq_len), 1, key=lambda query: span(query)[1])
        unseen += count * (case.kv_len - span(case.seq_len - 1)[1] + span(0)[0])
    return blind, unseen


def _items(case: Case) -> list[tuple[int, int]]:
    """The batch items that differ, and how many there are of each."""
    differ = min(case.batch, case.mask.items)
    return [(item, len(range(item, case.batch, differ))) for item in range(differ)]


def visible_blocks(
    case: Case, queries: int, keys: int = 1, item: int = 0
) -> Iterator[tuple[range, range]]:
    """Each block of `queries` queries with the keys that at least one of them sees.

    Of batch item `item`. The keys are a range from the first to the last one seen, widened to whole
    blocks of `keys`; empty where no query of the block sees any.
    """
    for first in range(0, case.seq_len, queries):
        rows = range(first, min(first + queries, case.seq_len))
        low, _ = case.mask.span(rows[0], case.seq_len, case.kv_len, item)
        _, high = case.mask.span(rows[-1], case.seq_len, case.kv_len, item)
        yield rows, range(low // keys * keys, min(-(-high // keys) * keys, case.kv_len))


def mask_density(case: Case) -> float:
    """Admitted pairs / all pairs."""
    return batch_pairs(case) / (case.batch * case.seq_len * case.kv_len)


def mask_block_density(case: Case) -> float:
    """Blocks of 128 queries and 128 keys that hold an admitted pair / all such blocks."""
    rows, columns = (-(-length // BLOCK) for length in (case.seq_len, case.kv_len))
    seen = sum(
        count * -(-len(keys) // BLOCK)
        for item, count in _items(case)
        for _, keys in visible_blocks(case, BLOCK, BLOCK, item)
    )
    return seen / (case.batch * rows * columns)
