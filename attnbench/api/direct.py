"""Implementations called as a person would, on plain tensors."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any

import torch

from attnbench.api import AttentionCall, implementation
from attnbench.api.loader import load_built_in, load_entry_points, load_file
from attnbench.base.parameters import meant
from attnbench.errors import UsageError, in_keywords
from attnbench.schema.case import DTYPE_BYTES, Case, parse_mask
from attnbench.theory.traits import impossible

_WORDS = {"impls": "name", "impl": "file", "masks": "mask", "scales": "scale"}


@cache
def _load() -> None:
    """Load what is installed, once."""
    load_built_in()
    for failure in load_entry_points():
        warnings.warn(failure, stacklevel=3)


@in_keywords(lambda: _WORDS)
def get(name: str, *, file: str | None = None) -> Callable[..., torch.Tensor]:
    """The implementation called `name`, as `f(q, k, v, *, mask=None, causal=False, scale=None)`.

    q is (B, H, L, D), k is (B, G, S, D), v is (B, G, S, V), all of one dtype on one device; the
    result is (B, H, L, V). `mask` is a word of `--masks`: `full` (the default), `causal`,
    `window:256`, `prefix:128`, `document:64+128` (packed sequences, in turn) or `padding:300+512`
    (batch item b has the first lengths[b mod count] keys); `causal=True` is `mask="causal"`. Causal
    means bottom-right: query i sees keys 0 … i + S − L. A query that sees no key gives 0. `scale`
    multiplies the scores, 1/√D unless given; a keyword `softcap` caps them by tanh, and `sink`,
    (H,), has a logit of each query head in the softmax's sum. What an implementation prepares is
    kept for the next call with the same sizes and mask. `file` loads a file of yours first, whose
    `name` it is.

    Raises:
        UnknownNameError: no such implementation, or mask; the message names the nearest.
        UsageError: shapes that do not fit, a mask beside `causal`, or a case that the
            implementation cannot take.
    """
    _load()
    names = load_file(str(file)) if file is not None else []
    impl = implementation(next(iter(meant(name, names)), name))

    @lru_cache(maxsize=32)
    def built(case: Case, device: torch.device) -> AttentionCall:
        unfit = impl.reason_against_workload(case.workload)
        reason = impossible(case) or unfit or impl.reason_against(case)
        if reason:
            raise UsageError(f"{name} cannot take this: {reason}")
        return impl.build(case)

    @in_keywords(lambda: _WORDS)
    def call(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, mask: str | None = None,
        causal: bool = False, scale: float | None = None, softcap: float | None = None,
        sink: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        if mask is None:
            mask = "causal" if causal else "full"
        elif not isinstance(mask, str):
            raise UsageError(f"mask is a word such as 'window:256', not a {type(mask).__name__}")
        elif causal and mask != "causal":
            raise UsageError(f"take causal=True or mask={mask!r}, not both")
        case = _case(
            q, k, v, *([] if sink is None else [sink]), mask=mask, scale=scale, softcap=softcap
        )
        # Which GPU is meant by "cuda" in a case is the current one: that of the tensors.
        with torch.cuda.device(q.device) if q.is_cuda else contextlib.nullcontext():
            core: Callable[..., torch.Tensor] = built(case, q.device)
            return core(q, k, v) if sink is None else core(q, k, v, sink)

    call.__name__, call.__doc__ = name, impl.doc
    return call


def _case(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *sink: torch.Tensor, mask: str, **own: Any
) -> Case:
    tensors = (q, k, v, *sink)
    if not all(isinstance(x, torch.Tensor) and x.dim() == 4 for x in (q, k, v)):
        raise UsageError("q, k and v must be tensors of four axes: batch, heads, tokens, dims")
    if (q.shape[0], *k.shape[:3], q.shape[3]) != (k.shape[0], *v.shape[:3], k.shape[3]):
        raise UsageError(
            f"shapes do not fit together: q {tuple(q.shape)}, k {tuple(k.shape)},"
            f" v {tuple(v.shape)}; q (B,H,L,D), k (B,G,S,D), v (B,G,S,V)"
        )
    if any(not isinstance(x, torch.Tensor) or x.shape != q.shape[1:2] for x in sink):
        raise UsageError(f"sink must be a tensor of {q.shape[1]} logits, one for each query head")
    dtypes = [str(x.dtype).removeprefix("torch.") for x in tensors]
    if len(set(dtypes)) > 1 or dtypes[0] not in DTYPE_BYTES:
        raise UsageError(
            f"q, k and v must share one dtype of {', '.join(DTYPE_BYTES)}, not {', '.join(dtypes)}"
        )
    devices = [str(x.device) for x in tensors]
    if len(set(devices)) > 1:
        raise UsageError(f"q, k and v must be on one device, not {', '.join(devices)}")
    grad = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    return Case(
        pass_="both" if grad else "forward", mask=parse_mask(mask), **own,
        sinks="learned" if sink else None,
        device=q.device.type, dtype=dtypes[0],  # type: ignore[arg-type]
        batch=q.shape[0], heads=q.shape[1], kv_heads=k.shape[1], seq_len=q.shape[2],
        kv_len=k.shape[2], head_dim=q.shape[3], value_dim=v.shape[3],
    )  # fmt: skip
