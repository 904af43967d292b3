"""Which part of a large case is checked, where the reference of all of it would take too long."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from time import perf_counter

import torch

from attnbench.api import Implementation, Patterned, mask_spans
from attnbench.base import units
from attnbench.schema.case import Case, Position
from attnbench.worker.inputs import Draw, Tensors, needle_pairs
from attnbench.worker.reference import (
    Drawn,
    DroppedError,
    PlainResult,
    Reference,
    plain_attention,
    reference_of,
)

_ROWS = 32  # of a part, at least: those that say most, and some at random
_ALIKE = 16  # queries up to which a kernel may take another path: a smaller case keeps them


@dataclass(frozen=True, kw_only=True)
class Affordable:
    """How many rows of how many key/value heads are checked, as a `share`; and a smaller case."""

    rows: int
    slices: int
    share: str
    smaller: Case


def affordable(case: Case, tensors: Tensors, reference_s: float) -> Affordable | None:
    """What of a case with these inputs can be checked, or None where that is all of it.

    Of the time, a third each goes to two draws and to a smaller case, whose sizes are divided by a
    power of 2. Forward, a part is of all heads, if they can have 32 rows each; where there are
    gradients it has all rows, since those of keys are sums over them.
    """
    if case.workload != "attention":
        return None
    slices, row_s = case.batch * case.kv_heads, _row_s(case, tensors, reference_s)
    if 2 * row_s * slices * case.seq_len <= reference_s:
        return None
    most = int(reference_s / 3 / row_s)
    rows = min(case.seq_len, case.seq_len if case.needs_grad else max(_ROWS, most // slices))
    if most < rows:
        takes, left = units.seconds(row_s * rows), units.seconds(reference_s / 3)
        why = f"{takes} a key/value head, of {left} that --budget gives it"
        needs_s = 30 * row_s * rows  # of which a tenth is for checks
        raise DroppedError(f"its check takes too long: {why}", dropped="budget", needs_s=needs_s)
    drawn, smaller, factor = min(slices, most // rows), case, 1
    while smaller.seq_len * smaller.kv_len * slices > most * case.kv_len / 2 and smaller.kv_len > 1:
        factor *= 2
        smaller = divided(case, factor)
    share = f"1 in {slices * case.seq_len / (drawn * rows):.3g} rows"
    return Affordable(rows=rows, slices=drawn, share=share, smaller=smaller)


def divided(case: Case, factor: int) -> Case:
    """A case of the same kind whose lengths, those of the mask too, are so many times smaller."""
    queries = max(min(_ALIKE, case.seq_len), case.seq_len // factor)
    keys, mask = max(1, case.kv_len // factor), case.mask.scaled(factor)
    return replace(case, seq_len=queries, kv_len=keys, mask=mask)


def _row_s(case: Case, tensors: Tensors, reference_s: float) -> float:
    """Seconds that the reference takes for a row of a key/value head: the least of a few sizes.

    It takes about 1/50 of `reference_s`; where 16 rows take longer, up to 1/6. The first call may
    load libraries, and any may be disturbed: there are three unless they take all of the time.
    """
    rows, begin, least_s = 1, perf_counter(), math.inf
    for call in itertools.count():
        numbers, before = torch.arange(rows, device=case.device), perf_counter()
        drawn_truth(tensors, Drawn(case=case, row_R=numbers, slice_P=numbers[:1]))
        now = perf_counter()
        least_s, spent = min(least_s, (now - before) / rows), (now - begin) / reference_s
        enough = spent > 1 / 6 or rows == case.seq_len or (rows >= 16 and spent > 1 / 50)
        if spent > 1 or (call >= 2 and enough):
            break
        rows = min(2 * rows, case.seq_len)
    return least_s


def draw_part(case: Case, sizes: Affordable, draw: Draw) -> Drawn:
    """A part at random. Where needles are planted, what says most is in it.

    That is the first and the last query, some that see no key, or fewest, and those of needles.
    """
    generator, first = torch.Generator().manual_seed(draw.seed), list[int]()
    counts = case.mask, case.seq_len, case.kv_len
    if draw.needles:
        start, end = mask_spans(*counts, "cpu", batch=case.batch)
        keys_L = (end - start).clamp(min=0).amin(0)
        by_keys, blind = keys_L.argsort(stable=True).tolist(), int((keys_L == 0).sum())
        first = [0, case.seq_len - 1, *by_keys[:2], *by_keys[blind : blind + 4]]
        first += [query for query, _ in needle_pairs(*counts, draw.seed)]
    others = torch.randperm(case.seq_len, generator=generator).tolist()
    rows = list(dict.fromkeys(first + others))[: sizes.rows]
    slices = torch.randperm(case.batch * case.kv_heads, generator=generator)[: sizes.slices]
    row_R, slice_P = (x.sort().values.to(case.device) for x in (torch.tensor(rows), slices))
    return Drawn(case=case, row_R=row_R, slice_P=slice_P)


def drawn_truth(tensors: Tensors, part: Drawn, impl: Implementation | None = None) -> Reference:
    """The reference of a part; of a definition that is not a pattern there is none."""
    admitted = None
    if impl is not None and impl.definition is not None:
        method = impl.definition(replace(part.case, position=Position()))
        if not isinstance(method, Patterned):
            raise DroppedError("its check takes too long: its definition gives all rows or none")
        every = method.admitted.expand(part.case.batch, part.case.heads, -1, -1)
        admitted = part.of("q", every)

    def plain(drawn: Tensors, *, terms: bool) -> PlainResult:
        return plain_attention(part.case, drawn, terms=terms, admitted=admitted, drawn=part)

    found = reference_of(part.case, {name: part.of(name, x) for name, x in tensors.items()}, plain)
    return replace(found, drawn=part)
