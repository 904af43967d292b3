"""Definitions held against transformers: positions, masks, caches, layers, sparse patterns.

Of each the largest difference, as a part of their largest number, is what rounding explains: EXACT
where both compute in float64, DENSE where theirs rounds to float32 on the way, ANGLES where it
makes angles of up to 64 radians in float32, which are off by 64 × 2⁻²⁴ = 4e-6.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch

from attnbench.api import dense_bias, dense_mask, implementation
from attnbench.api.bias import learned, relative_vectors
from attnbench.api.loader import load_built_in
from attnbench.schema.case import Case, parse_mask, parse_position
from attnbench.worker.positions import rotation
from attnbench.worker.workloads import WORKLOADS

EXACT, DENSE, ANGLES = 1e-12, 1e-6, 1e-5
Pairs = Iterator[tuple[torch.Tensor, torch.Tensor]]  # ours, theirs


def take(module: str, name: str) -> Any:
    """`name` of a module of transformers."""
    return getattr(importlib.import_module(f"transformers{module and '.'}{module}"), name)


def model(kind: str, name: str) -> Any:
    return take(f"models.{kind}.modeling_{kind}", name)


load_built_in()
HELD: dict[str, tuple[float, Callable[[], Pairs]]] = {}


def held(against: str, tolerance: float) -> Callable[[Callable[[], Pairs]], Callable[[], Pairs]]:
    """Add what is decorated: it yields what ours gives and what theirs, case by case."""

    def add(pairs: Callable[[], Pairs]) -> Callable[[], Pairs]:
        HELD[against] = tolerance, pairs
        return pairs

    return add


def case_of(**fields: Any) -> Any:
    """A case in float64; masks and positions as text."""
    return Case.from_json({"dtype": "float64", "seq_len": 24, "head_dim": 16} | fields)


def computed(name: str, case: Any, *inputs: torch.Tensor) -> list[torch.Tensor]:
    """What the implementation's call gives and, where it has one, its definition."""
    impl = implementation(name)
    calls = [impl.build(case), *([impl.definition(case)] if impl.definition else [])]
    return [call(*inputs) for call in calls]


def scores_added(case: Any) -> torch.Tensor:
    """The whole bias of a position encoding by distance, (H, L, S)."""
    bias = dense_bias(case)
    assert bias is not None
    return bias(torch.zeros(()))[0]


def rotated(text: str, x: torch.Tensor, length: int = 0) -> torch.Tensor:
    """x (B, heads, tokens, dims) as the timed rotation gives it."""
    count = x.shape[2]
    case = case_of(head_dim=x.shape[3], position=text)
    turn = rotation(case, 0, count, length or count)
    assert turn is not None
    return turn(x)


LENGTH = 16  # the trained length of the blocks below
LONG = [1 + i / 4 for i in range(8)]
YARN: dict[str, dict[str, Any]] = {
    "": {},
    ":truncate=0": {"truncate": False},
    ":slow=2:fast=8": {"beta_slow": 2.0, "beta_fast": 8.0},
    ":base=1000000": {"rope_theta": 1e6},
    ":mscale=0.7:mscale_all_dim=1": {"mscale": 0.7, "mscale_all_dim": 1.0},
    ":attention_factor=1.5": {"attention_factor": 1.5},
}
LLAMA3 = {
    "factor": 8.0, "rope_theta": 500000.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
}  # fmt: skip
# By kind: ours, the trained length, and what else is in `rope_parameters` of transformers.
SCALINGS: dict[str, list[tuple[str, int, dict[str, Any]]]] = {
    "linear": [("factor=4", LENGTH, {"factor": 4.0})],
    "dynamic": [
        ("length=16", LENGTH, {"factor": 1.0}),
        ("length=16:factor=4", LENGTH, {"factor": 4.0}),
    ],
    "yarn": [
        (f"factor={factor}:length={length}{text}", length, {"factor": float(factor)} | given)
        for factor, length in ((4, LENGTH), (16, 4096), (40, 2048))
        for text, given in YARN.items()
    ],
    "llama3": [(f"factor=8:length={n}:base=500000", n, LLAMA3) for n in (LENGTH, 8192)],
    "longrope": [
        (
            f"factor=4:length=16{text}:long={'+'.join(map(str, LONG))}",
            LENGTH,
            {"factor": 4.0, "short_factor": [short] * 8, "long_factor": LONG},
        )
        for text, short in (("", 1.0), (":short=1.1", 1.1))
    ],
}


def llama(kind: str, length: int, rope: dict[str, Any]) -> Any:
    """A configuration of two key heads and four query heads of 16 dims."""
    own = {"rope_theta": 10000.0, "rope_type": kind} | rope
    if kind != "dynamic":
        own["original_max_position_embeddings"] = length
    return take("", "LlamaConfig")(
        hidden_size=48, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        max_position_embeddings=length if kind == "dynamic" else 4 * length,
        rope_parameters=own, attn_implementation="eager",
    )  # fmt: skip


