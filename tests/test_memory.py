"""Bytes and FLOPs of one call: against counts by hand, another tracker, whatever ran before."""

import gc
from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils import flop_counter
from torch.utils._python_dispatch import TorchDispatchMode

from attnbench.api import IMPLEMENTATIONS
from attnbench.api.loader import load_built_in
from attnbench.measure import probes
from attnbench.measure.opcosts import op_costs
from attnbench.measure.probes import (
    call_kept,
    count_flops,
    make_matmul_workspaces,
    profile_call,
    watch_saved,
)
from attnbench.schema.case import Case, parse_mask, parse_position
from attnbench.theory.costs import OPAQUE_FORMULAS
from attnbench.worker.inputs import Draw
from attnbench.worker.workloads import WORKLOADS

load_built_in()

KIB = 1024


def numbers(kib: int) -> torch.Tensor:
    return torch.empty(kib * KIB // 4)


def test_peak_and_kept_bytes_equal_a_count_by_hand():
    x = numbers(4)

    def call() -> torch.Tensor:
        first = x.neg()  # 4 KiB
        second = torch.cat((first, first, first))  # 4 + 12
        del first  # 12
        third = second[: x.numel()].neg()  # 12 + 4
        fourth = third.neg()  # 12 + 4 + 4
        del second, third
        return fourth.neg()  # 4 + 4: the peak is past

    seen = profile_call(call, "cpu")
    assert (seen.peak_bytes, call_kept(call, "cpu").kept_bytes) == (20 * KIB, 4 * KIB)
    assert (seen.kernels, seen.kernel_count) == (("aten::neg", "aten::cat"), 5)


@pytest.mark.parametrize(("counts", "peak"), [([64, 96], 32), ([0, 0], None)])
def test_where_an_allocator_keeps_no_statistics_nothing_is_known_of_memory(
    monkeypatch, counts, peak
):
    """As cudaMallocAsync, which says 0 while inputs are alive."""
    said = iter(counts)
    for name in ("synchronize", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    monkeypatch.setattr(probes, "make_matmul_workspaces", lambda: None)
    known = {"requested_bytes.all.current": 0, "requested_bytes.all.peak": 0}
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda: dict.fromkeys(known, next(said)))
    assert probes.call_at_peak(lambda: 7) == (7, peak)


def bound(case: Case, name: str) -> tuple[Any, dict[str, torch.Tensor]]:
    workload = WORKLOADS.get(case.workload)
    tensors = workload.tensors(case)
    workload.fill(case, tensors, Draw(seed=1))
    return workload.bind(case, IMPLEMENTATIONS.get(name), tensors), tensors


def test_memory_that_was_there_before_is_neither_charged_nor_taken_off():
    garbage: list[Any] = [numbers(64)]
    garbage.append(garbage)

    def call() -> torch.Tensor:
        gc.set_threshold(10, 1, 1)  # from here on a collection would come at once
        lists: list[list[int]] = [[] for _ in range(2000)]
        assert len(lists) == 2000
        return numbers(8)

    thresholds = gc.get_threshold()
    gc.set_threshold(0)
    del garbage
    try:
        seen = profile_call(call, "cpu")
    finally:
        gc.set_threshold(*thresholds)
    assert gc.isenabled()
    assert seen.peak_bytes == 8 * KIB


class Ops(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def test_workspaces_are_made_by_every_kind_of_product_forward_and_backward():
    with torch.no_grad(), Ops() as ops:
        make_matmul_workspaces("cpu")
    assert ops.seen["addmm"] == 2  # one a dtype; with a bias it goes to another library
    assert ops.seen["bmm"] > 2  # more than the forward ones: gradients were computed, too
    assert ops.seen["mm"] > 2


Q, P, HALF = 2 * 32 * 16, 2 * 32 * 48, 2 * 48 * 16  # elements of q, of the weights, of k and of v
SAVED = [
    # The scaled q, and the weights; of the mask nothing, for it was there before.
    ("naive", "float32", "none", (Q + P) * 4),
    # The weights twice: as softmax gives them, in float32, and in the dtype of v.
    ("naive", "bfloat16", "none", Q * 2 + P * (4 + 2)),
    # Turned keys are no input any more; rotated queries are not saved, only scaled ones.
    ("naive", "float32", "rope", (Q + HALF + P) * 4),
    # Scaled q and scaled k, and v; in half precision all of it in float32.
    ("sdpa-math", "bfloat16", "none", (Q + HALF + P + HALF) * 4),
    # o and one float32 a row; rotated q and k where they are rotated.
    ("chunked", "bfloat16", "none", Q * 2 + 2 * 32 * 4),
    ("chunked", "float32", "rope", (Q + HALF + Q) * 4 + 2 * 32 * 4),
    ("sdpa-flash", "float32", "rope", (Q + HALF + Q) * 4 + 2 * 32 * 4),
]


@pytest.mark.parametrize(("mask", "pass_"), [("full", "both"), ("causal", "backward")])
@pytest.mark.parametrize(("name", "dtype", "position", "expected"), SAVED)
def test_what_is_saved_for_the_backward_pass(name, dtype, position, expected, pass_, mask):
    sizes: Any = {"heads": 2, "seq_len": 32, "kv_len": 48, "head_dim": 16}
    shape: Any = {"mask": parse_mask(mask), "position": parse_position(position)}
    case = Case(**sizes, **shape, pass_=pass_, dtype=dtype)
    ready, _ = bound(case, name)
    with watch_saved() as saved:
        ready.refresh()
        ready.call()
    if name == "sdpa-flash" and mask == "causal":
        expected += 32 * 48 * 4  # where L != S a boolean mask is passed, and made one of numbers
    assert saved.bytes == expected


@pytest.mark.parametrize(("rows", "s"), [(24, 24), (16, 40), (40, 16)])
def test_of_is_causal_attention_the_pairs_that_are_seen_are_counted_top_left(rows, s):
    q = torch.randn(1, 2, rows, 16, requires_grad=True)
    k, v = (torch.randn(1, 2, s, d, requires_grad=True) for d in (16, 16))
    pairs = int(torch.ones(rows, s).tril().sum())

    def forward() -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    def both() -> None:
        forward().sum().backward()

    assert count_flops(forward, OPAQUE_FORMULAS) == (2 * 2 * pairs * 32, "formula")
    assert count_flops(both, OPAQUE_FORMULAS) == (2 * 2 * pairs * 7 * 16, "formula")
    costs = op_costs(both, OPAQUE_FORMULAS, 1000)
    assert costs.flops.total() == 2 * 2 * pairs * 7 * 16
    on_gpu = torch.ops.aten._scaled_dot_product_efficient_attention
    given = [x.detach().to("meta") for x in (q, k, v)]
    call = partial(on_gpu, *given, None, False, 0.0, True)
    assert count_flops(call, OPAQUE_FORMULAS) == (2 * 2 * pairs * 32, "formula")


@pytest.mark.parametrize(
    ("name", "more"), [("flash", ()), ("efficient", (None, False)), ("cudnn", (None, False))]
)
def test_fused_attention_with_grouped_heads_is_priced_though_torch_refuses(name, more, monkeypatch):
    name = f"_scaled_dot_product_{name}_attention"
    q, kv = torch.empty(2, 4, 8, 16, device="meta"), torch.empty(2, 2, 12, 16, device="meta")
    repeated = kv.repeat(1, 2, 1, 1).shape
    forward = flop_counter.sdpa_flop_count(q.shape, repeated, repeated)
    backward = flop_counter.sdpa_backward_flop_count(q.shape, q.shape, repeated, repeated)
    assert OPAQUE_FORMULAS[f"{name}_backward"](q.shape, q.shape, kv.shape, kv.shape) == backward

    def before_2_12(*args: Any, **_: Any) -> int:
        raise AssertionError

    op = getattr(torch.ops.aten, name)
    monkeypatch.setitem(flop_counter.flop_registry, op, before_2_12)
    assert count_flops(lambda: op(q, kv, kv, *more), OPAQUE_FORMULAS) == (forward, "formula")
