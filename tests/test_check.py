"""The reference is itself checked: by hand, by loops, and by results that must not pass."""

import functools
import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from attnbench.measure.probes import profile_call
from attnbench.schema.case import Case, parse_mask, parse_position
from attnbench.theory.traits import case_label
from attnbench.worker import reference as module
from attnbench.worker.inputs import Draw, needle_pairs, with_gradients
from attnbench.worker.reference import (
    Reference,
    Size,
    block_bytes,
    block_elements,
    judge,
    plain_attention,
)
from attnbench.worker.workloads import WORKLOADS

ATTENTION = WORKLOADS.get("attention")
reference = ATTENTION.truth
CAUSAL = parse_mask("causal")


def drawn(case: Case, **draw) -> dict[str, torch.Tensor]:
    tensors = ATTENTION.tensors(case)
    ATTENTION.fill(case, tensors, Draw(seed=3, **draw))
    return tensors


def in_float64(tensors) -> dict[str, torch.Tensor]:
    return {name: x.detach().double() for name, x in tensors.items()}


def loop_attention(case: Case, q, k, v) -> torch.Tensor:
    """Attention element by element, as the definition reads."""
    o = torch.zeros(case.batch, case.heads, case.seq_len, case.value_dim, dtype=torch.float64)
    for b, h, i in itertools.product(range(case.batch), range(case.heads), range(case.seq_len)):
        g = h * case.kv_heads // case.heads
        seen = []
        for j in range(case.kv_len):
            behind = i + case.kv_len - case.seq_len - j  # how far key j lies before the query
            after = case.mask.after is None or -behind <= case.mask.after
            before = case.mask.before is None or behind <= case.mask.before
            if after and before:
                seen.append(j)
        if not seen:
            continue
        scores = [float(q[b, h, i] @ k[b, g, j]) * case.softmax_scale for j in seen]
        top = max(scores)
        weights = [math.exp(score - top) for score in scores]
        for weight, j in zip(weights, seen, strict=True):
            o[b, h, i] += weight / sum(weights) * v[b, g, j]
    return o


CASES = [
    Case(heads=2, seq_len=5, kv_len=8, head_dim=4, mask=CAUSAL),
    Case(heads=2, seq_len=8, kv_len=5, head_dim=4, mask=CAUSAL),
    Case(heads=4, kv_heads=2, seq_len=6, head_dim=4, value_dim=3, mask=parse_mask("window:2")),
    Case(heads=3, kv_heads=1, batch=2, seq_len=4, head_dim=5, scale=0.7),
    Case(heads=1, seq_len=1, head_dim=2),
]
TURNED = [
    Case(heads=2, seq_len=3, kv_len=5, head_dim=6, position=parse_position(name))
    for name in ("rope", "rope-interleaved:500")
]


