"""The built-in implementations against brute force, and what they say of themselves."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from attnbench.api import IMPLEMENTATIONS, Case, dense_mask
from attnbench.api.loader import BUILT_IN, load_built_in
from attnbench.measure.counted import count_flops
from attnbench.measure.profiled import profile_call
from attnbench.schema.case import parse_mask
from attnbench.theory.costs import OPAQUE_FORMULAS

EAGER = ("naive", "naive-heads", "sdpa", "sdpa-math", "sdpa-flash", "sdpa-mask")
DTYPES = ("float32", "float64", "bfloat16", "float16")

pytestmark = pytest.mark.usefixtures("one_thread")


def module(name: str) -> Any:
    """impls/<name>.py, as the harness loads it."""
    load_built_in()
    return sys.modules[f"{BUILT_IN}.{name}"]


def case_of(**fields: Any) -> Case:
    mask = parse_mask(fields.pop("mask", "full"))
    small: dict[str, Any] = {"batch": 2, "heads": 4, "seq_len": 13, "head_dim": 7, "pass_": "both"}
    return Case(**(small | fields), mask=mask)


def tensors(case: Case, spread: float = 1.0) -> list[torch.Tensor]:
    """q, k, v, do of the case: normal, seeded."""
    generator = torch.Generator().manual_seed(0)
    query, key = (case.heads, case.seq_len), (case.kv_heads, case.kv_len)
    shapes = [(*query, case.head_dim), (*key, case.head_dim), (*key, case.value_dim)]
    shapes.append((*query, case.value_dim))
    made = [torch.randn(case.batch, *shape, generator=generator) for shape in shapes]
    made = [(x * spread).to(getattr(torch, case.dtype)) for x in made]
    return [*(x.requires_grad_(case.needs_grad) for x in made[:3]), made[3]]


def run(call: Any, case: Case, q: Any, k: Any, v: Any, do: Any) -> list[torch.Tensor]:
    o = call(q, k, v)
    return [o, *torch.autograd.grad(o, (q, k, v), do)] if case.needs_grad else [o]


def plain(case: Case, q: Any, k: Any, v: Any) -> torch.Tensor:
    """softmax(QKᵀ·scale)V, as short as it can be; a blind row is uniform, then zero."""
    admitted = dense_mask(case.mask, case.seq_len, case.kv_len, "cpu")
    k, v = (x.repeat_interleave(case.heads // case.kv_heads, dim=1) for x in (k, v))
    scores = (q * case.softmax_scale) @ k.mT
    scores = scores.masked_fill(~admitted, torch.finfo(scores.dtype).min)
    weights = torch.softmax(scores, -1) * admitted.any(1, keepdim=True).to(q.dtype)
    return torch.matmul(weights, v)


def assert_right(call: Any, case: Case, inputs: list[torch.Tensor]) -> None:
    """The project's rule: error at most 2x (gradients 3x) that of the plain computation in the
    case's dtype, plus a floor of a few eps of the result."""
    wide = [x.detach().double().requires_grad_(x.requires_grad) for x in inputs]
    truth = run(functools.partial(plain, case), case, *wide)
    yardstick = run(functools.partial(plain, case), case, *inputs)
    eps = torch.finfo(inputs[0].dtype).eps
    for name, got, want, usual in zip(
        ("o", "dq", "dk", "dv"), run(call, case, *inputs), truth, yardstick, strict=False
    ):
        assert (got.shape, got.dtype) == (want.shape, inputs[0].dtype)
        factor = 2 if name == "o" else 3
        usual_error = (usual.double() - want).abs().max()
        # Sums of terms of size 1 may come out small: with one key dq is the difference of equals.
        floor = 8 * eps * max(1.0, float(want.detach().abs().max()))
        assert not got.isnan().any(), name
        assert (got.double() - want).abs().max() <= factor * usual_error + floor, name


def flops_of(name: str, case: Case) -> int:
    formula = IMPLEMENTATIONS.get(name).flops
    assert formula is not None
    return formula(case)


def unsupported(name: str, case: Case) -> str | None:
    return IMPLEMENTATIONS.get(name).reason_against(case)


