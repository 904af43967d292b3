"""What is wrong with a wrong result, in codes and figures: where, by how much, what explains it.

An explanation is another computation that gives what was got (`worker.variants`), a factor, or a
coarser dtype. It is looked for after a check has failed: in a few rows of attention, else in the
whole output. `report.documents.check` makes sentences of the codes.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from attnbench.api import Implementation, dense_mask
from attnbench.api.bias import BY_DISTANCE
from attnbench.machine.facts import gpu_libraries
from attnbench.schema.case import Case
from attnbench.schema.mask import FULL
from attnbench.schema.position import NONE
from attnbench.worker.inputs import Tensors
from attnbench.worker.reference import (
    Core,
    PlainResult,
    Reference,
    Size,
    core_of,
    judge_one,
    plain_attention,
)
from attnbench.worker.variants import PARTS, reads, scores_of, seen_scores, values_of, variants
from attnbench.worker.workloads import WORKLOADS

_AXES = {4: ("batch", "head", "query", "dim"), 3: ("batch", "token", "dim"), 2: ("row", "column"),
         1: ("head",)}  # fmt: skip
_ROWS = 6  # that lost keys and factors on scores are looked for in
_PAIRS = 1 << 19  # batch x heads x queries x keys up to which whole outputs are tried
_COARSER = {"float64": ("float32", "bfloat16", "float16"), "float32": ("bfloat16", "float16"),
            "float16": ("bfloat16",), "bfloat16": ()}  # fmt: skip
_FEW, _CLOSE = 32, 20.0  # rows; times what is allowed
_EVEN = 12.0  # the error of the worst row, in that of the median row, up to which rows are alike
_HALF_MAX, _EXP_MAX = 65_504, math.log(torch.finfo(torch.float32).max)
_SOLVED, _LEAST = 20, 1e-300  # steps to a share of the hidden keys, which is at least that
_ALIKE, _ROUNDING = 4.0, 20.0  # times the baseline error in a coarser dtype, and in its own

Near = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], bool]
Rows = tuple[torch.Tensor, ...]  # batch, head and query of each


def fault_of(
    case: Case,
    tensors: Tensors,
    outputs: Mapping[str, Any],
    truth: Reference,
    before: Tensors | None = None,
    impl: Implementation | None = None,
) -> dict[str, Any]:
    """The first of the outputs that is wrong, as plain JSON: `code`, `tensor`, and figures.

    `before` are inputs for which the result was right; what `impl` computes follows its definition.
    For the codes `not-a-tensor`, `shape`, `dtype` and `device` there are `got` and `expected`. For
    `not-finite` and `wrong`:

    - `at`, `got`, `expected`, `error`: the first element that is not finite, or that of the largest
      error; `allowed`: how large that may be;
    - `touched`: for each axis how many of its places have wrong elements, of how many, the first
      and the last of them;
    - `explained`: codes of all that would explain it, empty where nothing does, None where that was
      not looked into; with `ratio` or `scale-factor` (got ÷ expected of the output, of the scores,
      where constant), `slope` (a head, its slope and the right one), or `precision` (a dtype, and
      the error as a multiple of the baseline error in it);
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
    fault |= _why(case, tensors, name, got, value, allowed, before, impl)
    if fault["explained"] == ["blind-see-all"] and impl and Path(impl.file).name == "sdpa.py":
        cudnn = gpu_libraries()["cudnn"]
        versions = f"torch {torch.__version__}" + f", cuDNN {cudnn}" * bool(cudnn)
        return fault | {"explained": ["blind-sdpa"], "versions": versions}
    return fault


