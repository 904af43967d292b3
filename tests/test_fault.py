"""What a check says of a wrong result, in values: where it is wrong, and what would explain it."""

import dataclasses
import functools
import math
import random
import re
import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from attnbench.api import IMPLEMENTATIONS, attention, dense_mask
from attnbench.report import documents
from attnbench.schema.case import Case, parse_mask, parse_position
from attnbench.worker import checking
from attnbench.worker.checking import check_item
from attnbench.worker.fault import fault_of
from attnbench.worker.inputs import Draw
from attnbench.worker.positions import rotated
from attnbench.worker.reference import plain_attention
from attnbench.worker.variants import reads, variants
from attnbench.worker.workloads import WORKLOADS, caches

ATTENTION = WORKLOADS.get("attention")
CAUSAL = parse_mask("causal")
SQUARE = Case(heads=4, kv_heads=2, seq_len=40, head_dim=16, mask=CAUSAL)
UNEQUAL = Case(heads=2, seq_len=20, kv_len=33, head_dim=16, mask=CAUSAL)
FULL_SQUARE = dataclasses.replace(SQUARE, mask=parse_mask("full"))
FULL = Case(heads=4, kv_heads=2, seq_len=24, kv_len=70, head_dim=16)
BLIND = Case(heads=2, seq_len=33, kv_len=20, head_dim=16, mask=CAUSAL)
PREFIX = dataclasses.replace(UNEQUAL, mask=parse_mask("prefix:24"))
DOCUMENTS = dataclasses.replace(SQUARE, mask=parse_mask("document:11+6"))
GIVEN = dataclasses.replace(FULL, scale=0.3)
ROPE = dataclasses.replace(FULL, kv_heads=4, position=parse_position("rope"))
SAME = Case(heads=4, seq_len=20, head_dim=16)
FEW = Case(heads=4, seq_len=3, kv_len=1025, head_dim=64)
SIX_HEADS = Case(
    heads=6, kv_heads=3, seq_len=37, kv_len=53, head_dim=16, mask=CAUSAL,
    position=parse_position("alibi"),
)  # fmt: skip
PADDED = Case(batch=3, heads=2, seq_len=20, head_dim=16, mask=parse_mask("padding:8+20+13"))


def attend(q, k, v, *, scale, diagonal=None, tiled=False, hidden=()):
    """Attention in which a query sees the keys up to a diagonal, less those that are hidden."""
    share = q.shape[1] // k.shape[1]
    k, v = (
        x.repeat(1, share, 1, 1) if tiled else x.repeat_interleave(share, dim=1) for x in (k, v)
    )
    scores = (q * scale) @ k.mT
    if diagonal is not None:
        scores = scores + torch.full(scores.shape[-2:], -math.inf).triu(diagonal + 1)
    scores[..., list(hidden)] = -math.inf
    return scores.softmax(-1) @ v


def fault(case: Case, wrong: Callable[..., torch.Tensor], **draw: Any) -> dict[str, Any]:
    tensors = ATTENTION.tensors(case)
    ATTENTION.fill(case, tensors, Draw(seed=5, needles=True, **draw))
    o = wrong(*(tensors[name] for name in "qkv"), scale=case.softmax_scale)
    return fault_of(case, tensors, {"o": o}, ATTENTION.truth(case, tensors))


