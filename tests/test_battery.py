"""Any two things that a kernel may branch on meet in a check, and refusals are an explicit list."""

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest

from attnbench.api import IMPLEMENTATIONS
from attnbench.api.helpers import reason_against_compiling
from attnbench.api.loader import load_built_in
from attnbench.base.parameters import base_name
from attnbench.planning.battery import battery, by_coverage
from attnbench.schema.case import Case, Dtype
from attnbench.schema.check import Item
from attnbench.schema.position import POSITIONS
from attnbench.theory.projections import PROJECTIONS
from attnbench.worker.catalogue import reasons_against
from attnbench.worker.workloads import WORKLOADS
from tests.conftest import Cli

DTYPES: tuple[Dtype, ...] = ("float32", "bfloat16", "float16", "float64")
load_built_in()
BUILT_IN = [name for name, impl in IMPLEMENTATIONS.items() if "impls" in impl.file]
ITEMS = battery("cpu", DTYPES)
Refusal = Callable[[Case, Case], bool]  # of an item's case, and of its core's


def masked(case: Case, core: Case) -> bool:
    return not core.unmasked


def ringed(case: Case, core: Case) -> bool:
    """With a ring of keys, which are out of order."""
    return (case.cache or "").startswith("sliding")


def other_masks(case: Case, core: Case) -> bool:
    return ringed(case, core) or not (core.unmasked or core.mask.name in ("full", "causal"))


def no_flex(case: Case, core: Case) -> bool:
    return case.pass_ == "both" or case.dtype == "float64"


# What each built-in refuses on CPU. Anything else that is refused, or no longer is, fails here.
REFUSED: dict[str, Refusal] = {
    "sdpa-cudnn": lambda case, core: True,
    "sdpa-efficient": lambda case, core: True,
    "sdpa-flash": lambda case, core: (
        core.value_dim != core.head_dim
        # No gradient of an explicit bias.
        or (case.position.name == "shaw" and case.needs_grad)
    ),
    "sdpa-grouped": masked,
    "sdpa-expanded": lambda case, core: core.heads == core.kv_heads,
    "sdpa-items": lambda case, core: core.mask.name not in ("padding", "document"),
    "sdpa-trimmed": lambda case, core: core.mask.name != "padding",
    "sdpa-varlen": lambda case, core: True,
    "linear": other_masks,
    "linear-recurrent": other_masks,
    "linear-parallel": other_masks,
    "performer": other_masks,
    "retention": lambda case, core: ringed(case, core) or core.mask.text != "causal",
    "linformer": lambda case, core: masked(case, core) or core.kv_len < 128,
    "nystrom": lambda case, core: masked(case, core) or min(core.seq_len, core.kv_len) < 64,
    "flex": no_flex,
    "bigbird-flex": lambda case, core: (
        no_flex(case, core) or ringed(case, core) or core.seq_len != core.kv_len
    ),
    "reformer": lambda case, core: (
        ringed(case, core)
        or core.seq_len != core.kv_len
        or core.seq_len < 8
        or core.position.name != "none"
    ),
}
TAKE_BIASES = ("naive", "chunked", "flex", "sdpa", "sdpa-math", "sdpa-mask", "sdpa-flash")
TAKE_SOFTCAPS = ("naive", "naive-heads", "naive-compiled", "chunked", "split-kv", "flex")
TAKE_SINKS = (*TAKE_SOFTCAPS, "sdpa-mask")


@pytest.mark.parametrize("name", BUILT_IN)
def test_what_a_built_in_refuses_on_cpu_is_written_down(name):
    impl = IMPLEMENTATIONS.get(name)
    if impl.compiles and (reason := reason_against_compiling(ITEMS[0].case)):
        pytest.skip(reason)
    reasons = reasons_against([item.case for item in ITEMS], [name])[name]

    def expected(case: Case) -> bool:
        core = WORKLOADS.get(case.workload).core_case(case)
        unserved = case.workload not in impl.workloads
        if impl.definition is not None:  # other masks than it names, and rings of keys
            unserved |= not core.unmasked and core.mask.name not in impl.masks
            unserved |= ringed(case, core)
            latent = (case.cache or "").startswith("latent")
            unserved |= latent and impl.family != "sparse"
        unbiased = name not in TAKE_BIASES and case.position.encoding.kind == "bias"
        unbiased |= name not in TAKE_SOFTCAPS and case.softcap is not None
        unbiased |= name not in TAKE_SINKS and case.sinks is not None
        return unserved or unbiased or (name in REFUSED and REFUSED[name](case, core))

    wrong = [
        (item.name, item.case.pass_, item.case.dtype, reason)
        for item, reason in zip(ITEMS, reasons, strict=True)
        if bool(reason) != expected(item.case)
    ]
    assert wrong == []


