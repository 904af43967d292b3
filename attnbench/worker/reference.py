"""Is a result right? A float64 reference in blocks of queries, and how far off a result may be.

The rule is flash-attention's: the error against float64 may be at most 2 × (gradients 3 ×) that
of the plain computation in the case's own dtype, the baseline error, plus a floor of a few
eps × max|reference|; for gradients the floor scales with the terms of their sums instead. It is
applied to the largest error and to the root mean square: the largest alone is blind in low
precision, where a few large elements excuse a small error in every other one.

A backward pass that recomputes the weights as exp(s − lse), as flash-attention does, rounds its
exponent three times: the score again, the score that went into lse, and lse itself. Each changes a
weight by about eps·|lse| where it is large; the plain computation subtracts the row's maximum from
the same score and shows none of it (torch's CPU kernel at n = 531, D = 128: 98 % of dv's squared
error lies on the keys of large scores). The terms are therefore weighted by 1 + 3·|lse|, and the
output, whose scores are rounded once, by 1 + |lse|, with the eps of float32 at least, in which
such statistics are kept: in half precision this adds next to nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from attnbench.api import Implementation, Patterned, dense_mask
from attnbench.machine.facts import free_bytes
from attnbench.schema.case import Case, Position
from attnbench.worker import positions
from attnbench.worker.inputs import Tensors

OUTPUT_FACTOR = 2.0
GRADIENT_FACTOR = 3.0
FLOOR_EPS = 4.0
ROUNDINGS = 3
RMS_FLOOR_EPS = 1.0  # a mean needs no room for the unluckiest element

on_block: Callable[[], Any] = int  # called for each block, as a sign of life; this one does nothing
# Computes in the dtype of its tensors; with `terms=True` the terms of the errors' floor, too.
Core = Callable[..., "PlainResult"]
_OF_QUERIES = ("q", "o", "do", "dq")  # what has a row for each query, not for each key
# A block of scores in the reference holds about this many float64 elements: 16 MiB on CPU,
# which its last cache holds; on a GPU 512 MiB: it would wait for the next launch with smaller ones.
_BLOCK_ELEMENTS = {"cpu": 1 << 21, "cuda": 1 << 26}
# Pairs, of all heads, up to which a definition is called again, with other inputs, too.
_TRIED_PAIRS = 1 << 22
# What lives at once for each element of a block, at most; that again for each key/value head where
# scores have a bias, which is computed of all heads.
BLOCK_BYTES = 48


class DefinitionError(Exception):
    """By a method's definition nothing can be judged; the message says what it does."""


class DroppedError(Exception):
    """Not worth timing, or too slow to check: skipped; `metrics` are for the row."""

    def __init__(self, reason: str, **metrics: str | float) -> None:
        super().__init__(reason)
        self.metrics = metrics


