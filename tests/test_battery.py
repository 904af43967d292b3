"""The battery covers what the issue of correctness asks for, and refusals are an explicit list."""

from collections.abc import Callable

import pytest

from attnbench.api import IMPLEMENTATIONS
from attnbench.api.helpers import reason_against_compiling
from attnbench.api.loader import load_built_in
from attnbench.base.parameters import base_name
from attnbench.planning.battery import battery
from attnbench.schema.case import Case, Dtype
from attnbench.theory.projections import PROJECTIONS
from attnbench.worker.catalogue import reasons_against
from attnbench.worker.workloads import WORKLOADS

DTYPES: tuple[Dtype, ...] = ("float32", "bfloat16", "float16", "float64")
load_built_in()
BUILT_IN = [name for name, impl in IMPLEMENTATIONS.items() if "impls" in impl.file]
ITEMS = battery("cpu", DTYPES)
ALL: set[tuple[str, str, str]] = {(item.name, item.case.pass_, item.case.dtype) for item in ITEMS}


MASKED: set[tuple[str, str, str]] = {
    (item.name, item.case.pass_, item.case.dtype)
    for item in ITEMS
    if not WORKLOADS.get(item.case.workload).core_case(item.case).unmasked
}

BIASED: set[tuple[str, str, str]] = {
    (item.name, item.case.pass_, item.case.dtype)
    for item in ITEMS
    if item.case.position.encoding.kind == "bias"
}


def refused(where: Callable[[Case], bool]) -> set[tuple[str, str, str]]:
    """The items whose core's case is one that `where` says, and those with a ring of keys."""
    return {
        (item.name, item.case.pass_, item.case.dtype)
        for item in ITEMS
        if (item.case.cache or "").startswith("sliding")
        or where(WORKLOADS.get(item.case.workload).core_case(item.case))
    }


OTHER_MASKS = refused(lambda case: not case.unmasked and case.mask.name not in ("full", "causal"))

FLEX = {(name, pass_, dtype) for name, pass_, dtype in ALL if pass_ == "both" or dtype == "float64"}

# What each built-in refuses on CPU. Anything else that is refused, or no longer is, fails here.
REFUSED: dict[str, set[tuple[str, str, str]]] = {
    "sdpa-cudnn": ALL,
    "sdpa-efficient": ALL,
    "sdpa-flash": {
        key
        for key in ALL
        if key[0].endswith(("wider values", "narrower values"))
        or (key[0].startswith("shaw") and key[1] == "both")  # no gradient of an explicit bias
    },
    "sdpa-grouped": MASKED,
    "linear": OTHER_MASKS,
    "linear-recurrent": OTHER_MASKS,
    "linear-parallel": OTHER_MASKS,
    "performer": OTHER_MASKS,
    "retention": refused(lambda case: case.mask.text != "causal"),
    "linformer": MASKED | refused(lambda case: case.kv_len < 128),
    "nystrom": MASKED | refused(lambda case: min(case.seq_len, case.kv_len) < 64),
    "flex": FLEX,
    "bigbird-flex": FLEX | refused(lambda case: case.seq_len != case.kv_len),
    "reformer": refused(
        lambda case: case.seq_len != case.kv_len or case.seq_len < 8 or case.position.name != "none"
    ),
}
TAKE_BIASES = ("naive", "chunked", "flex", "sdpa", "sdpa-math", "sdpa-mask", "sdpa-flash")


@pytest.mark.parametrize("name", BUILT_IN)
def test_what_a_built_in_refuses_on_cpu_is_written_down(name):
    impl = IMPLEMENTATIONS.get(name)
    if impl.compiles and (reason := reason_against_compiling(ITEMS[0].case)):
        pytest.skip(reason)
    reasons = reasons_against([item.case for item in ITEMS], [name])[name]
    refused, expected = set(), set()
    for item, reason in zip(ITEMS, reasons, strict=True):
        key = (item.name, item.case.pass_, item.case.dtype)
        refused |= {key} if reason else set()
        unserved = item.case.workload not in impl.workloads
        if impl.definition is not None:  # other masks than it names, and rings of keys
            core = WORKLOADS.get(item.case.workload).core_case(item.case)
            unserved |= not core.unmasked and core.mask.name not in impl.masks
            unserved |= item.name.startswith("decode, sliding")
            unserved |= item.name.startswith("decode, latent") and impl.family != "sparse"
        unbiased = name not in TAKE_BIASES and key in BIASED
        expected |= {key} if unserved or unbiased or key in REFUSED.get(name, set()) else set()
    assert refused == expected


def test_every_workload_has_items_that_some_built_in_serves():
    assert {item.case.workload for item in ITEMS} == set(WORKLOADS.names())
    layers = [item.case for item in ITEMS if item.case.workload == "layer"]
    assert {base_name(case.projection or "") for case in layers} == set(PROJECTIONS.names())
    assert {case.layers for case in layers} == {1, 2, 3}


def test_the_battery_has_the_awkward_cases():
    cases = [item.case for item in ITEMS]
    attention = [case for case in cases if case.workload == "attention"]
    assert any(case.seq_len % 2 and case.kv_len % 2 for case in attention)
    plain = [case for case in attention if case.position.text == "none"]  # which all take
    causal = [case for case in plain if case.mask.text == "causal"]
    assert any(1 < case.seq_len < case.kv_len for case in causal)
    assert any(case.seq_len > case.kv_len for case in causal)
    assert any(1 < case.kv_heads < case.heads for case in attention)
    assert any(case.kv_heads == 1 < case.heads for case in attention)
    assert any(case.value_dim > case.head_dim for case in attention)
    assert any(case.batch == 1 and case.seq_len == 1 for case in attention)
    assert any(item.draw.get("query_amplitude", 1) > 10 for item in ITEMS)
    assert any(item.draw.get("strided") for item in ITEMS)
    assert {case.cache for case in cases} >= {"rerun", "none", "concat", "static"}
    for dtype in DTYPES:
        assert {case.pass_ for case in attention if case.dtype == dtype} == {"forward", "both"}


def test_those_that_compile_get_the_brief_items():
    brief = [item for item in ITEMS if item.brief]
    assert {item.case.pass_ for item in brief} == {"forward", "both"}
    assert len(brief) <= 6