@pytest.mark.parametrize("name", ["sdpa-items", "sdpa-trimmed"])
def test_ragged_batches_are_checked_with_every_kind_of_length(name):
    reasons = reasons_against([item.case for item in ITEMS], [name])[name]
    taken = [item.case for item, reason in zip(ITEMS, reasons, strict=True) if not reason]
    masks = ["padding:25+0+60", "padding:25+0+60:causal=1"]
    masks += ["document:9+20", "document:9+20:causal=0"] * (name == "sdpa-items")
    for mask, longer in itertools.product(masks, (-1, 0, 1)):
        cases = [case for case in taken if case.mask.text == mask]
        assert any(case.kv_heads < case.heads for case in cases), mask
        sizes = [(case.kv_len, case.seq_len) for case in cases]
        assert any((keys > queries) - (keys < queries) == longer for keys, queries in sizes), mask


def test_every_workload_has_items_that_some_built_in_serves():
    assert {item.case.workload for item in ITEMS} == set(WORKLOADS.names())
    layers = [item.case for item in ITEMS if item.case.workload == "layer"]
    assert {base_name(case.projection or "") for case in layers} == set(PROJECTIONS.names())
    assert {case.layers for case in layers} == {1, 2, 3}


# What a check is of, by its case and its draw alone: the values that each axis must have.
Axes = Mapping[str, tuple[Callable[[Item], Any], Iterable[Any]]]


def relation(item: Item) -> str:
    queries, keys = item.case.seq_len, item.case.kv_len
    if queries == 1:
        return "L = 1"
    return "L < S" if queries < keys else "L > S" if queries > keys else f"odd {keys % 2}"


def heads(item: Item) -> str:
    case, share = item.case, item.case.heads // item.case.kv_heads
    alone = "one head" if case.heads == 1 else "no power of 2" if case.heads % 2 else "power of 2"
    return alone if share == 1 else f"{share} share" if case.kv_heads > 1 else "all share"


def value_dim(item: Item) -> str:
    value, head = item.case.value_dim, item.case.head_dim
    return (
        "V = D" if value == head else "odd" if value % 2 else "V < D" if value < head else "V > D"
    )


MASKS = ("full", "causal", "window", "prefix", "document", "padding")
HEADS = ("one head", "no power of 2", "power of 2", "2 share", "3 share", "all share")
ATTENTION: Axes = {
    "mask": (lambda item: item.case.mask.name, MASKS),
    "lengths": (relation, ("odd 0", "odd 1", "L < S", "L > S", "L = 1")),
    "heads": (heads, HEADS),
    "head_dim": (lambda item: next(n for n in (256, 64, 32, 8, 1) if item.case.head_dim % n == 0),
                 (256, 64, 32, 8, 1)),
    "value_dim": (value_dim, ("V = D", "V < D", "V > D", "odd")),
    "batch": (lambda item: item.case.batch, (1, 2, 3)),
    "scale": (lambda item: item.case.scale, (None, 1, 0.5, 0.05)),
    "dtype": (lambda item: item.case.dtype, DTYPES),
    "pass": (lambda item: item.case.pass_, ("both", "forward")),
    "layout": (lambda item: item.case.layout, ("BHLD", "BLHD", "packed")),
    "strided": (lambda item: item.draw.get("strided"), (None, "q", "k", "v")),
    "gradient": (lambda item: item.draw.get("gradient"), (None, "expanded", "transposed")),
    "without": (lambda item: item.draw.get("without_gradient"), (None, "q", "kv", "qk")),
    "position": (lambda item: item.case.position.name,
                 ("none", "rope", "rope-dynamic", "alibi", "t5", "shaw")),
}  # fmt: skip
DECODE: Axes = {
    "cache": (lambda item: base_name(item.case.cache or ""),
              ("static", "concat", "none", "rerun", "paged", "int8", "int8-head")),
    "mask": (lambda item: item.case.mask.name, ("causal", "window", "padding")),
    "heads": (heads, ("no power of 2", "2 share", "3 share", "all share")),
    "position": (lambda item: item.case.position.name, ("none", "rope", "alibi", "t5")),
    "queries": (lambda item: item.case.query_tokens, (1, 2)),
    "scale": (lambda item: item.case.scale is None, (True, False)),
}  # fmt: skip
LAYER: Axes = {
    "projection": (lambda item: item.case.projection, ("fused", "separate", "per-head")),
    "mask": (lambda item: item.case.mask.name, ("full", "causal", "window")),
    "heads": (heads, ("power of 2", "no power of 2", "2 share")),
    "value_dim": (value_dim, ("V = D", "V > D")),
    "position": (lambda item: item.case.position.name, ("none", "rope", "sinusoidal", "alibi")),
    "pass": (lambda item: item.case.pass_, ("both", "forward")),
    "layers": (lambda item: item.case.layers, (1, 2)),
    "scale": (lambda item: item.case.scale is None, (True, False)),
}


