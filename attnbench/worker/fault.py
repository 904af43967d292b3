"""What is wrong with a wrong result, in codes and figures: where, by how much, what explains it.

An explanation is another computation that gives what was got: with another mask or scale, other
key/value heads, the inputs before, in a coarser dtype. It is tried on a few rows, after a check has
failed. `cli.faults` makes sentences of the codes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from attnbench.api import dense_mask
from attnbench.schema.case import Case, Mask
from attnbench.worker.inputs import Tensors
from attnbench.worker.positions import bias_scores, rotated
from attnbench.worker.reference import Reference, Size, judge_one
from attnbench.worker.workloads import WORKLOADS

_AXES = {4: ("batch", "head", "query", "dim"), 3: ("batch", "token", "dim"), 2: ("row", "column")}
_ROWS = 16  # that an explanation is tried on
_PAIRS = 1 << 18  # heads x queries x keys up to which coarser dtypes are tried
_COARSER = {"float64": ("float32", "bfloat16", "float16"), "float32": ("bfloat16", "float16"),
            "float16": ("bfloat16",), "bfloat16": ()}  # fmt: skip
_ALIKE, _ROUNDING = 4.0, 20.0  # times the baseline error in a coarser dtype, and in its own

Near = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], bool]


def fault_of(
    case: Case,
    tensors: Tensors,
    outputs: Mapping[str, Any],
    truth: Reference,
    before: Tensors | None = None,
    *,
    exact: bool = True,
) -> dict[str, Any]:
    """The first of the outputs that is wrong, as plain JSON: `code`, `tensor`, and figures.

    `before` are inputs for which the result was right; `exact` says that attention was to be
    computed, and not something else, which nothing here explains. For the codes `not-a-tensor`,
    `shape`, `dtype` and `device` there are `got` and `expected`. For `not-finite` and `wrong`:

    - `at`, `got`, `expected`, `error`: the first element that is not finite, or that of the largest
      error; `allowed`: how large that may be;
    - `touched`: for each axis how many of its places have wrong elements, of how many, the first
      and the last of them;
    - `explained`: codes of what would explain it, empty where nothing does, None where that was not
      looked into; with `ratio` (got ÷ expected, where constant), or `precision` (a dtype, and the
      error as a multiple of the baseline error in it);
    - `keys`: which the worst `query` has `lost`, or has `seen` without right (the first and the
      last), and the `span` that it should see.
    """
    for name, value in truth.values.items():
        got, allowed = outputs.get(name), truth.allowed[name]
        fault: dict[str, Any] = dict(judge_one(name, got, value, allowed, case.dtype).fault)
        if fault:
            break
    if not isinstance(got, torch.Tensor):
        return fault
    if "got" in fault:
        swapped = got.ndim == 4 and got.shape != value.shape == got.transpose(1, 2).shape
        return fault | {"explained": ["heads-after-rows"] if swapped else []}
    got = got.detach().double()
    fault |= _where(name, got, value, allowed)
    if not exact:
        return fault | {"explained": None}
    return fault | _why(case, tensors, name, got, value, allowed, before)


def _where(name: str, got: torch.Tensor, value: torch.Tensor, allowed: Size) -> dict[str, Any]:
    error = (got - value).abs().nan_to_num(nan=math.inf)
    at = tuple(int(x) for x in torch.unravel_index(error.argmax(), error.shape))
    rows = "key" if name in ("dk", "dv") else "query"
    named = _AXES.get(error.ndim) or [f"axis {number}" for number in range(error.ndim)]
    axes = [rows if axis == "query" else axis for axis in named]
    wrong, touched = ~(error <= allowed.max), {}
    for number, axis in enumerate(axes[:-1]):
        places = wrong.movedim(number, 0).flatten(1).any(1).nonzero().flatten().tolist()
        if places:
            touched[axis] = [len(places), wrong.shape[number], places[0], places[-1]]
    numbers = {"got": got[at], "expected": value[at], "error": error[at]}
    return {
        "at": dict(zip(axes, at, strict=True)),
        # JSON has no infinity and no NaN.
        **{n: float(x) if x.isfinite() else str(float(x)) for n, x in numbers.items()},
        "allowed": allowed.max,
        "touched": touched,
    }


def _why(
    case: Case,
    tensors: Tensors,
    name: str,
    got: torch.Tensor,
    value: torch.Tensor,
    allowed: Size,
    before: Tensors | None,
) -> dict[str, Any]:
    def near(candidate: torch.Tensor, got: torch.Tensor, value: torch.Tensor) -> bool:
        off, error = Size.of(candidate - got).rms, Size.of(got - value).rms
        return off <= error / 4 and off <= max(4 * allowed.rms, error / 50)

    if case.workload != "attention":
        return {"explained": None}
    finite, keys = got.isfinite().all(-1), {}
    sizes: Any = case.seq_len, case.kv_len, case.device
    blind = ~dense_mask(case.mask, *sizes, batch=case.batch).any(-1)
    if name == "o" and not finite.all() and bool((finite == ~blind).all()):
        return {"explained": ["rows-without-keys"]}
    if name == "o" and finite.any():
        errors = (got - value).abs().amax(-1).masked_fill(~finite, -1).flatten()
        worst = errors.topk(min(_ROWS, int(finite.sum()))).indices
        rows = torch.unravel_index(worst, finite.shape)
        fitting = [
            (code, changes)
            for code, other, changes in _variants(case, tensors, before)
            if near(_Rows.of(case, other, rows, **changes).outputs(), got[rows], value[rows])
        ]
        row = _Rows.of(case, tensors, tuple(x[:1] for x in rows))
        if found := row.keys(got[rows][:1], value[rows][:1], near):
            keys = {"keys": {"query": int(rows[2][0]), **found}}
        if fitting:
            codes = [code for code, _ in fitting]
            return {"explained": codes} | (keys if "mask" in fitting[0][1] else {})
    if not finite.all():
        return {"explained": ["keys"] if keys else [], **keys}
    if not got.any():
        return {"explained": ["zero"]}
    if name == "o" and near(value.transpose(1, 2).reshape(value.shape), got, value):
        return {"explained": ["heads-and-rows-mixed"]}
    square = float(value.square().sum())
    ratio = float((got * value).sum()) / square if square else 1.0
    if near(ratio * value, got, value):
        return {"explained": ["ratio"], "ratio": ratio}
    if keys:
        return {"explained": ["keys"], **keys}
    return _as_coarse(case, tensors, name, Size.of(got - value).rms, value)


@dataclass(frozen=True, kw_only=True)
class _Rows:
    """R rows of attention: their scores with all keys, the values, which keys each may see."""

    scores_RS: torch.Tensor
    v_RSV: torch.Tensor
    admitted_RS: torch.Tensor

    @classmethod
    def of(
        cls,
        case: Case,
        tensors: Tensors,
        rows: tuple[torch.Tensor, ...],
        *,
        scale: float | None = None,
        mask: Mask | None = None,
        groups: torch.Tensor | None = None,
    ) -> _Rows:
        """`rows` are batch, head and query of each; `groups` the key/value head of each head."""
        q, k, v = (tensors[name].detach().double() for name in "qkv")
        places = torch.arange(case.kv_len, device=q.device)
        query_places = torch.arange(case.seq_len, device=q.device) + (case.kv_len - case.seq_len)
        q = rotated(q, case.position, query_places, case.kv_len)
        if groups is None:
            share = case.heads // case.kv_heads
            groups = torch.arange(case.heads, device=q.device) // share
        batch, head, query = rows
        k_RSD = rotated(k, case.position, places, case.kv_len)[batch, groups[head]]
        scores_RS = (k_RSD @ q[rows].unsqueeze(-1)).squeeze(-1)
        scale = case.softmax_scale if scale is None else scale
        scores_RS *= scale
        if case.position.encoding.kind == "bias":
            slices = torch.arange(case.batch * case.kv_heads, device=q.device)
            q_NRID = (q[:, :, query] * scale).reshape(len(slices), -1, len(query), q.shape[-1])
            bias = bias_scores(case, q_NRID, query, slices % case.kv_heads)
            bias_BHIS = bias.reshape(case.batch, case.heads, *bias.shape[-2:])
            scores_RS += bias_BHIS[batch, head, torch.arange(len(query), device=q.device)]
        mask, sizes = mask or case.mask, (case.seq_len, case.kv_len, case.device)
        admitted = dense_mask(mask, *sizes, batch=case.batch)
        return cls(
            scores_RS=scores_RS,
            v_RSV=v[batch, groups[head]],
            admitted_RS=admitted[batch, 0, query] if mask.lengths else admitted[query],
        )

    def outputs(self) -> torch.Tensor:
        """o_RV; 0 for a row that sees no key."""
        weights = self.scores_RS.masked_fill(~self.admitted_RS, -math.inf).softmax(-1)
        return (weights.nan_to_num(0).unsqueeze(1) @ self.v_RSV).squeeze(1)

    def keys(self, got_1V: torch.Tensor, value_1V: torch.Tensor, near: Near) -> dict[str, Any]:
        """Of a single row: the keys that it has lost, or seen without right, if that is it.

        One key anywhere, or all from one on at the end or at the beginning.
        """
        (scores_S,), (v_SV,), (admitted_S,) = self.scores_RS, self.v_RSV, self.admitted_RS
        if not admitted_S.any():
            return {}
        span = admitted_S.nonzero().flatten()
        first, last = int(span[0]), int(span[-1])
        weights_S1 = (scores_S - scores_S[admitted_S].logsumexp(0)).exp().unsqueeze(1)
        signed_S1 = torch.where(admitted_S, -1, 1).unsqueeze(1) * weights_S1
        parts_SV = weights_S1 * v_SV
        candidates = {
            "one": (value_1V + signed_S1 * v_SV) / (1 + signed_S1),
            "end": parts_SV[first:].cumsum(0) / weights_S1[first:].cumsum(0),
            "start": (parts_SV[: last + 1].flip(0).cumsum(0)
                      / weights_S1[: last + 1].flip(0).cumsum(0)).flip(0),
        }  # fmt: skip
        for kind, candidate_SV in candidates.items():
            off = (candidate_SV - got_1V).square().sum(-1).nan_to_num(nan=math.inf)
            key = int(off.argmin())
            if not near(candidate_SV[key : key + 1], got_1V, value_1V):
                continue
            low, high = {
                "one": (key, key),
                "end": (first + key + 1, last) if first + key < last else (last + 1, first + key),
                "start": (first, key - 1) if key > first else (key, first - 1),
            }[kind]
            lost = first <= low <= last
            return {"lost" if lost else "seen": [low, high], "span": [first, last]}
        return {}


def _variants(
    case: Case, tensors: Tensors, before: Tensors | None
) -> Iterator[tuple[str, Tensors, dict[str, Any]]]:
    """What kernels often do instead: a code, its inputs, what changes in `_Rows.of`."""
    mask, shift = case.mask, case.seq_len - case.kv_len
    masks = {"mask-ignored": Mask()} if not case.unmasked else {"always-causal": Mask(after=0)}
    if mask.after is not None:
        masks["one-key-more"] = replace(mask, after=mask.after + 1)
        masks["one-key-less"] = replace(mask, after=mask.after - 1)
        if shift and not mask.documents:
            left = None if mask.before is None else mask.before - shift
            masks["top-left"] = replace(mask, before=left, after=mask.after + shift)
    if mask.before is not None:
        masks["window-wider"] = replace(mask, before=mask.before + 1)
        masks["window-narrower"] = replace(mask, before=mask.before - 1)
        masks["window-ignored"] = replace(mask, before=None)
    if mask.prefix:
        masks["prefix-ignored"] = replace(mask, prefix=0)
        masks["prefix-longer"] = replace(mask, prefix=mask.prefix + 1)
        masks["prefix-shorter"] = replace(mask, prefix=mask.prefix - 1)
    if mask.documents:
        masks["documents-ignored"] = replace(mask, documents=())
    if mask.lengths:
        masks["one-key-more"] = replace(mask, lengths=tuple(x + 1 for x in mask.lengths))
        masks["one-key-less"] = replace(mask, lengths=tuple(x - 1 for x in mask.lengths))
        masks["first-length"] = replace(mask, lengths=mask.lengths[:1])
    for code, other_mask in masks.items():
        yield code, tensors, {"mask": other_mask}
    scale, head_dim, log2_e = case.softmax_scale, case.head_dim, math.log2(math.e)
    scales = {"missing": 1.0, "1/D": 1 / head_dim, "twice": scale**2, "sqrt(D)": head_dim**0.5,
              "log2(e)": scale * log2_e, "ln(2)": scale / log2_e}  # fmt: skip
    for name, other in scales.items():
        yield f"scale-{name}", tensors, {"scale": other}
    heads = torch.arange(case.heads, device=case.device)
    if 1 < case.kv_heads < case.heads:
        yield "heads-tiled", tensors, {"groups": heads % case.kv_heads}
    if case.kv_heads > 1:
        yield "first-head", tensors, {"groups": torch.zeros_like(heads)}
    for names in ("q", "k", "v", "kv", "qkv") if before is not None else ():
        assert before is not None
        yield f"kept-{names}", tensors | {name: before[name] for name in names}, {}


def _as_coarse(
    case: Case, tensors: Tensors, name: str, error: float, value: torch.Tensor
) -> dict[str, Any]:
    if case.batch * case.heads * case.seq_len * case.kv_len > _PAIRS:
        return {"explained": None}
    likely = []
    for dtype in (case.dtype, *_COARSER[case.dtype]):
        coarse = {n: x.detach().to(getattr(torch, dtype)) for n, x in tensors.items()}
        baseline = WORKLOADS.get(case.workload).plain(case, coarse, terms=False).values[name]
        off = Size.of(baseline.double() - value).rms
        if error and off and math.isfinite(off):
            times = error / off
            most = _ROUNDING if dtype == case.dtype else _ALIKE
            likely += [(abs(math.log(times)), dtype, times)] if 1 / most < times < most else []
    if likely:
        _, dtype, times = min(likely)
        return {"explained": ["precision"], "precision": [dtype, times]}
    return {"explained": []}
