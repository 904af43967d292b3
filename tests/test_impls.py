"""The built-in implementations against the reference, and what they say of themselves."""

from __future__ import annotations

import functools
import itertools
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from attnbench.api import IMPLEMENTATIONS, Case, compile_alone, implementation
from attnbench.api.loader import BUILT_IN, load_built_in
from attnbench.measure.probes import call_kept
from attnbench.schema.case import parse_mask, parse_position
from attnbench.store.runs import load_run
from attnbench.theory.traits import case_label
from attnbench.worker.catalogue import reasons_against
from attnbench.worker.checking import check_item
from attnbench.worker.inputs import Draw
from attnbench.worker.workloads import WORKLOADS
from tests.conftest import probed
from tests.pairwise import ids, pairwise

EAGER = (
    "naive", "naive-heads", "sdpa", "sdpa-math", "sdpa-flash", "sdpa-mask", "sdpa-grouped",
    "sdpa-expanded", "chunked",
)  # fmt: skip
DTYPES = ("float32", "float64", "bfloat16", "float16")
PASSES = ("forward", "backward", "both")

pytestmark = pytest.mark.usefixtures("one_thread")


def module(name: str) -> Any:
    """impls/<name>.py, as the harness loads it."""
    load_built_in()
    return sys.modules[f"{BUILT_IN}.{name}"]


def case_of(**fields: Any) -> Case:
    """A small case; a row's `name` and `where` are no fields of it."""
    fields = {name: value for name, value in fields.items() if name not in ("name", "where")}
    mask, position = parse_mask(fields.pop("mask", "full")), fields.pop("position", "none")
    small: dict[str, Any] = {"batch": 2, "heads": 4, "seq_len": 13, "head_dim": 8, "pass_": "both"}
    return Case(**(small | fields), mask=mask, position=parse_position(position))


def drawn(case: Case, **draw: Any) -> list[torch.Tensor]:
    """q, k, v and, where the pass differentiates, do."""
    tensors = WORKLOADS.get("attention").tensors(case)
    WORKLOADS.get("attention").fill(case, tensors, Draw(**draw))
    return list(tensors.values())


def assert_right(case: Case, name: str) -> None:
    """By the project's rule, on two draws, where it takes wide values and the mask."""
    reason = reasons_against([case], [name])[name][0]
    if name == "sdpa-flash" and case.value_dim != case.head_dim:
        assert (reason or "").startswith("flash: ")
        return
    if name == "sdpa-grouped" and reason:
        assert reason == f"takes masks full, not {case.mask.text}"
        return
    if name == "sdpa-expanded" and case.heads == case.kv_heads:
        assert reason == "each head has its keys"
        return
    assert reason is None
    result = check_item(case, name, {}, 0)
    assert (result["status"], result["reason"]) == ("ok", None)


def unsupported(name: str, case: Case) -> str | None:
    return IMPLEMENTATIONS.get(name).reason_against(case)


DECODE: dict[str, Any] = {
    "workload": "decode", "width": 24, "new_tokens": 3, "pass_": "forward", "mask": "window:3"
}  # fmt: skip
WHERE: dict[str, dict[str, Any]] = {
    "odd lengths": {"head_dim": 7},
    "one query and key": {"seq_len": 1, "kv_len": 1},
    "causal, more keys": {"kv_len": 30, "mask": "causal"},
    "causal, one query": {"seq_len": 1, "kv_len": 9, "mask": "causal"},
    "causal, blind rows": {"kv_len": 7, "mask": "causal"},
    "window": {"mask": "window:3", "kv_len": 21},
    "window, blind rows": {"kv_len": 3, "mask": "window:2"},
    "prefix": {"mask": "prefix:6", "kv_len": 21, "kv_heads": 1},
    "documents, blind rows": {"mask": "document:5+3", "kv_len": 11},
    "documents, both ways": {"mask": "document:5+3:causal=0", "kv_len": 11},
    "padding": {"mask": "padding:1+9", "batch": 3, "kv_heads": 2},
    "padding, causal": {"mask": "padding:1+9:causal=1", "batch": 3, "kv_heads": 2},
    "grouped heads": {"kv_heads": 2, "mask": "causal"},
    "one key head": {"kv_heads": 1, "kv_len": 20},
    "wider values": {"value_dim": 11},
    "all at once": {"value_dim": 5, "kv_heads": 2, "kv_len": 5, "mask": "causal"},
    "own scale": {"scale": 0.5},
    "past one block": {"batch": 1, "heads": 1, "seq_len": 193, "kv_len": 515, "mask": "causal"},
    "layer, fused": {"workload": "layer", "width": 24, "projection": "fused", "mask": "causal"},
    "layer, per head": {"workload": "layer", "width": 24, "projection": "per-head", "kv_heads": 1},
    "decode, rerun": DECODE | {"cache": "rerun"},
    "decode, none": DECODE | {"cache": "none", "mask": "causal"},
    "decode, concat": DECODE | {"cache": "concat", "kv_heads": 2},
    "decode, static": DECODE | {"cache": "static", "mask": "causal", "kv_heads": 1},
}
POSITIONS = ("none", "rope", "rope-interleaved")
ROWS = pairwise(
    {"name": EAGER, "where": list(WHERE), "dtype": DTYPES, "pass_": PASSES, "position": POSITIONS}
)