def _where(name: str, got: torch.Tensor, value: torch.Tensor, allowed: Size) -> dict[str, Any]:
    error = (got - value).abs().nan_to_num(nan=math.inf)
    at = tuple(int(x) for x in torch.unravel_index(error.argmax(), error.shape))
    rows = "key" if name in ("dk", "dv") else "query"
    named = _AXES.get(error.ndim) or [f"axis {number}" for number in range(error.ndim)]
    axes = [rows if axis == "query" else axis for axis in named]
    wrong, touched = ~(error <= allowed.max), {}
    for number, axis in enumerate(axes[:-1] or axes):
        places = (
            wrong.movedim(number, 0)
            .reshape(wrong.shape[number], -1)
            .any(1)
            .nonzero()
            .flatten()
            .tolist()
        )
        if places:
            touched[axis] = [len(places), wrong.shape[number], places[0], places[-1]]
    numbers = {"got": got[at], "expected": value[at], "error": error[at]}
    figures = {name: float(x) for name, x in numbers.items()} | {"allowed": allowed.max}
    figures |= {"rms": Size.of(got - value).rms, "rms_allowed": allowed.rms}
    return {
        "at": dict(zip(axes, at, strict=True)),
        # JSON has no infinity and no NaN.
        **{name: x if math.isfinite(x) else str(x) for name, x in figures.items()},
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
    impl: Implementation | None,
) -> dict[str, Any]:
    def near(candidate: torch.Tensor, got: torch.Tensor, value: torch.Tensor) -> bool:
        off, error = Size.of(candidate - got).rms, Size.of(got - value).rms
        # Whatever is small is near 0: it has to be told from that, too.
        return off <= min(error, Size.of(got).rms) / 4 and off <= max(4 * allowed.rms, error / 50)

    if name == "dsink":  # a number for each head: more stories than these would fit
        ways = {"sink-gradient-missing": 0 * value, "sink-gradient-sign": -value}
        return {"explained": [code for code, other in ways.items() if near(other, got, value)]}
    finite, attention = got.isfinite().all(-1), case.workload == "attention"
    small = case.batch * case.heads * case.seq_len * case.kv_len <= _PAIRS
    errors, rms = (got - value).abs().amax(-1), Size.of(got - value).rms
    wrong = errors > allowed.max if finite.all() else ~finite
    by_rows = attention and small and name in ("o", "dq") and bool(wrong.any())
    if by_rows and (code := _where_rows(case, tensors, wrong, finite=bool(finite.all()))):
        blind = code == "rows-without-keys" and name == "o" and core_of(impl) is plain_attention
        finite_mask = _of_blind(case, tensors, got, near) if blind else None
        return {"explained": [finite_mask or code]}
    core, codes, figures = core_of(impl), list[str](), dict[str, Any]()
    hidden = dict[str, Any]()
    plain = attention and small and core is plain_attention and name == "o"
    plain &= not case.sinks  # which lost keys and factors are looked for without
    if plain and not case.unmasked and case.position.encoding.kind != "bias" and finite.any():
        hidden = _of_hidden(case, tensors, got, value, near)
    few = (int(wrong.sum()) or wrong.numel()) <= _FEW
    if finite.numel() <= 4 or (few and rms <= _CLOSE * allowed.rms):  # any story would fit, or one
        return {"explained": list(hidden) if finite.numel() > 4 and hidden else None, **hidden}
    if small and case.workload != "recurrent" and finite.any() and (name == "o" or attention):
        rows_BHL = finite & _seeing(case) if attention and name == "o" else finite
        for code, result in _tried(case, tensors, before or {}, core, name):
            both = rows_BHL & result.isfinite().all(-1)
            if 2 * both.sum() >= rows_BHL.sum() > 0 and near(result[both], got[both], value[both]):
                codes.append(code.partition(":")[0])
        if plain:
            worst = errors.masked_fill(~finite, -1).flatten()
            count = int((worst > allowed.max).sum()) or int(finite.sum())
            rows = torch.unravel_index(worst.topk(min(_ROWS, count)).indices, finite.shape)
            figures = _of_rows(case, tensors, rows, got, value, near) | hidden
    if finite.all() and not got.any():
        return {"explained": [*codes, "zero"]}
    if attention and near(value.transpose(1, 2).reshape(value.shape), got, value):
        codes.append("heads-and-rows-mixed")
    square, each = value.square(), (got * value).sum(-1, keepdim=True)
    ratio = float(each.sum()) / (float(square.sum()) or 1.0)
    if near(ratio * value, got, value):
        figures["ratio"] = ratio
    explained = dict.fromkeys([*codes, *figures])
    by_row = (each / square.sum(-1, keepdim=True)).nan_to_num(0)
    of_sink = bool(case.sinks and codes)  # a sink is a factor on each row
    if attention and name == "o" and not of_sink and near(by_row * value, got, value):
        explained["not-normalised"] = None
        if small and not case.sinks and (keys := _zero_keys(case, tensors, by_row)):
            explained, figures = {"zero-keys": None}, {"zero-keys": keys}
    if explained:
        return {"explained": list(explained), **figures}
    if not attention or not small:
        return {"explained": None if finite.all() else []}
    by_row = (got - value).square().mean(-1).sqrt()
    if by_row.max() > _EVEN * by_row.median():
        return {"explained": []}  # rounding is about alike in all rows
    return _as_coarse(case, tensors, name, rms, value, core)


