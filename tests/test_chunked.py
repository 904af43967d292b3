"""`chunked` is right, multiplies and allocates exactly what it declares, and fuses nothing."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from attnbench.api import IMPLEMENTATIONS, Case, Implementation, dense_mask
from attnbench.api.loader import load_built_in
from attnbench.measure.counted import count_flops
from attnbench.measure.profiled import profile_call
from attnbench.schema.case import parse_mask

Tensors = tuple[torch.Tensor, ...]
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="session")
def chunked() -> Implementation:
    """The registered implementation."""
    load_built_in()
    return IMPLEMENTATIONS.get("chunked")


def a_case(mask: str = "full", pass_: str = "both", **sizes: Any) -> Case:
    chosen: dict[str, Any] = {"pass_": pass_, "heads": 2, "head_dim": 16, "mask": parse_mask(mask)}
    return Case(**chosen | sizes)


def inputs(case: Case, *, loud: float = 1.0) -> tuple[Tensors, torch.Tensor]:
    """Random (q, k, v) and do; `loud` multiplies q, and so the scores."""
    seeded = torch.Generator().manual_seed(0)
    shapes = (
        (case.heads, case.seq_len, case.head_dim),
        (case.kv_heads, case.kv_len, case.head_dim),
        (case.kv_heads, case.kv_len, case.value_dim),
        (case.heads, case.seq_len, case.value_dim),
    )
    dtype = getattr(torch, case.dtype)
    made = [torch.randn(case.batch, *shape, generator=seeded) for shape in shapes]
    made[0].mul_(loud)
    q, k, v, do = (x.to(dtype) for x in made)
    return tuple(x.requires_grad_(case.needs_grad) for x in (q, k, v)), do


def plain(case: Case, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """softmax(scale·q·kᵀ)v by its definition, in the dtype of its inputs."""
    sharing = case.heads // case.kv_heads
    k_BHSD, v_BHSV = (x.repeat_interleave(sharing, dim=1) for x in (k, v))
    seen_LS = dense_mask(case.mask, case.seq_len, case.kv_len, case.device)
    s_BHLS = (q * case.softmax_scale @ k_BHSD.mT).masked_fill(~seen_LS, -torch.inf)
    blind_L1 = ~seen_LS.any(dim=1, keepdim=True)
    return torch.softmax(s_BHLS.masked_fill(blind_L1, 0), dim=-1).masked_fill(blind_L1, 0) @ v_BHSV


def with_gradients(call: Callable[..., torch.Tensor], qkv: Tensors, do: torch.Tensor) -> Tensors:
    o = call(*qkv)
    return (o, *torch.autograd.grad(o, qkv, do))


def timed_call(built: Any, case: Case) -> Callable[[], Tensors]:
    """What a benchmark would time for the case's pass, returning all of its outputs."""
    qkv, do = inputs(case)
    if case.pass_ == "forward":
        return lambda: (built(*qkv),)
    if case.pass_ == "both":
        return lambda: with_gradients(built, qkv, do)
    o = built(*qkv)
    return lambda: torch.autograd.grad(o, qkv, do, retain_graph=True)


def assert_as_right_as_plain(implementation: Implementation, case: Case, loud: float = 1.0) -> None:
    qkv, do = inputs(case, loud=loud)
    exact_qkv = tuple(x.detach().double().requires_grad_() for x in qkv)
    exact = with_gradients(lambda *x: plain(case, *x), exact_qkv, do.double())
    yardstick = with_gradients(lambda *x: plain(case, *x), qkv, do)
    ours = with_gradients(implementation.build(case), qkv, do)
    # The gradient of a single key is exactly 0, but a difference of terms of the order of 1; and
    # in float64 the reference rounds as the plain computation does, which then has no error.
    scale = max(1.0, *(float(x.detach().abs().max()) for x in exact))
    floor = (64 if case.dtype == "float64" else 8) * torch.finfo(qkv[0].dtype).eps * scale
    for name, got, want, rough, factor in zip(
        ("o", "dq", "dk", "dv"), ours, exact, yardstick, (2, 3, 3, 3), strict=True
    ):
        assert got.dtype == rough.dtype
        assert got.shape == rough.shape
        error, allowed = (float((x.detach() - want.detach()).abs().max()) for x in (got, rough))
        assert error <= factor * allowed + floor, f"{name}: {error:.3g}, plain {allowed:.3g}"


SIZES = {
    "one token": {"seq_len": 1},
    "odd length over several blocks": {"seq_len": 1101, "heads": 1},
    "fewer queries than keys": {"seq_len": 130, "kv_len": 1201},
    "more queries than keys": {"seq_len": 1201, "kv_len": 130},
    "grouped heads, wide values": {"seq_len": 600, "heads": 6, "kv_heads": 2, "value_dim": 24},
    "one key head, several items": {"seq_len": 333, "heads": 8, "kv_heads": 1, "batch": 3},
    "more slices than one block takes": {"seq_len": 515, "heads": 3, "batch": 2},
}


@pytest.mark.parametrize("mask", ["full", "causal", "window:77"])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_output_and_gradients_are_as_right_as_the_plain_computation(
    chunked: Implementation, sizes: dict[str, Any], mask: str
) -> None:
    assert_as_right_as_plain(chunked, a_case(mask, **sizes))