AXES: dict[str, Axes] = {"attention": ATTENTION, "decode": DECODE, "layer": LAYER}


def cannot_meet(workload: str, pair: dict[str, Any]) -> str | None:
    """Why two values are in no check together."""
    if workload == "decode" and pair.get("mask") == "padding":
        if pair.get("cache") in ("concat", "none", "rerun"):
            return "the cache keeps the items of a batch equally long"
        if pair.get("queries") == 2:
            return "decoding takes lengths a query at a time"
        if pair.get("position") in ("alibi", "t5"):
            return "a bias by place needs each key in its place"
    if pair == {"mask": "padding", "batch": 1}:
        return "lengths are to differ between the items of a batch"
    if pair.get("layout") == "packed" and pair.get("lengths") in ("L < S", "L > S", "L = 1"):
        return "what is packed is of as many tokens"
    if pair.get("strided") and pair.get("layout") in ("BLHD", "packed"):
        return "all three are strided there"
    if pair == {"head_dim": 256, "value_dim": "V > D"}:
        return "V is 96 at most"
    if pair.get("pass") == "forward" and (pair.get("gradient") or pair.get("without")):
        return "there is no gradient"
    return None


SIMPLE: dict[str, Any] = {"mask": ("full", "causal"), "position": ("none",)}
EQUAL = {"heads": HEADS[:3], "value_dim": ("V = D",)}
# What kernels are confined to: who takes these values alone misses no pair of them.
KERNELS: dict[str, tuple[str, dict[str, Any]]] = {
    "takes everything": ("attention", {}),
    "in one dtype": ("attention", {"dtype": ("float32",)}),
    "without a backward": (
        "attention", {"pass": ("forward",), "gradient": (None,), "without": (None,)},
    ),
    "takes no biases": ("attention", {"position": ("none",)}),
    "takes biases, full and causal": ("attention", {"mask": ("full", "causal")}),
    "simple": ("attention", SIMPLE),
    "simple, in one dtype": ("attention", SIMPLE | {"dtype": ("float32",)}),
    "simple, V = D, H = G": ("attention", SIMPLE | EQUAL),
    "decodes": ("decode", {}),
    "decodes, simple": ("decode", {"mask": ("causal",), "position": ("none", "rope")}),
    "in a layer": ("layer", {}),
}  # fmt: skip


@pytest.mark.parametrize("kernel", KERNELS)
def test_any_two_values_that_a_kernel_may_branch_on_meet_in_a_check(kernel):
    workload, narrow = KERNELS[kernel]
    axes = {name: (of, narrow.get(name, wanted)) for name, (of, wanted) in AXES[workload].items()}
    seen = set()
    for item in ITEMS:
        if item.case.workload == workload and "property" not in item.draw:
            values = {name: of(item) for name, (of, _) in axes.items()}
            if all(values[name] in narrow[name] for name in narrow):
                seen |= set(itertools.combinations(values.items(), 2))
    missing = [
        (x, y)
        for (a, (_, first)), (b, (_, second)) in itertools.combinations(axes.items(), 2)
        for x in ((a, value) for value in first)
        for y in ((b, value) for value in second)
        if (x, y) not in seen and not cannot_meet(workload, dict([x, y]))
    ]
    assert missing == []


