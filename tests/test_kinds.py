"""What planning knows of the workloads, and the laws that implementations declare."""

import inspect
import math
from dataclasses import replace
from typing import Any

import pytest

from attnbench.api import IMPLEMENTATIONS, attention, attention_builder, recurrent_builder
from attnbench.api.loader import load_built_in
from attnbench.errors import UsageError
from attnbench.planning.plan import Axes, work
from attnbench.schema.case import Case, parse_mask
from attnbench.theory.law import parse
from attnbench.theory.traits import (
    OPTIONAL_AXES,
    TRAITS,
    case_label,
    impossible,
)
from attnbench.worker.workloads import WORKLOADS

CAUSAL = parse_mask("causal")


def decode(cache: str) -> Case:
    return Case(workload="decode", cache=cache, mask=CAUSAL)


def test_every_workload_has_one_row_for_planning():
    assert set(TRAITS.names()) == set(WORKLOADS.names())
    assert set(OPTIONAL_AXES) <= set(Axes.__dataclass_fields__)
    names = {name: kind.n_name for name, kind in TRAITS.items()}
    assert [name for name, n in names.items() if n == "context n"] == ["decode"]
    for kind in dict(TRAITS.items()).values():
        assert set(kind.axes) <= set(OPTIONAL_AXES)
        assert set(kind.defaults) <= set(Case.__dataclass_fields__)


@pytest.mark.parametrize(
    ("case", "core", "law"),
    [
        (Case(), "n^2 d", "n^2 d"),
        (Case(workload="layer"), "n^2 d", "n d^2 + n^2 d"),
        (Case(workload="layer"), "O(n d)", "O(n d^2 + n d)"),
        (Case(workload="layer"), "n d^2", "n d^2"),
        (Case(workload="recurrent"), "n d^2", "n d^2"),
        (decode("rerun"), "n^2 d", "n d^2 + n^2 d"),
        (decode("none"), "n^2 d", "n d^2 + n d"),
        (decode("concat"), "n^2 d", "d^2 + n d"),
        (decode("static"), "n^2 d", "d^2 + n d"),
        (decode("static"), "n w d", "d^2 + d w"),
        (decode("static"), "n", "d^2 + n"),
        (decode("static"), "O(n^2 + n)", "O(d^2 + n)"),
        (decode("static"), "n d^2", "d^2 + n d^2"),
        (decode("static"), "n^2 log n", "d^2 + n log n"),
    ],
)
def test_a_core_s_law_becomes_the_workload_s(case, core, law):
    assert TRAITS.get(case.workload).time(parse(core), case) == parse(law)


@pytest.mark.parametrize(
    ("case", "core", "law"),
    [
        (Case(), "n^2", "n^2"),
        (Case(workload="layer"), "O(n)", "O(n d + n)"),
        (decode("rerun"), "n^2", "n d + n^2"),
        (decode("none"), "n^2", "n d + n"),
        (decode("static"), "n^2", "d + n"),
    ],
)
def test_a_core_s_memory_becomes_the_workload_s(case, core, law):
    assert TRAITS.get(case.workload).memory(parse(core), case) == parse(law)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"workload": "decode", "pass_": "both"}, "decode has no both pass (--passes forward)"),
        ({"workload": "layer", "kv_len": 7}, "layer has no key/value length of its own"),
        ({"workload": "recurrent", "kv_heads": 2}, "recurrent has no heads to share"),
        ({"workload": "recurrent", "value_dim": 2}, "recurrent has no values of width 2"),
        ({"workload": "recurrent", "mask": parse_mask("window:3")}, "--masks causal"),
        ({"workload": "recurrent", "heads": 1, "kv_heads": 2}, "recurrent has no heads to share"),
        ({"kv_heads": 3}, "--kv-heads must divide --heads"),
    ],
)
def test_what_a_workload_makes_no_sense_of_has_a_reason(fields, words):
    assert words in (impossible(Case(**fields)) or "")


def test_work_grows_with_what_surrounds_the_core():
    core = Case(seq_len=64)
    assert work(replace(core, workload="layer")) > work(core)
    wide = replace(core, workload="recurrent", width=2048)
    assert work(wide) == 64 * work(replace(wide, width=256))


@pytest.fixture
def forgotten():
    yield
    IMPLEMENTATIONS.remove("lawful")


@pytest.mark.parametrize("field", ["time", "memory", "flops_law"])
def test_a_law_that_is_none_is_refused_by_name_with_examples(field, forgotten):
    declared: dict[str, Any] = {field: "n^2 q"}
    with pytest.raises(UsageError) as refused:
        attention("lawful", **declared)(lambda q, k, v, *, causal, scale: q)
    text = str(refused.value)
    assert f"'lawful' declares {field}='n^2 q': 'n^2 q' is no law" in text
    assert "'n^2 d'" in text
    assert "\n" not in text
    assert "lawful" not in IMPLEMENTATIONS


