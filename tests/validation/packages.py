"""Definitions, kernels, masks, positions and caches held against what other packages have.

A row is one function of theirs: package, function, what of ours is held against it, and how far the
two may lie apart, as a part of their largest number. Bounds are what rounding explains: 1e-12 where
both compute in float64, DENSE where theirs rounds to float32 on the way, ANGLES where it makes
angles of up to 64 radians in float32, which are off by 64 × 2⁻²⁴ = 4e-6. Of times PREDICTED is what
a prediction may be off. The packages live in an environment of their own (`packages.txt`), in which
this file runs.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import math
import os
import runpy
import statistics
import subprocess
import sys
import venv
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

ROOT = Path(__file__).resolve().parents[2]
REQUIRED = Path(__file__).with_name("packages.txt")
PAGE = "packages.md"
HEADER = (
    "package", "version", "function", "held against it", "cases", "largest difference",
    "tolerance", "verdict",
)  # fmt: skip
EXACT, DENSE, ANGLES = 1e-12, 1e-6, 1e-5
PREDICTED = 0.15  # of a time
Pairs = Iterator[tuple[torch.Tensor, torch.Tensor]]  # ours, theirs


class Row(NamedTuple):
    """One function of a package; `pairs` yields what ours gives and what theirs, case by case."""

    package: str
    function: str
    ours: str
    tolerance: float
    pairs: Callable[[], Pairs]


ROWS: list[Row] = []


def row(package: str, function: str, ours: str, tolerance: float) -> Any:
    """Add what is decorated to the table."""

    def add(pairs: Callable[[], Pairs]) -> Callable[[], Pairs]:
        ROWS.append(Row(package, function, ours, tolerance, pairs))
        return pairs

    return add


def take(module: str, name: str) -> Any:
    """`name` of a module of one of the packages."""
    return getattr(importlib.import_module(module), name)


def of_fla(operation: str, name: str) -> Any:
    """`name` of a single file of fla-core: the whole needs Triton."""
    file = importlib.metadata.distribution("fla-core").locate_file(f"fla/ops/{operation}/naive.py")
    return runpy.run_path(str(file))[name]


def case_of(**fields: Any) -> Any:
    """A case in float64; masks and positions as text."""
    from attnbench.schema.case import Case

    return Case.from_json({"dtype": "float64", "seq_len": 24, "head_dim": 16} | fields)


def qkv(case: Any, *, size: float = 1.0) -> list[torch.Tensor]:
    """q_BHLD, k_BGSD, v_BGSV from N(0, size²), the same for the same case."""
    torch.manual_seed(0)
    queries, keys = (case.batch, case.heads, case.seq_len), (case.batch, case.kv_heads, case.kv_len)
    shapes = (*queries, case.head_dim), (*keys, case.head_dim), (*keys, case.value_dim)
    return [size * torch.randn(shape, dtype=torch.float64) for shape in shapes]


def computed(name: str, case: Any, *inputs: torch.Tensor) -> list[torch.Tensor]:
    """What the implementation's call gives and, where it has one, its definition."""
    from attnbench.api import implementation

    impl = implementation(name)
    calls = [impl.build(case), *([impl.definition(case)] if impl.definition else [])]
    return [call(*inputs) for call in calls]