def frequencies(kind: str) -> Pairs:
    """Each frequency over theirs, below and past the trained length; and the factor."""
    initial = take("modeling_rope_utils", "ROPE_INIT_FUNCTIONS")[kind]
    for text, length, rope in SCALINGS[kind]:
        position = parse_position(f"rope-{kind}:{text}")
        for n in (length // 2, length, length + 1, 5 * length):
            theirs, factor = initial(llama(kind, length, rope), "cpu", seq_len=n)
            ours = position.encoding.frequencies(position.values, 16, n)
            ratio = torch.tensor(ours, dtype=torch.float64) / theirs.double()
            yield ratio, torch.ones_like(ratio)
            yield (
                torch.tensor(position.encoding.factor(position.values)),
                torch.tensor(float(factor)),
            )


def filled(case: Any) -> dict[str, torch.Tensor]:
    """A layer's or a decoding's x and weights, so that heads are of the size of x."""
    torch.manual_seed(case.seq_len)
    tensors = WORKLOADS.get(case.workload).tensors(case)
    for name, x in tensors.items():
        drawn = torch.randn(x.shape, dtype=x.dtype)
        x.copy_(drawn if name == "x" else drawn * x.shape[-1] ** -0.5)
    return tensors


def output_of(case: Any, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """The reference that every implementation is held against."""
    return WORKLOADS.get(case.workload).truth(case, tensors).values["o"]


def blocks(kind: str, cache: str = "", window: int = 0) -> Pairs:
    """A layer of Llama's attention with the same weights: at once, or token by token by a cache."""
    turning, attention = (
        model("llama", f"Llama{name}") for name in ("RotaryEmbedding", "Attention")
    )
    for (text, length, rope), n in product(SCALINGS[kind], (12, 24)):
        if cache and n > length:
            continue
        config, context = llama(kind, length, rope), n - 4 if cache else n
        config.sliding_window = window or None
        sizes = {"seq_len": context, "batch": 2, "heads": 4, "kv_heads": 2, "width": 48}
        mask = f"window:{window}" if window else "causal"
        how = {"workload": "decode", "cache": cache, "new_tokens": 4} if cache else {
            "workload": "layer", "projection": "separate",
        }  # fmt: skip
        case = case_of(mask=mask, position=f"rope-{kind}:{text}", **sizes, **how)
        theirs, tensors = attention(config, 0).double(), filled(case)
        weights = [tensors[name] for name in ("wq", "wk", "wv", "wo") if name in tensors]
        if "wqkv" in tensors:
            weights = [*torch.split(tensors["wqkv"], [64, 32, 32]), tensors["wo"]]
        for name, weight in zip("qkvo", weights, strict=True):
            getattr(theirs, f"{name}_proj").weight.data.copy_(weight)
        places = torch.arange(n).expand(2, -1)
        cos_sin = turning(config)(tensors["x"], places)
        kept = take("", "DynamicCache")(config=config) if cache else None
        steps = [slice(0, context), *(slice(i, i + 1) for i in range(context, n))]
        outputs = []
        with torch.no_grad():
            for step in steps:
                # One token sees whatever its cache has kept.
                back = torch.arange(step.stop)[:, None] - torch.arange(step.stop)
                seen = (back >= 0) & (back < (window or n))
                hidden = torch.zeros(seen.shape).double().masked_fill(~seen, -math.inf)
                turns = tuple(x[:, step] for x in cos_sin)
                added = hidden if step.start == 0 else None
                outputs.append(theirs(tensors["x"][:, step], turns, added, cache=kept)[0])
        yield output_of(case, tensors), torch.cat(outputs[1:] if cache else outputs, 1)


for _kind in SCALINGS:
    held(f"frequencies of rope-{_kind}", DENSE)(partial(frequencies, _kind))
    held(f"LlamaAttention with rope-{_kind}", DENSE)(partial(blocks, _kind))
held("LlamaAttention with DynamicCache", DENSE)(partial(blocks, "llama3", "concat"))
held("LlamaAttention with a sliding cache", DENSE)(partial(blocks, "llama3", "sliding", 5))


@held("gptj: apply_rotary_pos_emb: rope-interleaved, rope-matrix", ANGLES)
def _gptj() -> Pairs:
    turn, tables = (
        model("gptj", name) for name in ("apply_rotary_pos_emb", "create_sinusoidal_positions")
    )
    x = torch.randn(2, 3, 64, 16, dtype=torch.float64)
    sin, cos = tables(64, 16).expand(2, -1, -1).chunk(2, dim=-1)
    for text in ("rope-interleaved", "rope-matrix"):
        yield rotated(text, x), turn(x.transpose(1, 2), sin, cos).transpose(1, 2)


@held("gpt_neox: apply_rotary_pos_emb: rope-partial", ANGLES)
def _neox() -> Pairs:
    module, x = "gpt_neox", torch.randn(2, 3, 64, 32)
    for share in (0.25, 0.5, 1.0):
        rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": share}
        config = take("", "GPTNeoXConfig")(
            hidden_size=96, num_attention_heads=3, rope_parameters=rope
        )
        places = torch.arange(64).expand(2, -1)
        cos, sin = model(module, "GPTNeoXRotaryEmbedding")(config)(x, places)
        theirs, _ = model(module, "apply_rotary_pos_emb")(x, x, cos, sin)
        yield rotated(f"rope-partial:{share}", x.double()), theirs


@held("T5Attention._relative_position_bucket: t5", EXACT)
def _t5() -> Pairs:
    """The table's row of each bucket of theirs; distances at a bucket's edge left out."""
    attention = model("t5", "T5Attention")
    for (buckets, most), mask in product(((32, 128), (16, 64), (64, 1000)), ("full", "causal")):
        text = f"t5:buckets={buckets}:distance={most}"
        case = case_of(heads=3, seq_len=200, mask=mask, position=text)
        distance_LS = torch.arange(200) - torch.arange(200)[:, None]
        sides = mask == "full"
        found = attention._relative_position_bucket(
            distance_LS, bidirectional=sides, num_buckets=buckets, max_distance=most
        )
        theirs = learned(buckets, 3, "cpu")[found].movedim(-1, 0)
        side = buckets // 2 if sides else buckets
        growth = torch.log(distance_LS.abs().double().clamp(min=1) / (side // 2))
        growth = growth / math.log(most / (side // 2)) * (side - side // 2)
        at_edge = ((growth - growth.round()).abs() < 1e-5) & (distance_LS.abs() > side // 2)
        yield scores_added(case).masked_fill(at_edge, 0), theirs.masked_fill(at_edge, 0)


@held("SeamlessM4Tv2ConformerSelfAttention: layer, shaw", EXACT)
def _shaw() -> Pairs:
    module = "seamless_m4t_v2"
    for clip, n in ((3, 10), (16, 40)):
        config = take("", "SeamlessM4Tv2Config")(
            hidden_size=48, speech_encoder_attention_heads=3, attn_implementation="eager",
            position_embeddings_type="relative_key", left_max_position_embeddings=clip,
            right_max_position_embeddings=clip, speech_encoder_dropout=0.0,
        )  # fmt: skip
        theirs = model(module, "SeamlessM4Tv2ConformerSelfAttention")(config).double().eval()
        case = case_of(
            workload="layer", seq_len=n, batch=2, heads=3, width=48, projection="separate",
            position=f"shaw:{clip}",
        )  # fmt: skip
        tensors = filled(case)
        for name, weight in (("q", "wq"), ("k", "wk"), ("v", "wv"), ("out", "wo")):
            getattr(theirs, f"linear_{name}").weight.data.copy_(tensors[weight])
            getattr(theirs, f"linear_{name}").bias.data.zero_()
        theirs.distance_embedding.weight.data.copy_(relative_vectors(case, "cpu"))
        with torch.no_grad():
            yield output_of(case, tensors), theirs(tensors["x"])[0]


@held("masking_utils: causal, window, document, padding", EXACT)
def _masks() -> Pairs:
    def theirs(name: str, *arguments: Any) -> Any:
        return take("masking_utils", name)(*arguments)

    causal = take("masking_utils", "causal_mask_function")
    packed = torch.tensor([[0] * 5 + [1] * 3 + [2] * 5 + [3] * 3 + [4] * 5]).expand(3, -1)
    kept = torch.arange(21) < torch.tensor([4, 21, 9])[:, None]
    both = take("masking_utils", "and_masks")
    masks = {
        "causal": causal,
        "window:4": theirs("sliding_window_causal_mask_function", 4),
        "window:1": theirs("sliding_window_causal_mask_function", 1),
        "document:6": theirs("chunked_causal_mask_function", 6, torch.zeros(3, dtype=torch.int)),
        "document:5+3": both(causal, theirs("packed_sequence_mask_function", packed)),
        "document:5+3:causal=0": theirs("packed_sequence_mask_function", packed),
        "padding:4+21+9": theirs("padding_mask_function", kept),
        "padding:4+21+9:causal=1": both(causal, theirs("padding_mask_function", kept)),
    }
    for (text, function), queries in product(masks.items(), (21, 8, 1)):
        item, place, key = torch.arange(3), torch.arange(21 - queries, 21), torch.arange(21)
        found = function(item[:, None, None], 0, place[:, None], key)
        ours = dense_mask(parse_mask(text), queries, 21, "cpu", batch=3)
        ours = ours.view(-1, queries, 21).expand(3, -1, -1)
        yield ours.double(), found.expand(3, queries, 21).double()


@held("DeepseekV2Attention without its rotary part: layer, mla", DENSE)
def _mla() -> Pairs:
    module = "deepseek_v2"
    for heads, rank, values in ((2, 8, 16), (4, 12, 6)):
        config = take("", "DeepseekV2Config")(
            hidden_size=40, num_attention_heads=heads, num_key_value_heads=heads, q_lora_rank=None,
            kv_lora_rank=rank, qk_nope_head_dim=16, qk_rope_head_dim=4, v_head_dim=values,
            attn_implementation="eager",
        )  # fmt: skip
        theirs = model(module, "DeepseekV2Attention")(config, 0).double()
        theirs.kv_a_layernorm = torch.nn.Identity()
        case = case_of(
            workload="layer", projection=f"mla:{rank}", batch=2, heads=heads, width=40,
            value_dim=values, mask="causal", scale=20**-0.5,
        )  # fmt: skip
        tensors = filled(case)
        zero = torch.zeros(heads, 4, 40, dtype=torch.float64)
        wq = torch.cat((tensors["wq"].view(heads, 16, 40), zero), 1).flatten(0, 1)
        up = tensors["wupk"].view(heads, 16, rank), tensors["wupv"].view(heads, values, rank)
        theirs.q_proj.weight.data.copy_(wq)
        theirs.kv_a_proj_with_mqa.weight.data.copy_(torch.cat((tensors["wdown"], zero[0])))
        theirs.kv_b_proj.weight.data.copy_(torch.cat(up, 1).flatten(0, 1))
        theirs.o_proj.weight.data.copy_(tensors["wo"])
        hidden = torch.full((24, 24), -math.inf, dtype=torch.float64).triu(1)
        unturned = torch.ones(2, 24, 2, dtype=torch.complex64)
        with torch.no_grad():
            wanted = theirs(tensors["x"], hidden, position_embeddings=unturned)[0]
        yield output_of(case, tensors), wanted


@held("LongformerSelfAttention: sliding-window", DENSE)
def _longformer() -> Pairs:
    make = model("longformer", "LongformerSelfAttention")
    for window in (4, 8):
        config = take("", "LongformerConfig")(
            hidden_size=32, num_attention_heads=2, attention_window=[window],
            attention_probs_dropout_prob=0.0,
        )  # fmt: skip
        theirs = make(config, 0).double().eval()
        x = torch.randn(2, 32, 32, dtype=torch.float64)
        nowhere = torch.zeros(2, 32, dtype=torch.bool)
        with torch.no_grad():
            heads = [getattr(theirs, name)(x) for name in ("query", "key", "value")]
            inputs = [y.view(2, 32, 2, 16).transpose(1, 2) for y in heads]
            wanted = theirs(x, torch.zeros(2, 32).double(), is_index_masked=nowhere,
                            is_index_global_attn=nowhere, is_global_attn=False)[0]  # fmt: skip
        case = case_of(batch=2, heads=2, seq_len=32)
        for ours in computed(f"sliding-window:{window}", case, *inputs):
            yield ours, wanted.view(2, 32, 2, 16).transpose(1, 2)


@held("NystromformerSelfAttention: nystrom", EXACT)
def _nystromformer() -> Pairs:
    make = model("nystromformer", "NystromformerSelfAttention")
    for landmarks in (8, 16):
        config = take("", "NystromformerConfig")(
            hidden_size=16, num_attention_heads=1, num_landmarks=landmarks,
            segment_means_seq_len=64,
        )  # fmt: skip
        theirs, case = make(config).double().eval(), case_of(heads=1, seq_len=64)
        theirs.conv.weight.data.zero_()
        x = torch.randn(1, 64, 16, dtype=torch.float64)
        with torch.no_grad():
            inputs = [getattr(theirs, n)(x).unsqueeze(1) for n in ("query", "key", "value")]
            wanted = theirs(x)[0].unsqueeze(1)
        for ours in computed(f"nystrom:{landmarks}", case, *inputs):
            yield ours, wanted


@pytest.mark.parametrize("against", HELD)
def test_ours_is_what_transformers_computes(against: str) -> None:
    torch.manual_seed(0)
    tolerance, pairs = HELD[against]
    cases = [(ours.detach().double(), theirs.detach().double()) for ours, theirs in pairs()]
    assert cases
    for ours, theirs in cases:
        assert float((ours - theirs).abs().max()) <= tolerance * float(theirs.abs().max())