def test_laws_are_kept_in_one_way_of_writing(forgotten):
    attention("lawful", time="d n^2 + n*d*d", memory="O( n )")(lambda q, k, v, **_: q)
    kept = IMPLEMENTATIONS.get("lawful")
    assert (kept.time, kept.memory, kept.flops_law) == ("n^2 d + n d^2", "O(n)", None)


def test_whom_a_workload_is_served_by_is_declared(forgotten):
    recurrent_builder("lawful")(lambda case: lambda x, w_ih, w_hh: x)
    network = IMPLEMENTATIONS.get("lawful")
    assert network.workloads == ("recurrent",)
    assert network.reason_against_workload("recurrent") is None
    assert network.reason_against_workload("layer") == "serves recurrent, not layer"


@pytest.mark.parametrize(
    ("declared", "says"),
    [
        ({"workloads": "layer"}, "Expected `array`"),
        ({"dtypes": ("float12",)}, "Invalid enum value 'float12'"),
        ({"masks": ("diagonal",)}, "unknown mask 'diagonal'"),
        ({"gqa": 1}, "Expected `bool`"),
        ({"flops": 7}, "expected a function of the case"),
    ],
)
def test_what_is_not_of_its_parameter_s_type_is_refused_by_name(declared, says):
    with pytest.raises(UsageError, match=says) as refused:
        attention("lawful", **declared)(lambda q, k, v, *, causal, scale: q)
    assert f"'lawful' declares {next(iter(declared))}=" in str(refused.value)
    assert "lawful" not in IMPLEMENTATIONS


def test_what_an_author_can_declare_are_real_parameters():
    wanted = inspect.signature(attention_builder).parameters
    for decorator in (attention, recurrent_builder):
        assert inspect.signature(decorator).parameters == wanted
    assert {"dtypes", "devices", "passes", "masks", "gqa", "workspace"} <= set(wanted)
    with pytest.raises(TypeError, match="speed"):
        attention("lawful", speed=9)(lambda q, k, v, *, causal, scale: q)  # type: ignore[call-arg]


def test_a_workload_that_there_is_not_is_refused_by_name():
    with pytest.raises(UsageError, match=r"'lawful' declares workloads=.*'atention'.*layer"):
        attention("lawful", workloads=("atention",))(lambda q, k, v, *, causal, scale: q)
    assert "lawful" not in IMPLEMENTATIONS


def test_a_label_of_what_has_no_heads_gives_its_width():
    network = Case(workload="recurrent", heads=1, head_dim=96, width=96, seq_len=8, mask=CAUSAL)
    assert case_label(network) == "recurrent forward n=8 B=1 E=96 float32 causal"
    grouped = Case(workload="layer", kv_heads=2, value_dim=8, width=96, seq_len=8)
    assert case_label(grouped) == "layer forward n=8 B=1 H=4 G=2 D=64 V=8 E=96 float32"


def declaring_bytes() -> list[str]:
    load_built_in()
    everyone = IMPLEMENTATIONS.items()
    return [name for name, impl in everyone if impl.workspace and "cpu" in impl.devices]


@pytest.mark.parametrize("pass_", ["forward", "backward", "both"])
@pytest.mark.parametrize("name", declaring_bytes())
def test_built_in_workspaces_grow_in_n_as_declared(name, pass_):
    impl = IMPLEMENTATIONS.get(name)
    assert impl.memory is not None
    assert impl.workspace is not None
    law = parse(impl.memory)
    shorter = Case(workload=impl.workloads[0], pass_=pass_, seq_len=8192, mask=CAUSAL)
    few = impl.workspace(shorter)
    many = impl.workspace(replace(shorter, seq_len=16384, kv_len=16384))
    if few is None or many is None:
        pytest.skip("not known from sizes alone")
    growth = math.log2(many / few)
    assert growth <= float(law.degree("n")) + 0.01
    assert law.bound or growth >= float(law.degree("n")) - 0.1


@pytest.mark.parametrize("name", declaring_bytes())
def test_built_in_flops_grow_in_n_and_d_as_declared(name):
    impl = IMPLEMENTATIONS.get(name)
    assert impl.time is not None
    assert impl.flops is not None
    law, n, d = parse(impl.flops_law or impl.time), 8192, 64
    start = Case(workload=impl.workloads[0], seq_len=n, head_dim=d)
    grown = {
        "n": replace(start, seq_len=2 * n, kv_len=2 * n),
        "d": replace(start, head_dim=2 * d, value_dim=2 * d),
    }
    for variable, case in grown.items():
        growth = math.log2(impl.flops(case) / impl.flops(start))
        assert growth == pytest.approx(float(law.degree(variable)), abs=0.01)
