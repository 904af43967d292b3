"""The recurrent baseline: a GRU against its definition, its costs, and the loop it cannot avoid."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from attnbench.api import IMPLEMENTATIONS, recurrent_builder
from attnbench.schema.case import Case, parse_mask
from attnbench.worker.checking import check_item
from attnbench.worker.inputs import Draw
from attnbench.worker.reference import FLOOR_EPS, Size
from attnbench.worker.workloads import WORKLOADS
from attnbench.worker.workloads.recurrent import gru_states
from tests.conftest import probed

PASSES, DTYPES = ("forward", "backward", "both"), ("float32", "bfloat16", "float64")
pytestmark = pytest.mark.usefixtures("one_thread")


def case_of(**fields: Any) -> Case:
    small: dict[str, Any] = {"batch": 2, "seq_len": 9, "width": 16}
    return Case(workload="recurrent", mask=parse_mask("causal"), **(small | fields))


MUTANTS = {
    "gates exchanged": lambda x, w_ih, w_hh: gru_states(
        x, torch.cat([w_ih.chunk(3)[i] for i in (1, 0, 2)]), w_hh
    ),
    "no memory": lambda x, w_ih, w_hh: gru_states(x, w_ih, w_hh * 0),
    "backwards": lambda x, w_ih, w_hh: gru_states(x.flip(1), w_ih, w_hh).flip(1),
    "no gradient of w_hh": lambda x, w_ih, w_hh: gru_states(x, w_ih, w_hh.detach()),
    "a tenth of a percent": lambda x, w_ih, w_hh: gru_states(x, w_ih, w_hh) * 1.001,
}


@pytest.mark.parametrize(("pass_", "dtype"), list(zip(PASSES, DTYPES, strict=True)))
def test_gru_is_right_and_trains_where_a_gradient_is_asked_for(pass_, dtype, monkeypatch):
    # cuDNN refuses a backward after a forward that did not train; a CPU does not care.
    seen = []
    real = torch.gru

    def watched(*arguments):
        seen.append(arguments[6])
        return real(*arguments)

    monkeypatch.setattr(torch, "gru", watched)
    result = check_item(case_of(pass_=pass_, dtype=dtype, seq_len=40), "gru", {}, 0)
    assert (result["status"], result["reason"]) == ("ok", None)
    assert set(seen) == {pass_ != "forward"}


def status_of(network: Callable[..., torch.Tensor], **fields: Any) -> str:
    recurrent_builder("judged")(lambda case: network)
    try:
        return str(check_item(case_of(**fields), "judged", {}, 0)["status"])
    finally:
        IMPLEMENTATIONS.remove("judged")


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_wrong_network_is_found(mutant):
    assert status_of(MUTANTS[mutant], pass_="both") == "incorrect"


@pytest.mark.parametrize("seq_len", [1, 512])
def test_one_state_that_is_off_by_1e_5_is_found(seq_len):
    def off(x, w_ih, w_hh):
        o = gru_states(x, w_ih, w_hh)
        o[0, -1, 0] += 1e-5
        return o

    assert status_of(off, batch=1, seq_len=seq_len, width=512) == "incorrect"


class InOrder(torch.Tensor):
    """A matrix whose products add one summand after the other: no order of sums rounds more."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        x, *rest = [y.as_subclass(torch.Tensor) if isinstance(y, cls) else y for y in args]
        if function is torch.Tensor.matmul:
            return functools.reduce(torch.add, (x[:, i, None] * w for i, w in enumerate(rest[0])))
        return function(x, *rest, **kwargs or {}).as_subclass(cls)


def in_order(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
    return gru_states(x, *(w.as_subclass(InOrder) for w in weights))


@pytest.mark.parametrize("width", [16, 64, 256])
def test_sums_in_the_order_that_rounds_most_are_right_and_move_states_as_predicted(width):
    assert status_of(in_order, batch=1, seq_len=24, width=width) == "ok"
    case, workload = case_of(batch=1, seq_len=24, width=width), WORKLOADS.get("recurrent")
    tensors = workload.tensors(case)
    workload.fill(case, tensors, Draw(seed=0))
    wide = {name: x.double() for name, x in tensors.items()}
    found = workload.plain(case, wide, terms=True)
    error = in_order(*tensors.values()).double() - found.values["o"]
    off, predicted = Size.of(error / torch.finfo(torch.float32).eps), Size.of(found.moved["o"])
    assert 0.45 * predicted.rms < off.rms < predicted.rms
    assert off.max < FLOOR_EPS * predicted.max


@pytest.mark.parametrize(("pass_", "seq_len"), [("forward", 33), ("backward", 1), ("both", 9)])
def test_counted_flops_are_those_executed_and_none_is_in_vain(pass_, seq_len):
    case = case_of(pass_=pass_, seq_len=seq_len)
    metrics = probed(case, "gru")
    forward = 12 * case.batch * seq_len * 16**2
    spared = 0 if pass_ == "forward" else 6 * case.batch * 16**2  # of the state before the first
    useful = {"forward": 1, "backward": 2, "both": 3}[pass_] * forward - spared
    counts = [metrics[f"flops_{name}"] for name in ("useful", "executed", "counted")]
    assert counts == [useful] * 3
    assert metrics["flops_counted_source"] == "dispatched"
    assert metrics["flops_note"] is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.filterwarnings("error:RNN module weights")
@pytest.mark.parametrize("pass_", PASSES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_cudnn_is_right_and_takes_the_weights_as_they_lie(pass_, dtype):
    """Only cuDNN copies weights that are not in one piece, with a warning, at each call."""
    case = case_of(pass_=pass_, dtype=dtype, device="cuda", seq_len=40, width=64)
    assert check_item(case, "gru", {}, 0)["status"] == "ok"


def test_gradients_that_cancel_are_held_to_the_size_of_what_cancelled():
    case = case_of(pass_="both", dtype="float64", batch=2)
    workload = WORKLOADS.get("recurrent")
    tensors = workload.tensors(case)
    workload.fill(case, tensors, Draw(seed=0))
    with torch.no_grad():
        tensors["x"][1], tensors["do"][1] = tensors["x"][0], -tensors["do"][0]
    found = workload.plain(case, tensors, terms=True)
    for name in ("dw_ih", "dw_hh"):
        assert found.values[name].abs().max() < 1e-12
        assert found.terms[name].min() > 0.1
    allowed = workload.truth(case, tensors).allowed
    assert allowed["dw_ih"].rms > torch.finfo(torch.float64).eps * 0.1
