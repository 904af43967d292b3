"""The first call of an implementation for a case, judged by the rule of `attnbench check`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from attnbench.api import AttentionCall, Implementation, dense_mask
from attnbench.capturing.masks import BLOCKED
from attnbench.schema.case import Case
from attnbench.worker.drawn import Affordable, draw_part, drawn_truth
from attnbench.worker.inputs import Draw
from attnbench.worker.reference import judge
from attnbench.worker.workloads import WORKLOADS

_PAIRS = (64 << 20) // 8  # scores in float64 that are looked at
_ROWS = 32  # of a head, at least


def mask_differs(case: Case, mask: torch.Tensor, keys: int) -> str | None:
    """Why a mask, broadcastable to (B, H, L, keys), is not that of the case, or None.

    Keys past those of the case must be hidden from all.
    """
    admitted = mask if mask.dtype is torch.bool else mask > BLOCKED
    admitted = admitted.expand(*admitted.shape[:-1], keys)
    wanted = dense_mask(case.mask, case.seq_len, case.kv_len, str(mask.device), batch=case.batch)
    if admitted[..., case.kv_len :].any():
        return "keys past the mask's that some queries see"
    if not (admitted[..., : case.kv_len] == wanted).all():
        return "a mask that no case has"
    if mask.dtype is not torch.bool and not wanted.any(-1).all():
        return "rows without keys behind an additive mask, which torch averages"
    return None


def fault(
    impl: Implementation, call: AttentionCall, case: Case, qkv: tuple[torch.Tensor, ...], o: Any
) -> str | None:
    """What is wrong with `o`, or with gradients of the same call, in a sentence; None if right.

    Judged are as many rows and heads as have 64 MiB of scores: the last row, those with fewest
    keys, and others at random. Gradients are of whole heads, one at least.
    """
    tensors = {name: x.detach() for name, x in zip("qkv", qkv, strict=True)}
    outputs = {"o": o}
    if case.needs_grad:
        tensors["do"], gradients = _gradients(call, case, qkv)
        outputs |= gradients
    with torch.no_grad():
        if impl.definition is not None:
            truth = WORKLOADS.get("attention").truth(case, tensors, impl)
        else:
            slices, wide = case.batch * case.kv_heads, case.heads // case.kv_heads * case.kv_len
            rows = max(_ROWS, _PAIRS // wide // slices)
            rows = case.seq_len if case.needs_grad else min(case.seq_len, rows)
            slices = min(slices, max(1, _PAIRS // wide // rows))
            sizes = Affordable(rows=rows, slices=slices, share="", smaller=case)
            truth = drawn_truth(tensors, draw_part(case, sizes, Draw(needles=True)))
        values = {name: x for name, x in truth.values.items() if name in outputs}
        return judge(outputs, replace(truth, values=values), case.dtype).reason


def _gradients(
    call: AttentionCall, case: Case, qkv: tuple[torch.Tensor, ...]
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """do, drawn, and the gradients of a call on the same q, k and v; the program's graph stays."""
    inputs = [x.detach().requires_grad_(x.requires_grad) for x in qkv]
    generator = torch.Generator(qkv[0].device).manual_seed(0)
    shape = (*qkv[0].shape[:3], case.value_dim)
    do = torch.randn(shape, generator=generator, device=qkv[0].device).to(qkv[0].dtype)
    kept = torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)  # not a checkpoint's
    with torch.enable_grad(), kept, torch.random.fork_rng(devices=[]):
        o = call(*inputs)
        wanted = [x for x in inputs if x.requires_grad]
        found = iter(torch.autograd.grad(o, wanted, do))
    names = zip("qkv", inputs, strict=True)
    return do, {f"d{name}": next(found) for name, x in names if x.requires_grad}
