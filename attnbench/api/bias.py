"""Position biases: what ALiBi, T5 and Shaw add to the scaled scores, without an (L, S) tensor.

Axes beyond the usual ones: `I` queries and `J` keys of a block; `W` = L + S − 1 distances; `C`
relative vectors; `N` slices, one for each batch item and key/value head; `R` query heads a slice.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from attnbench.schema.case import Case

_SEED = 20260
# (case, distances j − i of keys from queries) -> float64 of each head, (H, *distances.shape).
ByDistance = Callable[[Case, torch.Tensor], torch.Tensor]


def learned(rows: int, columns: int, device: str) -> torch.Tensor:
    """Float64 (rows, columns) from N(0, 1), always the same: what training would have found.

    torch draws 16 numbers at a time: of whole blocks a row, fewer rows are the first of more.
    """
    generator = torch.Generator().manual_seed(_SEED)
    drawn = torch.randn(rows, -(-columns // 16) * 16, generator=generator)
    return drawn[:, :columns].double().to(device)


def _alibi(case: Case, distance: torch.Tensor) -> torch.Tensor:
    """Press, Smith & Lewis 2022 (arXiv:2108.12409): slopes 2^(−8h/H), h from 1.

    Where H is no power of two, those of the next lower one, then every other of the next higher.
    """
    lower = 1 << (max(case.heads, case.position.values["heads"]).bit_length() - 1)
    slopes = [2 ** (-8 * h / lower) for h in range(1, lower + 1)]
    slopes += [2 ** (-4 * h / lower) for h in range(1, 2 * lower, 2)]
    slopes_H = torch.tensor(slopes[: case.heads], dtype=torch.float64, device=distance.device)
    return -slopes_H.view(-1, *[1] * distance.dim()) * distance.abs()


def _t5(case: Case, distance: torch.Tensor) -> torch.Tensor:
    """Raffel et al. 2020 (arXiv:1910.10683): a number for each head and bucket of distances.

    Half of a side's buckets hold one distance each, the others grow by a factor up to `distance`.
    A mask that shows no key past the query leaves all buckets to those before it.
    """
    buckets, farthest = case.position.values["buckets"], case.position.values["distance"]
    heads = max(case.heads, case.position.values["heads"])
    table_BH = learned(buckets, heads, str(distance.device))[:, : case.heads]
    if case.mask.after is None:
        buckets //= 2
        side, away = (distance > 0) * buckets, distance.abs()
    else:
        side, away = torch.zeros_like(distance), (-distance).clamp(min=0)
    exact = buckets // 2
    growth = (away.clamp(min=1) / exact).double().log() / math.log(farthest / exact)
    wide = (exact + (growth * (buckets - exact)).long()).clamp(max=buckets - 1)
    return table_BH[side + torch.where(away < exact, away, wide)].movedim(-1, 0)


BY_DISTANCE: dict[str, ByDistance] = {"alibi": _alibi, "t5": _t5}


def relative_vectors(case: Case, device: str) -> torch.Tensor:
    """Float64 (2·clip + 1, D): for each clipped distance what is added to a key for its score.

    Shaw, Uszkoreit & Vaswani 2018 (arXiv:1803.02155), keys alone, the same for all heads.
    """
    return learned(2 * case.position.values["clip"] + 1, case.head_dim, device)


class PositionBias:
    """What is added to the scaled scores of a case: `columns(q)[…, i, index(i, j)]`.

    `alibi` and `t5` have `table_HW`, a number for each head and distance, times `unit`. `shaw` has
    `vectors_CD` and so one column for each of them, made of a query. Both are prepared, in float32
    at least, and not differentiated; gradients flow to q.
    """

    def __init__(self, case: Case, unit: float = 1.0) -> None:
        self._queries, self._shift = case.seq_len, case.kv_len - case.seq_len
        self._groups = case.kv_heads
        dtype = torch.promote_types(getattr(torch, case.dtype), torch.float32)
        self.table_HW: torch.Tensor | None = None
        self.vectors_CD: torch.Tensor | None = None
        if by_distance := BY_DISTANCE.get(case.position.name):
            distance_W = torch.arange(1 - case.kv_len, case.seq_len, device=case.device)
            self.table_HW = (by_distance(case, distance_W) * unit).to(dtype)
        else:
            self.clip: int = case.position.values["clip"]
            self.vectors_CD = relative_vectors(case, case.device).to(dtype)

    def index(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        """Which column the scores of `query` and `key` take; broadcasts."""
        if self.vectors_CD is None:
            return key - query + (self._queries - 1)
        return (key - query - self._shift).clamp(-self.clip, self.clip) + self.clip

    def columns(self, q_NRID: torch.Tensor, first: int = 0) -> torch.Tensor:
        """The columns for some queries, already scaled, of the slices from the `first` on.

        (N, R, W), the same for all queries, or (N, R, I, C).
        """
        if self.vectors_CD is not None:
            scores_NRIC: torch.Tensor = q_NRID.to(self.vectors_CD.dtype) @ self.vectors_CD.mT
            return scores_NRIC
        assert self.table_HW is not None
        slices = torch.arange(first, first + len(q_NRID), device=q_NRID.device)
        table_GRW = self.table_HW.view(self._groups, -1, self.table_HW.shape[1])
        return table_GRW[slices % self._groups]

    def block(
        self, columns: torch.Tensor, i: slice, j: slice, *, keys_first: bool = False
    ) -> torch.Tensor:
        """What is added to queries i and keys j: broadcasts to (…, I, J), or to (…, J, I)."""
        queries, keys = i.stop - i.start, j.stop - j.start
        if self.vectors_CD is None:
            # Rows of a Toeplitz matrix are windows of its diagonal's numbers, one further for each.
            start = j.start - i.stop + self._queries
            near = columns[..., start : start + queries + keys - 1]
            if keys_first:
                return near.unfold(-1, queries, 1).flip(-1)
            return near.unfold(-1, keys, 1).flip(-2)
        columns = columns.mT if keys_first else columns
        axis = -2 if keys_first else -1
        which = self._clipped(i, j)
        if which is not None:
            return columns.narrow(axis, which, 1)
        index = self.pairs(i, j)
        index = index.mT if keys_first else index
        return columns.gather(axis, index.expand(*columns.shape[:-2], *index.shape))

    def collect(
        self, dcolumns_NRCI: torch.Tensor, ds_NRJI: torch.Tensor, i: slice, j: slice
    ) -> None:
        """Add the gradient of scores, keys first, to that of the columns of `shaw`."""
        which = self._clipped(i, j)
        if which is not None:
            dcolumns_NRCI[..., which, :] += ds_NRJI.sum(-2)
        else:
            dcolumns_NRCI.scatter_add_(-2, self.pairs(i, j).mT.expand_as(ds_NRJI), ds_NRJI)

    def _clipped(self, i: slice, j: slice) -> int | None:
        """The one column of a block whose distances are all clipped to the same; else None."""
        farthest_back = j.start - (i.stop - 1) - self._shift
        farthest_on = j.stop - 1 - i.start - self._shift
        if farthest_on <= -self.clip:
            return 0
        return 2 * self.clip if farthest_back >= self.clip else None

    def pairs(self, i: slice, j: slice) -> torch.Tensor:
        """`index` of all queries i and keys j: (I, J)."""
        numbers = self.table_HW if self.vectors_CD is None else self.vectors_CD
        assert numbers is not None
        query, key = (torch.arange(x.start, x.stop, device=numbers.device) for x in (i, j))
        return self.index(query.unsqueeze(1), key)


def position_bias(case: Case, unit: float = 1.0) -> PositionBias | None:
    """The case's bias on scaled scores, or None where its position encoding is none.

    `unit` multiplies what does not come from q: log2(e) for scores in base 2.
    """
    return PositionBias(case, unit) if case.position.encoding.kind == "bias" else None


def dense_bias(
    case: Case, hidden: torch.Tensor | None = None
) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """The whole bias of an unscaled q_BHLD, (1 or B, H, L, S), -inf for `hidden` pairs.

    In the case's dtype. Of `alibi` and `t5` made once; of `shaw` gathered in every call,
    differentiable.
    """
    bias, whole = position_bias(case), (slice(0, case.seq_len), slice(0, case.kv_len))
    scale, dtype = case.softmax_scale, getattr(torch, case.dtype)

    def finished(added: torch.Tensor) -> torch.Tensor:
        added = added if hidden is None else added.masked_fill(hidden, -math.inf)
        return added.to(dtype).contiguous()

    if bias is None:
        return None
    if bias.table_HW is not None:
        prepared_1HLS = finished(bias.block(bias.table_HW, *whole).unsqueeze(0))
        return lambda _: prepared_1HLS
    index_LS = bias.pairs(*whole)

    def gathered(q_BHLD: torch.Tensor) -> torch.Tensor:
        columns_BHLC = bias.columns(q_BHLD * scale)
        return finished(columns_BHLC.gather(-1, index_LS.expand(*columns_BHLC.shape[:-1], -1)))

    return gathered