SHAPES: dict[str, dict[str, Any]] = {
    "odd lengths": {},
    "one query and key": {"seq_len": 1, "kv_len": 1},
    "causal": {"mask": "causal"},
    "causal, more keys": {"kv_len": 30, "mask": "causal"},
    "causal, one query": {"seq_len": 1, "kv_len": 9, "mask": "causal"},
    "causal, blind rows": {"kv_len": 7, "mask": "causal"},
    "window": {"mask": "window:3"},
    "window, blind rows": {"kv_len": 3, "mask": "window:2"},
    "grouped heads": {"kv_heads": 2, "mask": "causal"},
    "one key head": {"kv_heads": 1, "kv_len": 20},
    "wider values": {"value_dim": 11},
    "all at once": {"value_dim": 5, "kv_heads": 2, "kv_len": 5, "mask": "causal"},
    "own scale": {"scale": 0.5},
    "past one block": {"batch": 1, "heads": 1, "seq_len": 193, "kv_len": 515, "mask": "causal"},
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", EAGER)
def test_it_computes_attention_and_its_gradients(name, shape, dtype):
    for pass_ in ("forward", "both"):
        case = case_of(**{"dtype": dtype, "pass_": pass_} | SHAPES[shape])
        if unsupported(name, case):
            assert (name, case.value_dim != case.head_dim) == ("sdpa-flash", True)
            continue
        assert_right(IMPLEMENTATIONS.get(name).build(case), case, tensors(case))


@pytest.mark.parametrize("mask", ["causal", "window:2"])
@pytest.mark.parametrize("name", EAGER)
def test_a_query_that_sees_no_key_gives_zero_and_no_gradient(name, mask):
    case = case_of(kv_len=6, mask=mask)
    o, dq, _, _ = run(IMPLEMENTATIONS.get(name).build(case), case, *tensors(case))
    assert not o[:, :, :7].any()
    assert not dq[:, :, :7].any()
    assert o[:, :, 7:].all()
    assert dq[:, :, 8:].any()


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("name", EAGER)
def test_large_logits_neither_overflow_nor_turn_into_nan(name, dtype):
    # The unscaled scores reach 100000, past float16's 65504.
    case = case_of(dtype=dtype, head_dim=64, mask="causal", pass_="forward")
    inputs = tensors(case, spread=60.0)
    assert (inputs[0].float() @ inputs[1].float().mT).abs().max() > 65504
    assert IMPLEMENTATIONS.get(name).build(case)(*inputs[:3]).isfinite().all()


@pytest.mark.parametrize("name", EAGER)
def test_inputs_need_not_be_contiguous(name):
    case = case_of(kv_heads=2, mask="causal", pass_="forward")
    q, k, v, _ = tensors(case)
    strided = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    call = IMPLEMENTATIONS.get(name).build(case)
    torch.testing.assert_close(call(*strided), call(q, k, v))


UNSUPPORTED_ON_CPU = {
    ("sdpa-efficient", ""): "runs on cuda, not cpu",
    ("sdpa-cudnn", ""): "runs on cuda, not cpu",
    ("sdpa-flash", "value_dim"): "flash: Flash attention requires q,k,v to have the same last"
    " dimension",
    ("flex", "both"): "FlexAttention has no backward pass on CPU",
    ("flex", "float64"): "takes float32, bfloat16, float16, not float64",
}


def test_what_is_unsupported_on_cpu_is_exactly_this():
    asked = {
        "": case_of(pass_="forward"),
        "both": case_of(),
        "value_dim": case_of(pass_="forward", value_dim=9),
        "float64": case_of(pass_="forward", dtype="float64"),
        "grouped": case_of(pass_="forward", kv_heads=2),
        "blind": case_of(pass_="forward", kv_len=3, mask="causal"),
        "window": case_of(pass_="forward", mask="window:2"),
    }
    names = (*EAGER, "sdpa-efficient", "sdpa-cudnn", "flex", "naive-compiled")
    for name in names:
        for what, case in asked.items():
            expected = UNSUPPORTED_ON_CPU.get((name, what)) or UNSUPPORTED_ON_CPU.get((name, ""))
            assert unsupported(name, case) == expected, (name, what)


def test_a_missing_gpu_is_a_reason_and_no_exception(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    module("sdpa").refusal.cache_clear()
    for name in ("sdpa", "sdpa-flash", "sdpa-mask", "flex", "naive-compiled"):
        assert unsupported(name, case_of(device="cuda")) == "torch sees no CUDA device"
    module("sdpa").refusal.cache_clear()


@pytest.mark.parametrize("name", ["flex", "naive-compiled"])
def test_without_a_compiler_there_is_a_reason(name, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert "no-such-compiler" in (unsupported(name, case_of(pass_="forward")) or "")


def test_supports_probes_once_for_many_sizes():
    sdpa = module("sdpa")
    cases = [case_of(seq_len=n, batch=b) for n in (64, 128, 1024) for b in (1, 2)]
    assert len({sdpa.tiny(case) for case in cases}) == 1


def test_a_probe_leaves_the_random_numbers_and_the_switches_alone():
    sdpa = module("sdpa")
    sdpa.refusal.cache_clear()
    torch.manual_seed(7)
    before = torch.random.get_rng_state()
    states = [enabled() for _, enabled in sdpa.SWITCHES.values()]
    assert unsupported("sdpa-flash", case_of(value_dim=9))
    assert not unsupported("sdpa-math", case_of(value_dim=9))
    assert torch.equal(before, torch.random.get_rng_state())
    assert states == [enabled() for _, enabled in sdpa.SWITCHES.values()]


def test_a_forced_kernel_that_cannot_run_raises():
    case = case_of(value_dim=9, pass_="forward")
    q, k, v, _ = tensors(case)
    with (
        pytest.warns(UserWarning, match="same last dimension"),
        pytest.raises(RuntimeError, match="kernel"),
    ):
        IMPLEMENTATIONS.get("sdpa-flash").build(case)(q, k, v)


@pytest.mark.parametrize(
    ("name", "op"),
    [
        ("sdpa-flash", "aten::_scaled_dot_product_flash_attention_for_cpu"),
        ("sdpa", "aten::_scaled_dot_product_flash_attention_for_cpu"),
        ("sdpa-math", "aten::bmm"),
    ],
)
def test_the_kernel_that_runs_is_the_one_asked_for(name, op):
    case = case_of(pass_="forward", mask="causal")
    call = IMPLEMENTATIONS.get(name).build(case)
    assert op in profile_call(lambda: call(*tensors(case)[:3]), "cpu").kernels


def prepared(name: str, case: Case) -> Callable[[], Any]:
    """One call of the case's pass, as it is measured: the graph of `backward` is there before."""
    call, (q, k, v, do) = IMPLEMENTATIONS.get(name).build(case), tensors(case)
    if case.pass_ == "backward":
        o = call(q, k, v)
        return lambda: torch.autograd.grad(o, (q, k, v), do, retain_graph=True)
    return lambda: run(call, case, q, k, v, do)


@pytest.mark.parametrize("pass_", ["forward", "backward", "both"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ["naive", "naive-heads", "sdpa-math"])
def test_declared_flops_are_the_counted_ones(name, shape, pass_):
    case = case_of(**SHAPES[shape] | {"pass_": pass_})
    counted, source = count_flops(prepared(name, case), OPAQUE_FORMULAS)
    assert (flops_of(name, case), source) == (counted, "dispatched")


def test_flash_flops_skip_the_key_blocks_past_the_diagonal():
    def pairs(**fields: Any) -> float:
        case = case_of(batch=1, heads=1, head_dim=1, **fields)
        return flops_of("sdpa-flash", case) / {"forward": 4, "backward": 10}[case.pass_]

    # 256 queries at a time see 512 keys or 1024: block rows 0 and 1, then 2 and 3.
    causal = {"mask": "causal", "seq_len": 1024}
    assert pairs(pass_="forward", **causal) == 512 * 512 + 512 * 1024
    assert pairs(pass_="backward", **causal) == 512 * 512 + 512 * 1024
    assert pairs(pass_="forward", mask="causal", seq_len=500) == 500 * 500
    assert pairs(pass_="forward", seq_len=1024) == 1024 * 1024
    # A mask of numbers hides from the kernel that it is causal.
    assert pairs(pass_="forward", mask="causal", seq_len=1024, kv_len=2048) == 1024 * 2048


def test_flex_flops_are_whole_blocks_of_the_mask():
    flops = functools.partial(flops_of, "flex")
    one = {"batch": 1, "heads": 1, "head_dim": 1, "pass_": "forward", "seq_len": 300}
    assert flops(case_of(**one)) == 4 * 300 * 300
    causal = 128 * 128 + 128 * 256 + 44 * 300
    assert flops(case_of(**one, mask="causal")) == 4 * causal
    window = 128 * 128 + 128 * 256 + 44 * (300 - 128)
    assert flops(case_of(**one, mask="window:4")) == 4 * window


# Not the sizes that the formulas were worked out at (B=1, H=4, n=512, D=64).
BIG: dict[str, dict[str, Any]] = {
    "plain": {"batch": 1, "heads": 3, "seq_len": 576, "head_dim": 48},
    "long": {"batch": 1, "heads": 2, "seq_len": 800, "head_dim": 96},
    "grouped": {"batch": 2, "heads": 4, "kv_heads": 2, "seq_len": 520, "head_dim": 80},
    "causal": {"batch": 1, "heads": 3, "seq_len": 600, "head_dim": 72, "mask": "causal"},
    "blind": {"batch": 1, "heads": 2, "seq_len": 600, "kv_len": 520, "mask": "causal"},
    "wide": {"batch": 1, "heads": 2, "seq_len": 640, "head_dim": 40, "value_dim": 88},
}


# float16 matmuls take seconds on CPU: one small shape stands for both halves there.
BIG_DTYPES = [(shape, dtype) for shape in BIG for dtype in ("float32", "float64", "bfloat16")]


@pytest.mark.parametrize(("shape", "dtype"), [*BIG_DTYPES, ("plain", "float16")])
@pytest.mark.parametrize("name", EAGER)
def test_the_workspace_is_predicted(name, shape, dtype):
    for pass_ in ("forward", "backward", "both"):
        case = case_of(**BIG[shape] | {"dtype": dtype, "pass_": pass_})
        if unsupported(name, case):
            continue
        profiled = profile_call(prepared(name, case), "cpu")
        measured = profiled.peak_bytes - sum(x.nbytes for x in profiled.result)
        formula = IMPLEMENTATIONS.get(name).workspace
        assert formula is not None
        predicted = formula(case)
        # oneDNN's own memory for bfloat16 products depends on the processor.
        tolerance = 0.25 if dtype == "bfloat16" else 0.02
        assert abs(predicted - measured) <= tolerance * measured, (pass_, predicted, measured)


# Compiling takes seconds a shape: two real ones, and the rest with dynamo alone.


@pytest.mark.parametrize("name", ["flex", "naive-compiled"])
def test_compiled_ones_are_right(name):
    fields = {"kv_heads": 2, "kv_len": 7, "value_dim": 5, "mask": "causal"}
    case = case_of(**fields, pass_="forward" if name == "flex" else "both")
    if reason := unsupported(name, case):
        pytest.skip(reason)
    call = IMPLEMENTATIONS.get(name).build(case)
    assert_right(call, case, tensors(case))
    if case.needs_grad:
        q, k, v, do = tensors(case)
        o = call(q, k, v)
        first = torch.autograd.grad(o, (q, k, v), do, retain_graph=True)
        again = torch.autograd.grad(o, (q, k, v), do, retain_graph=True)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize(
    ("name", "function"), [("flex", "flex_call"), ("compiled", "plain_attention")]
)
def test_twelve_shapes_in_one_process_all_stay_compiled(name, function):
    compiled: list[int] = []

    def backend(graph: Any, _examples: Any) -> Any:
        compiled.append(1)
        return graph.forward

    impl = module(name)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for n in range(3, 15):
            case = case_of(seq_len=n, mask="causal", pass_="forward")
            call = impl.compile_alone(getattr(impl, function)(case), backend=backend)
            for _ in range(2):
                assert_right(call, case, tensors(case))
    assert len(compiled) == 12


def test_without_a_code_object_of_their_own_the_ninth_would_be_an_error():
    impl = module("compiled")
    cases = [case_of(seq_len=n, pass_="forward") for n in range(3, 12)]

    def run_all() -> None:
        for case in cases:
            function = impl.plain_attention(case)
            shared: Any = torch.compile(function, fullgraph=True, dynamic=False, backend="eager")
            shared(*tensors(case)[:3])

    with pytest.raises(torch._dynamo.exc.FailOnRecompileLimitHit):
        run_all()
