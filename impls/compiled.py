"""torch.compile of the plain softmax(QKᵀ·scale)V."""

from __future__ import annotations

import itertools
import os
import shutil
import types
from collections.abc import Callable
from typing import Any

import torch

from attnbench.api import Case, attention_builder, mask_for

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

_numbers = itertools.count()


def fresh(function: types.FunctionType) -> types.FunctionType:
    """The same function over a code object of its own.

    torch keeps compiled code per code object, which all closures of one `def` share, and gives
    up after 8 shapes of one. A code object for each case keeps every case at its first.
    """
    code = function.__code__.replace(co_name=f"{function.__name__}_{next(_numbers)}")
    return types.FunctionType(
        code, function.__globals__, code.co_name, function.__defaults__, function.__closure__
    )


def compile_alone(function: Any, backend: Any = "inductor") -> Attend:
    """torch.compile for these shapes alone; whatever would fall back to eager raises instead.

    fullgraph turns both graph breaks and the limit on recompilations into errors. With donated
    buffers a compiled backward pass writes over what the forward pass saved, and torch refuses to
    run it twice on one graph, which is how it is timed. torch looks at that switch when it compiles
    and again whenever the backward pass runs, so it stays off for the process.
    """
    from torch._functorch import config

    config.donated_buffer = False
    return torch.compile(fresh(function), fullgraph=True, dynamic=False, backend=backend)


def no_toolchain(case: Case) -> str | None:
    """Why inductor cannot build kernels for the case's device here, or None."""
    if case.device == "cuda":
        return None if torch.cuda.is_available() else "torch sees no CUDA device"
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        return f"torch.compile needs a C++ compiler on CPU, and there is no {compiler}"
    return None


def plain_attention(case: Case) -> Any:
    """softmax(QKᵀ·scale)V over one case's mask, as one would write it to be compiled."""
    scale, sharing = case.softmax_scale, case.heads // case.kv_heads
    wide = torch.promote_types(getattr(torch, case.dtype), torch.float32)
    hidden_LS, blind_L1 = hidden_and_blind(case)

    def naive(q_BHLD: torch.Tensor, k_BGSD: torch.Tensor, v_BGSV: torch.Tensor) -> torch.Tensor:
        k_BHSD = k_BGSD.repeat_interleave(sharing, dim=1) if sharing > 1 else k_BGSD
        v_BHSV = v_BGSV.repeat_interleave(sharing, dim=1) if sharing > 1 else v_BGSV
        scores_BHLS = (q_BHLD * scale) @ k_BHSD.mT
        if hidden_LS is not None:
            scores_BHLS = scores_BHLS.masked_fill(hidden_LS, float("-inf"))
        weights_BHLS = torch.softmax(scores_BHLS, dim=-1, dtype=wide).to(v_BHSV.dtype)
        o_BHLV = weights_BHLS @ v_BHSV
        return o_BHLV if blind_L1 is None else o_BHLV.masked_fill(blind_L1, 0)

    return naive


def hidden_and_blind(case: Case) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """(L, S) mask of the pairs to hide, and (L, 1) mask of the queries that see no key.

    Blind queries see every key in the first, so that softmax has no empty row to turn into NaN.
    """
    admitted_LS = mask_for(case)
    if admitted_LS is None:
        return None, None
    blind_L1 = ~admitted_LS.any(dim=1, keepdim=True)
    return ~(admitted_LS | blind_L1), blind_L1 if bool(blind_L1.any()) else None


def flops(case: Case) -> int:
    """FLOPs executed: the full square whatever the mask, and no scores recomputed backward."""
    forward = case.head_dim + case.value_dim
    width = {"forward": forward, "backward": 2 * forward, "both": 3 * forward}[case.pass_]
    return 2 * case.batch * case.heads * case.seq_len * case.kv_len * width


@attention_builder(
    "naive-compiled",
    time="n^2 d",
    memory="n^2",
    masks=("full", "causal", "window"),
    compiles=True,
    flops=flops,
    supports=no_toolchain,
)
def build_naive_compiled(case: Case) -> Attend:
    """torch.compile of softmax(QKᵀ·scale)V, compiled afresh for every case."""
    return compile_alone(plain_attention(case))
