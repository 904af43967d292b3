"""Decoding and position encodings against the definition."""

import dataclasses
import math

import pytest
import torch

from attnbench.api import IMPLEMENTATIONS, dense_bias
from attnbench.api.loader import load_built_in
from attnbench.schema.case import Case, parse_mask, parse_position
from attnbench.schema.position import POSITIONS
from attnbench.worker.catalogue import reasons_against
from attnbench.worker.inputs import Draw
from attnbench.worker.positions import placed, rotated
from attnbench.worker.reference import judge
from attnbench.worker.workloads import WORKLOADS
from attnbench.worker.workloads.decode import CACHES

load_built_in()

DECODE = Case(
    workload="decode",
    batch=2,
    heads=4,
    kv_heads=2,
    seq_len=11,
    head_dim=8,
    value_dim=6,
    mask=parse_mask("causal"),
    width=20,
    cache="static",
    new_tokens=5,
    dtype="float64",
)


def bound(case: Case, impl: str = "naive"):
    workload = WORKLOADS.get("decode")
    tensors = workload.tensors(case)
    workload.fill(case, tensors, Draw(seed=1))
    return workload.bind(case, IMPLEMENTATIONS.get(impl), tensors), tensors


def full_forward(case: Case, tensors) -> torch.Tensor:
    """The whole causal layer at once, with torch's own attention."""
    total = case.seq_len + (case.new_tokens or 0)

    def heads(name: str, count: int) -> torch.Tensor:
        x: torch.Tensor = placed(tensors["x"], case) @ tensors[name].T
        return x.reshape(case.batch, total, count, -1).transpose(1, 2)

    q, k, v = heads("wq", 4), heads("wk", 2), heads("wv", 2)
    places = torch.arange(total)
    q, k = (rotated(y, case.position, places, total) for y in (q, k))
    whole = dataclasses.replace(case, seq_len=total, kv_len=total, mask=parse_mask("causal"))
    bias, hidden = dense_bias(whole), torch.ones(total, total).triu(1).bool()
    scores = torch.zeros(1, 1, total, total, dtype=q.dtype) if bias is None else bias(q)
    o = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=scores.masked_fill(hidden, -math.inf), enable_gqa=True
    )
    merged: torch.Tensor = o.transpose(1, 2).reshape(case.batch, total, -1) @ tensors["wo"].T
    return merged[:, case.seq_len :]


@pytest.mark.parametrize("cache", CACHES.names())
def test_every_cache_gives_the_full_forward_pass_step_by_step(cache):
    for name in POSITIONS.names():
        case = dataclasses.replace(DECODE, cache=cache, position=parse_position(name))
        decoder, tensors = bound(case)
        expected = full_forward(case, tensors)
        for _ in range(2):  # each call starts from the same restored cache
            steps = decoder.named(decoder.call())["o"]
            torch.testing.assert_close(steps, expected, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("cache", CACHES.names())
def test_the_check_of_decode_accepts_it_and_notices_a_stale_cache(cache):
    case = dataclasses.replace(DECODE, cache=cache, position=parse_position("rope"))
    decoder, tensors = bound(case)
    workload = WORKLOADS.get("decode")
    workload.fill(case, tensors, Draw(seed=2))
    truth = workload.truth(case, tensors)
    stale = judge(decoder.named(decoder.call()), truth, case.dtype)
    prefilled = cache in ("concat", "static")
    assert (stale.reason is not None) == prefilled
    decoder.refresh()
    assert judge(decoder.named(decoder.call()), truth, case.dtype).reason is None


def test_a_window_limits_what_decode_sees_and_without_a_mask_it_makes_no_sense():
    case = dataclasses.replace(DECODE, mask=parse_mask("window:3"))
    decoder, tensors = bound(case)
    truth = WORKLOADS.get("decode").truth(case, tensors)
    assert judge(decoder.named(decoder.call()), truth, case.dtype).reason is None
    whole = dataclasses.replace(DECODE, mask=parse_mask("causal"))
    other = WORKLOADS.get("decode").truth(whole, tensors)
    assert judge(decoder.named(decoder.call()), other, case.dtype).reason
    assert reasons_against([case], ["naive"]) == {"naive": (None,)}
    unfit = [dataclasses.replace(DECODE, mask=parse_mask("full"))]
    unfit.append(dataclasses.replace(DECODE, pass_="both"))
    assert all(reasons_against(unfit, ["naive"])["naive"])


def test_a_token_lost_from_a_long_cache_shows_by_its_needle_alone():
    case = dataclasses.replace(
        DECODE,
        dtype="bfloat16",
        seq_len=8192,
        heads=2,
        head_dim=32,
        value_dim=32,
        width=128,
        new_tokens=2,
        position=parse_position("rope"),
    )
    workload = WORKLOADS.get("decode")
    noticed = {}
    for needles in (False, True):
        decoder, tensors = bound(case, "sdpa")
        workload.fill(case, tensors, Draw(seed=4, needles=needles))
        decoder.refresh()
        truth = workload.truth(case, tensors)
        assert judge(decoder.named(decoder.call()), truth, case.dtype).reason is None
        k_whole, v_whole = decoder.call._prefilled
        k_whole[:, :, 0] = v_whole[:, :, 0] = 0  # the context's first token is lost
        verdict = judge(decoder.named(decoder.call()), truth, case.dtype)
        noticed[needles] = verdict.reason is not None
    assert noticed == {False: False, True: True}