@pytest.mark.parametrize("row", ROWS, ids=ids(ROWS))
def test_it_computes_attention_and_its_gradients(row):
    assert_right(case_of(**row | WHERE[row["where"]]), row["name"])


ENCODED: dict[str, dict[str, Any]] = {
    "more keys": {"kv_len": 30, "kv_heads": 2, "mask": "causal"},
    "blind rows": {"kv_len": 7, "mask": "causal"},
    "padding": {"batch": 3, "seq_len": 20, "mask": "padding:20+5"},
    "past one block": {"heads": 2, "seq_len": 130, "kv_len": 700},
    "layers": {"workload": "layer", "width": 24, "projection": "separate", "layers": 2},
    "pruned": {"workload": "layer", "width": 24, "projection": "pruned:2", "heads": 6},
    "decode": DECODE | {"cache": "concat", "kv_heads": 2},
}
BIASED = pairwise(
    {
        "name": ("naive", "chunked", "sdpa", "sdpa-math", "sdpa-mask"),
        "position": ("alibi", "t5:distance=20", "shaw:3"),
        "where": list(ENCODED),
        "dtype": ("float32", "bfloat16"),
        "pass_": ("forward", "both"),
    }
)
# Pairs of choices leave out triples: dq goes through Shaw's vectors, too.
BIASED += [
    {"name": name, "position": "shaw:3", "where": where, "dtype": "float32", "pass_": "both"}
    for name in ("naive", "chunked")
    for where in ("more keys", "past one block")
]
AROUND = pairwise(
    {
        "name": ("naive", "sdpa"),
        "position": ("sinusoidal", "learned", "rope-matrix", "rope-partial", "rope-yarn:length=8"),
        "where": ["layers", "decode"],
        "dtype": ("float32", "bfloat16"),
        "pass_": ("forward", "both"),
    }
)


@pytest.mark.parametrize("row", BIASED + AROUND, ids=ids(BIASED + AROUND))
def test_it_is_right_under_every_kind_of_position_encoding(row):
    assert_right(case_of(**row | ENCODED[row["where"]]), row["name"])


@pytest.mark.parametrize("width", [7, 24])
def test_what_is_learned_is_the_same_for_batch_items_of_any_length(width):
    decode = DECODE | {"width": width, "mask": "padding:13+5", "cache": "static"}
    assert_right(case_of(position="learned", **decode), "naive")


def test_the_flash_kernel_takes_what_rotation_matrices_of_one_dim_give():
    for sizes in ({}, {"heads": 1}, {"batch": 1, "seq_len": 33}):
        assert_right(case_of(head_dim=1, position="rope-matrix", **sizes), "sdpa-flash")


def test_what_turns_keys_anew_is_refused_in_decoding_past_its_length_alone():
    for text, held in {"rope-dynamic:": (16, 15), "rope-longrope:length=": (16, 15)}.items():
        fits, beyond = (case_of(position=f"{text}{n}", cache="static", **DECODE) for n in held)
        assert_right(fits, "naive")
        assert "turns keys again" in (reasons_against([beyond], ["naive"])["naive"][0] or "")