def _seeing(case: Case) -> torch.Tensor:
    """Which queries see a key, (B, H, L)."""
    admitted = dense_mask(case.mask, case.seq_len, case.kv_len, case.device, batch=case.batch)
    return admitted.any(-1).expand(case.batch, case.heads, -1)


def _of_blind(case: Case, tensors: Tensors, got: torch.Tensor, near: Near) -> str | None:
    """Which finite number in the place of −inf gives what rows without keys have."""
    blind_BHL, v = ~_seeing(case), values_of(case, tensors)
    scores = seen_scores(replace(case, mask=FULL), tensors)
    for code, weights in (("mask-filled", 0 * scores), ("blind-see-all", scores)):
        if near((weights.softmax(-1) @ v)[blind_BHL], got[blind_BHL], 0 * got[blind_BHL]):
            return code
    return None


def _of_hidden(
    case: Case, tensors: Tensors, got: torch.Tensor, value: torch.Tensor, near: Near
) -> dict[str, Any]:
    """By code: the number that hidden scores are filled with, or that is added to them.

    It is solved for: e^number weighs the hidden keys in each row, the sums of which are linear.
    """
    admitted = dense_mask(case.mask, case.seq_len, case.kv_len, case.device, batch=case.batch)
    scores, v = seen_scores(replace(case, mask=FULL), tensors), values_of(case, tensors)
    found = dict[str, Any]()
    top = scores.amax(-1, keepdim=True)
    seen = (scores - top).exp() * admitted
    rows = _seeing(case) & ~admitted.all(-1).expand(*got.shape[:-1]) & got.isfinite().all(-1)
    for code, of in (("mask-filled", 0 * scores), ("mask-added", scores)):
        hidden = (of - top).exp() * ~admitted
        sums = [(part @ v, part.sum(-1, keepdim=True)) for part in (seen, hidden)]
        share = 1.0
        for _ in range(_SOLVED):  # residuals are as large as the output, at the share before
            scale = sums[0][1] + share * sums[1][1]
            y, x = ((part - total * got) / scale for part, total in sums)
            share = max(-float((x * y)[rows].sum() / x.square()[rows].sum()), _LEAST)
        o = (sums[0][0] + share * sums[1][0]) / (sums[0][1] + share * sums[1][1])
        number = math.log(share)
        if near(o[rows], got[rows], value[rows]) and (code == "mask-filled" or abs(number) > 0.1):
            found[code] = number
    return found


def _where_rows(
    case: Case, tensors: Tensors, wrong_BHL: torch.Tensor, *, finite: bool
) -> str | None:
    """What the rows that are wrong, or not finite, have in common, and no others."""
    admitted = dense_mask(case.mask, case.seq_len, case.kv_len, case.device, batch=case.batch)
    admitted = admitted.expand(case.batch, case.heads, -1, -1)
    seen = admitted.any(-1)
    if not (wrong_BHL & seen).any():
        return "rows-without-keys"
    if finite:
        return None
    for size in PARTS:
        if torch.equal(wrong_BHL, seen & ~admitted[..., :size].any(-1)):
            return "hidden-tile"
    if case.position.encoding.kind == "bias":
        return None
    most_BHL, raw_max = seen_scores(case, tensors).amax(-1), _HALF_MAX * case.softmax_scale
    if case.dtype == "float16" and torch.equal(wrong_BHL, most_BHL > raw_max):
        return "half-overflow"
    return "exp-overflow" if torch.equal(wrong_BHL, most_BHL > _EXP_MAX) else None