@pytest.mark.parametrize("case", CASES, ids=case_label)
def test_the_reference_equals_a_loop_over_the_definition(case):
    tensors = in_float64(drawn(case))
    expected = loop_attention(case, *tensors.values())
    for terms in (True, False):  # the reference, and the baseline's way
        o = plain_attention(case, tensors, terms=terms).values["o"]
        torch.testing.assert_close(o, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("case", CASES[1:] + TURNED, ids=case_label)
def test_the_reference_gradients_equal_finite_differences(case):
    case = Case.from_json(case.to_json() | {"pass": "both"})
    tensors = in_float64(drawn(case))
    values = plain_attention(case, tensors, terms=True).values
    for name, value in plain_attention(case, tensors).values.items():
        torch.testing.assert_close(value, values[name], rtol=1e-12, atol=1e-12)
    for name in "qkv":
        flat = tensors[name].view(-1)
        for index in range(0, flat.numel(), 11):
            ends = []
            for step in (1e-5, -1e-5):
                flat[index] += step
                o = plain_attention(case, {n: tensors[n] for n in "qkv"}).values["o"]
                flat[index] -= step
                ends.append(float((o * tensors["do"]).sum()))
            slope = (ends[0] - ends[1]) / 2e-5
            got = float(values["d" + name].reshape(-1)[index])
            assert slope == pytest.approx(got, abs=2e-8, rel=1e-6)


def test_on_a_gpu_blocks_fit_into_half_of_the_free_memory(monkeypatch):
    """A card of 8 GB would lose the whole case to blocks made for one of 80."""
    for free, elements in ((None, 1 << 26), (64 << 30, 1 << 26), (3 << 30, 1 << 25), (200, 2)):
        monkeypatch.setattr(module, "free_bytes", lambda device, free=free: free)
        assert block_elements(CASES[0], "cuda") == elements
        assert block_elements(CASES[0], "cpu") == 1 << 21, "which its cache holds"


@pytest.mark.parametrize("position", ["none", "t5"])
def test_what_lives_of_a_block_is_within_what_is_reckoned_with(monkeypatch, position):
    case = Case(
        pass_="both", heads=2, seq_len=512, head_dim=4, mask=CAUSAL,
        position=parse_position(position),
    )  # fmt: skip
    tensors, peaks = in_float64(drawn(case)), list[int]()
    for elements in (1 << 16, 1 << 18):
        monkeypatch.setattr(module, "_BLOCK_ELEMENTS", {"cpu": elements})
        call = functools.partial(plain_attention, case, tensors, terms=True)
        peaks.append(profile_call(call, "cpu").peak_bytes or 0)
    each = (peaks[1] - peaks[0]) / ((1 << 18) - (1 << 16))
    assert block_bytes(case) / 2 < each <= block_bytes(case)


def test_the_terms_are_those_of_the_definition():
    case = Case(pass_="both", heads=2, kv_heads=1, seq_len=9, kv_len=7, head_dim=4, mask=CAUSAL)
    tensors = in_float64(drawn(case))
    q, k, v, do = (tensors[name] for name in ("q", "k", "v", "do"))
    scores = (q @ k.mT * case.softmax_scale).masked_fill(beyond(case, -2), -math.inf)
    weights, dweights = scores.softmax(-1).nan_to_num(), do @ v.mT
    lse = scores.logsumexp(-1, keepdim=True).nan_to_num(neginf=0.0)
    unsure = weights * (1 + 3 * lse.abs())
    mean = (weights * dweights).sum(-1, keepdim=True)
    subtracted = (do * (weights @ v)).norm(dim=-1, keepdim=True).maximum(mean.abs())
    uncancelled = unsure * (dweights.abs() + subtracted) * case.softmax_scale
    expected = {
        "dq": uncancelled.square() @ k.square(),
        "dk": (uncancelled.square().mT @ q.square()).sum(1, keepdim=True),
        "dv": (unsure.square().mT @ do.square()).sum(1, keepdim=True),
    }
    terms = plain_attention(case, tensors, terms=True).terms
    for name, squares in expected.items():
        torch.testing.assert_close(terms[name].double(), squares.sqrt(), rtol=1e-5, atol=1e-6)


def naive(case, tensors, hidden=None):
    """Plain attention in the dtype of the tensors, less the pairs that are `hidden`."""
    q, k, v = (tensors[name].detach() for name in "qkv")
    scores = (q * case.softmax_scale) @ k.mT
    if hidden is not None:
        scores = scores.masked_fill(hidden, -math.inf)
    return scores.softmax(-1) @ v


def reason_against(case, tensors, o) -> str:
    return judge({"o": o}, reference(case, tensors), case.dtype).reason or ""


def beyond(case: Case, diagonal: int) -> torch.Tensor:
    """The pairs above a diagonal; 0 is that of the first query, as in a top-left mask."""
    pairs = torch.ones(case.seq_len, case.kv_len, dtype=torch.bool)
    return pairs.triu(diagonal + 1)


def keys_hidden(case: Case, keys: slice) -> torch.Tensor:
    hidden = torch.zeros(case.kv_len, dtype=torch.bool)
    hidden[keys] = True
    return hidden


SMALL = Case(heads=2, seq_len=20, kv_len=30, head_dim=8, mask=CAUSAL)
LONG = Case(heads=1, seq_len=1024, head_dim=64, dtype="bfloat16")
LONG_CAUSAL = Case(heads=1, seq_len=1024, head_dim=64, dtype="bfloat16", mask=CAUSAL)


@pytest.mark.parametrize(
    ("case", "needles", "right", "wrong"),
    [
        (SMALL, False, beyond(SMALL, 10), ~beyond(SMALL, 9)),
        (SMALL, False, beyond(SMALL, 10), beyond(SMALL, 0)),
        (LONG_CAUSAL, True, beyond(LONG_CAUSAL, 0), beyond(LONG_CAUSAL, 1)),
        (LONG, False, None, keys_hidden(LONG, slice(512, 576))),
    ],
    ids=("inverted", "top-left", "one key too many", "a block of keys lost"),
)
def test_a_wrong_mask_is_noticed_and_the_right_one_passes(case, needles, right, wrong):
    tensors = drawn(case, needles=needles)
    assert reason_against(case, tensors, naive(case, tensors, right)) == ""
    assert "o is off by" in reason_against(case, tensors, naive(case, tensors, wrong))


def test_at_long_n_a_dropped_key_shows_by_its_needle_alone():
    # Why needles are planted at all: among many keys one is lost in the rounding.
    case = Case(heads=1, seq_len=64, kv_len=16384, head_dim=64, dtype="bfloat16")
    lost = needle_pairs(case.mask, 64, 16384, seed=3)[0][1]
    hidden = keys_hidden(case, slice(lost, lost + 1))
    noticed = []
    for needles in (False, True):
        tensors = drawn(case, needles=needles)
        noticed.append(bool(reason_against(case, tensors, naive(case, tensors, hidden))))
    assert noticed == [False, True]


def by_sdpa(case: Case, tensors, **how) -> tuple[Reference, dict[str, torch.Tensor]]:
    """The truth of a case of both passes, and what SDPA makes of it."""
    q, k, v = (tensors[name].detach().requires_grad_() for name in "qkv")
    o = torch.nn.functional.scaled_dot_product_attention(q, k, v, **how)
    gradients = torch.autograd.grad(o, (q, k, v), tensors["do"])
    results = {"o": o.detach(), **dict(zip(("dq", "dk", "dv"), gradients, strict=True))}
    return reference(case, tensors), results


@functools.cache
def bfloat16_both() -> tuple[Reference, dict[str, torch.Tensor]]:
    case = Case(pass_="both", heads=1, seq_len=1024, head_dim=64, dtype="bfloat16")
    return by_sdpa(case, drawn(case))


def mostly_zero(x):
    return torch.cat((x[..., : x.shape[-2] // 10, :], 0 * x[..., x.shape[-2] // 10 :, :]), dim=-2)


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("o", lambda x: x * 0.98),
        *((name, lambda x: x * 0.9) for name in ("dq", "dk", "dv")),
        *((name, mostly_zero) for name in ("dq", "dk", "dv")),
    ],
)
def test_a_small_error_everywhere_cannot_hide_behind_one_large_element(name, damage):
    truth, results = bfloat16_both()
    assert judge(results, truth, "bfloat16").reason is None
    damaged = results | {name: damage(results[name])}
    assert f"{name} is off" in (judge(damaged, truth, "bfloat16").reason or "")


def test_needles_keep_their_weight_under_a_position_encoding():
    case = Case(heads=1, seq_len=256, head_dim=32, position=parse_position("rope"))
    tensors = drawn(case, needles=True)
    values = torch.zeros_like(tensors["v"])
    pairs = needle_pairs(case.mask, 256, 256, seed=3)
    for number, (_, key) in enumerate(pairs):
        values[..., key, 0] = number + 1.0
    tensors["v"] = values
    o = plain_attention(case, in_float64(tensors)).values["o"]
    for number, (query, _) in enumerate(pairs):
        assert float(o[0, 0, query, 0]) == pytest.approx(number + 1.0, rel=0.05)


def test_an_overflowing_baseline_excuses_nobody():
    case = Case(heads=1, seq_len=8, head_dim=64, dtype="float16")
    tensors = drawn(case)
    tensors["q"].fill_(6e4)
    tensors["k"].fill_(6e4)
    allowed = reference(case, tensors).allowed["o"]
    assert math.isfinite(allowed.max)
    truth = Reference(values={"o": torch.ones(3).double()}, allowed={"o": Size(max=1e-6, rms=1e-6)})
    assert judge({"o": torch.full((3,), 1.1)}, truth, "float32").reason


def test_a_dtype_has_to_hold_what_may_be_off_too():
    def beyond_by(largest: float, allowed: float) -> str | None:
        size = Size(max=allowed, rms=allowed)
        values = {"dq": torch.tensor([1.0, -largest], dtype=torch.float64)}
        return Reference(values=values, allowed={"dq": size}).beyond("float16")

    assert beyond_by(6e4, 5e3) is None
    assert beyond_by(6e4, 6e3) == "exact dq reaches 6e+04 ± 6e+03, and float16 6.55e+04 at most"
    assert beyond_by(math.nan, 1.0)
    assert beyond_by(1.0, math.inf)


def test_recomputed_weights_have_room_for_the_rounding_of_their_log_sum_exp():
    # A fused backward makes the weights again as exp(s - lse); large logits make lse coarse.
    case = Case(pass_="both", heads=4, seq_len=64, head_dim=32, mask=CAUSAL)
    tensors = drawn(case, query_amplitude=30.0)
    truth, named = by_sdpa(case, tensors, is_causal=True)
    assert judge(named, truth, case.dtype).reason is None
    assert judge(named | {"dv": named["dv"] * (1 + 1e-3)}, truth, case.dtype).reason


def test_what_cancels_in_the_gradient_of_a_single_query_has_room_for_what_was_rounded():
    # do·o comes from o in bfloat16: where it is 0, one error of its summands is in every element.
    case = Case(pass_="both", heads=1, seq_len=1, kv_len=33, head_dim=72, dtype="bfloat16")
    tensors = drawn(case, needles=True)
    o = plain_attention(case, in_float64(tensors)).values["o"]
    along = (tensors["do"].double() * o).sum() / o.square().sum()
    tensors["do"].sub_((along * o).bfloat16())
    truth, named = by_sdpa(case, tensors)
    assert judge(named, truth, case.dtype).reason is None
    assert judge(named | {"dv": named["dv"] * 1.02}, truth, case.dtype).reason


def test_a_float64_case_is_judged_by_what_float32_loses():
    case = Case(heads=2, seq_len=200, kv_len=530, head_dim=16, dtype="float64")
    tensors = drawn(case)
    q, k, v = (tensors[name] for name in "qkv")
    o = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    assert reason_against(case, tensors, o) == ""
    coarse = naive(case, {n: x.float() for n, x in tensors.items()}).double()
    assert reason_against(case, tensors, coarse)


def test_scores_lie_where_the_draw_says_and_expanded_keys_are_the_same_for_all_heads():
    case = Case(pass_="both", batch=2, heads=3, seq_len=64, head_dim=32)

    def filled(**options: Any) -> Any:
        draw = Draw(seed=5, **options)
        tensors = with_gradients(ATTENTION.tensors(case), draw)
        ATTENTION.fill(case, tensors, draw)
        return [x.detach() for x in tensors.values()]

    q, k, _, _ = filled(score_offset=-120.0)
    scores = (q @ k.mT) * case.softmax_scale
    assert float(scores.mean()) == pytest.approx(-120, abs=1)
    assert float(scores.logsumexp(-1).max()) < -100
    _, k, v, _ = filled(expanded="kv")
    assert (k.stride(1), v.stride(1)) == (0, 0)
    assert torch.equal(k[:, 0], k[:, 2])
    assert not torch.equal(k[0], k[1])


@pytest.mark.parametrize(("kv_heads", "value_dim"), [(3, 4), (1, 6)])
@pytest.mark.parametrize("layout", ["BHLD", "BLHD", "packed"])
def test_inputs_lie_as_the_case_and_the_gradient_as_the_draw_says(layout, kv_heads, value_dim):
    case = Case(
        pass_="both", batch=2, heads=3, kv_heads=kv_heads, seq_len=9, head_dim=4,
        value_dim=value_dim, layout=layout,
    )  # fmt: skip
    plain = ATTENTION.tensors(replace(case, layout="BHLD"))
    ATTENTION.fill(case, plain, Draw(seed=5))
    gradients: Any = (None, "expanded", "transposed")
    for gradient in gradients:
        draw = Draw(seed=5, without_gradient="kv", gradient=gradient)
        tensors = with_gradients(ATTENTION.tensors(case), draw)
        ATTENTION.fill(case, tensors, draw)
        assert all(torch.equal(tensors[name], plain[name]) for name in "qkv")
        q, do = tensors["q"], tensors["do"]
        token = {"BHLD": 4, "BLHD": 12}.get(layout, 12 + kv_heads * (4 + value_dim))
        assert (q.stride(2), q.stride(3)) == (token, 1)
        gap = 0 if layout == "BHLD" else 64  # of NaN
        offsets = [tensors[name].storage_offset() - gap for name in "qkv"]
        assert offsets == ([0, 12, 12 + 4 * kv_heads] if layout == "packed" else [0, 0, 0])
        buffers = {tensors[name].untyped_storage().data_ptr() for name in "qkv"}
        assert len(buffers) == (1 if layout == "packed" else 3)
        assert do.is_contiguous() == (gradient is None)
        assert (do.stride(-1) == 0) == (gradient == "expanded")
        assert [tensors[name].requires_grad for name in "qkv"] == [True, False, False]
