"""Workload `recurrent`: x_BLE -> o_BLE by a gated recurrent network of the model's width.

The baseline that attention is said to replace: its path from the first token to the last has
n − 1 steps, none of which can begin before the one before has ended.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from attnbench.api import Implementation
from attnbench.schema.case import Case
from attnbench.theory import costs
from attnbench.worker.inputs import Draw, Tensors, empty, fill_normal
from attnbench.worker.reference import Core, PlainResult, plain_attention, statistics_share
from attnbench.worker.workloads.base import WORKLOADS, Bound, Workload, bind_pass


class _Recurrent(Workload):
    """x_BLE -> the hidden states o_BLE of a GRU without biases: O(nd²), in n steps."""

    def tensors(self, case: Case) -> Tensors:
        """x_BLE; w_ih and w_hh, (3E, E) each, gates r, z, n one under the other; and do_BLE.

        The weights begin one block of memory that ends in two biases, 3E zeros each, as cuDNN
        wants them even where a network has none: else it copies the weights in every call.
        """
        e = case.model_width
        block = empty(case, (6 * e * e + 6 * e,)).zero_()
        w_ih, w_hh = block[: 6 * e * e].view(2, 3 * e, e).unbind()
        tensors = {"x": empty(case, (case.batch, case.seq_len, e))}
        tensors |= {"w_ih": w_ih.detach(), "w_hh": w_hh.detach()}
        if case.needs_grad:
            for x in tensors.values():
                x.requires_grad_()
            tensors["do"] = empty(case, (case.batch, case.seq_len, e))
        return tensors

    def fill(self, case: Case, tensors: Tensors, draw: Draw) -> None:
        fill_normal(tensors.values(), draw.seed)
        with torch.no_grad():
            for name in ("w_ih", "w_hh"):
                tensors[name].mul_(case.model_width**-0.5)

    def bind(self, case: Case, impl: Implementation, tensors: Tensors) -> Bound:
        inputs = tensors["x"], tensors["w_ih"], tensors["w_hh"]
        return bind_pass(case.pass_, impl.build(case), inputs, tensors.get("do"), _named)

    def plain(
        self, case: Case, tensors: Tensors, *, terms: bool, core: Core = plain_attention
    ) -> PlainResult:
        """The states, and their gradients: gates of the size of 1 round, whatever they leave.

        Floors of sums scale with the squares of gradients of states, times what these multiply.
        """
        inputs, trained = [tensors[n].detach() for n in ("x", "w_ih", "w_hh")], "do" in tensors
        inputs.append(torch.zeros_like(inputs[0]))  # added to the states: its gradient is theirs
        with torch.set_grad_enabled(trained):
            o = gru_states(*(y.requires_grad_(trained) for y in inputs))
        result = PlainResult(values={"o": o.detach()}, terms={"o": torch.ones_like(o)}, most=4)
        if terms:
            result.moved["o"] = state_errors(case, [y.detach() for y in inputs[:3]], o.detach())
        if trained:
            *gradients, dh = torch.autograd.grad(o, inputs, tensors["do"])
            x, w_ih, before = *inputs[:2], torch.nn.functional.pad(o, (0, 0, 1, -1))
            squares = (dh.square() + tensors["do"].square()).repeat(1, 1, 3)
            sums = [squares @ w_ih.square()]
            sums += [torch.einsum("blf,ble->fe", squares, y.square()) for y in (x, before)]
            result.values |= _named(gradients)
            result.terms |= _named([y.detach().sqrt() for y in sums])
        return result

    def costs(self, case: Case, impl: Implementation) -> dict[str, int | None]:
        return {
            "flops_useful": (impl.useful or costs.recurrent_flops_useful)(case),
            "flops_executed": impl.flops(case) if impl.flops else None,
            "bytes_min": costs.recurrent_bytes_min(case),
            "memory_predicted_bytes": impl.workspace(case) if impl.workspace else None,
        }


def _named(gradients: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    return dict(zip(("dx", "dw_ih", "dw_hh"), gradients, strict=True))


def gru_states(x_BLE: torch.Tensor, w_ih: torch.Tensor, w_hh: torch.Tensor,
               added_BLE: torch.Tensor | None = None) -> torch.Tensor:  # fmt: skip
    """A GRU by its definition (Cho et al. 2014, arXiv:1406.1078), with the reset gate as in cuDNN.

    r = σ(W_ir·x + W_hr·h), z = σ(W_iz·x + W_hz·h), c = tanh(W_ic·x + r·(W_hc·h)), and the new
    state is (1 − z)·c + z·h. It begins with 0.
    """
    h_BE = torch.zeros_like(x_BLE[:, 0])
    states: list[torch.Tensor] = []
    for x_BE in x_BLE.unbind(dim=1):
        h_BE = _cell(x_BE @ w_ih.mT, h_BE @ w_hh.mT, h_BE)
        h_BE = h_BE if added_BLE is None else h_BE + added_BLE[:, len(states)]
        states.append(h_BE)
    return torch.stack(states, dim=1)


def _cell(of_x: torch.Tensor, of_h: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
    (r_in, z_in, c_in), (r_hidden, z_hidden, c_hidden) = of_x.chunk(3, -1), of_h.chunk(3, -1)
    reset, update = torch.sigmoid(r_in + r_hidden), torch.sigmoid(z_in + z_hidden)
    return (1 - update) * torch.tanh(c_in + reset * c_hidden) + update * h


def state_errors(case: Case, inputs: list[torch.Tensor], o_BLE: torch.Tensor) -> torch.Tensor:
    """How far rounding moves each state o_BLE, in eps of the case's dtype, in the root mean square.

    Squares add up. E products added one after the other, the longest chain that an order has, are
    off by E/24 + 1/4 of their squares: each partial sum rounds by up to eps/2, uniformly.
    """
    x_BLE, w_ih, w_hh = inputs
    before, w_squares = torch.nn.functional.pad(o_BLE, (0, 0, 1, -1)), w_hh.square().mT
    slopes = torch.func.grad(lambda *of: _cell(*of).sum(), (0, 1, 2))
    of_x, of_h, kept = map(torch.square, slopes(x_BLE @ w_ih.mT, before @ w_hh.mT, before))
    share = statistics_share(case) ** 2 * case.model_width / 24 + 1 / 4
    of_x *= share * x_BLE.square() @ w_ih.square().mT
    errors = [torch.zeros_like(o_BLE[:, 0])]
    for i in range(o_BLE.shape[1]):
        sums = (share * before[:, i].square() + errors[-1]) @ w_squares
        added = torch.stack((of_x[:, i] + of_h[:, i] * sums).chunk(3, -1)).sum(0)
        errors.append(added + kept[:, i] * errors[-1] + o_BLE[:, i].square() / 3)
    return torch.stack(errors[1:], dim=1).sqrt()


WORKLOADS.add("recurrent", _Recurrent())
