"""torch's gated recurrent unit: the recurrent baseline."""

import torch

from attnbench.api import AttentionCall, Case, recurrent_builder


def flops(case: Case) -> int:
    """Two products of (3E, E) a token; backward twice that, less the gradient of the zero state."""
    product = 6 * case.batch * case.model_width**2
    forward, backward = 2 * case.seq_len * product, (4 * case.seq_len - 1) * product
    return {"forward": forward, "backward": backward, "both": forward + backward}[case.pass_]


def workspace(case: Case) -> int | None:
    """Bytes beyond the states: forward in float32 and float64 on a CPU; None elsewhere.

    The products of all tokens with w_ih (3n) and the zero state stay throughout. A step adds five
    to the states before it; at the end all states are there twice, the second time as the output.
    """
    if case.device != "cpu" or case.element_bytes < 4 or case.needs_grad:
        return None
    n = case.seq_len
    return case.batch * case.model_width * case.element_bytes * (3 * n + 1 + max(4, n))


@recurrent_builder("gru", time="n d^2", memory="O(n d + d^2)", flops=flops, workspace=workspace)
def build_gru(case: Case) -> AttentionCall:
    """torch.gru: cuDNN on a GPU, a loop on a CPU.

    In bfloat16 it is a loop on a GPU, too, before torch 2.10 and cuDNN 9.13 (pytorch PR #164411).
    """
    training = case.needs_grad  # without it cuDNN keeps nothing that a backward could start from

    def gru(x_BLE: torch.Tensor, w_ih: torch.Tensor, w_hh: torch.Tensor, /) -> torch.Tensor:
        start_1BE = x_BLE.new_zeros(1, x_BLE.shape[0], x_BLE.shape[2])
        weights = (w_ih, w_hh)
        o_BLE, _ = torch.gru(x_BLE, start_1BE, weights, False, 1, 0.0, training, False, True)
        return o_BLE

    return gru