def token_first(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """(B, heads, tokens, dims) as (B, tokens, heads, dims)."""
    return [x.transpose(1, 2).contiguous() for x in tensors]


def scores_added(case: Any) -> torch.Tensor:
    """The whole bias of a position encoding by distance, (H, L, S)."""
    from attnbench.api import dense_bias

    bias = dense_bias(case)
    assert bias is not None
    return bias(torch.zeros(()))[0]


def rotated(text: str, x: torch.Tensor, length: int = 0) -> torch.Tensor:
    """x (B, heads, tokens, dims) as the timed rotation gives it."""
    from attnbench.worker.positions import rotation

    count = x.shape[2]
    case = case_of(head_dim=x.shape[3], position=text)
    turn = rotation(case, 0, count, length or count)
    assert turn is not None
    return turn(x)


# Position encodings

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
    return take("transformers", "LlamaConfig")(
        hidden_size=48, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        max_position_embeddings=length if kind == "dynamic" else 4 * length,
        rope_parameters=own, attn_implementation="eager",
    )  # fmt: skip


for _kind in SCALINGS:

    @row("transformers", f"ROPE_INIT_FUNCTIONS['{_kind}']", f"rope-{_kind}", DENSE)
    def _frequencies(kind: str = _kind) -> Pairs:
        """Each frequency over theirs, below and past the trained length; and the factor."""
        from attnbench.schema.case import parse_position

        initial = take("transformers.modeling_rope_utils", "ROPE_INIT_FUNCTIONS")[kind]
        for text, length, rope in SCALINGS[kind]:
            position = parse_position(f"rope-{kind}:{text}")
            for n in (length // 2, length, length + 1, 5 * length):
                theirs, factor = initial(llama(kind, length, rope), "cpu", seq_len=n)
                ours = position.encoding.frequencies(position.values, 16, n)
                ratio = torch.tensor(ours, dtype=torch.float64) / theirs.double()
                yield ratio, torch.ones_like(ratio)
                own = position.encoding.factor(position.values)
                yield torch.tensor(own), torch.tensor(float(factor))


def filled(case: Any) -> dict[str, torch.Tensor]:
    """A layer's or a decoding's x and weights, so that heads are of the size of x."""
    from attnbench.worker.workloads import WORKLOADS

    torch.manual_seed(case.seq_len)
    tensors = WORKLOADS.get(case.workload).tensors(case)
    for name, x in tensors.items():
        drawn = torch.randn(x.shape, dtype=x.dtype)
        x.copy_(drawn if name == "x" else drawn * x.shape[-1] ** -0.5)
    return tensors


def output_of(case: Any, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """The reference that every implementation is held against."""
    from attnbench.worker.workloads import WORKLOADS

    return WORKLOADS.get(case.workload).truth(case, tensors).values["o"]


def blocks(kind: str, cache: str = "", window: int = 0) -> Pairs:
    """A layer of Llama's attention with the same weights: at once, or token by token by a cache."""
    turning, attention = (
        take("transformers.models.llama.modeling_llama", f"Llama{name}")
        for name in ("RotaryEmbedding", "Attention")
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
        kept = take("transformers", "DynamicCache")(config=config) if cache else None
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

    @row("transformers", "LlamaAttention", f"layer, rope-{_kind}", DENSE)
    def _layer(kind: str = _kind) -> Pairs:
        return blocks(kind)


@row("transformers", "LlamaAttention, DynamicCache", "decode, rope-llama3", DENSE)
def _decode() -> Pairs:
    return blocks("llama3", "concat")


@row("transformers", "LlamaAttention, its sliding DynamicCache", "decode, sliding", DENSE)
def _sliding() -> Pairs:
    return blocks("llama3", "sliding", window=5)


@row("transformers", "gptj: apply_rotary_pos_emb", "rope-interleaved, rope-matrix", ANGLES)
def _gptj() -> Pairs:
    turn, tables = (
        take("transformers.models.gptj.modeling_gptj", name)
        for name in ("apply_rotary_pos_emb", "create_sinusoidal_positions")
    )
    x = torch.randn(2, 3, 64, 16, dtype=torch.float64)
    sin, cos = tables(64, 16).expand(2, -1, -1).chunk(2, dim=-1)
    for text in ("rope-interleaved", "rope-matrix"):
        yield rotated(text, x), turn(x.transpose(1, 2), sin, cos).transpose(1, 2)


@row("transformers", "gpt_neox: apply_rotary_pos_emb", "rope-partial", ANGLES)
def _neox() -> Pairs:
    module, x = "transformers.models.gpt_neox.modeling_gpt_neox", torch.randn(2, 3, 64, 32)
    for share in (0.25, 0.5, 1.0):
        rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": share}
        config = take("transformers", "GPTNeoXConfig")(
            hidden_size=96, num_attention_heads=3, rope_parameters=rope
        )
        places = torch.arange(64).expand(2, -1)
        cos, sin = take(module, "GPTNeoXRotaryEmbedding")(config)(x, places)
        theirs, _ = take(module, "apply_rotary_pos_emb")(x, x, cos, sin)
        yield rotated(f"rope-partial:{share}", x.double()), theirs


LUCIDRAINS: dict[str, dict[str, float]] = {
    "rope-interleaved": {},
    "rope-interleaved:500000": {"theta": 500000},
    "rope-ntk:factor=4": {"theta_rescale_factor": 4.0},
    "rope-linear:factor=4": {"interpolate_factor": 4.0},
}


@row("rotary-embedding-torch", "RotaryEmbedding", "rope-interleaved, -ntk, -linear", ANGLES)
def _lucidrains() -> Pairs:
    """It pairs neighbours; ours may pair halves, so the dims are reordered for it."""
    x = torch.randn(2, 3, 64, 16)
    for text, given in LUCIDRAINS.items():
        halves = "interleaved" not in text
        paired = torch.stack(x.chunk(2, dim=-1), dim=-1).flatten(-2) if halves else x
        turn = take("rotary_embedding_torch", "RotaryEmbedding")(dim=16, **given)
        theirs = turn.rotate_queries_or_keys(paired)
        if halves:
            theirs = torch.cat((theirs[..., ::2], theirs[..., 1::2]), dim=-1)
        yield rotated(text, x.double()), theirs


@row("transformers", "xlm: create_sinusoidal_embeddings", "sinusoidal", DENSE)
def _sinusoidal() -> Pairs:
    from attnbench.worker.positions import addition

    make = take("transformers.models.xlm.modeling_xlm", "create_sinusoidal_embeddings")
    for tokens, width in ((5, 6), (64, 48), (300, 20)):
        ours = addition(case_of(workload="layer", width=width, position="sinusoidal"), tokens)
        assert ours is not None
        yield ours, make(tokens, width, torch.empty(tokens, width))


@row("x-transformers", "AlibiPositionalBias", "alibi", DENSE)
def _x_alibi() -> Pairs:
    make = take("x_transformers.x_transformers", "AlibiPositionalBias")
    for heads, (queries, keys) in product((*range(1, 21), 71), ((9, 9), (3, 11))):
        case = case_of(heads=heads, seq_len=queries, kv_len=keys, position="alibi")
        yield scores_added(case), make(heads)(queries, keys)


@row("transformers", "T5Attention._relative_position_bucket", "t5", EXACT)
def _t5() -> Pairs:
    """The table's row of each bucket of theirs; distances at a bucket's edge left out."""
    from attnbench.api.bias import learned

    attention = take("transformers.models.t5.modeling_t5", "T5Attention")
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


@row("transformers", "SeamlessM4Tv2ConformerSelfAttention", "layer, shaw", EXACT)
def _shaw() -> Pairs:
    from attnbench.api.bias import relative_vectors

    module = "transformers.models.seamless_m4t_v2.modeling_seamless_m4t_v2"
    for clip, n in ((3, 10), (16, 40)):
        config = take("transformers", "SeamlessM4Tv2Config")(
            hidden_size=48, speech_encoder_attention_heads=3, attn_implementation="eager",
            position_embeddings_type="relative_key", left_max_position_embeddings=clip,
            right_max_position_embeddings=clip, speech_encoder_dropout=0.0,
        )  # fmt: skip
        theirs = take(module, "SeamlessM4Tv2ConformerSelfAttention")(config).double().eval()
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


# Masks


@row("transformers", "masking_utils", "causal, window, document, padding", EXACT)
def _masks() -> Pairs:
    from attnbench.api import dense_mask
    from attnbench.schema.case import parse_mask

    def theirs(name: str, *arguments: Any) -> Any:
        return take("transformers.masking_utils", name)(*arguments)

    causal = take("transformers.masking_utils", "causal_mask_function")
    packed = torch.tensor([[0] * 5 + [1] * 3 + [2] * 5 + [3] * 3 + [4] * 5]).expand(3, -1)
    kept = torch.arange(21) < torch.tensor([4, 21, 9])[:, None]
    both = take("transformers.masking_utils", "and_masks")
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


# Softmax attention and layers

CORES = ("naive", "naive-heads", "sdpa", "sdpa-math", "chunked", "split-kv")
SIZES: list[dict[str, Any]] = [
    {"batch": 2, "heads": 4, "kv_heads": 4, "seq_len": 70},
    {"batch": 2, "heads": 6, "kv_heads": 2, "seq_len": 70, "value_dim": 8},
    {"heads": 4, "kv_heads": 1, "seq_len": 130, "scale": 0.3},
]


@row("transformers", "llama: eager_attention_forward, repeat_kv", ", ".join(CORES), DENSE)
def _eager() -> Pairs:
    attend = take("transformers.models.llama.modeling_llama", "eager_attention_forward")
    masks = ("full", "causal", "window:1", "window:9")
    for name, sizes, mask in product(CORES, SIZES, masks):
        case = case_of(**sizes, mask=mask)
        inputs = qkv(case)
        groups = SimpleNamespace(num_key_value_groups=case.heads // case.kv_heads, training=False)
        seen = torch.ones(case.seq_len, case.seq_len, dtype=torch.bool)
        if mask != "full":
            seen = seen.tril().triu(1 - int(mask.partition(":")[2] or case.seq_len))
        added = torch.zeros(seen.shape).double().masked_fill(~seen, -math.inf)
        theirs = attend(groups, *inputs, added, case.softmax_scale)[0].transpose(1, 2)
        for ours in computed(name, case, *inputs):
            yield ours, theirs


@row("torch", "nn.MultiheadAttention", "layer, fused", EXACT)
def _multihead() -> Pairs:
    for mask, heads in product(("full", "causal"), (1, 3)):
        case = case_of(
            workload="layer", projection="fused", batch=2, heads=heads, width=16 * heads, mask=mask
        )
        theirs = torch.nn.MultiheadAttention(16 * heads, heads, bias=False, batch_first=True)
        theirs = theirs.double()
        tensors = filled(case)
        theirs.in_proj_weight.data.copy_(tensors["wqkv"])
        theirs.out_proj.weight.data.copy_(tensors["wo"])
        hidden = torch.ones(24, 24, dtype=torch.bool).triu(1) if mask == "causal" else None
        with torch.no_grad():
            wanted = theirs(*[tensors["x"]] * 3, attn_mask=hidden, need_weights=False)[0]
        yield output_of(case, tensors), wanted


@row("transformers", "DeepseekV2Attention without its rotary part", "layer, mla", DENSE)
def _mla() -> Pairs:
    module = "transformers.models.deepseek_v2.modeling_deepseek_v2"
    for heads, rank, values in ((2, 8, 16), (4, 12, 6)):
        config = take("transformers", "DeepseekV2Config")(
            hidden_size=40, num_attention_heads=heads, num_key_value_heads=heads, q_lora_rank=None,
            kv_lora_rank=rank, qk_nope_head_dim=16, qk_rope_head_dim=4, v_head_dim=values,
            attn_implementation="eager",
        )  # fmt: skip
        theirs = take(module, "DeepseekV2Attention")(config, 0).double()
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


# Sparse patterns


@row("transformers", "LongformerSelfAttention", "sliding-window", DENSE)
def _longformer() -> Pairs:
    make = take("transformers.models.longformer.modeling_longformer", "LongformerSelfAttention")
    for window in (4, 8):
        config = take("transformers", "LongformerConfig")(
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


# Linear and low-rank attention


@row("fla-core", "naive_chunk_linear_attn(normalize)", "linear, -recurrent, -parallel", 1e-9)
def _fla_linear() -> Pairs:
    """It adds 1e-10 to sums of weights."""
    attend = of_fla("linear_attn", "naive_chunk_linear_attn")
    for name, n in product(("linear", "linear-recurrent", "linear-parallel"), (64, 192)):
        case = case_of(batch=2, heads=2, seq_len=n, mask="causal")
        q, k, v = qkv(case)
        features = [torch.nn.functional.elu(x) + 1 for x in (q, k)]
        theirs = attend(*token_first(*features, v), scale=1.0, normalize=True)
        for ours in computed(name, case, q, k, v):
            yield ours, theirs.transpose(1, 2)


@row("fla-core", "naive_retention", "retention", ANGLES)
def _fla_retention() -> Pairs:
    attend = of_fla("retention", "naive_retention")
    for heads, n in ((1, 40), (4, 200), (8, 64)):
        case = case_of(batch=2, heads=heads, seq_len=n, mask="causal")
        inputs = qkv(case)
        for ours in computed("retention", case, *inputs):
            yield ours, attend(*inputs)


@row("performer-pytorch", "softmax_kernel, linear_attention", "performer", EXACT)
def _performer() -> Pairs:
    """With its directions ours, and without what it adds to features and sums."""
    kernel, whole, causal = (
        take("performer_pytorch.performer_pytorch", name)
        for name in ("softmax_kernel", "linear_attention", "causal_linear_attention_noncuda")
    )
    directions = take("attnbench_impls.performer", "directions")
    for features, mask in product((16, 40), ("full", "causal")):
        case = case_of(batch=2, heads=2, seq_len=50, mask=mask)
        q, k, v = qkv(case, size=0.5)
        omega_FD = directions(case, features, 0).mT * case.head_dim**0.25
        made = [kernel(x, projection_matrix=omega_FD, is_query=x is q, eps=0.0) for x in (q, k)]
        theirs = whole(*made, v) if mask == "full" else causal(*made, v, eps=0.0)
        for ours in computed(f"performer:{features}", case, q, k, v):
            yield ours, theirs


@row("linformer", "LinformerSelfAttention", "linformer", EXACT)
def _linformer() -> Pairs:
    for rank, heads in ((8, 1), (24, 4)):
        case, width = case_of(heads=heads, seq_len=40), 16 * heads
        x = torch.randn(1, 40, width, dtype=torch.float64)
        theirs = take("linformer.linformer", "LinformerSelfAttention")(
            width, 40, k=rank, heads=heads
        ).double()
        e_RS, f_RS = take("attnbench_impls.linformer", "projections")(case, rank, 0)
        theirs.proj_k.data.copy_(e_RS.mT)
        theirs.proj_v.data.copy_(f_RS.mT)
        theirs.to_out = torch.nn.Identity()
        with torch.no_grad():
            heads_of = [getattr(theirs, f"to_{name}")(x) for name in "qkv"]
            wanted = theirs(x).view(1, 40, heads, 16).transpose(1, 2)
        inputs = [y.view(1, 40, heads, 16).transpose(1, 2) for y in heads_of]
        for ours in computed(f"linformer:{rank}", case, *inputs):
            yield ours, wanted


@row("transformers", "NystromformerSelfAttention", "nystrom", EXACT)
def _nystromformer() -> Pairs:
    make = take(
        "transformers.models.nystromformer.modeling_nystromformer", "NystromformerSelfAttention"
    )
    for landmarks in (8, 16):
        config = take("transformers", "NystromformerConfig")(
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


# Times

MODELS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "Llama": (
        {"hidden_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 4},
        {"heads": 16, "kv_heads": 4, "seq_len": 512, "mask": "causal"},
    ),
    "Bert": (
        {"hidden_size": 768, "num_attention_heads": 12},
        {"heads": 12, "seq_len": 256, "batch": 2},
    ),
}
for _name in MODELS:

    @row("transformers", f"{_name}Model: time of sdpa in a block", "time of attention", PREDICTED)
    def _times(name: str = _name) -> Pairs:
        """The call that a sweep times over what the block's attention takes: median of 20 rounds.

        That is timed where the block calls it. A block without its attention would be a difference
        of two long times, each of which scatters by as much as the attention takes.
        """
        from attnbench.api import implementation
        from attnbench.measure.clock import clock_for
        from attnbench.theory.choices import as_transformers
        from attnbench.worker.workloads import WORKLOADS

        given, sizes = MODELS[name]
        config = take("transformers", f"{name}Config")(
            vocab_size=64, num_hidden_layers=1, intermediate_size=3 * given["hidden_size"],
            attn_implementation="sdpa", **given,
        )  # fmt: skip
        block = take("transformers", f"{name}Model")(config).eval()
        functions = take("transformers.modeling_utils", "ALL_ATTENTION_FUNCTIONS")
        theirs, clock, took_us = functions["sdpa"], clock_for("cpu", l2="warm"), list[float]()

        def timed(*arguments: Any, **named: Any) -> Any:
            found: list[Any] = []
            call = partial(theirs, *arguments, **named)
            took_us.append(clock.batch(lambda: found.append(call()), 1).own_us)
            return found[0]

        for dtype in ("float32", "bfloat16"):
            case = case_of(dtype=dtype, layout="BLHD", head_dim=64, **sizes)
            workload, impl = WORKLOADS.get("attention"), implementation(as_transformers(case))
            tensors = workload.tensors(case)
            for x in tensors.values():
                x.normal_()
            call, ratios = workload.bind(case, impl, tensors).call, []
            tokens = torch.zeros(case.batch, case.seq_len, dtype=torch.int64)
            block, functions["sdpa"] = block.to(getattr(torch, dtype)), timed
            try:
                with torch.no_grad():
                    for _ in range(21):
                        call()
                        ours_us = min(clock.batch(call, 1).own_us for _ in range(3))
                        took_us.clear()
                        for _ in range(3):
                            block(tokens)
                        ratios.append(ours_us / min(took_us))
            finally:
                functions["sdpa"] = theirs
            yield torch.tensor(statistics.median(ratios[1:])), torch.ones(())


# The table


def compared(one: Row) -> dict[str, Any]:
    """How far apart the two are at most, as a part of theirs; or what was raised."""
    cases, most = 0, 0.0
    version = importlib.metadata.version(one.package)
    try:
        torch.manual_seed(0)
        for ours, theirs in one.pairs():
            ours, theirs = (x.detach().double() for x in (ours, theirs))
            apart = float((ours - theirs).abs().max() / theirs.abs().max().clamp(min=1e-300))
            cases, most = cases + 1, max(most, apart if apart == apart else math.inf)
        end = {"apart": most} if cases else {"error": "no case"}
    except Exception as err:
        end = {"error": f"{type(err).__name__}: {err}"[:200]}
    return {"version": version, "cases": cases} | end


def environment(folder: Path, tell: Callable[[str], None]) -> Path:
    """The interpreter of the environment, made where it is not as `packages.txt` has it.

    Raises:
        UsageError: pip cannot install it.
    """
    from attnbench.errors import UsageError

    python, made = folder / "bin" / "python", folder / "made-of.txt"
    if made.exists() and made.read_text() == REQUIRED.read_text():
        return python
    tell(f"making an environment in {folder}: about 1 GB")
    venv.create(folder, clear=True, with_pip=True)
    pip = (python, "-m", "pip", "install", "-q", "-c", ROOT / "constraints.txt")
    # What the packages want beside these is not needed for the functions that are compared.
    for wanted in (("torch", "numpy", "msgspec", "psutil"), ("--no-deps", "-r", REQUIRED)):
        done = subprocess.run([*pip, *wanted], capture_output=True, text=True)
        if done.returncode:
            raise UsageError(f"pip in {folder}: {done.stderr.strip().splitlines()[-1]}")
    made.write_text(REQUIRED.read_text())
    return python


def examine(path: Path, tell: Callable[[str], None]) -> Any:
    """Compare all rows in their environment; the page, its table, and whether all are within.

    Raises:
        UsageError: the environment cannot be made, or its process ends early.
        StoreError: the folder cannot be written.
    """
    from attnbench.errors import UsageError
    from tests.validation.page import Table, markdown, write_texts
    from tests.validation.runner import Ended

    python = environment(ROOT / "build" / "packages", tell)
    settings = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    rows, well = [], True
    with subprocess.Popen(
        [python, "-W", "ignore", "-m", __name__], cwd=ROOT, env=settings, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        told = filter(lambda line: line.startswith("{"), process.stdout)
        for one, found in zip(ROWS, map(json.loads, told), strict=False):
            within = "error" not in found and found["apart"] <= one.tolerance
            well &= within
            rows.append((
                one.package, found["version"] or "–", one.function, one.ours, str(found["cases"]),
                found["error"] if "error" in found else f"{found['apart']:.1e}",
                f"{one.tolerance:.2g}", "within" if within else "BEYOND",
            ))  # fmt: skip
            tell("  ".join(rows[-1]))
    if len(rows) < len(ROWS):
        raise UsageError(f"{python} ended with {process.returncode} at row {len(rows) + 1}")
    table = Table(
        title=f"{len(rows)} functions of other packages, {sum(int(x[4]) for x in rows)} cases",
        header=HEADER, rows=tuple(rows), note="Differences are parts of their largest number.",
    )  # fmt: skip
    path.mkdir(parents=True, exist_ok=True)
    write_texts(path, {PAGE: markdown("make validate PART=packages", [table])})
    return Ended(met=well, tables=[table], page=path / PAGE)


if __name__ == "__main__":
    from attnbench.api.loader import load_built_in

    torch.set_num_threads(1)
    load_built_in()
    for each in ROWS:
        print(json.dumps(compared(each)), flush=True)
    sys.exit(0)