def test_a_check_is_there_once_by_name_and_by_what_is_done():
    names = Counter((item.name, item.case.pass_, item.case.dtype) for item in ITEMS)
    done = Counter((item.case.case_id, str(item.draw)) for item in ITEMS)
    assert {count for counts in (names, done) for count in counts.values()} == {1}


def test_the_battery_has_what_is_no_value_of_an_axis():
    cases = [item.case for item in ITEMS if item.case.workload == "attention"]
    assert any(case.seq_len == case.kv_len == 1 for case in cases)
    assert any(case.seq_len > 1024 for case in cases)
    assert any(case.seq_len < 8 and case.kv_len > 1024 for case in cases)
    assert any(case.seq_len % 128 == case.kv_len % 128 == 0 for case in cases)
    assert any(item.draw.get("query_amplitude", 1) > 10 for item in ITEMS)
    low = [item.case for item in ITEMS if item.draw.get("score_offset", 0) < -100]
    assert {case.kv_len for case in low if not case.unmasked and case.needs_grad} == {64, 192}
    assert any(item.draw.get("expanded") == "kv" for item in ITEMS)
    rotary = {case.position.name for case in cases if case.position.encoding.kind == "rotary"}
    assert rotary == {name for name in POSITIONS.names() if POSITIONS.get(name).kind == "rotary"}


def test_the_first_items_in_the_order_of_coverage_are_of_all_kinds():
    items = [item for item in ITEMS if item.case.workload == "attention"]
    first = [items[place] for place in itertools.islice(by_coverage(items), 20)]
    for name in ("mask", "lengths", "dtype", "batch", "scale", "gradient"):
        of, wanted = ATTENTION[name]
        assert {of(item) for item in first} >= set(wanted)


ORDER = """
import torch
from attnbench.api import ALL_MASKS, attention_builder, dense_mask, hidden_and_blind
_masks = {}

@attention_builder("by-shape", masks=ALL_MASKS, workloads=("attention",), gqa=False)
def by_shape(case):
    key = case.seq_len, case.kv_len, case.batch, case.unmasked
    if key not in _masks:
        _masks[key] = hidden_and_blind(case)
    return lambda q, k, v: attend(q, k, v, case.softmax_scale, _masks[key])

@attention_builder("delayed", masks=ALL_MASKS, workloads=("attention",), gqa=False)
def delayed(case):
    state, masks = {}, hidden_and_blind(case)

    def call(q, k, v):
        most = q.detach().abs().max().item()
        limit, state["most"] = state.get("most", most), most
        return attend(q.clamp(-limit, limit), k, v, case.softmax_scale, masks)

    return call

def attend(q, k, v, scale, masks):
    scores = (q * scale) @ k.mT
    scores = scores if masks[0] is None else scores.masked_fill(masks[0], -torch.inf)
    o = scores.softmax(-1) @ v
    return o if masks[1] is None else o.masked_fill(masks[1], 0)
"""


def test_what_an_earlier_case_or_call_leaves_is_said(cli: Cli, tmp_path):
    file = tmp_path / "order.py"
    file.write_text(ORDER)
    options = ("--impl", str(file), "--dtypes", "float32")
    masks = ("--seq-lens", "24", "--masks", "causal,window:8")
    said = cli("check", *options, "--impls", "by-shape", *masks).stdout
    assert "right alone in a fresh process: it keeps something from an earlier case" in said
    assert "only window" not in said
    said = cli("check", *options, "--impls", "delayed", "--seq-lens", "24,40,56").stdout
    assert "only after its inputs changed: state from the call before" in said
    assert "random" not in said
    where = ("--min-time", "0.01", "--max-time", "0.01", "--output", tmp_path, "--name", "run")
    assert cli("sweep", *options, "--impls", "by-shape", *masks, *where).exit_code == 0
    records = (tmp_path / "run" / "records.jsonl").read_text()
    assert records.count("it keeps something from an earlier case") == 1
