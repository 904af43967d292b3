"""Soft-capped scores and sinks: held against plain loops, and what `check` says of mistakes."""

import math
import os
import random
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from attnbench.api import IMPLEMENTATIONS, attention_builder, hidden_and_blind
from attnbench.api.loader import load_built_in
from attnbench.errors import UsageError
from attnbench.schema.case import Case, Dtype, Sinks, parse_mask
from attnbench.theory.costs import attention_bytes_min, attention_flops_useful
from attnbench.worker.checking import check_item
from attnbench.worker.inputs import Draw
from attnbench.worker.reference import Reference, judge
from attnbench.worker.workloads import WORKLOADS

load_built_in()
ATTENTION = WORKLOADS.get("attention")
CASES = int(os.environ.get("SOFTCAP", "60"))
DTYPES: tuple[Dtype, ...] = ("float32", "bfloat16", "float64")
KINDS: tuple[tuple[float | None, Sinks | None], ...] = (
    (1.5, None), (50.0, None), (None, "learned"), (2.0, "learned"),
)  # fmt: skip
MASKS = ("full", "causal", "window:3", "prefix:4", "document:3+5", "padding:4+0+9")
TAKERS = ("naive", "naive-heads", "chunked", "split-kv")  # and two that compile, in few cases


def random_case(number: int) -> Case:
    """Of every third S is below L: under causal masks the first rows see no key."""
    draw = random.Random(number)
    groups, queries = draw.choice((1, 2)), draw.randint(1, 11)
    cap, sinks = draw.choice(KINDS)
    return Case(
        pass_="both", dtype=DTYPES[number % 3], softcap=cap, sinks=sinks,
        mask=parse_mask(draw.choice(MASKS)), batch=draw.choice((1, 2, 3)), kv_heads=groups,
        heads=groups * draw.choice((1, 3)), seq_len=queries, head_dim=draw.choice((3, 8)),
        kv_len=max(1, queries + draw.choice((-4, 0, 5))), value_dim=draw.choice((4, 7)),
        scale=draw.choice((None, 1.0)),
    )  # fmt: skip