def joined(q, k, v, scale, *, running):
    """Four parts of the keys, each relative to its own maximum or to that of the parts so far."""
    scores, size, total, weight = (q * scale) @ k.mT, -(-k.shape[2] // 4), 0.0, 0.0
    top = torch.full_like(scores[..., :1], -math.inf)
    for part, values in zip(scores.split(size, -1), v.split(size, 2), strict=True):
        most = part.amax(-1, keepdim=True)
        top = torch.maximum(top, most) if running else most
        weights = (part - top).exp()
        total, weight = total + weights @ values, weight + weights.sum(-1, keepdim=True)
    return total / weight


def turned(x: torch.Tensor, name: str, length: int) -> torch.Tensor:
    places = torch.arange(length - x.shape[2], length)
    return rotated(x.double(), parse_position(name), places, length)


def rope(*names: str) -> Callable[..., torch.Tensor]:
    """Full attention whose q and k are rotated by these encodings, one after the other."""

    def wrong(q, k, v, scale):
        for name in names:
            q, k = turned(q, name, k.shape[2]), turned(k, name, k.shape[2])
        return attend(q.double(), k.double(), v.double(), scale=scale).float()

    return wrong


def sloped(slopes: list[float]) -> Callable[..., torch.Tensor]:
    def wrong(q, k, v, scale):
        share, keys, shift = q.shape[1] // k.shape[1], k.shape[2], k.shape[2] - q.shape[2]
        k, v = k.repeat_interleave(share, 1), v.repeat_interleave(share, 1)
        distance = torch.arange(keys) - torch.arange(shift, keys).unsqueeze(1)
        bias = -torch.tensor(slopes).view(-1, 1, 1) * distance.abs()
        hidden = torch.full(distance.shape, -math.inf).triu(shift + 1)
        return ((q * scale) @ k.mT + bias + hidden).softmax(-1) @ v

    return wrong


def at(diagonal: int | None, **more: Any) -> Callable[..., torch.Tensor]:
    return lambda q, k, v, scale: attend(q, k, v, scale=scale, diagonal=diagonal, **more)


def of_scores(q, k, v, scale, change, case):
    """Attention whose scores are changed, given the pairs that the case's mask admits."""
    admitted = dense_mask(case.mask, q.shape[2], k.shape[2], "cpu", batch=len(q))
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    return change((q * scale) @ k.mT, admitted).softmax(-1) @ v


def by(case: Case, change: Callable[..., torch.Tensor]) -> tuple[Case, Callable[..., torch.Tensor]]:
    return case, lambda q, k, v, scale: of_scores(q, k, v, scale, change, case)


def halves(power: float) -> Callable[..., torch.Tensor]:
    """Two halves of the keys, joined by weights to a power."""

    def wrong(q, k, v, scale):
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
        parts = ((q * scale) @ k.mT).chunk(2, -1)
        share = (power * torch.stack([x.logsumexp(-1, keepdim=True) for x in parts])).softmax(0)
        each = [x.softmax(-1) @ y for x, y in zip(parts, v.chunk(2, 2), strict=True)]
        return (share * torch.stack(each)).sum(0)

    return wrong


def top_left_alibi(q, k, v, scale):
    share, keys = q.shape[1] // k.shape[1], torch.arange(k.shape[2])
    k, v = k.repeat_interleave(share, 1), v.repeat_interleave(share, 1)
    slopes = torch.tensor([2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3]).view(-1, 1, 1)
    away = (keys - torch.arange(q.shape[2]).unsqueeze(1)).abs()
    hidden = torch.full(away.shape, -math.inf).triu(k.shape[2] - q.shape[2] + 1)
    return ((q * scale) @ k.mT - slopes * away + hidden).softmax(-1) @ v


WINDOW = dataclasses.replace(SQUARE, mask=parse_mask("window:6"))
EXPLAINED: dict[str, tuple[Case, Callable[..., torch.Tensor]]] = {
    "one-key-more": (SQUARE, at(1)),
    "one-key-less": (SQUARE, at(-1)),
    "mask-ignored": (UNEQUAL, at(None)),
    "top-left": (UNEQUAL, at(0)),
    "always-causal": (FULL, at(46)),
    "prefix-ignored": (PREFIX, at(13)),
    "documents-ignored": (DOCUMENTS, at(0)),
    "first-length": (PADDED, at(None, hidden=range(8, 20))),
    "heads-tiled": (SQUARE, at(0, tiled=True)),
    "mask-inverted": by(UNEQUAL, lambda s, seen: s.masked_fill(seen, -math.inf)),
    "mask-added": by(SQUARE, lambda s, seen: s + seen.float()),
    "mask-added ": by(SQUARE, lambda s, seen: s + (~seen).float()),
    "mask-filled": by(SQUARE, lambda s, seen: s.masked_fill(~seen, -1e-9)),
    "mask-filled ": by(UNEQUAL, lambda s, seen: s.masked_fill(~seen, -3.0)),
    "mask-filled  ": by(BLIND, lambda s, seen: s.masked_fill(~seen, -1e4)),
    "blind-see-all": by(BLIND, lambda s, seen: s - 1e4 * (~seen)),
    "padding-side": by(PADDED, lambda s, seen: s.masked_fill(~seen.flip(-1), -math.inf)),
    "window-both-sides": (
        WINDOW,
        lambda q, k, v, scale: of_scores(
            q, k, v, scale, lambda s, seen: s.masked_fill(~(seen | seen.mT), -math.inf), WINDOW
        ),
    ),
    "lse-base-2": (FULL, halves(1 / math.log(2))),
    "lse-base-e": (FULL, halves(math.log(2))),
    "lse-sign": (FULL, halves(-1.0)),
    "bias-from-0": (SIX_HEADS, top_left_alibi),
    "scale-missing": (FULL, lambda q, k, v, scale: attend(q, k, v, scale=1.0)),
    "scale-log2(e)": (FULL, lambda q, k, v, scale: attend(q, k, v, scale=scale / math.log(2))),
    "scale-ignored": (GIVEN, lambda q, k, v, scale: attend(q, k, v, scale=16**-0.5)),
    "scale-factor": (FULL, lambda q, k, v, scale: attend(q, k, v, scale=1.7 * scale)),
    "slope": (SIX_HEADS, sloped([2 ** (-8 * h / 6) for h in range(1, 7)])),
    "position-ignored": (ROPE, rope()),
    "rope-layout": (ROPE, rope("rope-interleaved")),
    "rope-base": (ROPE, rope("rope:500000")),
    "rope-twice": (ROPE, rope("rope", "rope")),
    "layout-swapped": (
        SAME,
        lambda q, k, v, scale: attend(
            *(x.transpose(1, 2) for x in (q, k, v)), scale=scale
        ).transpose(1, 2),
    ),
    "not-normalised": (
        FULL,
        lambda q, k, v, scale: (
            ((q * scale) @ k.repeat_interleave(2, 1).mT).exp() @ v.repeat_interleave(2, 1)
        ),
    ),
    "not-rescaled": (FEW, functools.partial(joined, running=False)),
    "not-rescaled ": (FEW, functools.partial(joined, running=True)),
    "rows-without-keys": (BLIND, at(-13)),
    "keys": (FULL, at(None, hidden=range(64, 70))),
    "ratio": (FULL, lambda q, k, v, scale: 1.25 * attend(q, k, v, scale=scale)),
    "precision": (
        FULL,
        lambda q, k, v, scale: attend(*(x.bfloat16() for x in (q, k, v)), scale=scale).float(),
    ),
    "heads-and-rows-mixed": (
        UNEQUAL,
        lambda q, k, v, scale: (
            attend(q, k, v, scale=scale, diagonal=13).transpose(1, 2).reshape(q.shape)
        ),
    ),
}


@pytest.mark.parametrize("code", EXPLAINED)
def test_a_computation_that_gives_the_same_explains_it(code):
    case, wrong = EXPLAINED[code]
    assert fault(case, wrong)["explained"][:1] == [code.strip()]


def test_a_slope_of_alibi_is_named_with_its_head_and_the_right_one():
    head, got, right = fault(*EXPLAINED["slope"])["slope"]
    assert got == pytest.approx(2 ** (-8 * (head + 1) / 6), rel=1e-3)
    assert right == pytest.approx([2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3][head])


@pytest.mark.parametrize("offset", [False, True])
def test_memory_that_is_read_as_if_inputs_were_dense_is_told(offset):
    tensors = ATTENTION.tensors(replace(SAME, layout="BHLD" if offset else "BLHD"))
    if offset:
        tensors = {name: torch.stack((x, x))[1] for name, x in tensors.items()}
    ATTENTION.fill(SAME, tensors, Draw(seed=5))
    if offset:
        for x in tensors.values():
            x.as_strided(x.shape, x.stride(), 0).normal_()
    dense = torch.empty(tensors["q"].shape).stride()
    q, k, v = (
        x.as_strided(x.shape, dense, 0 if offset else x.storage_offset()) for x in tensors.values()
    )
    o = attend(q, k, v, scale=SAME.softmax_scale)
    found = fault_of(SAME, tensors, {"o": o}, ATTENTION.truth(SAME, tensors))
    assert found["explained"] == ["strides-qkv"]


DECODE = Case(
    workload="decode", batch=2, heads=4, kv_heads=2, seq_len=29, head_dim=16, width=48,
    mask=CAUSAL, new_tokens=4, cache="static",
)  # fmt: skip


def pages_of_others(self, first, end):
    k, v = paged_extend(self, first, end)
    return k.roll(1, 0), v.roll(1, 0)


def page_of_another(self, first, end):
    k, v = (x.clone() for x in paged_extend(self, first, end))
    k[:, :, 4:8], v[:, :, 4:8] = k[:, :, 12:16].clone(), v[:, :, 12:16].clone()
    return k, v


def first_page_lost(self, first, end):
    k, v = (x.clone() for x in paged_extend(self, first, end))
    k[:, :, :4], v[:, :, :4] = 0, 0
    return k, v


def scales_of_the_token_before(self, first, end):
    kept = self.scales
    eight_bits_extend(self, first, end)  # writes them
    self.scales = [torch.cat((x[:, :, :1], x[:, :, :-1]), dim=2) for x in kept]
    for codes, scales, wide in zip(self.codes, self.scales, self._wide, strict=True):
        wide[:, :, :end].copy_(codes[:, :, :end]).mul_(scales[:, :, :end])
    self.scales = kept
    return tuple(wide[:, :, :end] for wide in self._wide)


paged_extend, eight_bits_extend = caches.Paged.extend, caches.EightBits.extend
CACHES = {
    "page-foreign": ("paged:4", caches.Paged, "extend", pages_of_others),
    "page-foreign ": ("paged:4", caches.Paged, "extend", page_of_another),
    "page-stale": ("paged:4", caches.Paged, "extend", first_page_lost),
    "int8-other-token": ("int8", caches.EightBits, "extend", scales_of_the_token_before),
    "new-tokens-lost": ("static", caches.DecodeLayer, "write", lambda *_: None),
}


@pytest.mark.parametrize("code", CACHES)
def test_what_a_cache_gives_back_wrongly_is_named(monkeypatch, checked, code):
    cache, owner, name, wrong = CACHES[code]
    monkeypatch.setattr(owner, name, wrong)
    found = checked(
        lambda q, k, v, *, causal, scale: attend(q, k, v, scale=scale),
        dataclasses.replace(DECODE, cache=cache),
    )
    assert code.strip() in found["explained"]


def test_a_core_is_explained_in_decoding_and_in_layers(checked):
    def last_lost(q, k, v, *, causal, scale):
        return attend(q, k, v, scale=scale, diagonal=k.shape[2] - q.shape[2] - 1)

    layer = dataclasses.replace(DECODE, workload="layer", cache=None, new_tokens=None)
    for case in (DECODE, dataclasses.replace(layer, projection="separate")):
        assert checked(last_lost, case)["explained"] == ["one-key-less"]


def test_a_method_with_a_definition_of_its_own_is_explained_by_it(checked):
    def squared(q, k, v, scale, case):
        share = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(share, 1), v.repeat_interleave(share, 1)
        admitted = dense_mask(case.mask, case.seq_len, case.kv_len, case.device)
        return (((q * scale) @ k.mT).square() * admitted) @ v

    declared = {
        "definition": lambda case: lambda q, k, v: squared(q, k, v, case.softmax_scale, case)
    }
    for code, changed in {
        "mask-ignored": lambda q, k, v, *, causal, scale: squared(q, k, v, scale, FULL_SQUARE),
        "scale-missing": lambda q, k, v, *, causal, scale: squared(q, k, v, 1.0, SQUARE),
        "heads-tiled": lambda q, k, v, *, causal, scale: squared(
            q, k.repeat(1, 2, 1, 1), v.repeat(1, 2, 1, 1), scale, SQUARE
        ),
    }.items():
        assert code in checked(changed, SQUARE, **declared)["explained"]


def test_of_a_single_row_no_story_is_told():
    single = dataclasses.replace(FULL, heads=1, kv_heads=1, seq_len=1)
    for wrong in (lambda q, k, v, scale: 1.37 * v[:, :, :1], lambda q, k, v, scale: 0 * q + 1e-9):
        assert set(fault(single, wrong)["explained"] or ()) <= {"zero"}


def test_of_gradients_nothing_is_said_of_a_normaliser(checked):
    def wrong(q, k, v, *, causal, scale):
        q = q.clone()  # whose gradient comes with a factor of its own for each row
        if q.requires_grad:
            q.register_hook(lambda grad: grad * torch.linspace(0.5, 2, q.shape[2]).unsqueeze(-1))
        return attend(q, k, v, scale=scale)

    found = checked(wrong, dataclasses.replace(FULL, pass_="both"))
    assert (found["tensor"], "not-normalised" in (found["explained"] or ())) == ("dq", False)


@pytest.mark.parametrize("saved", [False, True])
def test_a_causal_backward_pass_of_a_full_forward_pass_is_named(checked, saved):
    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v, scale):
            ctx.save_for_backward(q, k, v)
            ctx.scale = scale
            return attend(q, k, v, scale=scale)

        @staticmethod
        def backward(ctx, do):
            q, k, v = (x.double() for x in ctx.saved_tensors)
            scores = ctx.scale * q @ k.mT
            hidden = torch.ones_like(scores).triu(k.shape[2] - q.shape[2] + 1).bool()
            shown = scores.masked_fill(hidden, -math.inf)
            lse = (scores if saved else shown).logsumexp(-1, keepdim=True)
            p, do, o = (
                (shown - lse).exp(),
                do.double(),
                (scores if saved else shown).softmax(-1) @ v,
            )
            ds = p * (do @ v.mT - (do * o).sum(-1, keepdim=True)) * ctx.scale
            return *(x.float() for x in (ds @ k, ds.mT @ q, p.mT @ do)), None

    def wrong(q, k, v, *, causal, scale):
        return Wrong.apply(q, k, v, scale)

    found = checked(wrong, dataclasses.replace(FULL, kv_heads=4, pass_="both"))
    assert (found["tensor"], found["explained"]) == ("dq", ["always-causal"])