@dataclass(frozen=True, kw_only=True)
class Size:
    """The largest magnitude in a tensor, and its root mean square."""

    max: float
    rms: float

    @classmethod
    def of(cls, x: torch.Tensor) -> Size:
        """Of any tensor; 0 and 0 for an empty one."""
        if not x.numel():
            return cls(max=0.0, rms=0.0)
        largest = float(x.abs().max())
        if not 0 < largest < math.inf:
            return cls(max=largest, rms=largest)
        # Scaled first, so that squares neither overflow nor vanish.
        return cls(max=largest, rms=largest * float((x / largest).square().mean().sqrt()))


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """A part of a call: queries `row_R` of key/value heads `slice_P`, counted through the batch."""

    case: Case
    row_R: torch.Tensor
    slice_P: torch.Tensor

    def of(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """That part of an input or a result (B, heads, L, D): (P, heads a slice, R, D).

        Of sinks (H,) it is (P, heads a slice, 1, 1).
        """
        groups = self.case.kv_heads
        if name == "sink":
            return x.detach().view(groups, -1, 1, 1)[self.slice_P % groups]
        x_BGMLD = x.detach().view(len(x), groups, -1, *x.shape[2:])
        x_PMLD = x_BGMLD[self.slice_P // groups, self.slice_P % groups]
        return x_PMLD[:, :, self.row_R] if name in _OF_QUERIES else x_PMLD

    def whole(self, name: str, part: torch.Tensor) -> tuple[int, ...]:
        """The shape of the input or the result that `part` is of."""
        rows = self.case.seq_len if name in _OF_QUERIES else part.shape[2]
        return self.case.batch, self.case.kv_heads * part.shape[1], rows, part.shape[3]


@dataclass(frozen=True, kw_only=True)
class Reference:
    """Float64 results by name (`o`, `dq`, …), of what was `drawn`, and the error allowed."""

    values: dict[str, torch.Tensor]
    allowed: dict[str, Size]
    drawn: Drawn | None = None

    def beyond(self, dtype: str) -> str | None:
        """Which result may be larger than `dtype` holds and still right, in words, or None."""
        most = torch.finfo(getattr(torch, dtype)).max
        for name, value in self.values.items():
            top, off = float(value.abs().max()), self.allowed[name].max
            if not top + off <= most:
                return f"exact {name} reaches {top:.3g} ± {off:.3g}, and {dtype} {most:.3g} at most"
        return None


@dataclass(frozen=True, kw_only=True)
class CheckResult:
    """Errors of the worst tensor of a result, in its units, and error ÷ allowed (passes ≤ 1).

    `reason` is None for a right result. `fault` has the `code` and the `tensor` of a wrong one, and
    for codes other than `not-finite` and `wrong` what was `got` in place of what was `expected`.
    """

    error_max: float | None = None
    error_rmse: float | None = None
    error_ratio: float | None = None
    reason: str | None = None
    fault: dict[str, str] = field(default_factory=dict)

    def worse(self, other: CheckResult) -> CheckResult:
        """The worse of two results; one with a reason is always worse."""
        if (self.reason is None) != (other.reason is None):
            return self if self.reason else other
        return max(self, other, key=lambda v: math.inf if v.error_ratio is None else v.error_ratio)


@dataclass(kw_only=True)
class PlainResult:
    """What a plain computation gave; `terms` is what the floor of each error scales with.

    Terms have the shapes of the values they belong to; a value without them scales with itself.
    `moved` is what the rounding of scores or sums does, in eps: the baseline has some of it, by
    luck. It counts up to `most` times the baseline error; 0 is no limit.
    """

    values: dict[str, torch.Tensor] = field(default_factory=dict)
    terms: dict[str, torch.Tensor] = field(default_factory=dict)
    moved: dict[str, torch.Tensor] = field(default_factory=dict)
    most: float = 0.0


def plain_attention(
    case: Case,
    tensors: Mapping[str, torch.Tensor],
    *,
    terms: bool = False,
    admitted: torch.Tensor | None = None,
    drawn: Drawn | None = None,
) -> PlainResult:
    """softmax(QKᵀ·scale)V and, where `do` is given, its gradients, in the dtype of the tensors.

    With a `softcap` scaled scores are capped before a bias is added. With `sinks` there is a tensor
    `sink`, (H,), and its gradient, but not of a part, which lacks some of its summands.
    Works in blocks of queries, so that the (L, S) matrix never exists; position encodings, masks
    and grouped heads are applied by their definitions. Gradients accumulate in float32 at least.
    A query without keys gives output 0 and gradient 0. The baseline needs no `terms`. `admitted`,
    boolean and (L, S), (H, L, S) or (B, H, L, S), takes the place of the case's mask. Where a part
    is `drawn`, all tensors and results are that part of them.
    """
    counts = case.seq_len, case.batch * case.kv_heads, case.kv_len
    row_R, slice_P, key_places = (torch.arange(n, device=tensors["q"].device) for n in counts)
    part = drawn or Drawn(case=case, row_R=row_R, slice_P=slice_P)
    query_places = part.row_R + (case.kv_len - case.seq_len)
    inputs = {n: x.detach() if drawn else _grouped(x.detach(), case) for n, x in tensors.items()}
    sink = inputs["sink"] if case.sinks else None
    q = positions.rotated(inputs["q"], case.position, query_places, case.kv_len)
    k = positions.rotated(inputs["k"], case.position, key_places, case.kv_len)
    v, do = inputs["v"], inputs.get("do")
    if admitted is not None and admitted.ndim > 2 and not drawn:
        admitted = _grouped(admitted.expand(case.batch, case.heads, -1, -1), case)
    result = (_with_terms if terms else _plain)(case, q, k, v, do, sink, admitted, part)
    for values in (result.values, result.terms, result.moved):
        for name, x in values.items():
            values[name] = x.reshape(len(part.slice_P) if drawn else case.batch, -1, *x.shape[-2:])
    for name, places in (("dq", query_places), ("dk", key_places)):
        if name in result.values:
            at = case.position, places, case.kv_len
            result.values[name] = positions.rotated_back(result.values[name], *at)
            if terms:
                squares = positions.rotated_squares(result.terms[name].square(), *at)
                result.terms[name] = squares.sqrt()
    if "dsink" in result.values:
        dsink_B, terms_B = result.values.pop("dsink"), result.terms.pop("dsink", None)
        if not drawn:
            result.values["dsink"] = dsink_B.sum(0).flatten()
            if terms_B is not None:
                result.terms["dsink"] = terms_B.square().sum(0).sqrt().flatten()
    return result


def _plain(
    case: Case, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, do: torch.Tensor | None,
    sink: torch.Tensor | None, admitted: torch.Tensor | None, part: Drawn,
) -> PlainResult:  # fmt: skip
    """As an author would write it; heads are (B·G, H/G, …), those of keys and values (B·G, 1, …).

    Its roundings are what others are allowed: a change here is a change of the rule.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    o = torch.empty(*q.shape[:-1], v.shape[-1], dtype=q.dtype, device=q.device)
    dq, dk, dv = (torch.zeros_like(x, dtype=wide) for x in (q, k, v))
    dsink = None if sink is None else torch.zeros_like(sink, dtype=wide)
    biased, group_N = case.position.encoding.kind == "bias", part.slice_P % case.kv_heads
    elements = block_elements(case, q.device.type)
    for rows, hidden, blind in _blocks(case, q, slice(None), admitted, elements, part):
        q_rows = q[..., rows, :] * case.softmax_scale
        scores = _product(q_rows, k.mT)
        if case.softcap:
            capped = (scores / case.softcap).tanh()
            scores = capped * case.softcap
        if biased:
            scores += positions.bias_scores(case, q_rows, part.row_R[rows], group_N)
        if hidden is not None:
            scores.masked_fill_(hidden, -math.inf)
        if sink is not None:
            scores = torch.cat((scores, sink.expand(*scores.shape[:-1], 1)), -1)
        every = scores.softmax(-1)
        weights = every[..., : case.kv_len]
        if blind is not None:
            weights.masked_fill_(blind, 0)
        o[..., rows, :] = _product(weights, v)
        if do is None:
            continue
        dweights = _product(do[..., rows, :], v.mT)
        mean = (weights * dweights).sum(-1, keepdim=True)
        if dsink is not None:
            dsink -= (every[..., -1:] * mean).sum(-2, keepdim=True)
        dscores = weights * (dweights - mean)
        if biased:
            dbias = positions.bias_gradient(case, dscores, part.row_R[rows])
            dq[..., rows, :] += dbias * case.softmax_scale
        if case.softcap:
            dscores = dscores * (1 - capped.square())
        dq[..., rows, :] += _product(dscores, k) * case.softmax_scale
        # The products sum over the query heads that share a key/value head, too.
        dk += _product((dscores * case.softmax_scale).mT, q[..., rows, :]).sum(1, keepdim=True)
        dv += _product(weights.mT, do[..., rows, :]).sum(1, keepdim=True)
    if do is None:
        return PlainResult(values={"o": o})
    values = {"o": o, "dq": dq, "dk": dk, "dv": dv}
    return PlainResult(values=values if dsink is None else values | {"dsink": dsink})


def _product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """A matmul. That of float16 on a CPU adds up in float32, too, and takes 50 times as long."""
    if a.dtype == b.dtype == torch.float16 and a.device.type == "cpu":
        return (a.float() @ b.float()).half()
    return a @ b


def _with_terms(
    case: Case, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, do: torch.Tensor | None,
    sink: torch.Tensor | None, admitted: torch.Tensor | None, part: Drawn,
) -> PlainResult:  # fmt: skip
    """The same in float64, and the terms, whose size alone matters, in float32.

    Blocks stay in the caches, and are worked on in place; the query heads that share a key/value
    head are rows of one matrix. The mean of dweights is do·o, by definition the same number. Terms
    of a capped score are those without the cap: its slope, 1 − tanh², is off by as much as tanh.
    """
    share = statistics_share(case)
    scaled, single = q * case.softmax_scale, torch.float32
    o = torch.empty(*q.shape[:-1], v.shape[-1], dtype=q.dtype, device=q.device)
    unsure = torch.empty(*q.shape[:-1], 1, dtype=q.dtype, device=q.device)
    o_squares = torch.zeros_like(o, dtype=single)
    dq, dk, dv = torch.empty_like(q), torch.zeros_like(k[:, 0]), torch.zeros_like(v[:, 0])
    dq_squares, dk_squares, dv_squares = (torch.zeros_like(x, dtype=single) for x in (dq, dk, dv))
    dsinks = [] if sink is None else [torch.zeros_like(sink), torch.zeros_like(sink)]
    biased, group_N = case.position.encoding.kind == "bias", part.slice_P % case.kv_heads
    elements = block_elements(case, q.device.type)
    few = max(1, elements // (q.shape[1] * case.kv_len * q.shape[2]))
    for first in range(0, len(q), few):
        some = slice(first, first + few)
        k_PSD, v_PSV = k[some, 0], v[some, 0]
        k_squares = (k_PSD * case.softmax_scale).to(single).square_()
        for rows, hidden, blind in _blocks(case, q, some, admitted, elements, part):
            at = some, slice(None), rows
            heads = scaled[at].shape[:3]
            q_PMD = scaled[at].flatten(1, 2)
            weights = q_PMD @ k_PSD.mT
            if case.softcap:
                slope = weights.div_(case.softcap).tanh_().square().neg_().add_(1)
                weights.mul_(case.softcap)
            if biased:
                bias = positions.bias_scores(case, scaled[at], part.row_R[rows], group_N[some])
                weights.view(*heads, -1).add_(bias)
            if hidden is not None:
                weights.view(*heads, -1).masked_fill_(hidden, -math.inf)
            scores = every = weights
            if sink is not None:
                column = sink[some].expand(*heads, 1).flatten(1, 2)
                every = torch.cat((scores, column), -1)
            top, every = every.amax(-1, keepdim=True), every.softmax(-1)
            weights = every[..., : case.kv_len]
            lse = (top - every.amax(-1, keepdim=True).log()).abs_()
            unsure[at] = top.abs_().view(*heads, -1)
            if blind is not None:
                weights.view(*heads, -1).masked_fill_(blind, 0)
            o_PMV = weights @ v_PSV
            o[at] = o_PMV.view(*heads, -1)
            scores.nan_to_num_(0, 0, 0).mul_(weights).mul_(1 - weights)
            scattered = scores.to(single).square_() @ v_PSV.to(single).square()
            o_squares[at] = scattered.view(*heads, -1)
            if do is None:
                continue
            do_PMV = do[at].flatten(1, 2)
            dweights = do_PMV @ v_PSV.mT
            products = do_PMV * o_PMV
            mean = products.sum(-1, keepdim=True)
            # What a backward pass subtracts is made of the rounded o: it is off by its summands'
            # rounding even where they cancel, the same for all keys of the query.
            subtracted = products.norm(dim=-1, keepdim=True).maximum(mean.abs())
            dv[some].baddbmm_(weights.mT, do_PMV)
            if dsinks:
                off_PM1 = every[..., -1:] * subtracted * (1 + ROUNDINGS * share * lse)
                dsinks[0][some] -= (every[..., -1:] * mean).view(*heads, 1).sum(2, keepdim=True)
                dsinks[1][some] += off_PM1.square().view(*heads, 1).sum(2, keepdim=True)
            # dscores is a difference that may cancel to nothing (at n = 1 it does): what rounding
            # leaves behind scales with what was subtracted, so the floor does too.
            rounded = weights.to(single).mul_((1 + ROUNDINGS * share * lse).to(single))
            uncancelled = dweights.to(single).abs_().add_(subtracted.to(single)).mul_(rounded)
            uncancelled.square_()
            dv_squares[some].baddbmm_(rounded.square_().mT, do_PMV.to(single).square_())
            dk_squares[some].baddbmm_(uncancelled.mT, q_PMD.to(single).square_())
            dq_squares[at] = (uncancelled @ k_squares).view(*heads, -1)
            if biased:
                summands = uncancelled.view(*heads, -1), part.row_R[rows]
                dbias = positions.bias_gradient(case, *summands, squares=True)
                dq_squares[at] += dbias * case.softmax_scale**2
            dscores = dweights.sub_(mean).mul_(weights)
            raw = dscores.view(*heads, -1), part.row_R[rows]
            dbias = positions.bias_gradient(case, *raw) if biased else 0
            if case.softcap:
                dscores.mul_(slope)
            dk[some].baddbmm_(dscores.mT, q_PMD)
            dq[at] = (dscores @ k_PSD).view(*heads, -1) + dbias
    lse_bound = unsure + math.log(case.kv_len)  # |lse| is at most this
    # A score's error moves its weight w by w·(1 − w) of that. Three roundings, of q, of k and of
    # the score, each uniform in ± eps/2, are off by eps·√(3/12) of it in the root mean square.
    terms, moved = {"o": o * (1 + share * lse_bound)}, {"o": o_squares.sqrt_() / 2}
    result = PlainResult(values={"o": o}, terms=terms, moved=moved)
    if do is not None:
        result.values |= {"dq": dq.mul_(case.softmax_scale), "dk": dk, "dv": dv}
        # Rounding errors of many summands have no common sign: their squares add up.
        result.terms |= {
            "dq": dq_squares.sqrt_(), "dk": dk_squares.sqrt_(), "dv": dv_squares.sqrt_()
        }  # fmt: skip
        if dsinks:
            result.values["dsink"], result.terms["dsink"] = dsinks[0], dsinks[1].sqrt()
    return result


def statistics_share(case: Case) -> float:
    """The eps of a softmax's statistics, float32 at least, over the eps of the case's dtype."""
    dtype = getattr(torch, case.dtype)
    statistics = torch.promote_types(dtype, torch.float32)
    return torch.finfo(statistics).eps / torch.finfo(dtype).eps


def core_of(impl: Implementation | None) -> Core:
    """What the implementation's results are held against: its definition, or plain attention."""
    if impl is None or impl.definition is None:
        return plain_attention
    definition: Callable[[Case], Any] = impl.definition

    def defined(case: Case, tensors: Tensors, *, terms: bool = False) -> PlainResult:
        """As `plain_attention`, with `_terms_of`; a `DefinitionError` where `_believe` has one."""
        method, again = (definition(replace(case, position=Position())) for _ in range(2))
        tried = terms and case.batch * case.heads * case.seq_len * case.kv_len <= _TRIED_PAIRS
        # Of larger numbers products of three or four overflow, by definition.
        believed = terms and all(
            float(x.abs().max()) <= torch.finfo(x.dtype).max ** 0.25 for x in tensors.values()
        )
        if believed:
            _believe(case, tensors, method, again if tried else None)
        if isinstance(method, Patterned):
            return plain_attention(case, tensors, terms=terms, admitted=method.admitted)
        inputs, do = [tensors[name].detach() for name in case.inputs], tensors.get("do")
        with torch.set_grad_enabled(do is not None):
            for x in inputs if do is not None else ():
                x.requires_grad_()
            q, k = (positions.rotated_last(x, case.position, case.kv_len) for x in inputs[:2])
            o: torch.Tensor = method(q, k, *inputs[2:])
            values = {"o": o.detach()}
            if do is not None:
                gradients = torch.autograd.grad(
                    o, inputs, do.detach(), allow_unused=True, materialize_grads=True
                )
                values |= {f"d{n}": x for n, x in zip(case.inputs, gradients, strict=True)}
                if believed and not all(bool(x.isfinite().all()) for x in gradients):
                    raise DefinitionError("has gradients that are not finite")
        found = _terms_of(case, (q, k), do, values) if terms else {}
        # A method that is ill-conditioned where softmax is not passes on what rounding its inputs
        # does, as measured: by signs at random, whose squares add up.
        eps = torch.finfo(getattr(torch, case.dtype)).eps
        generator = torch.Generator(q.device).manual_seed(0)
        moved = {n: x.detach() for n, x in tensors.items() if tried}
        for name, x in moved.items():
            signs = 2 * torch.empty_like(x).bernoulli_(generator=generator) - 1
            moved[name] = x * (1 + eps * signs)
        for name, x in defined(case, moved).values.items() if tried else ():
            found[name] = torch.hypot(found[name], (x - values[name]) / eps)
        return PlainResult(values=values, terms=found)

    return defined


def _believe(
    case: Case, tensors: Tensors, method: Callable[..., Any], again: Callable[..., Any] | None
) -> None:
    """See that o is finite, of its shape and dtype and, `again`, the same whatever a mask hides."""
    q, k, v, *sink = (tensors[name].detach() for name in case.inputs)
    o = method(q, k, v, *sink)
    expected = q.new_zeros(case.batch, case.heads, case.seq_len, case.value_dim)
    anything, dtype = Size(max=math.inf, rms=math.inf), str(q.dtype).removeprefix("torch.")
    if reason := judge_one("o", o, expected, anything, dtype).reason:
        raise DefinitionError(f"is wrong: {reason}")
    if again is None:
        return
    alike = torch.finfo(q.dtype).eps ** 0.5 * Size.of(o).rms
    if Size.of(again(q, k, v, *sink) - o).rms > alike:
        raise DefinitionError("gives something else when it is called again")
    query, sizes = (case.seq_len - 1) // 2, (case.seq_len, case.kv_len, str(q.device))
    admitted = dense_mask(case.mask, *sizes, first_query=query, count=1, batch=case.batch)
    sign_S1 = torch.where(admitted.mT, 1, -1).to(q.dtype)
    if Size.of((again(q, k * sign_S1, v * sign_S1, *sink) - o)[:, :, query]).rms > alike:
        raise DefinitionError("depends on keys that the mask hides")


def _terms_of(
    case: Case, turned: Sequence[torch.Tensor], do: torch.Tensor | None, values: Tensors
) -> Tensors:
    """What the floors of a definition's errors scale with, from sizes alone: as for softmax.

    Results scale with themselves, times 1 + the size of an exponent, which rounds, once in o and
    three times in gradients: (|q| + |k|)²·scale/2 holds that of a score and of a feature. Those of
    q and k may besides cancel to nothing, as at n = 1, and rounding leaves what was subtracted:
    do·o, times how fast a weight's logarithm changes with a query, or a key. `turned` are q and k,
    rotated.
    """
    q, k = (x.detach().norm(dim=-1, keepdim=True) for x in turned)
    share, scale = statistics_share(case), abs(case.softmax_scale)
    factor = case.position.encoding.factor(case.position.values)
    of_q, of_k = (
        share * ((x + other.amax()).square() * scale / 2 + math.log(case.kv_len))
        for x, other in ((q, k), (k, q))
    )
    terms = {"o": values["o"] * (1 + of_q)}
    if do is not None:
        summed = (do * values["o"]).norm(dim=-1, keepdim=True)
        # A key has one share in S of those of its queries.
        shared = (summed.square().sum((1, 2), keepdim=True) / case.kv_heads).sqrt() / case.kv_len
        sides = ("dq", q, k, summed, of_q), ("dk", k, q, shared, of_k)
        for name, x, other, rest, of_x in sides:
            slope = (1 / x).nan_to_num(posinf=0) + scale * (x + other.square().mean().sqrt())
            rest = factor * rest * slope / case.head_dim**0.5
            terms[name] = values[name].abs().maximum(rest) * (1 + ROUNDINGS * of_x)
        terms["dv"] = values["dv"] * (1 + ROUNDINGS * of_k)
        if case.sinks:
            terms["dsink"] = (summed * (1 + ROUNDINGS * of_q)).square().sum((0, 2, 3)).sqrt()
    return terms


def _grouped(x_BHLD: torch.Tensor, case: Case) -> torch.Tensor:
    """(B·G, heads a group, L, D): all query heads that share a key/value head, or that alone."""
    if x_BHLD.ndim == 1:  # sinks
        x_BHLD = x_BHLD.view(1, -1, 1, 1).expand(case.batch, -1, 1, 1)
    return x_BHLD.reshape(case.batch * case.kv_heads, -1, *x_BHLD.shape[2:])


def block_elements(case: Case, device: str) -> int:
    """Elements of a block of scores: on a GPU at most what half of its free memory can hold."""
    most, free = _BLOCK_ELEMENTS[device], free_bytes(device) if device == "cuda" else None
    return most if free is None else min(most, free // (2 * block_bytes(case)))


def block_bytes(case: Case) -> int:
    """Bytes that live at once for each element of a block, at most."""
    return BLOCK_BYTES * (1 + case.kv_heads * (case.position.encoding.kind == "bias"))


def _blocks(
    case: Case, q: torch.Tensor, some: slice, pattern: torch.Tensor | None, elements: int,
    part: Drawn,
) -> Iterator[tuple[slice, torch.Tensor | None, torch.Tensor | None]]:  # fmt: skip
    """Rows of queries, the pairs hidden from them, and which of them see no key at all.

    So many that the scores of `some` groups of heads fill a block of `elements`. What is hidden has
    a row of axes for each group, (groups, 1, …), where the mask differs between batch items. A
    pattern, (L, S) or (B·G, H/G, L, S), takes the place of the mask.
    """
    wide = len(range(len(q))[some]) * q.shape[1] * case.kv_len
    count = max(1, elements // wide)
    for first in range(0, len(part.row_R), count):
        on_block()
        rows = slice(first, min(len(part.row_R), first + count))
        if pattern is not None:
            admitted = (pattern if pattern.ndim == 2 else pattern[some])[..., rows, :]
        elif case.unmasked:
            yield rows, None, None
            continue
        else:
            sizes = case.seq_len, case.kv_len, str(q.device)
            admitted = dense_mask(case.mask, *sizes, rows=part.row_R[rows], batch=case.batch)
            if admitted.ndim > 2:
                admitted = admitted[part.slice_P[some] // case.kv_heads]
        blind = ~admitted.any(-1, keepdim=True)
        yield rows, ~admitted & ~blind, blind


# Of a workload's tensors; as a core, with the case first.
Plain = Callable[..., PlainResult]


def reference_of(
    case: Case, tensors: Tensors, plain: Plain, rounding: Plain | None = None
) -> Reference:
    """Run `plain` in float64 for the values, and in the case's own dtype for what is allowed.

    A float64 case has no finer reference. Its baseline error is that of float32, scaled down by
    the ratio of the two precisions: rounding errors of the same sums are proportional to eps.
    `rounding` gives the baseline in the place of `plain` where what is computed rounds by more than
    the dtype does; in float64, where it may happen to round nothing, beside it.
    """
    reference = plain({name: x.detach().double() for name, x in tensors.items()}, terms=True)
    dtype = getattr(torch, case.dtype)
    coarse = torch.float32 if dtype == torch.float64 else dtype
    runs = [(plain, coarse)] if rounding is None or coarse != dtype else []
    runs += [(rounding, dtype)] if rounding else []
    eps, baselines = torch.finfo(dtype).eps, []
    for run, of in runs:
        coarsened = {name: x.detach().to(of) for name, x in tensors.items()}
        baselines.append((run(coarsened, terms=False).values, eps / torch.finfo(of).eps))
    if case.pass_ == "backward":
        del reference.values["o"]
    allowed, unit = {}, eps + torch.finfo(torch.float64).eps  # the reference rounds, too
    most_eps, rms_eps = FLOOR_EPS * unit, RMS_FLOOR_EPS * unit
    for name, value in reference.values.items():
        scale = Size.of(reference.terms.get(name, value))
        moved = Size.of(reference.moved.get(name, value[:0]))
        largest = rms = 0.0
        for values, shrink in baselines:
            error = Size.of(values[name].double() - value)
            if math.isfinite(error.max):  # a baseline that overflows excuses no error
                largest, rms = largest + shrink * error.max, rms + shrink * error.rms
        factor = GRADIENT_FACTOR if name.startswith("d") else OUTPUT_FACTOR
        caps = [reference.most * x if reference.most else math.inf for x in (largest, rms)]
        largest = max(factor * largest, min(caps[0], most_eps * moved.max)) + most_eps * scale.max
        rms = max(factor * rms, min(caps[1], rms_eps * moved.rms)) + rms_eps * scale.rms
        # One element alone may be as far off as any.
        allowed[name] = Size(max=largest, rms=max(rms, largest / max(1, value.numel()) ** 0.5))
    return Reference(values=reference.values, allowed=allowed)


def judge(outputs: Mapping[str, torch.Tensor], truth: Reference, dtype: str) -> CheckResult:
    """Compare named outputs with the truth. NaN never passes; shape, dtype and device count."""
    worst = CheckResult(error_max=0.0, error_rmse=0.0, error_ratio=0.0)
    for name, value in truth.values.items():
        judged = name, outputs.get(name), value, truth.allowed[name], dtype, truth.drawn
        worst = worst.worse(judge_one(*judged))
    return worst


def compare_calls(
    first: Mapping[str, torch.Tensor], second: Mapping[str, torch.Tensor], truth: Reference
) -> tuple[bool, CheckResult | None]:
    """Whether two calls on equal inputs agree in every bit; what is wrong where not by rounding.

    By rounding: within what a result may be off. Where all that differs is NaN in the first, its
    memory was not written, or read before it was.
    """
    exact = True
    for name, allowed in truth.allowed.items():
        one, other = first.get(name), second.get(name)
        if not (isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)):
            continue
        if one.shape != other.shape or one.dtype != other.dtype or torch.equal(one, other):
            continue
        off = (one.detach().double() - other.detach().double()).abs()
        off = off.masked_fill((one == other) | (one.isnan() & other.isnan()), 0)
        exact &= not off.any()
        if not (off.max() <= allowed.max and Size.of(off).rms <= allowed.rms):
            beyond = ~(off <= allowed.rms)
            by_row = beyond.movedim(-2, 0).flatten(1).any(1)
            rows = f"{int(by_row.sum())} of {len(by_row)}"
            unwritten = bool(one[beyond].isnan().all())
            code, by = "unwritten" if unwritten else "random", f"{float(off.max()):.2g}"
            return False, CheckResult(
                reason=f"two calls on equal inputs differ by {by} in {rows} rows of {name}",
                fault={"code": code, "tensor": name, "by": by, "rows": rows},
            )
    return exact, None


def judge_one(
    name: str, output: object, value: torch.Tensor, allowed: Size, dtype: str,
    drawn: Drawn | None = None,
) -> CheckResult:  # fmt: skip
    """Compare one output with its true value, or what is `drawn` of it."""

    def wrong(code: str, reason: str, **fault: str) -> CheckResult:
        return CheckResult(reason=f"{name} {reason}", fault={"code": code, "tensor": name} | fault)

    # A subclass may compute its values when they are looked at, which no clock would see.
    torchs = type(output) is type(value) or type(output).__module__.split(".")[0] == "torch"
    if not isinstance(output, torch.Tensor) or not torchs:
        kind = type(output).__name__
        return wrong("not-a-tensor", f"is {kind}, not a plain tensor of torch", got=kind)
    shape = drawn.whole(name, value) if drawn else tuple(value.shape)
    for code, verb, found, expected in (
        ("shape", "has shape", tuple(output.shape), shape),
        ("dtype", "is", output.dtype, getattr(torch, dtype)),
        ("device", "is on", output.device, value.device),
    ):
        if found != expected:
            text = f"{verb} {found}, expected {expected}"
            return wrong(code, text, got=str(found), expected=str(expected))
    if count := int((~torch.isfinite(output)).sum()):
        return wrong("not-finite", f"has {count} elements that are not finite")
    error = Size.of((drawn.of(name, output) if drawn else output).detach().double() - value)
    # An allowed error of 0 (all inputs exactly representable) still admits an exact result.
    parts = [("", error.max, allowed.max), (" in the root mean square", error.rms, allowed.rms)]
    ratios = [got / most if most else (math.inf if got else 0.0) for _, got, most in parts]
    ratio = max(ratios)
    result = CheckResult()
    if not ratio <= 1:
        how, got, most = parts[ratios.index(ratio)]
        result = wrong("wrong", f"is off by {got:.3g}{how} where {most:.3g} is allowed")
    return replace(
        result,
        error_max=error.max,
        error_rmse=error.rms,
        error_ratio=ratio if math.isfinite(ratio) else None,
    )
