"""What several kernel files need: masks, torch.compile for one case, and a first run."""

from __future__ import annotations

import itertools
import math
import os
import shutil
import sys
import tempfile
import time
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

from attnbench.schema.case import Case, Mask
from attnbench.theory.costs import PRODUCTS
from attnbench.theory.masks import batch_pairs

_numbers = itertools.count()


class Estimate(int):
    """An estimate of the workspace in bytes by a short formula, rather too high than too low.

    A plain `int` from `workspace=` is exact, and `attnbench verify` refutes it where it is off. An
    estimate is no prediction: it is what has to be free before a cell is tried.
    """


class _MaskClock:
    """`with building_mask:` what is done within makes a mask; its time is `mask_build_us`.

    Host time since `reset`, None where no mask was made.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget what was spent."""
        self.spent_us: float | None = None
        self._begins: list[float] = []

    def __enter__(self) -> None:
        self._begins.append(self._now())

    def __exit__(self, *_: object) -> None:
        begin = self._begins.pop()
        if not self._begins:  # the outermost one has counted the others, too
            self.spent_us = (self.spent_us or 0.0) + (self._now() - begin) * 1e6

    def _now(self) -> float:
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.synchronize()
        return time.perf_counter()


building_mask = _MaskClock()


def mask_spans(
    mask: Mask,
    queries: int,
    keys: int,
    device: str,
    *,
    batch: int = 1,
    rows: range | torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Half-open ranges of keys, first and end, that the queries in `rows` see: each (I, rows).

    I is `batch` for a mask that differs between batch items, else 1. As `Mask.span`, of many
    queries at once; a query sees no key where the first is not before the end.
    """
    rows = range(queries) if rows is None else rows
    if isinstance(rows, range):
        rows = torch.arange(rows.start, rows.stop, device=device)
    place = rows + (keys - queries)
    first, end = torch.zeros_like(place), torch.full_like(place, keys)
    if mask.before is not None:
        first = (place - mask.before).clamp_(min=0)
    if mask.after is not None:
        end = (place + (mask.after + 1)).clamp_(min=mask.prefix)
    if mask.documents:
        starts = torch.tensor(mask.document_starts, device=device)
        inside = place.clamp(min=0) % starts[-1]
        cycle, own = place.clamp(min=0) - inside, torch.searchsorted(starts, inside, right=True)
        first = torch.maximum(first, cycle + starts[own - 1])
        end = torch.minimum(end, cycle + starts[own])
    items = range(batch if mask.lengths else 1)
    lengths = torch.tensor([[mask.length(keys, item)] for item in items], device=device)
    end = torch.minimum(end, lengths)
    return first.int().expand_as(end), end.int()


def dense_mask(
    mask: Mask,
    queries: int,
    keys: int,
    device: str,
    *,
    first_query: int = 0,
    count: int | None = None,
    rows: range | torch.Tensor | None = None,
    batch: int = 1,
) -> torch.Tensor:
    """Boolean tensor, True where query `first_query`+i of `queries`, or `rows`[i], sees key j.

    (count, keys), or (batch, 1, count, keys) of a mask that differs between batch items.
    """
    with building_mask:
        if rows is None:
            rows = range(first_query, queries if count is None else first_query + count)
        key = torch.arange(keys, device=device, dtype=torch.int32)
        spans = mask_spans(mask, queries, keys, device, batch=batch, rows=rows)
        first, end = (x.unsqueeze(-1) for x in spans)
        admitted = key < end
        if mask.before is not None or mask.documents:  # a comparison is what a mask takes longest
            admitted &= key >= first
        return admitted.unsqueeze(1) if mask.lengths else admitted[0]


def mask_for(case: Case) -> torch.Tensor | None:
    """The case's boolean mask as `dense_mask` makes it, or None where every pair is admitted."""
    if case.unmasked:
        return None
    return dense_mask(case.mask, case.seq_len, case.kv_len, case.device, batch=case.batch)


def hidden_and_blind(case: Case) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """(…, L, S) mask of the pairs to hide, and (…, L, 1) mask of the queries that see no key.

    Both (B, 1, …) for a mask that differs between batch items. A row of hidden pairs alone would
    make softmax NaN, so blind queries are left to see every key; they must lose their output, and
    with it their gradient, afterwards.
    """
    if case.unmasked:
        return None, None
    with building_mask:
        sizes = case.seq_len, case.kv_len, case.device
        hidden = dense_mask(case.mask, *sizes, batch=case.batch).logical_not_()
        first, end = mask_spans(case.mask, *sizes, batch=case.batch)
        blind = (first >= end).view(*hidden.shape[:-1], 1)
        if not blind.any():
            return hidden, None
        return hidden.logical_and_(~blind), blind


def by_slice(x_BHLD: torch.Tensor, slices: int) -> torch.Tensor:
    """(B, H, L, D) as (N, R, L, D): each query head beside those it shares keys with."""
    return x_BHLD.reshape(slices, -1, *x_BHLD.shape[2:])


def rows_of(x_NRID: torch.Tensor, wide: torch.dtype, factor: float = 1.0) -> torch.Tensor:
    """A wide copy times `factor`, with the rows of its R heads joined: (N, M, D)."""
    x_NRID = x_NRID.to(wide, copy=True, memory_format=torch.contiguous_format)
    return x_NRID.mul_(factor).flatten(1, 2)


class Patterned:
    """Dense softmax attention over the admitted pairs alone: a definition of a sparse method.

    `admitted` is a boolean (L, S), (H, L, S) or (B, H, L, S) on the case's device. A query that is
    admitted to no key gives 0. Softmax in float32 at least.
    """

    def __init__(self, case: Case, admitted: torch.Tensor) -> None:
        self.admitted, self._scale = admitted, case.softmax_scale

    def __call__(
        self, q_BHLD: torch.Tensor, k_BGSD: torch.Tensor, v_BGSV: torch.Tensor
    ) -> torch.Tensor:
        """o_BHLV; key/value heads may be fewer than H."""
        blind = ~self.admitted.any(-1, keepdim=True)
        sharing = q_BHLD.shape[1] // k_BGSD.shape[1]
        k_BHSD, v_BHSV = (x.repeat_interleave(sharing, dim=1) for x in (k_BGSD, v_BGSV))
        scores = (q_BHLD * self._scale) @ k_BHSD.mT
        scores = scores.masked_fill(~(self.admitted | blind), -math.inf)
        wide = torch.promote_types(scores.dtype, torch.float32)
        weights = scores.softmax(-1, dtype=wide).masked_fill(blind, 0).to(v_BHSV.dtype)
        return weights @ v_BHSV


def chunk_sizes(case: Case, chunk: int) -> list[tuple[int, int]]:
    """How many queries and keys each step of a recurrence over chunks takes: their sums are L, S.

    A query sees the keys of all steps before its own, and of its own those up to its place there.
    Causal, or a single query: first the keys before all queries, or the queries without keys, then
    chunks of both. Else every pair is admitted: chunks of keys, then chunks of queries.
    """

    def chunks(count: int) -> list[int]:
        return [min(chunk, count - first) for first in range(0, count, chunk)]

    causal = case.mask.text == "causal" or case.seq_len == 1
    both = min(case.seq_len, case.kv_len) if causal else 0
    keys, queries = chunks(case.kv_len - both), chunks(case.seq_len - both)
    return [(0, n) for n in keys] + [(n, 0) for n in queries] + [(n, n) for n in chunks(both)]


def in_chunks(
    case: Case, chunk: int, q_BHLD: torch.Tensor, k_BGSD: torch.Tensor, v_BGSV: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """The steps of `chunk_sizes` as q_BGRLD, k_BG1SD and v_BG1SV in float32 at least.

    R query heads share a key/value head. Parts of a split and not slices, of which each has a
    gradient as large as its whole tensor.
    """
    wide = torch.promote_types(q_BHLD.dtype, torch.float32)
    queries, keys = map(list, zip(*chunk_sizes(case, chunk), strict=True))
    sharing = case.heads // case.kv_heads
    q_BGRLD = q_BHLD.view(len(q_BHLD), case.kv_heads, sharing, *q_BHLD.shape[2:])
    grouped = (q_BGRLD, queries), (k_BGSD.unsqueeze(2), keys), (v_BGSV.unsqueeze(2), keys)
    parts = (torch.split(x, sizes, dim=3) for x, sizes in grouped)
    for q, k, v in zip(*parts, strict=True):
        yield q.to(wide), k.to(wide), v.to(wide)


def flops_in_chunks(
    case: Case, chunk: int | None, width: int, value_width: int, *, of_token: int = 0
) -> int:
    """FLOPs of the steps of `chunk_sizes` with a state of (width, value_width) a key/value head.

    Pairs inside chunks, keys into the state, queries times the state; backward twice that, less the
    gradients of the state before the first step and after the last. Beside these `of_token`
    products with fixed numbers for each query and each key, and back. Without a chunk the least of
    all forms: a state token by token, 2·B·(H·L + G·S)·width·value_width, or 2·B·H·P·(width + V).
    """
    queries, keys, sizes = case.heads * case.seq_len, case.kv_heads * case.kv_len, [(0, 0)]
    forward, state = (queries + keys) * width * value_width, width * value_width
    if chunk is None:
        pairs = case.heads * batch_pairs(case) // case.batch
        forward = min(forward, pairs * (width + case.value_dim))
    else:
        sizes = chunk_sizes(case, chunk)
        forward += case.heads * sum(i * j for i, j in sizes) * (width + value_width)
    spared = (case.heads * sizes[0][0] + 2 * case.kv_heads * sizes[-1][1]) * state
    spared *= case.pass_ != "forward"
    fixed = of_token * (queries + keys) * (2 if case.pass_ == "both" else 1)
    return 2 * case.batch * (forward * PRODUCTS[case.pass_] - spared + fixed)


def kernelised(
    case: Case, q_BHLF: torch.Tensor, k_BGSF: torch.Tensor, v_BGSV: torch.Tensor
) -> torch.Tensor:
    """Linear attention by its definition, dense: o_BHLV, from features that are at least 0.

    The weights of the admitted pairs are φ(q)·φ(k) over their sum for the query, taken in float32
    at least. A query without keys gives 0. 1024 queries at a time, for the sake of memory.
    """
    sharing = q_BHLF.shape[1] // k_BGSF.shape[1]
    k_BHSF, v_BHSV = (x.repeat_interleave(sharing, dim=1) for x in (k_BGSF, v_BGSV))
    wide, outputs = torch.promote_types(q_BHLF.dtype, torch.float32), []
    for first, q in zip(range(0, case.seq_len, 1024), torch.split(q_BHLF, 1024, 2), strict=True):
        weights_BHLS = q @ k_BHSF.mT
        if not case.unmasked:
            sizes, rows = (case.seq_len, case.kv_len), range(first, first + q.shape[2])
            admitted_LS = dense_mask(case.mask, *sizes, case.device, rows=rows)
            weights_BHLS = weights_BHLS.masked_fill(~admitted_LS, 0)
        total_BHL1 = weights_BHLS.sum(-1, keepdim=True, dtype=wide)
        weights_BHLS = weights_BHLS / total_BHL1.masked_fill(total_BHL1 == 0, 1)
        outputs.append(weights_BHLS.to(v_BHSV.dtype) @ v_BHSV)
    return torch.cat(outputs, dim=2)


def compile_alone(
    function: Callable[..., torch.Tensor], backend: Any = "inductor"
) -> Callable[..., torch.Tensor]:
    """torch.compile for the shapes of one case; whatever would fall back to eager raises instead.

    torch keeps compiled code per code object, which all closures of one `def` share, and gives up
    after 8 shapes of one: hence a code object for each case. With donated buffers a compiled
    backward pass could not run twice on one graph, which is how it is timed: torch looks at that
    switch in the backward pass, too, so it stays off for the process.
    """
    from torch._functorch import config

    config.donated_buffer = False
    if hasattr(torch.compiler, "config"):  # else a kernel kept from wider instructions gives NaN
        torch.compiler.config.cache_key_tag = torch.backends.cpu.get_cpu_capability()
    assert isinstance(function, types.FunctionType)
    code = function.__code__.replace(co_name=f"{function.__name__}_{next(_numbers)}")
    own = types.FunctionType(
        code, function.__globals__, code.co_name, function.__defaults__, function.__closure__
    )
    compiled: Callable[..., torch.Tensor] = torch.compile(
        own, fullgraph=True, dynamic=False, backend=backend
    )
    return compiled


def reason_against_compiling(case: Case) -> str | None:
    """Why inductor cannot build kernels for the case's device here, or None."""
    if case.device == "cuda":
        return _reason_against_triton()
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        return f"torch.compile needs a C++ compiler on CPU, and there is no {compiler}"
    # Paths go unquoted into one command line (torch 2.13).
    cache = os.environ.get("TORCHINDUCTOR_CACHE_DIR", "")
    for path in (torch.__file__, sys.base_prefix, tempfile.gettempdir(), cache):
        if " " in path:
            return f"torch.compile cannot use a path with a space on CPU: {path}"
    return None


def _reason_against_triton() -> str | None:
    """Why Triton cannot build kernels here, which compiles a launcher in C for each, or None."""
    from torch.utils._triton import has_triton

    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    if not has_triton():
        return "torch.compile needs Triton on CUDA, and a GPU of compute capability 7.0 or more"
    # Where Triton looks (its runtime/build.py).
    compilers = [os.environ["CC"]] if "CC" in os.environ else ["gcc", "clang"]
    if not any(map(shutil.which, compilers)):
        return f"torch.compile needs a C compiler on CUDA, and there is no {' or '.join(compilers)}"
    return None


def reason_against_flex(case: Case) -> str | None:
    """Why FlexAttention cannot take the case here, or None."""
    cannot_compile = reason_against_compiling(case)
    if cannot_compile:
        return cannot_compile
    if case.device == "cuda":
        narrow = min(case.head_dim, case.value_dim) < 16
        return "FlexAttention needs head and value dims of at least 16 on CUDA" if narrow else None
    if case.needs_grad:
        return "FlexAttention has no backward pass on CPU"
    if "AVX" not in torch.backends.cpu.get_cpu_capability():
        return "FlexAttention needs AVX2 or AVX512 on CPU"
    return None