LONG: dict[str, dict[str, Any]] = {
    "odd length over several blocks": {"seq_len": 1101, "heads": 1},
    "fewer queries than keys": {"seq_len": 130, "kv_len": 1201},
    "more queries than keys": {"seq_len": 1201, "kv_len": 130},
    "grouped heads, wide values": {"seq_len": 600, "heads": 6, "kv_heads": 2, "value_dim": 24},
    "one key head, several items": {"seq_len": 333, "heads": 4, "kv_heads": 1, "batch": 3},
    "more slices than one block takes": {"seq_len": 515, "heads": 3, "batch": 2},
}
# Each mask once, each length with a full and a bounded one: one case a branch, not their product.
BANDS = (
    "full", "causal", "window:77", "window:1", "window:512", "window:700", "prefix:100",
    "prefix:600", "document:77", "document:512+300:causal=0", "padding:77+1+600", "full",
)  # fmt: skip
BLOCKS = [
    {"where": where, "mask": mask, "dtype": dtype}
    for where, mask, dtype in zip(
        [*LONG] * 2, BANDS, ("float32", "bfloat16", "float32") * 4, strict=True
    )
]


@pytest.mark.parametrize("row", BLOCKS, ids=ids(BLOCKS))
def test_chunked_is_right_over_several_blocks(row):
    sizes = {"batch": 1, "heads": 2, "head_dim": 16} | LONG[row["where"]]
    assert_right(case_of(**sizes | row), "chunked")


RAGGED = pairwise({
    "name": ("sdpa-items", "sdpa-trimmed"), "kv_len": (13, 21, 7), "kv_heads": (4, 2, 1),
    "mask": ("padding:9+0+13", "padding:9+0+4:causal=1", "padding:5", "document:5+3", "document:40",
             "document:5+3:causal=0"),
    "dtype": DTYPES, "pass_": PASSES, "value_dim": (8, 11), "layout": ("BHLD", "BLHD"),
})  # fmt: skip


@pytest.mark.parametrize("row", RAGGED, ids=ids(RAGGED))
def test_a_ragged_batch_is_right_item_by_item_and_with_its_keys_cut(row):
    case = case_of(**row, batch=3)
    if (row["name"], case.mask.name) == ("sdpa-trimmed", "document"):
        assert unsupported("sdpa-trimmed", case) == f"takes masks padding, not {row['mask']}"
    else:
        assert_right(case, row["name"])


ALONE: dict[str, list[dict[str, Any]]] = {  # calls that do the same
    "padding:320+100": [{}, {"kv_len": 100}],
    "padding:320+0": [{}],
    "padding:320+100:causal=1": [
        {"mask": "causal"}, {"mask": "causal", "seq_len": 100}, {"seq_len": 220, "kv_len": 100},
    ],
    "document:220+100": [{"mask": "causal", "seq_len": n} for n in (220, 100)] * 2,
    "document:220+100:causal=0": [{"seq_len": n} for n in (220, 100)] * 2,
}  # fmt: skip


@pytest.mark.parametrize("mask", ALONE)
@pytest.mark.parametrize("pass_", PASSES)
def test_item_by_item_multiplies_what_each_item_has_and_prepares_no_mask(mask, pass_):
    sizes: dict[str, Any] = {"head_dim": 64, "seq_len": 320, "pass_": pass_}
    alone = [flops_of("sdpa", case_of(**sizes | each, batch=1)) for each in ALONE[mask]]
    case = case_of(**sizes, mask=mask)
    assert flops_of("sdpa-items", case) == sum(alone)
    if pass_ != "backward":  # which prepares the graph
        assert probed(case, "sdpa-items")["memory_prepared_bytes"] == 0


def test_what_is_for_ragged_batches_says_so_of_others():
    for name, masks in (("sdpa-items", "padding:… and document:…"), ("sdpa-trimmed", "padding:…")):
        assert unsupported(name, case_of()) == f"is for {masks} with keys"
        assert (
            unsupported(name, case_of(mask="padding:0+9", batch=1)) == f"is for {masks} with keys"
        )


def varlen_by_document(q, k, v, *, cu_seq_q, cu_seq_k, max_q, max_k, **options):
    """What torch's varlen_attn computes, by its documentation: (T, heads, width) each."""
    assert cu_seq_q is cu_seq_k
    assert (cu_seq_q.dtype, max_q) == (torch.int32, max_k)
    causal = {(-1, 0): True, (-1, -1): False}[options.pop("window_size")]
    sizes = cu_seq_q.diff().tolist()
    assert max(sizes) == max_q
    parts = zip(*(x.transpose(0, 1).split(sizes, 1) for x in (q, k, v)), strict=True)
    attend = functools.partial(torch.nn.functional.scaled_dot_product_attention, **options)
    return torch.cat([attend(*part, is_causal=causal) for part in parts], 1).transpose(0, 1)


