"""Decoding and position encodings against the definition."""

import dataclasses
import itertools
import math
import types
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from attnbench.api import IMPLEMENTATIONS, dense_bias
from attnbench.api.loader import load_built_in
from attnbench.base.parameters import base_name, read_name
from attnbench.errors import UsageError
from attnbench.schema.case import Case, parse_mask, parse_position
from attnbench.schema.position import POSITIONS
from attnbench.theory.caches import CACHES, cache_bytes
from attnbench.theory.costs import decode_bytes_given, decode_bytes_min
from attnbench.theory.traits import impossible
from attnbench.worker.catalogue import reasons_against
from attnbench.worker.inputs import Draw
from attnbench.worker.positions import placed, rotated
from attnbench.worker.reference import judge
from attnbench.worker.workloads import WORKLOADS
from attnbench.worker.workloads.decode import each_layer, hidden_states

load_built_in()

DECODE = Case(
    workload="decode", batch=2, heads=4, kv_heads=2, seq_len=11, head_dim=8, value_dim=6,
    mask=parse_mask("causal"), width=20, cache="static", new_tokens=6, dtype="float64",
)  # fmt: skip


def bound(case: Case, impl: str = "naive"):
    workload = WORKLOADS.get("decode")
    tensors = workload.tensors(case)
    workload.fill(case, tensors, Draw(seed=1))
    return workload.bind(case, IMPLEMENTATIONS.get(impl), tensors), tensors


@pytest.mark.parametrize("batch", [1, 3])
def test_projections_are_products_of_rows_as_in_a_model(batch):
    """As batched products they were 50 times slower in bfloat16 on a CPU (torch 2.13)."""
    made, _ = bound(dataclasses.replace(DECODE, batch=batch, value_dim=8), "sdpa-flash")
    with FlopCounterMode(display=False) as counter:
        made.call()
    assert torch.ops.aten.bmm not in counter.get_flop_counts()["Global"]


def full_forward(case: Case, tensors, keys_from=None) -> torch.Tensor:
    """The whole layer at once, each batch item by itself, with torch's own attention."""
    found = []
    keys_from = keys_from or tensors
    for item, x_NE in enumerate(tensors["x"]):
        length = case.mask.length(case.seq_len, item)
        x, x_of_keys = (
            placed(torch.cat((own[:length], own[case.seq_len :])).unsqueeze(0), case)[0]
            for own in (x_NE, keys_from["x"][item])
        )
        latent = x @ tensors["wdown"].T if "wdown" in tensors else None
        q, k, v = (
            (given @ source[name].T if name in source else latent @ source["wup" + name[1]].T)
            .view(len(x), count, -1)
            .transpose(0, 1)
            for given, source, name, count in (
                (x, tensors, "wq", 4),
                (x_of_keys, keys_from, "wk", 2),
                (x_of_keys, keys_from, "wv", 2),
            )
        )
        places = torch.arange(len(x))
        q, k = (rotated(y.unsqueeze(0), case.position, places, len(x))[0] for y in (q, k))
        seen = torch.ones(len(x), len(x), dtype=torch.bool).tril()
        if case.mask.before is not None:
            seen = seen.triu(-case.mask.before)
        whole = dataclasses.replace(case, seq_len=len(x), kv_len=len(x), mask=parse_mask("causal"))
        bias = dense_bias(whole)
        scores = (
            torch.zeros(1, len(x), len(x), dtype=q.dtype)
            if bias is None
            else bias(q.unsqueeze(0))[0]
        )
        scores = scores.masked_fill(~seen, -math.inf)
        o = torch.nn.functional.scaled_dot_product_attention(q, k, v, scores, enable_gqa=True)
        found.append(o.transpose(0, 1).flatten(1)[length:] @ tensors["wo"].T)
    return torch.stack(found)


