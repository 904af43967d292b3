"""The profiler's events as self times, memory and costs: fabricated events, then torch's own."""

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from attnbench.base.sample import ALONE
from attnbench.measure import ops
from attnbench.measure.opcosts import op_costs
from attnbench.measure.probes import CALL
from tests.test_profiling import Event as KinetoEvent


def node(name: str, us: float, *children: Any, begin_us: float = 0.0) -> Any:
    """An event of the tree, `us` long."""
    return SimpleNamespace(
        name=name, tag=SimpleNamespace(name="TorchOp"), children=list(children),
        duration_time_ns=round(1000 * us), start_time_ns=round(1000 * begin_us),
    )  # fmt: skip


def allocation(size: int, address: int, at_us: float, device: str = "cpu") -> Any:
    """A change of memory in the tree; below 0 a free."""
    typed = SimpleNamespace(ptr=address, alloc_size=size, device=torch.device(device))
    return SimpleNamespace(
        name="[memory]", tag=SimpleNamespace(name="Allocation"), children=[], typed=(None, typed),
        duration_time_ns=0, start_time_ns=round(1000 * at_us),
    )  # fmt: skip


def test_what_an_op_calls_inside_of_its_kernel_belongs_to_it():
    scalar = node("aten::to", 4, node("aten::_to_copy", 3, node("aten::copy_", 2)))
    found = ops.cpu_call(node(CALL, 20, node("aten::mul", 15, scalar)))
    assert found.self_us == {"aten::mul": 15}


def test_scopes_and_the_engine_of_autograd_are_gaps_and_compiled_code_is_a_row():
    inside = node("autograd::engine::evaluate_function: BmmBackward0", 30,
                  node("BmmBackward0", 25, node("aten::bmm", 20)))  # fmt: skip
    compiled = node("Torch-Compiled Region: 0/0", 40, node("aten::mm", 10))
    found = ops.cpu_call(node(CALL, 100, node("my scope", 35, inside), compiled))
    assert found.self_us == {"aten::bmm": 20, "aten::mm": 10, ops.COMPILED: 30}
    assert found.gaps_us == 40


@pytest.mark.parametrize(
    ("name", "composite"),
    [("matmul", True), ("contiguous", True), ("softmax", True), ("reshape", True),
     ("scaled_dot_product_attention", True), ("bmm", False), ("clone", False), ("copy_", False),
     ("_softmax", False), ("view", False), ("sum", False), ("mul", False)],
)  # fmt: skip
def test_composite_ops_are_told_from_those_that_are_handed_to_kernels(name, composite):
    assert (f"aten::{name}" in ops.composite_ops()) == composite


def seen(total_us: float, alone: float = 1.0, **self_us: float) -> ops.CallSeen:
    return ops.CallSeen(
        total_us=total_us, counts=Counter(dict.fromkeys(self_us, 1)), self_us=self_us,
        gaps_us=0.0, alone=alone,
    )  # fmt: skip


def test_other_work_that_hits_one_op_now_and_another_then_is_in_none():
    found = ops.quietest([seen(40, 0.75, a=30, b=10), seen(50, 0.6, a=10, b=40)])
    assert found.self_us == {"a": 10, "b": 10}
    assert found.total_us == pytest.approx(30 / ALONE)


def test_of_ops_longer_than_the_slices_of_other_work_the_processor_time_counts():
    found = ops.quietest([seen(200, 0.5, a=160, b=40), seen(220, 0.5, a=170, b=50)])
    assert found.total_us == pytest.approx(100 / ALONE)
    assert found.self_us == {"a": pytest.approx(80 / ALONE), "b": pytest.approx(20 / ALONE)}


def launches(*rows: tuple[str, float, float, float]) -> list[Any]:
    """Events of one marked call: kernels with the times of their launch, begin and end, in µs."""
    events = [KinetoEvent(CALL, (0, 1_000_000))]
    for number, (name, launch, begin, end) in enumerate(rows, start=1):
        at = round(1000 * launch)
        events.append(KinetoEvent("cudaLaunchKernel", (at, at + 500), id_=number))
        span = (round(1000 * begin), round(1000 * end))
        events.append(KinetoEvent(name, span, gpu=True, id_=number))
    return events


def test_kernels_of_a_call_have_self_times_gaps_and_the_time_from_their_launch():
    events = [
        *launches(("gemm", 10, 20, 50), ("softmax", 12, 50, 60), ("gemm", 70, 80, 100)),
        KinetoEvent("aten::bmm", (9_000, 11_000)),
        KinetoEvent("aten::copy_", (9_500, 10_500)),  # inside: the outer op is who asked
        KinetoEvent("aten::matmul", (8_000, 12_500)),  # composite: not who launches
        KinetoEvent("aten::_softmax", (11_500, 13_000)),
        KinetoEvent("spin", (1, 2), gpu=True, id_=99),  # launched outside of the call
    ]
    (call,) = ops.gpu_calls(events) or []
    assert call.self_us == {"gemm": 50, "softmax": 10}
    assert (call.total_us, call.gaps_us, call.gaps) == (80, 20, 1)
    assert call.counts == {"gemm": 2, "softmax": 1}
    assert call.launches_us == (10, 38, 10)
    assert call.launched_by == {"gemm": {"aten::bmm", ""}, "softmax": {"aten::_softmax"}}


def test_where_a_kernel_was_lost_there_are_no_calls_rather_than_wrong_ones():
    whole = launches(("gemm", 10, 20, 50), ("softmax", 12, 50, 60))
    assert ops.gpu_calls(whole) is not None
    assert ops.gpu_calls(whole[:-1]) is None
    assert ops.gpu_calls([KinetoEvent(CALL, (0, 10))]) is None


def test_allocations_belong_to_the_op_whose_kernel_made_them_and_frees_of_older_memory_to_nobody():
    clone = node("aten::clone", 9, node("aten::empty_like", 3, allocation(400, 2, 22)))
    call = node(
        CALL, 90,
        allocation(-64, 7, 21),  # from before the call
        node("aten::contiguous", 10, clone),
        node("aten::bmm", 40, allocation(1000, 3, 30), allocation(999, 4, 31, "cuda")),
        allocation(-400, 2, 80),
        begin_us=20,
    )  # fmt: skip
    assert ops.memory_changes(call, "cpu") == [
        (2.0, 400, "aten::clone"), (10.0, 1000, "aten::bmm"), (60.0, -400, None),
    ]  # fmt: skip
    assert ops.memory_changes(call, "cuda") == [(11.0, 999, "aten::bmm")]


@pytest.mark.parametrize(("call", "op", "bytes_"), [
    (lambda x: x.transpose(0, 1).contiguous(), "clone", 2 * 800),  # read and written
    (lambda x: x.mul_(2.0), "mul_", 2 * 800),
    (lambda x: x.copy_(torch.ones(20)), "copy_", 800 + 80),  # what was there is not read
    (lambda x: x + torch.ones(1, 20).expand(10, 20), "add", 800 + 80 + 800),
    (lambda x: x + x, "add", 2 * 800),  # the same tensor is read once
    (lambda x: torch.sum(x, 0, out=torch.empty(20)), "sum", 800 + 80),
])  # fmt: skip
def test_bytes_are_those_that_an_op_must_read_and_write(call, op, bytes_):
    assert op_costs(lambda: call(torch.ones(10, 20)), {}, 100).bytes[f"aten::{op}"] == bytes_
