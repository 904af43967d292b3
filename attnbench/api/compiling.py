"""torch.compile for one case at a time, where a fall to eager is an error."""

from __future__ import annotations

import itertools
import os
import shutil
import types
from collections.abc import Callable
from typing import Any

import torch

from attnbench.schema.case import Case

_numbers = itertools.count()


def compile_alone(
    function: types.FunctionType, backend: Any = "inductor"
) -> Callable[..., torch.Tensor]:
    """torch.compile for the shapes of one case; whatever would fall back to eager raises instead.

    fullgraph turns both graph breaks and the limit on recompilations into errors. With donated
    buffers a compiled backward pass writes over what the forward pass saved, and torch refuses to
    run it twice on one graph, which is how it is timed. torch looks at that switch when it compiles
    and again whenever the backward pass runs, so it stays off for the process.
    """
    from torch._functorch import config

    config.donated_buffer = False
    compiled: Callable[..., torch.Tensor] = torch.compile(
        _with_own_code(function), fullgraph=True, dynamic=False, backend=backend
    )
    return compiled


def _with_own_code(function: types.FunctionType) -> types.FunctionType:
    """The same function over a code object of its own.

    torch keeps compiled code per code object, which all closures of one `def` share, and gives
    up after 8 shapes of one. A code object for each case keeps every case at its first.
    """
    code = function.__code__.replace(co_name=f"{function.__name__}_{next(_numbers)}")
    return types.FunctionType(
        code, function.__globals__, code.co_name, function.__defaults__, function.__closure__
    )


def reason_against_compiling(case: Case) -> str | None:
    """Why inductor cannot build kernels for the case's device here, or None."""
    if case.device == "cuda":
        return None if torch.cuda.is_available() else "torch sees no CUDA device"
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        return f"torch.compile needs a C++ compiler on CPU, and there is no {compiler}"
    return None