@pytest.mark.parametrize("mask", ["document:5+3", "document:5+3:causal=0", "document:40"])
def test_varlen_is_asked_for_the_documents_of_all_batch_items(mask, monkeypatch):
    from torch.nn.attention import varlen

    monkeypatch.setattr(varlen, "varlen_attn", varlen_by_document)
    case = case_of(mask=mask, kv_heads=2, value_dim=8, pass_="forward", scale=0.3)
    inputs = drawn(case)
    expected = IMPLEMENTATIONS.get("naive").build(case)(*inputs)
    torch.testing.assert_close(module("sdpa").build_varlen(case)(*inputs), expected)


def test_varlen_is_refused_with_the_reason(monkeypatch):
    documents: dict[str, Any] = {"mask": "document:5+3", "device": "cuda"}
    assert unsupported("sdpa-varlen", case_of(mask="document:5+3")) == "runs on cuda, not cpu"
    reason = "is for document:… with keys, L = S"
    assert unsupported("sdpa-varlen", case_of(**documents, kv_len=20)) == reason
    monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", None)
    assert "has no varlen_attn" in (unsupported("sdpa-varlen", case_of(**documents)) or "")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")
@pytest.mark.parametrize("mask", ["document:500+300", "document:500+300:causal=0"])
def test_varlen_is_right_on_a_gpu(mask):
    """Torch has this kernel for CUDA alone."""
    sizes: dict[str, Any] = {"seq_len": 1000, "head_dim": 64, "kv_heads": 2, "device": "cuda"}
    for pass_ in PASSES:
        assert_right(case_of(**sizes, mask=mask, dtype="bfloat16", pass_=pass_), "sdpa-varlen")


IMPOSSIBLE = {
    "sliding-window:5": "window must be even: half of it lies on either side",
    "bigbird:window=2": "window must be odd: as many blocks on either side of the own",
    "reformer:buckets=64": "more buckets than keys: 64 for 40",
    "reformer:buckets=5": "buckets must be 1 or even: a direction and its opposite",
    "linformer:41": "rank 41 is above its 40 keys",
    "nystrom:41": "41 landmarks are more than its 40 tokens",
    "retention": "its decay is that of a causal mask",
}


def test_impossible_parameters_have_a_reason():
    for name, reason in IMPOSSIBLE.items():
        assert implementation(name).reason_against(case_of(seq_len=40)) == reason