def _zero_keys(case: Case, tensors: Tensors, ratio_BHL1: torch.Tensor) -> int | None:
    """How many more keys of score 0 and value 0 would explain each row's ratio to the right one."""
    if case.position.encoding.kind == "bias":
        return None
    sums_BHL1 = seen_scores(case, tensors).logsumexp(-1, keepdim=True).exp()
    count_BHL1 = (1 / ratio_BHL1 - 1) * sums_BHL1
    # A row that hardly sees them says little of how many they are.
    counts = count_BHL1[count_BHL1.isfinite() & (ratio_BHL1 < 0.99)]
    whole = int(counts.median().round()) if len(counts) else 0
    if not 0 < whole <= PARTS[-1]:
        return None
    return whole if (counts - whole).abs().quantile(0.9) <= 0.1 * whole else None


def _tried(
    case: Case, tensors: Tensors, before: Tensors, right: Core, name: str
) -> Iterator[tuple[str, torch.Tensor]]:
    """Outputs of the workload, or gradients of attention, with each variant of the right core."""
    plain, codes = WORKLOADS.get(case.workload).plain, dict[str, None]()
    if case.workload == "attention":
        for code, other in variants(case, tensors, before, right, name):
            with contextlib.suppress(Exception):  # a definition need not take what is tried
                found = other()
                if name == "o" or found.shape == tensors[name[1:]].shape:
                    yield code, found
        return

    def core(case: Case, inner: Tensors, *, wanted: str = "", terms: bool = False) -> PlainResult:
        for code, other in variants(case, inner, {}, right):
            codes[code] = None
            if code == wanted:
                return PlainResult(values={"o": other().nan_to_num(0)})
        return right(case, inner, terms=terms)

    wide = {name: x.detach().double() for name, x in tensors.items() if name != "do"}
    plain(case, wide, terms=False, core=core)
    for code in list(codes):
        with contextlib.suppress(Exception):
            yield code, plain(case, wide, terms=False, core=partial(core, wanted=code)).values["o"]
    for code, as_read in reads(case) if case.workload == "decode" else ():
        options: Any = {"core": right, "as_read": as_read}
        yield code, plain(case, wide, terms=False, **options).values["o"]


def _of_rows(
    case: Case, tensors: Tensors, rows: Rows, got: torch.Tensor, value: torch.Tensor, near: Near
) -> dict[str, Any]:
    """By code: the keys that some rows have lost, or seen without right, or factors on scores."""
    found: dict[str, Any] = {}
    got_RV, value_RV, group_R = got[rows], value[rows], rows[1] * case.kv_heads // case.heads
    admitted = dense_mask(case.mask, case.seq_len, case.kv_len, case.device, batch=case.batch)
    admitted_RS = admitted.expand(case.batch, case.heads, -1, -1)[rows]
    scores_RS = scores_of(case, tensors)[rows]
    v_RSV = tensors["v"].detach().double()[rows[0], group_R]
    each_row = zip(scores_RS, v_RSV, admitted_RS, got_RV, value_RV, strict=True)
    each = [_keys(row, near) for row in each_row]
    if all(each) and len({next(iter(keys)) for keys in each}) == 1:
        found["keys"] = {"query": int(rows[2][0]), **each[0]}
    if len(got_RV) == 1:
        return found  # for which there is a factor of many a kind
    biased = case.position.encoding.kind == "bias"
    bare_RS = scores_of(replace(case, position=NONE) if biased else case, tensors)[rows]
    seen_RS = scores_RS.masked_fill(~admitted_RS, -math.inf)
    factor = float(_factors(seen_RS, bare_RS, v_RSV, got_RV)[0].median())
    weights_RS = (seen_RS + (factor - 1) * bare_RS).softmax(-1)
    if near((weights_RS.unsqueeze(1) @ v_RSV).squeeze(1), got_RV, value_RV):
        found["scale-factor"] = factor
    factor_R, o_RV = _factors(seen_RS, scores_RS - bare_RS, v_RSV, got_RV)
    if case.position.name == "alibi" and near(o_RV, got_RV, value_RV):
        slope = -float(BY_DISTANCE["alibi"](case, torch.ones(1))[rows[1][0]])
        found["slope"] = [int(rows[1][0]), float(factor_R[0]) * slope, slope]
    return found