LENGTHS, WINDOW = parse_mask("padding:11+4"), parse_mask("window:6")
EXACT: dict[str, dict[str, Any]] = {
    **{cache: {"cache": cache} for cache in ("rerun", "none", "concat", "static", "paged:3")},
    "half empty": {"cache": "static:capacity=40"},
    "ring": {"cache": "sliding", "mask": WINDOW},
    "ring, shorter than a generation": {"cache": "sliding", "mask": parse_mask("window:3")},
    "ring, not full at first": {"cache": "sliding", "mask": parse_mask("window:13")},
    "ring, never full": {"cache": "sliding", "mask": parse_mask("window:99")},
    "lengths": {"cache": "static", "mask": LENGTHS},
    "latents": {"cache": "latent:5"},
    "latents, lengths": {"cache": "latent:5", "mask": LENGTHS},
    "latents, window, two at once": {"cache": "latent:5", "mask": WINDOW, "query_tokens": 2},
    "lengths, half empty": {"cache": "static:40", "mask": LENGTHS},
    "lengths, paged": {"cache": "paged:3", "mask": LENGTHS},
    "all new tokens at once": {"cache": "static", "query_tokens": 6},
    "two at once": {"cache": "paged:3", "query_tokens": 2},
    "three at once, everything again": {"cache": "rerun", "query_tokens": 3},
    "two at once, in a window": {
        "cache": "concat",
        "query_tokens": 2,
        "mask": parse_mask("window:3"),
    },
}


@pytest.mark.parametrize("row", EXACT)
def test_every_cache_gives_the_full_forward_pass_step_by_step(row):
    lossy = {name for name, kind in CACHES.items() if kind.lossy}
    tested = {base_name(fields["cache"]) for fields in EXACT.values()}
    assert tested | lossy | {"shared"} == set(CACHES.names())  # shared has several layers
    positions: Sequence[str] = ("none", "rope", "sinusoidal")
    if row == "static" or row.startswith("latents"):
        positions = POSITIONS.names() if row == "static" else ("none", "sinusoidal")
    for name in positions:
        case = dataclasses.replace(DECODE, position=parse_position(name), **EXACT[row])
        decoder, tensors = bound(case)
        expected = full_forward(case, tensors)
        for _ in range(2):  # each call starts from the same restored cache
            steps = decoder.named(decoder.call())["o"]
            torch.testing.assert_close(steps, expected, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize(
    ("cache", "read"), [("shared", [0, 0, 2, 2]), ("shared:4", [0] * 4), ("static", [0, 1, 2, 3])]
)
def test_layers_that_share_a_cache_read_the_keys_of_the_first_of_them(cache, read):
    for mask in ("causal", "padding:11+4"):
        case = dataclasses.replace(
            DECODE, cache=cache, layers=4, position=parse_position("rope"), mask=parse_mask(mask)
        )
        decoder, tensors = bound(case)
        layers = each_layer(case, tensors)
        expected = [full_forward(case, layers[i], layers[j]) for i, j in enumerate(read)]
        steps = decoder.named(decoder.call())["o"]
        torch.testing.assert_close(steps, torch.cat(expected, dim=-1), rtol=1e-11, atol=1e-11)
        truth = WORKLOADS.get("decode").truth(case, tensors)
        assert judge({"o": steps}, truth, case.dtype).reason is None
        alone = cache_bytes(dataclasses.replace(case, cache="static", layers=1))
        assert cache_bytes(case) == len(set(read)) * alone


def kept(store: Any) -> list[torch.Tensor]:
    """Every tensor that a cache holds on to, however deep."""

    def within(value: Any) -> list[torch.Tensor]:
        if isinstance(value, torch.Tensor):
            return [value]
        return [x for y in value for x in within(y)] if isinstance(value, (list, tuple)) else []

    tensors = {id(x): x for value in vars(store).values() for x in within(value)}
    return list(tensors.values())


HELD: list[dict[str, Any]] = [
    {"cache": "static"}, {"cache": "static:64"}, {"cache": "paged:4"}, {"cache": "int8"},
    {"cache": "paged:4", "mask": LENGTHS}, {"cache": "int8-head"},
    {"cache": "sliding", "mask": WINDOW}, {"cache": "latent:5"},
]  # fmt: skip


@pytest.mark.parametrize("fields", HELD, ids=lambda fields: fields["cache"])
def test_the_bytes_of_a_cache_are_those_that_it_holds_and_beside_it_are_named_buffers(fields):
    for dtype in ("bfloat16", "float32"):
        case = dataclasses.replace(DECODE, dtype=dtype, **fields)
        store = bound(case)[0].call.stores[0]
        # Made wide or gathered for the core; where things lie; what a ring puts back.
        beside = ("_wide", "_gathered", "_rows", "_overwritten", "_before")
        held = sum(x.nbytes for x in kept(store))
        for name in beside:
            held -= sum(x.nbytes for x in kept(types.SimpleNamespace(x=getattr(store, name, []))))
        assert held == cache_bytes(case)


class Traffic(TorchDispatchMode):
    """Bytes that operators read and write, each tensor once an operator; views move nothing."""

    moved = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **kwargs or {})
        if not function.is_view:
            given = [x for x in tree_leaves((args, kwargs, result)) if isinstance(x, torch.Tensor)]
            distinct = {x.data_ptr(): x for x in given}.values()
            self.moved += sum(min(x.nbytes, x.untyped_storage().nbytes()) for x in distinct)
        return result