def test_every_explanation_has_its_sentence():
    cases = [SQUARE, UNEQUAL, PREFIX, DOCUMENTS, PADDED, ROPE, SIX_HEADS]
    cases.append(WINDOW)
    codes = {code.strip() for code in EXPLAINED}
    for case in cases:
        tensors = ATTENTION.tensors(case)
        codes |= {code for code, _ in variants(case, tensors, tensors, plain_attention)}
    for cache in ("paged:4", "int8"):
        codes |= {code for code, _ in reads(dataclasses.replace(DECODE, cache=cache))}
    told = tomllib.loads(Path(documents.__path__[0], "check.toml").read_text("utf-8"))
    kinds = {re.sub(r":.*|(?<=^kept)-.*|(?<=^strides)-.*", "", code) for code in codes}
    assert kinds <= told["explained"].keys()


def test_the_keys_that_a_row_has_lost_or_seen_are_named():
    lost = fault(FULL, at(None, hidden=range(64, 70)))["keys"]
    assert (lost["lost"], lost["span"]) == ([64, 69], [0, 69])
    more = fault(UNEQUAL, at(14))["keys"]
    assert more["seen"] == [more["query"] + 14] * 2
    assert more["span"] == [0, more["query"] + 13]


def test_the_place_of_the_largest_error_and_what_is_touched_are_figures():
    def wrong(q, k, v, scale):
        o = attend(q, k, v, scale=scale)
        o[0, 2, 11, 3] += 1.0
        o[0, 3, 7, 5] += 0.5
        return o

    found = fault(FULL, wrong)
    assert found["at"] == {"batch": 0, "head": 2, "query": 11, "dim": 3}
    assert found["got"] - found["expected"] == pytest.approx(1.0, abs=1e-5)
    assert found["touched"] == {
        "batch": [1, 1, 0, 0],
        "head": [2, 4, 2, 3],
        "query": [2, 24, 7, 11],
    }
    assert found["explained"] == []