def _factors(
    scores_RS: torch.Tensor, part_RS: torch.Tensor, v_RSV: torch.Tensor, got_RV: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The factors on a part of each row's scores that give what was got, and the nearest o_RV."""
    step_F = torch.linspace(-1, 1, 65, dtype=torch.float64, device=got_RV.device)
    factor_F = torch.cat((2 ** (8 * step_F), -(2 ** (8 * step_F)), 0 * step_F[:1]))
    factor_RF = factor_F.expand(len(got_RV), -1)
    for reach in (2**-2, 2**-7, 2**-12, 2**-17, 0):  # each as far as two steps before it
        changed_RFS = (factor_RF.unsqueeze(2) - 1) * part_RS.unsqueeze(1)
        o_RFV = (scores_RS.unsqueeze(1) + changed_RFS).softmax(-1) @ v_RSV
        off_RF = (o_RFV - got_RV.unsqueeze(1)).square().sum(-1).nan_to_num(nan=math.inf)
        best_R1 = off_RF.argmin(1, keepdim=True)
        nearest_R1 = factor_RF.gather(1, best_R1)
        factor_RF = nearest_R1 * 2 ** (reach * step_F)
    return nearest_R1.squeeze(1), o_RFV.take_along_dim(best_R1.unsqueeze(2), 1).squeeze(1)


def _keys(row: Sequence[torch.Tensor], near: Near) -> dict[str, Any]:
    """The keys that a row has lost, or seen without right, if that is it.

    One key anywhere, or all from one on at the end or at the beginning.
    """
    scores_S, v_SV, admitted_S, got_V, value_V = row
    got_1V, value_1V = got_V.unsqueeze(0), value_V.unsqueeze(0)
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
    tried = []
    for kind, candidate_SV in candidates.items():
        off = (candidate_SV - got_1V).square().sum(-1).nan_to_num(nan=math.inf)
        key = int(off.argmin())
        if near(candidate_SV[key : key + 1], got_1V, value_1V):
            tried.append((float(off[key]), kind, key))
    if tried:
        _, kind, key = min(tried, key=lambda found: found[0])
        low, high = {
            "one": (key, key),
            "end": (first + key + 1, last) if first + key < last else (last + 1, first + key),
            "start": (first, key - 1) if key > first else (key, first - 1),
        }[kind]
        lost = first <= low <= last
        return {"lost" if lost else "seen": [low, high], "span": [first, last]}
    return {}


def _as_coarse(
    case: Case, tensors: Tensors, name: str, error: float, value: torch.Tensor, core: Core
) -> dict[str, Any]:
    likely = []
    for dtype in (case.dtype, *_COARSER[case.dtype]):
        coarse = {n: x.detach().to(getattr(torch, dtype)) for n, x in tensors.items()}
        baseline = core(case, coarse, terms=False).values[name]
        off = Size.of(baseline.double() - value).rms
        if error and off and math.isfinite(off):
            times = error / off
            most = _ROUNDING if dtype == case.dtype else _ALIKE
            likely += [(abs(math.log(times)), dtype, times)] if 1 / most < times < most else []
    if likely:
        _, dtype, times = min(likely)
        return {"explained": ["precision"], "precision": [dtype, times]}
    return {"explained": []}