def walked(case: Case, tensors: Any, stores: Any) -> float:
    """Bytes that a generation must move, step by step, of the tensors as they are."""
    total, together, layers = 0.0, case.query_tokens, each_layer(case, tensors)
    for end in range(case.seq_len + together, case.seq_len + (case.new_tokens or 1) + 1, together):
        for number, own in enumerate(layers):
            used = own if number in stores else {name: own[name] for name in ("wq", "wo")}
            total += sum(x.nbytes for name, x in used.items() if name != "x")
            token = own["x"][0, 0].nbytes
            total += 2 * case.batch * together * token  # x of the new ones, and their outputs
            for item in range(case.batch if number in stores else 0):
                now = case.mask.length(case.seq_len, item) + end - case.seq_len
                before = case.mask.before
                seen = now if before is None else min(now, before + together)
                if base_name(case.cache or "") in ("none", "rerun"):
                    total += (seen - together) * token
                    continue
                # Of each tensor with a place for each token: what a place takes.
                for name in ("buffers", "pools", "codes", "scales", "_prefilled"):
                    for x in getattr(stores[number], name, ()):
                        if x.shape[2] > 1:
                            total += seen * x.nbytes / (x.shape[0] * x.shape[2])
    return total


OF_A_STEP = list(itertools.product(
    ("causal", "window:6", "window:40", "padding:11+4"), (1, 2, 4), (1, 2, 6),
    (("float32", 4), ("float64", 2), ("float64", 1)),
))  # fmt: skip


@pytest.mark.parametrize("cache", CACHES.names())
def test_least_traffic_is_what_a_walk_over_the_tensors_of_a_step_reads_and_less_than_moves(cache):
    count = 0
    for mask, layers, together, (dtype, kv_heads) in OF_A_STEP[::7]:  # each value of each
        varied: dict[str, Any] = {
            "cache": "latent:5" if cache == "latent" else cache, "mask": parse_mask(mask),
            "layers": layers, "query_tokens": together, "dtype": dtype, "kv_heads": kv_heads,
        }  # fmt: skip
        case = dataclasses.replace(DECODE, **varied)
        if impossible(case):
            continue
        count += 1
        decoder, tensors = bound(case)
        least, tokens = decode_bytes_min(case), case.new_tokens or 1
        walk = walked(case, tensors, decoder.call.stores)
        assert 0 <= walk / tokens - least < 3  # rounded down
        with Traffic() as traffic:
            steps = decoder.call()
        assert tokens * least <= traffic.moved
        given = sum(x.nbytes for x in tensors.values()) + sum(x.nbytes for x in steps)
        assert decode_bytes_given(case) == given
    assert count >= 2


@pytest.mark.parametrize("cache", CACHES.names())
def test_the_check_of_decode_accepts_it_and_notices_a_stale_cache(cache):
    special: dict[str, dict[str, Any]] = {"shared": {"layers": 2}, "sliding": {"mask": WINDOW}}
    for dtype in ("float64", "bfloat16"):
        where = parse_position("none" if cache == "latent" else "rope")
        case = dataclasses.replace(DECODE, cache=cache, position=where, dtype=dtype)
        case = dataclasses.replace(case, **special.get(cache, {}))
        decoder, tensors = bound(case)
        workload = WORKLOADS.get("decode")
        workload.fill(case, tensors, Draw(seed=2))
        truth = workload.truth(case, tensors)
        stale = judge(decoder.named(decoder.call()), truth, case.dtype)
        assert (stale.reason is not None) == (cache not in ("rerun", "none"))
        decoder.refresh()
        assert judge(decoder.named(decoder.call()), truth, case.dtype).reason is None