@pytest.fixture
def checked():
    """Check a function as an implementation in a case; the fault that was found."""

    def run(function: Callable[..., Any], case: Case = FULL, **declared: Any) -> dict[str, Any]:
        attention("wrong", **declared)(function)
        try:
            found = check_item(case, "wrong", {}, 0)
        finally:
            IMPLEMENTATIONS.remove("wrong")
        assert found["status"] != "ok"
        return dict(found["metrics"]["fault"], status=found["status"])

    return run


def test_who_changes_its_input_is_told_so_although_the_result_is_wrong_too(checked):
    def writes(q, k, v, *, causal, scale):
        k.mul_(2)
        return attend(q, k, v, scale=scale)

    assert (checked(writes)["code"], checked(writes)["tensor"]) == ("wrote-input", "k")


@pytest.mark.parametrize("copied", [True, False])
def test_a_result_that_was_kept_is_told_from_one_that_is_wrong(checked, copied):
    kept: list[torch.Tensor] = []

    def keeps(q, k, v, *, causal, scale):
        kept.append(attend(q, k, v, scale=scale))
        return kept[0].clone() if copied else kept[0]

    assert checked(keeps)["code"] == "kept-result"


def test_what_is_another_result_at_each_call_is_told_so(checked, monkeypatch):
    def dropped(q, k, v, *, causal, scale):
        return torch.nn.functional.dropout(attend(q, k, v, scale=scale), 0.1)

    # As in a worker, where random numbers begin anew after each call.
    begin = random.getstate(), torch.get_rng_state()
    monkeypatch.setattr("attnbench.machine.state._generators", begin)
    for case in (FULL, dataclasses.replace(FULL, pass_="both")):
        assert checked(dropped, case)["code"] == "random"


