"""What planning knows of the workloads, and the laws that implementations declare."""

import math
from dataclasses import replace
from typing import Any

import pytest

from attnbench.api import IMPLEMENTATIONS, attention
from attnbench.api.loader import load_built_in
from attnbench.errors import UsageError
from attnbench.schema.case import Case, parse_mask
from attnbench.theory.law import parse
from attnbench.theory.traits import TRAITS, impossible

CAUSAL = parse_mask("causal")


def decode(cache: str) -> Case:
    return Case(workload="decode", cache=cache, mask=CAUSAL)


@pytest.mark.parametrize(("case", "core", "law"), [
    (Case(), "n^2 d", "n^2 d"), (Case(workload="layer"), "n^2 d", "n d^2 + n^2 d"),
    (Case(workload="layer"), "O(n d)", "O(n d^2 + n d)"),
    (Case(workload="layer"), "n d^2", "n d^2"), (Case(workload="recurrent"), "n d^2", "n d^2"),
    (decode("rerun"), "n^2 d", "n d^2 + n^2 d"), (decode("none"), "n^2 d", "n d^2 + n d"),
    (decode("concat"), "n^2 d", "d^2 + n d"), (decode("static"), "n^2 d", "d^2 + n d"),
    (decode("static"), "n w d", "d^2 + d w"), (decode("paged"), "n w d", "d^2 + n d + d w"),
    (decode("int8"), "n", "d^2 + n d + n"), (decode("sliding"), "n^2 d", "d^2 + w d"),
    (decode("static"), "n", "d^2 + n"), (decode("static"), "O(n^2 + n)", "O(d^2 + n)"),
    (decode("static"), "n d^2", "d^2 + n d^2"), (decode("static"), "n^2 log n", "d^2 + n log n"),
])  # fmt: skip
def test_a_core_s_law_becomes_the_workload_s(case, core, law):
    assert TRAITS.get(case.workload).time(parse(core), case) == parse(law)


@pytest.mark.parametrize(("fields", "words"), [
    ({"workload": "decode", "pass_": "both"}, "decode has no both pass (--passes forward)"),
    ({"workload": "layer", "kv_len": 7}, "layer has no kv_len of its own, but 7 (--kv-lens)"),
    ({"workload": "recurrent", "kv_heads": 2}, "recurrent has no kv_heads of its own"),
    ({"workload": "recurrent", "value_dim": 2}, "recurrent has no value_dim of its own"),
    ({"workload": "recurrent", "mask": parse_mask("window:3")}, "--masks causal"),
    ({"workload": "recurrent", "heads": 1, "kv_heads": 2}, "recurrent has no kv_heads of its own"),
    ({"kv_heads": 3}, "--kv-heads must divide --heads"),
])  # fmt: skip
def test_what_a_workload_makes_no_sense_of_has_a_reason(fields, words):
    assert words in (impossible(Case(**fields)) or "")


@pytest.fixture
def forgotten():
    yield
    IMPLEMENTATIONS.remove("lawful")


@pytest.mark.parametrize(("declared", "says"), [
    *(({field: "n^2 q"}, "'n^2 q' is not a law") for field in ("time", "memory", "flops_law")),
    ({"workloads": "layer"}, "Expected `array`"),
    ({"workloads": ("atention",)}, "'attention'"),
    ({"dtypes": ("float12",)}, "Invalid enum value 'float12'"),
    ({"masks": ("diagonal",)}, "unknown mask 'diagonal'"),
    ({"gqa": 1}, "Expected `bool`"),
    ({"flops": 7}, "expected a function of the case"),
])  # fmt: skip
def test_a_law_that_is_none_is_refused_by_name_with_examples(declared: Any, says, forgotten):
    """And whatever else is not of its parameter's type."""
    with pytest.raises(UsageError) as refused:
        attention("lawful", **declared)(lambda q, k, v, *, causal, scale: q)
    text, (name, value) = str(refused.value), next(iter(declared.items()))
    assert f"'lawful' declares {name}=" in text
    assert says in text
    assert ("'n^2 d'" in text) == (value == "n^2 q")
    assert "\n" not in text
    assert "lawful" not in IMPLEMENTATIONS


def declaring_bytes() -> list[str]:
    load_built_in()
    everyone = IMPLEMENTATIONS.items()
    plain = [name for name, impl in everyone if "causal" in impl.masks and "cpu" in impl.devices]
    return [name for name in plain if IMPLEMENTATIONS.get(name).workspace]


@pytest.mark.parametrize("name", declaring_bytes())
def test_built_in_workspaces_and_flops_grow_in_n_and_d_as_declared(name):
    impl = IMPLEMENTATIONS.get(name)
    assert impl.memory is not None
    assert impl.time is not None
    assert impl.workspace is not None
    assert impl.flops is not None
    memory, flops = parse(impl.memory), parse(impl.flops_law or impl.time)
    n, d = 4**7, 64  # long, so that blocks at the ends weigh little, and √n is a whole number
    start = Case(workload=impl.workloads[0], seq_len=n, head_dim=d)
    longer = replace(start, seq_len=4 * n, kv_len=4 * n)
    for variable, case in {
        "n": longer,
        "d": replace(start, head_dim=4 * d, value_dim=4 * d),
    }.items():
        growth = math.log(impl.flops(case) / impl.flops(start), 4)
        assert growth == pytest.approx(float(flops.degree(variable)), abs=0.02)
    for pass_ in ("forward", "backward", "both"):
        cases = (replace(case, pass_=pass_, mask=CAUSAL) for case in (start, longer))
        few, many = (impl.workspace(case) for case in cases)
        if few is not None and many is not None:  # else not known from sizes alone
            growth = math.log(many / few, 4)
            assert growth <= float(memory.degree("n")) + 0.01
            assert memory.bound or growth >= float(memory.degree("n")) - 0.1