def by_loops(case: Case, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Outputs and gradients in float64, a row at a time."""
    x = {name: t.detach().double().numpy() for name, t in tensors.items()}
    q, k, v, do = (x[name] for name in ("q", "k", "v", "do"))
    found = {f"d{name}": np.zeros_like(x[name]) for name in case.inputs} | {"o": np.zeros_like(do)}
    for b, h, i in np.ndindex(case.batch, case.heads, case.seq_len):
        g = h // (case.heads // case.kv_heads)
        first, end = case.mask.span(i, case.seq_len, case.kv_len, b)
        keys = list(range(first, end))
        scores = [case.softmax_scale * float(q[b, h, i] @ k[b, g, j]) for j in keys]
        slopes = [1.0] * len(keys)
        if case.softcap:
            slopes = [1 - math.tanh(s / case.softcap) ** 2 for s in scores]
            scores = [case.softcap * math.tanh(s / case.softcap) for s in scores]
        logits = scores + ([float(x["sink"][h])] if case.sinks else [])
        if not keys:
            continue
        total = sum(math.exp(s - max(logits)) for s in logits)
        weights = [math.exp(s - max(logits)) / total for s in logits]
        o = sum(w * v[b, g, j] for w, j in zip(weights, keys, strict=False))
        found["o"][b, h, i] = o
        mean = float(do[b, h, i] @ o)
        for w, slope, j in zip(weights, slopes, keys, strict=False):
            ds = w * (float(do[b, h, i] @ v[b, g, j]) - mean) * slope * case.softmax_scale
            found["dq"][b, h, i] += ds * k[b, g, j]
            found["dk"][b, g, j] += ds * q[b, h, i]
            found["dv"][b, g, j] += w * do[b, h, i]
        if case.sinks:
            found["dsink"][h] -= weights[-1] * mean
    return {name: torch.from_numpy(value) for name, value in found.items()}


@pytest.mark.parametrize("dtype", DTYPES)
def test_all_that_take_them_are_right_by_plain_loops(dtype):
    cases = [case for case in map(random_case, range(CASES)) if case.dtype == dtype]
    blind = 0
    for case in cases:
        ATTENTION.fill(case, tensors := ATTENTION.tensors(case), Draw(seed=case.seq_len))
        exact, truth = by_loops(case, tensors), ATTENTION.truth(case, tensors)
        for name, value in exact.items():
            assert torch.allclose(truth.values[name], value, rtol=1e-10, atol=1e-12), (name, case)
        blind += bool((exact["o"] == 0).all(-1).any())
        for name in TAKERS:
            bound = ATTENTION.bind(case, IMPLEMENTATIONS.get(name), tensors)
            outputs = bound.named(bound.call())
            judged = judge(outputs, Reference(values=exact, allowed=truth.allowed), dtype)
            assert judged.reason is None, (name, case, judged.reason)
    assert blind
    assert any(case.batch > 1 and case.sinks for case in cases)


def test_steps_of_decoding_take_both_through_caches():
    for cache in ("static", "paged:4", "none", "int8"):
        case = Case(
            workload="decode", cache=cache, seq_len=9, new_tokens=2, kv_heads=2, head_dim=8,
            width=16, mask=parse_mask("causal"), softcap=1.5, sinks="learned",
        )  # fmt: skip
        for name in TAKERS:
            assert check_item(case, name, {}, 0)["status"] == "ok"


def test_what_takes_neither_refuses_them_with_their_flags():
    for name, impl in IMPLEMENTATIONS.items():
        if name not in (*TAKERS, "flex", "naive-compiled", "sdpa-mask") and (
            "attention" in impl.workloads and "cpu" in impl.devices
        ):
            for flag, case in (
                ("--softcaps", Case(softcap=50.0)),
                ("--sinks", Case(sinks="learned")),
            ):
                assert flag in str(ATTENTION.reason_against(case, impl)), name


def test_a_sink_is_read_once_and_costs_no_flop():
    plain, sunk = Case(pass_="both"), Case(pass_="both", sinks="learned", softcap=50.0)
    assert attention_flops_useful(sunk) == attention_flops_useful(plain)
    assert attention_bytes_min(sunk) - attention_bytes_min(plain) == 2 * 4 * 4
    with pytest.raises(UsageError, match="--softcaps takes a number above 0"):
        Case(softcap=-1.0)
    with pytest.raises(UsageError, match="--sinks"):
        Case(sinks="learnt")  # type: ignore[arg-type]


FAULTS = {  # by what check says of each
    "sink left out": "sink-missing", "sink in the maximum alone": "sink-missing",
    "sink of another head": "sink-head", "sink scaled": "sink-scaled",
    "cap before the scale": "soft-cap-before-scale", "cap after the mask": "soft-cap-after-mask",
    "cap left out": "soft-cap-missing", "gradient of the cap left out": "soft-cap-gradient",
    "gradient of the sink": "sink-gradient-",
}  # fmt: skip
WAYS = ("whole", "online", "split")


def joined(way: str, scores: torch.Tensor, v: torch.Tensor, column: torch.Tensor, counts: bool):
    """Softmax with a sink: at once, block by block, or of parts joined by their sums."""
    if way == "whole":
        top = torch.cat((scores, column), -1).amax(-1, keepdim=True).detach()
        weights = (scores - top).exp()
        return weights @ v / (weights.sum(-1, keepdim=True) + counts * (column - top).exp())
    blocks = list(zip(scores.split(7, -1), v.split(7, -2), strict=True))
    if way == "split":
        top = torch.cat((scores, column), -1).amax(-1, keepdim=True).detach()
        parts = [((s - top).exp() @ x, (s - top).exp().sum(-1, keepdim=True)) for s, x in blocks]
        o, total = (sum(part[at] for part in parts) for at in (0, 1))
        return o / (total + counts * (column - top).exp())
    top, o = column.detach(), torch.zeros(*scores.shape[:-1], v.shape[-1])
    total = (column - top).exp() * counts
    for s, x in blocks:
        higher = torch.maximum(top, s.amax(-1, keepdim=True).detach())
        weights, shrink = (s - higher).exp(), (top - higher).exp()
        o, total = o * shrink + weights @ x, total * shrink + weights.sum(-1, keepdim=True)
        top = higher
    return o / total


def wrong(case: Case, fault: str, way: str) -> Any:
    hidden, blind = hidden_and_blind(case)
    cap, scale, share = case.softcap or math.inf, case.softmax_scale, case.heads // case.kv_heads

    def capped(s: torch.Tensor) -> torch.Tensor:
        return s if math.isinf(cap) or fault == "cap left out" else cap * (s / cap).tanh()

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *sink: torch.Tensor) -> Any:
        k, v = (x.repeat_interleave(share, 1) for x in (k, v))
        raw = q @ k.mT
        s = capped(raw) * scale if fault == "cap before the scale" else capped(raw * scale)
        if fault == "gradient of the cap left out":
            s = raw * scale + (s - raw * scale).detach()
        if hidden is not None:
            if fault == "cap after the mask" and not math.isinf(cap):
                s = capped((raw * scale).masked_fill(hidden, -math.inf))
            else:
                s = s.masked_fill(hidden, -math.inf)
        sink_H = sink[0] if sink else torch.full((case.heads,), -1e30)
        if fault == "sink left out":
            sink_H = torch.full((case.heads,), -1e30)
        if sink and fault == "sink of another head":
            sink_H = sink_H.roll(1)
        if sink and fault == "sink scaled":
            sink_H = sink_H * scale
        if fault == "gradient of the sink":
            sink_H = sink_H.detach() if way == "whole" else 2 * sink_H.detach() - sink_H
        column = sink_H.view(-1, 1, 1).expand(*s.shape[:-1], 1)
        o = joined(way, s, v, column, fault != "sink in the maximum alone")
        return o if blind is None else o.masked_fill(blind, 0)

    return call


@pytest.mark.parametrize("way", WAYS)
def test_each_fault_is_found_and_named_and_the_right_kernel_passes(way, monkeypatch):
    monkeypatch.setattr(IMPLEMENTATIONS, "_items", dict(IMPLEMENTATIONS._items))
    cases = [
        Case(pass_="both", heads=4, kv_heads=2, seq_len=20, kv_len=29, head_dim=8,
             mask=parse_mask(mask), softcap=cap, sinks=sinks)
        for mask, (cap, sinks) in zip(("causal", "full", "window:8"), KINDS[::2] + KINDS[3:],
                                      strict=True)
    ]  # fmt: skip
    for fault, code in {"none": "", **FAULTS}.items():
        name = fault.replace(" ", "-")
        build = partial(wrong, fault=fault, way=way)
        declared: Any = {"masks": ("full", "causal", "window"), "softcap": True, "sinks": True}
        attention_builder(name, **declared)(build)
        results = [check_item(case, name, {}, 0) for case in cases]
        failed = [r["metrics"]["fault"].get("explained") for r in results if r["status"] != "ok"]
        assert {r["status"] for r in results} <= {"ok", "incorrect"}, results
        assert bool(failed) == (fault != "none"), (fault, results)
        named = [bool(why) and why[0].startswith(code) for why in failed]
        assert all(named), (fault, failed)