def test_each_call_draws_random_numbers_of_its_own(checked):
    drawn: list[float] = []

    def noting(q, k, v, *, causal, scale):
        drawn.append(float(torch.rand(())))
        return 2 * attend(q, k, v, scale=scale)

    for case in (FULL, dataclasses.replace(FULL, batch=2)):
        checked(noting, case)
    assert len(set(drawn)) == len(drawn) == 4


def test_what_overflows_alike_in_both_calls_is_not_random(checked):
    def overflows(q, k, v, *, causal, scale):
        o = attend(q, k, v, scale=scale).clone()
        o[:, :, 0], o[:, :, 1] = torch.inf, torch.nan
        return o

    assert checked(overflows)["code"] == "not-finite"


def test_memory_that_is_read_before_it_is_written_is_told_so(checked):
    def last_row(q, k, v, *, causal, scale):
        o = torch.empty_like(q)
        o[:, :, :-1] = attend(q, k, v, scale=scale)[:, :, :-1]
        return o

    # What malloc hands out is its own: of one size it may be what the first call was given, NaN.
    sizes = (dataclasses.replace(FULL, batch=batch) for batch in range(1, 6))
    codes = {checked(last_row, case)["code"] for case in sizes}
    assert codes & {"unwritten", "random"}
    assert codes <= {"unwritten", "random", "not-finite", "state"}