def test_a_missing_gpu_or_compiler_is_a_reason_and_not_an_exception(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("CXX", "no-such-compiler")
    for name in ("sdpa", "sdpa-flash", "sdpa-mask", "flex", "naive-compiled"):
        assert unsupported(name, case_of(device="cuda", seq_len=3)) == "torch sees no CUDA device"
    module("sdpa").refusal.cache_clear()
    for name in ("flex", "naive-compiled"):
        assert "no-such-compiler" in (unsupported(name, case_of(pass_="forward")) or "")


def test_a_probe_of_one_kernel_leaves_the_switches_of_all_alone():
    sdpa = module("sdpa")
    sdpa.refusal.cache_clear()
    switches = [getattr(torch.backends.cuda, f"{x}_sdp_enabled") for x in sdpa.SWITCHES.values()]
    before = [enabled() for enabled in switches]
    assert unsupported("sdpa-flash", case_of(value_dim=9))
    assert not unsupported("sdpa-math", case_of(value_dim=9))
    assert before == [enabled() for enabled in switches]


def flops_of(name: str, case: Case) -> int:
    formula = IMPLEMENTATIONS.get(name).flops
    assert formula is not None
    return formula(case)


ALL_OF_A_KIND = (
    "causal", "window:200", "prefix:140", "document:100+30", "document:1", "padding:40+300",
    "document:100+30:causal=0", "padding:40+300:causal=1",
)  # fmt: skip


def test_flex_flops_are_whole_blocks_of_the_mask():
    flops = functools.partial(flops_of, "flex")
    one = {"batch": 1, "heads": 1, "head_dim": 1, "pass_": "forward", "seq_len": 300}
    assert flops(case_of(**one)) == 4 * 300 * 300
    causal = 128 * 128 + 128 * 256 + 44 * 300
    assert flops(case_of(**one, mask="causal")) == 4 * causal
    window = 128 * 128 + 128 * 256 + 44 * (300 - 128)
    assert flops(case_of(**one, mask="window:4")) == 4 * window
    flex = module("flex")
    assert flex.block_mask(case_of(**one, device="cuda")) is None
    for mask, kv_len in itertools.product((*ALL_OF_A_KIND, "full"), (512, 384)):
        case = case_of(**one | {"seq_len": 512, "batch": 2}, kv_len=kv_len, mask=mask)
        blocks = flex.block_mask(case)
        counts = blocks.kv_num_blocks, blocks.full_kv_num_blocks
        count = sum(int(x.expand(2, 1, 4).sum()) for x in counts)
        assert flops(case) == 4 * count * flex.BLOCK**2, (mask, kv_len)


BIG: dict[str, dict[str, Any]] = {
    "grouped": {"heads": 4, "kv_heads": 2, "seq_len": 520, "head_dim": 80},
    "blind": {"batch": 1, "heads": 2, "seq_len": 600, "kv_len": 520, "mask": "causal"},
    "causal": {"heads": 2, "seq_len": 100, "mask": "causal"},
    "wide": {"batch": 1, "heads": 2, "seq_len": 640, "head_dim": 40, "value_dim": 88},
    "narrow, few queries": {"seq_len": 8, "kv_len": 1024, "head_dim": 64, "value_dim": 16},
    "window": {"batch": 1, "seq_len": 1100, "kv_len": 700, "mask": "window:300", "head_dim": 16},
    "padding": {"batch": 3, "kv_heads": 2, "seq_len": 520, "mask": "padding:300+5"},
    "documents": {"heads": 2, "seq_len": 700, "mask": "document:300+20"},
}
EXACT = pairwise({
    "name": ("naive", "naive-heads", "chunked"), "where": list(BIG), "dtype": ("float32", "float64")
})  # fmt: skip


@pytest.mark.parametrize("row", EXACT, ids=ids(EXACT))
def test_a_workspace_that_follows_from_sizes_is_declared_to_the_byte(row):
    metrics = probed(case_of(**BIG[row["where"]] | row, pass_="forward"), row["name"])
    assert metrics["memory_predicted_bytes"] == metrics["memory_workspace_bytes"]


ESTIMATED = pairwise({
    "name": ("naive", "sdpa-flash", "sdpa-math", "sdpa-mask", "sdpa-grouped", "chunked"),
    "dtype": DTYPES, "pass_": ("forward", "backward", "both"), "mask": ("full", "causal"),
    "position": ("none", "shaw:3"), "kv_heads": (1, 4), "value_dim": (32, 40),
})  # fmt: skip


@pytest.mark.parametrize("row", ESTIMATED, ids=ids(ESTIMATED))
def test_other_workspaces_are_estimated_within_a_factor_of_two(row, monkeypatch):
    """But for operands that oneDNN packs where the processor multiplies tiles (AMX)."""
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
    case = case_of(**row, seq_len=600, head_dim=32)
    if unsupported(row["name"], case) is None:
        metrics = probed(case, row["name"])
        assert 0.5 <= metrics["memory_bound_bytes"] / metrics["memory_workspace_bytes"] <= 2


class Waits(TorchDispatchMode):
    """How often a number or a size is asked for, for which the host would wait for a GPU."""

    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        asked = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero")
        self.count += function.overloadpacket.__name__ in asked
        return function(*args, **kwargs or {})


load_built_in()
RUN_HERE = [
    name
    for name, x in IMPLEMENTATIONS.items()
    if "impls" in x.file and "attention" in x.workloads and "cpu" in x.devices and not x.compiles
]


@pytest.mark.parametrize("name", RUN_HERE)
def test_what_is_timed_makes_nothing_on_the_host_and_does_not_wait_for_a_gpu(name):
    """But once: `performer` looks whether it lost something."""
    done = 0
    for mask, position in (
        ("full", "none"),
        ("causal", "alibi"),
        ("causal", "none"),
        ("full", "shaw:3"),
        ("padding:90+120", "none"),
    ):
        shared = 2 if name == "sdpa-expanded" else 4
        case = case_of(mask=mask, position=position, seq_len=150, kv_heads=shared)
        if unsupported(name, case):
            continue
        call, (*inputs, do) = IMPLEMENTATIONS.get(name).build(case), drawn(case)
        with Waits() as waits, torch.device("meta"):  # where a tensor without a device would go
            torch.autograd.grad(call(*inputs), inputs, do, allow_unused=True)
            with torch.no_grad():
                call(*inputs)
        assert waits.count <= 2 * (name == "performer")
        done += 1
    assert done


COMPILED: tuple[dict[str, Any], ...] = (
    {}, {"dtype": "bfloat16"}, {"mask": "causal", "dtype": "bfloat16", "pass_": "forward"},
    {"kv_heads": 2, "dtype": "float16", "pass_": "forward"}, {"position": "alibi"},
    {"heads": 1, "batch": 1, "scale": 1.0, "pass_": "forward"},
)  # fmt: skip


@pytest.mark.slow
def test_inductor_leaves_naive_what_it_is_though_it_knows_attention_when_it_sees_it():
    """It makes fused attention of what its patterns match (fuse_attention.py), on CUDA and CPU."""
    from torch._dynamo.utils import counters
    from torch._functorch._aot_autograd.utils import make_boxed_func
    from torch._inductor.compile_fx import compile_fx

    def textbook(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return torch.softmax(q @ k.transpose(-2, -1) * 0.3, dim=-1) @ v

    def without_code(graph: Any, inputs: Any) -> Any:
        boxed: Any = lambda own, *_, **__: make_boxed_func(own)  # noqa: E731
        return compile_fx(graph, inputs, inner_compile=boxed)

    def fused(case: Case, function: Any, *, strided: bool = False) -> int:
        counters.clear()
        case = replace(case, layout="BLHD" if strided else "BHLD")
        tensors = WORKLOADS.get("attention").tensors(case)
        q, k, v, *do = tensors.values()
        o = compile_alone(function, without_code)(q, k, v)
        if do:
            torch.autograd.grad(o, (q, k, v), do)
        return counters["inductor"]["fuse_attention"]

    assert fused(case_of(), textbook) > 0
    for number, row in enumerate(COMPILED):
        case = case_of(**row)
        assert fused(case, module("naive").build_naive(case), strided=number % 2 == 1) == 0


# Rows without keys: the first of L > S, or all of a batch item of length 0.
BLIND: dict[str, dict[str, Any]] = {
    "causal": {"kv_len": 7, "mask": "causal"}, "window": {"kv_len": 3, "mask": "window:2"},
    "an empty item": {"mask": "padding:0+9"},
    "an empty item, causal": {"mask": "padding:0+9:causal=1", "pass_": "forward"},
}  # fmt: skip


@pytest.mark.parametrize("where", BLIND)
def test_a_forced_kernel_that_is_loud_where_no_key_is_seen_is_refused_and_torch_s_choice_is_not(
    monkeypatch, where
):
    """As SDPA on Hopper before torch 2.12, where such a row attends to all keys."""

    def filled(q: Any, k: Any, v: Any, attn_mask: Any = None, **how: Any) -> torch.Tensor:
        hidden = torch.zeros(attn_mask.shape, dtype=q.dtype).masked_fill(~attn_mask, -65504)
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, hidden, **how)

    sdpa, case = module("sdpa"), case_of(dtype="bfloat16", **BLIND[where])
    routes = ("any", "mask", "math", "flash")
    sdpa.refusal.cache_clear()
    assert [sdpa.supports(route, case) for route in routes] == [None] * 4
    monkeypatch.setattr(sdpa, "build", functools.partial(sdpa.build, attend=filled))
    sdpa.refusal.cache_clear()
    assert [sdpa.supports(route, case) for route in routes] == [
        None, None, *(f"{x}: queries that see no key do not give zero" for x in routes[2:]),
    ]  # fmt: skip
    sdpa.refusal.cache_clear()


MASKED: tuple[dict[str, Any], ...] = (
    {"mask": "causal", "kv_len": 17}, {"mask": "window:4"}, {"mask": "padding:9+13"},
    {"position": "alibi"}, {"mask": "causal", "position": "t5:distance=20"},
    {"mask": "padding:0+9", "position": "shaw:5"},
)  # fmt: skip


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("row", MASKED, ids=str)
def test_sdpa_s_masks_are_boolean_or_of_q_s_dtype_dense_in_memory_and_right_in_other_layouts(
    row, dtype
):
    case, passed = case_of(**row, dtype=dtype, pass_="forward"), []

    def attend(q: Any, k: Any, v: Any, attn_mask: Any = None, **how: Any) -> torch.Tensor:
        passed.append((attn_mask, how))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask, **how)

    q, k, v = drawn(case)
    o = module("sdpa").build("any", case, attend)(q, k, v)
    [(mask, how)] = passed
    assert mask.dtype in (torch.bool, q.dtype), "others are read as if they were q's"
    assert mask.stride()[-2:] == (case.kv_len, 1), "kernels ask for dense rows"
    wide = mask.expand(case.batch, case.heads, -1, -1)
    for other in (mask.mT.contiguous().mT, wide, wide.contiguous()):
        again = torch.nn.functional.scaled_dot_product_attention(q, k, v, other, **how)
        assert torch.equal(again, o)


