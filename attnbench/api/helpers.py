"""What several kernel files need: masks, torch.compile for one case, and a first run."""

from __future__ import annotations

import itertools
import math
import os
import shutil
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from attnbench.machine.host import allocator_variables
from attnbench.schema.case import Case, Mask

_numbers = itertools.count()


def dense_mask(
    mask: Mask,
    queries: int,
    keys: int,
    device: str,
    *,
    first_query: int = 0,
    count: int | None = None,
) -> torch.Tensor:
    """Boolean (count, keys) tensor, True where query `first_query`+i of `queries` sees key j."""
    count = queries - first_query if count is None else count
    query = torch.arange(first_query, first_query + count, device=device).unsqueeze(1)
    offset = torch.arange(keys, device=device) - (query + (keys - queries))
    admitted = torch.ones_like(offset, dtype=torch.bool)
    if mask.before is not None:
        admitted &= offset >= -mask.before
    if mask.after is not None:
        admitted &= offset <= mask.after
    return admitted


def mask_for(case: Case) -> torch.Tensor | None:
    """The case's boolean (L, S) mask on its device, or None where every pair is admitted."""
    if case.unmasked:
        return None
    return dense_mask(case.mask, case.seq_len, case.kv_len, case.device)


def hidden_and_blind(case: Case) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """(L, S) mask of the pairs to hide, and (L, 1) mask of the queries that see no key.

    A row of hidden pairs alone would make softmax NaN, so blind queries are left to see every
    key; they must lose their output, and with it their gradient, afterwards.
    """
    admitted_LS = mask_for(case)
    if admitted_LS is None:
        return None, None
    blind_L1 = ~admitted_LS.any(dim=1, keepdim=True)
    return ~(admitted_LS | blind_L1), blind_L1 if bool(blind_L1.any()) else None


def patterned(case: Case, admitted: torch.Tensor) -> Callable[..., torch.Tensor]:
    """Dense softmax attention over the admitted pairs alone: a definition of a sparse method.

    `admitted` is a boolean (L, S), (H, L, S) or (B, H, L, S) on the case's device. A query that is
    admitted to no key gives 0. Softmax in float32 at least.
    """
    blind = ~admitted.any(-1, keepdim=True)

    def attend(q_BHLD: torch.Tensor, k_BGSD: torch.Tensor, v_BGSV: torch.Tensor) -> torch.Tensor:
        sharing = q_BHLD.shape[1] // k_BGSD.shape[1]
        k_BHSD, v_BHSV = (x.repeat_interleave(sharing, dim=1) for x in (k_BGSD, v_BGSV))
        scores = (q_BHLD * case.softmax_scale) @ k_BHSD.mT
        scores = scores.masked_fill(~(admitted | blind), -math.inf)
        wide = torch.promote_types(scores.dtype, torch.float32)
        weights = scores.softmax(-1, dtype=wide).masked_fill(blind, 0).to(v_BHSV.dtype)
        return weights @ v_BHSV

    return attend


def visible_blocks(case: Case, queries: int, keys: int = 1) -> Iterator[tuple[range, range]]:
    """Each block of `queries` queries with the keys that at least one of them sees.

    The keys are a range from the first to the last one seen, widened to whole blocks of `keys`;
    empty where no query of the block sees any.
    """
    for first in range(0, case.seq_len, queries):
        rows = range(first, min(first + queries, case.seq_len))
        low, _ = case.mask.span(rows[0], case.seq_len, case.kv_len)
        _, high = case.mask.span(rows[-1], case.seq_len, case.kv_len)
        yield rows, range(low // keys * keys, min(-(-high // keys) * keys, case.kv_len))


def compile_alone(
    function: Callable[..., torch.Tensor], backend: Any = "inductor"
) -> Callable[..., torch.Tensor]:
    """torch.compile for the shapes of one case; whatever would fall back to eager raises instead.

    torch keeps compiled code per code object, which all closures of one `def` share, and gives up
    after 8 shapes of one: hence a code object for each case. With donated buffers a compiled
    backward pass could not run twice on one graph, which is how it is timed: torch looks at that
    switch in the backward pass, too, so it stays off for the process.
    """
    from torch._functorch import config

    config.donated_buffer = False
    assert isinstance(function, types.FunctionType)
    code = function.__code__.replace(co_name=f"{function.__name__}_{next(_numbers)}")
    own = types.FunctionType(
        code, function.__globals__, code.co_name, function.__defaults__, function.__closure__
    )
    compiled: Callable[..., torch.Tensor] = torch.compile(
        own, fullgraph=True, dynamic=False, backend=backend
    )
    return compiled


def reason_against_compiling(case: Case) -> str | None:
    """Why inductor cannot build kernels for the case's device here, or None."""
    if case.device == "cuda":
        return None if torch.cuda.is_available() else "torch sees no CUDA device"
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        return f"torch.compile needs a C++ compiler on CPU, and there is no {compiler}"
    return None


def run_file(file: str) -> None:
    """Check and time what a kernel file registers, and exit; for `if __name__ == "__main__":`.

    In a process of its own, where they take the place of installed ones of the same names.
    """
    command = [sys.executable, "-P", "-m", "attnbench.worker.alone", str(Path(file).resolve())]
    environment = os.environ | allocator_variables(os.environ)
    ended = subprocess.run(command, env=environment, stderr=subprocess.PIPE, check=False)
    if ended.returncode not in (0, 1):  # else what is there is torch's own profiler's
        sys.stderr.buffer.write(ended.stderr)
    sys.exit(ended.returncode)