def test_inputs_of_an_earlier_call_are_named(checked):
    kept: list[torch.Tensor] = []

    def keeps_keys(q, k, v, *, causal, scale):
        kept.append(k.clone())
        return attend(q, kept[0], v, scale=scale)

    assert checked(keeps_keys)["explained"] == ["kept-k"]


def test_what_is_raised_is_named_with_the_line_of_the_authors_file(checked):
    def raises(q, k, v, *, causal, scale):
        raise ValueError("not a multiple of 16")

    found = checked(raises)
    assert (found["status"], found["code"], found["type"]) == ("error", "raised", "ValueError")
    assert "raise ValueError" in Path(found["file"]).read_text().splitlines()[found["line"] - 1]


@pytest.mark.usefixtures("one_thread")
def test_one_reference_serves_all_implementations_and_both_passes_of_the_same_inputs(monkeypatch):
    made: list[Case] = []
    workload = WORKLOADS.get("attention")

    def truth(case, tensors, impl):
        made.append(case)
        return type(workload).truth(workload, case, tensors, impl)

    monkeypatch.setattr(workload, "truth", truth, raising=False)
    checking._recent.clear()
    same: Any = {"heads": 2, "seq_len": 12, "head_dim": 8}
    both, forward = (Case(**same, pass_=pass_) for pass_ in ("both", "forward"))
    for case in (both, both, forward):
        assert check_item(case, "naive", {}, 0)["status"] == "ok"
    assert made == [both, both]  # one for each draw
    assert check_item(Case(**same, mask=CAUSAL), "naive", {}, 0)["status"] == "ok"
    assert len(made) == 4