def test_the_kernel_that_sdpa_takes_where_it_may_choose_is_asked_of_torch(monkeypatch):
    sdpa, case = module("sdpa"), case_of(kv_heads=2, mask="causal")
    sdpa.chosen.cache_clear()
    taken = {route: sdpa.kernel_taken(case, route) for route in ("any", "mask", "math")}
    assert taken == {"any": "flash", "mask": "flash", "math": "math"}
    monkeypatch.setattr("torch._fused_sdp_choice", lambda *_, **__: 3)  # as on Hopper
    sdpa.chosen.cache_clear()
    assert sdpa.kernel_taken(case, "any") == "cudnn"
    sdpa.chosen.cache_clear()


@pytest.mark.parametrize(("kv_heads", "blocks"), [(16, 64), (4, 128)])
def test_chunked_issues_few_blocks_to_a_gpu(kv_heads, blocks):
    sizes = {"heads": 16, "kv_heads": kv_heads, "seq_len": 16384, "head_dim": 128}
    places = module("chunked").cut(Case(device="cuda", dtype="bfloat16", **sizes)).places
    assert sum(len(key_blocks) for *_, key_blocks in places) == blocks  # a dozen launches each


def halved(monkeypatch: Any, seen: Any = lambda *_: None) -> Any:
    """`chunked` on a CPU with the products that it has on CUDA: of half precision, in float32."""
    chunked, bmm = module("chunked"), torch.bmm

    def into(a: Any, b: Any, out: Any, out_dtype: Any = None) -> Any:
        if out_dtype is None:
            return bmm(a, b, out=out)
        assert (a.dtype, b.dtype, out.dtype) == (b.dtype, a.dtype, out_dtype)
        seen((a, b), [out])
        with _disable_current_modes():
            return out.copy_(bmm(a.float(), b.float()))

    monkeypatch.setattr(torch, "bmm", into)
    monkeypatch.setattr(chunked, "product_dtype", lambda x, _: x.dtype)
    return chunked


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("row", [
    {}, {"mask": "causal", "kv_heads": 2}, {"kv_len": 40, "mask": "padding:0+33"},
    {"mask": "window:9", "value_dim": 24}, {"mask": "causal", "kv_len": 600},
], ids=str)  # fmt: skip
def test_chunked_is_right_with_the_products_that_it_has_on_a_gpu(monkeypatch, row, dtype):
    halved(monkeypatch)
    case = case_of(**{"seq_len": 700, "head_dim": 16, "dtype": dtype} | row)
    result = check_item(case, "chunked", {}, 0)
    assert (result["status"], result["reason"]) == ("ok", None)