@pytest.mark.parametrize("width", [1, 511, 512, 700, 2000])
def test_windows_of_any_width_beside_that_of_a_block(chunked: Implementation, width: int) -> None:
    assert_as_right_as_plain(chunked, a_case(f"window:{width}", seq_len=1100, heads=1))


@pytest.mark.parametrize("dtype", ["float64", "bfloat16", "float16"])
@pytest.mark.parametrize("mask", ["full", "causal"])
def test_every_dtype_keeps_to_the_error_of_the_plain_computation(
    chunked: Implementation, dtype: str, mask: str
) -> None:
    assert_as_right_as_plain(chunked, a_case(mask, dtype=dtype, seq_len=700, kv_heads=1))


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_scores_of_several_hundreds_do_not_overflow(chunked: Implementation, dtype: str) -> None:
    case = a_case("causal", dtype=dtype, seq_len=600)
    (q, k, _), _ = inputs(case, loud=100)
    assert (
        float((q.detach().double() @ k.detach().double().mT).abs().max()) * case.softmax_scale > 300
    )
    assert_as_right_as_plain(chunked, case, loud=100)


@pytest.mark.parametrize("mask", ["causal", "window:5"])
def test_a_query_that_sees_no_key_gives_zero_and_zero_gradient(
    chunked: Implementation, mask: str
) -> None:
    case = a_case(mask, seq_len=1300, kv_len=100)
    o, dq, dk, dv = with_gradients(chunked.build(case), *inputs(case))
    assert not o[:, :, :1200].any()
    assert not dq[:, :, :1200].any()
    assert o[:, :, 1200:].all()
    assert all(x.isfinite().all() for x in (o, dq, dk, dv))


def test_strided_inputs_give_what_contiguous_ones_give(chunked: Implementation) -> None:
    case = a_case("causal", seq_len=530, batch=2, heads=4, kv_heads=2)
    qkv, do = inputs(case)
    strided = tuple(
        x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in qkv
    )
    strided_do = do.mT.contiguous().mT
    assert not any(x.is_contiguous() for x in (*strided, strided_do))
    built = chunked.build(case)
    for got, want in zip(
        with_gradients(built, strided, strided_do), with_gradients(built, qkv, do), strict=True
    ):
        torch.testing.assert_close(got, want)


def test_forward_is_the_same_with_and_without_gradients(chunked: Implementation) -> None:
    case = a_case("causal", seq_len=600)
    qkv, _ = inputs(case)
    built = chunked.build(case)
    with torch.no_grad():
        alone = built(*qkv)
    recorded = built(*qkv)
    assert alone.grad_fn is None
    assert recorded.grad_fn is not None
    assert torch.equal(alone, recorded.detach())


@pytest.mark.parametrize("pass_", ["forward", "backward", "both"])
@pytest.mark.parametrize("mask", ["full", "causal", "window:300"])
@pytest.mark.parametrize(
    "sizes",
    [
        {"seq_len": 1100},
        {"seq_len": 520, "kv_len": 1200, "heads": 4, "kv_heads": 2, "value_dim": 24, "batch": 2},
        {"seq_len": 1200, "kv_len": 520, "dtype": "bfloat16"},
    ],
    ids=["square", "grouped", "half"],
)
def test_flops_and_workspace_are_exactly_as_declared(
    chunked: Implementation, sizes: dict[str, Any], mask: str, pass_: str
) -> None:
    assert chunked.flops is not None
    assert chunked.workspace is not None
    case = a_case(mask, pass_, **sizes)
    call = timed_call(chunked.build(case), case)
    assert count_flops(call, {}) == (chunked.flops(case), "dispatched")
    seen = profile_call(call, "cpu")
    assert seen.peak_bytes - sum(x.nbytes for x in seen.result) == chunked.workspace(case)


def test_no_fused_attention_op_runs(chunked: Implementation) -> None:
    case = a_case("causal", seq_len=600)
    kernels = profile_call(timed_call(chunked.build(case), case), "cpu").kernels
    assert "aten::bmm" in kernels
    assert not [name for name in kernels if "attention" in name or "softmax" in name]


def test_causal_executes_little_more_than_half_of_full(chunked: Implementation) -> None:
    assert chunked.flops is not None
    full, causal = (chunked.flops(a_case(mask, seq_len=4096)) for mask in ("full", "causal"))
    assert causal / full < 0.57


def test_forward_workspace_at_4096_is_a_64th_of_the_score_matrices(chunked: Implementation) -> None:
    case = a_case("full", "forward", seq_len=4096, heads=4, head_dim=64)
    seen = profile_call(timed_call(chunked.build(case), case), "cpu")
    naive_bytes = 2 * case.heads * case.seq_len**2 * case.element_bytes
    assert 64 * (seen.peak_bytes - seen.result[0].nbytes) <= naive_bytes


@pytest.mark.parametrize("pass_", ["forward", "backward", "both"])
def test_workspace_grows_no_faster_than_the_sequence(chunked: Implementation, pass_: str) -> None:
    assert chunked.workspace is not None
    short, long = (chunked.workspace(a_case("full", pass_, seq_len=n)) for n in (4096, 65536))
    assert short is not None
    assert long is not None
    assert long <= 16 * short


def test_masks_built_ahead_stay_small(chunked: Implementation) -> None:
    call = profile_call(lambda: chunked.build(a_case("causal", seq_len=8192)), "cpu")
    assert call.kept_bytes <= 2**20