def test_eight_bits_take_half_the_bytes_of_bfloat16_and_the_error_is_that_of_rounding():
    wide = dataclasses.replace(DECODE, head_dim=128, value_dim=128, width=64, dtype="bfloat16")
    error = {}
    for cache, most in (("int8", 0.51), ("int8-head", 0.501)):
        case = dataclasses.replace(wide, cache=cache)
        assert cache_bytes(case) < most * cache_bytes(wide)
        fine = dataclasses.replace(case, dtype="float64", seq_len=300, kv_len=300)
        decoder, tensors = bound(fine)
        exact = full_forward(fine, tensors)
        steps = decoder.named(decoder.call())["o"]
        error[cache] = float((steps - exact).norm() / exact.norm())
    # A step is the largest of 128 normal numbers / 127: 0.02, whose rounding is 0.006 of them. The
    # largest of a head's 300 x 128 is half as large again.
    assert 0.003 < error["int8"] < 0.012
    assert error["int8"] < error["int8-head"] < 3 * error["int8"]


@pytest.mark.parametrize(("fields", "words"), [
    ({"cache": "sliding"}, "(--masks window:256)"),
    (
        {"cache": "sliding", "mask": parse_mask("window:4"), "query_tokens": 2},
        "--query-tokens 1",
    ),
    ({"cache": "concat", "mask": LENGTHS}, "with caches static, shared, paged, int8,"),
    ({"mask": LENGTHS, "query_tokens": 2}, "one query at a time"),
    ({"cache": "static:12"}, "holds 12 tokens, not the 17"),
    ({"cache": "static:64", "query_tokens": 2}, "by a mask that is for one query"),
    ({"cache": "shared"}, "shares among 2 layers, which --layers 1 does not fill"),
    ({"query_tokens": 4}, "4 tokens a step (--query-tokens), which do not divide 6"),
])  # fmt: skip
def test_what_no_core_could_make_sense_of_in_decoding_has_a_reason(fields, words):
    assert words in (impossible(dataclasses.replace(DECODE, **fields)) or "")
    for text in ("paged:page=0", "paged:size=3", "concat:4", "static:many"):
        with pytest.raises(UsageError, match="--caches"):
            read_name(text, CACHES)


def test_a_window_limits_what_decode_sees_and_without_a_mask_it_makes_no_sense():
    case = dataclasses.replace(DECODE, mask=parse_mask("window:3"))
    decoder, tensors = bound(case)
    truth = WORKLOADS.get("decode").truth(case, tensors)
    assert judge(decoder.named(decoder.call()), truth, case.dtype).reason is None
    whole = dataclasses.replace(DECODE, mask=parse_mask("causal"))
    other = WORKLOADS.get("decode").truth(whole, tensors)
    assert judge(decoder.named(decoder.call()), other, case.dtype).reason
    assert reasons_against([case], ["naive"]) == {"naive": (None,)}
    later = dataclasses.replace(DECODE, mask=parse_mask(f"window:{DECODE.seq_len + 1}"))
    assert "takes masks" in (reasons_against([later], ["linear"])["linear"][0] or "")
    senseless = ("full", "prefix:4", "document:5")
    unfit = [dataclasses.replace(DECODE, mask=parse_mask(text)) for text in senseless]
    unfit.append(dataclasses.replace(DECODE, pass_="both"))
    assert all(reasons_against(unfit, ["naive"])["naive"])


class Seen(TorchDispatchMode):
    """The names of the operators that ran."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.add(str(function))
        return function(*args, **kwargs or {})


@pytest.mark.parametrize("width", [8, 16, 40])  # narrower than all keys together, as wide, wider
def test_a_needle_is_solved_for_as_by_a_pseudo_inverse_and_without_its_decomposition(width):
    torch.manual_seed(0)
    w_KE, wanted_BTK = torch.randn(16, width).bfloat16().double(), torch.randn(2, 3, 16).double()
    with Seen() as seen:
        x_BTE = hidden_states(w_KE, wanted_BTK)
    torch.testing.assert_close(x_BTE, wanted_BTK @ torch.linalg.pinv(w_KE).mT)
    assert width < 16 or torch.allclose(x_BTE @ w_KE.mT, wanted_BTK)
    assert not any(name in text for text in seen.names for name in ("svd", "eig", "pinv"))