class Traffic(TorchDispatchMode):
    """Launches, and the bytes of tensors of a whole block of scores that they read and write."""

    def __init__(self, scores: int) -> None:
        super().__init__()
        self.scores, self.launches, self.moved = scores, 0, 0

    def note(self, *tensors: Any) -> None:
        self.launches += 1
        every = [x for some in tensors for x in some if isinstance(x, torch.Tensor)]
        self.moved += sum(x.nbytes for x in every if x.numel() == self.scores)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if not func.is_view and "empty" not in func.__name__:
            self.note(args, found if isinstance(found, (list, tuple)) else [found])
        return found


NAIVE = [
    record for record in load_run(Path(__file__).parents[1] / "results/gpu-h200").records
    if record.cell.impl == "naive" and record.cell.case.seq_len >= 8192
    and record.cell.case.workload == "attention"
]  # fmt: skip


@pytest.mark.parametrize("record", NAIVE, ids=lambda record: case_label(record.cell.case))
def test_chunked_moves_no_more_on_an_h200_than_naive_has_time_for(monkeypatch, record):
    """With 4.28 TB/s and 5 µs a launch; products are left out, which tensor cores do meanwhile.

    What it moves is counted at a 64th of the length and of the tiles, D = 3.
    """
    case, shrunk = record.cell.case, 64
    traffic = Traffic(2**26 // shrunk**2)
    chunked = halved(monkeypatch, traffic.note)
    scores, *sides = chunked.MOST["cuda"]
    tiles = scores // shrunk**2, *(side // shrunk for side in sides)
    monkeypatch.setitem(chunked.MOST, "cpu", tiles)
    length = case.seq_len // shrunk
    small = replace(
        case, device="cpu", seq_len=length, kv_len=length, head_dim=3, value_dim=3, pass_="both"
    )
    q, k, v, do = (x.detach() for x in drawn(small))
    tiling = chunked.cut(small)
    with traffic:
        o, lse = chunked.attend(tiling, q, k, v, None, keep=True)
        if case.pass_ == "both":
            chunked.differentiate(tiling, (q, k, v, None, o, lse), do)
    time_us = traffic.moved * shrunk**2 / 4.28e6 + 5 * traffic.launches
    assert time_us <= min(sample.time_us for sample in record.samples)
    workspace = IMPLEMENTATIONS.get("chunked").workspace
    assert workspace is not None
    assert 16 * (workspace(case) or 0) <= record.metrics["memory_workspace_bytes"]


# Compiling takes seconds a shape: two real ones, and the rest with dynamo alone.


def test_chunked_needs_a_64th_of_the_score_matrices_and_keeps_small_masks():
    chunked = IMPLEMENTATIONS.get("chunked")
    assert chunked.workspace is not None
    case = case_of(batch=1, seq_len=4096, head_dim=64, pass_="forward")
    workspace = chunked.workspace(case) or 0
    assert 64 * workspace <= 2 * case.heads * case.seq_len**2 * case.element_bytes
    long = case_of(batch=1, seq_len=65536, head_dim=64, pass_="forward")
    assert chunked.workspace(long) == workspace  # only half precision copies what grows with n
    causal = case_of(seq_len=8192, mask="causal")
    assert flops_of("chunked", causal) < 0.57 * flops_of("chunked", case_of(seq_len=8192))
    assert (call_kept(lambda: chunked.build(causal), "cpu").kept_bytes or 0) <= 2**20


def test_kernels_that_inductor_keeps_serve_no_process_with_other_instructions():
    """With ATEN_CPU_CAPABILITY=avx2 one made for AVX-512 leaves half of each vector unwritten."""
    compile_alone(lambda x: x)
    assert torch.compiler.config.cache_key_tag == torch.backends.cpu.get_cpu_capability()


@pytest.mark.slow
@pytest.mark.parametrize(("name", "pass_"), [("flex", "forward"), ("naive-compiled", "both")])
def test_compiled_ones_are_right(name, pass_):
    position = "shaw:3" if name == "flex" else "none"
    case = case_of(kv_heads=2, kv_len=7, value_dim=5, mask="causal", pass_=pass_, position=position)
    if reason := unsupported(name, case):
        pytest.skip(reason)
    assert_right(case, name)


@pytest.mark.parametrize(
    ("triton", "cc", "installed", "reason"),
    [
        (True, None, "gcc", None),
        (True, None, "clang", None),
        (True, "/opt/cc", "/opt/cc", None),
        (True, "/opt/cc", "gcc", "there is no /opt/cc"),
        (True, None, "cc", "there is no gcc or clang"),
        (False, None, "gcc", "needs Triton"),
    ],
)
def test_on_cuda_nothing_compiles_without_triton_and_a_c_compiler(
    triton, cc, installed, reason, monkeypatch
):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.utils._triton.has_triton", lambda: triton)
    monkeypatch.setattr("shutil.which", lambda name: name if name == installed else None)
    monkeypatch.setenv("CC", cc) if cc else monkeypatch.delenv("CC", raising=False)
    case = Case(device="cuda", dtype="bfloat16")
    for name in ("naive-compiled", "flex", "bigbird-flex"):
        found = IMPLEMENTATIONS.get(name).reason_against(case)
        assert found is reason is None or reason in str(found)
