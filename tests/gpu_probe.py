"""What torch's SDPA does on this device where kernels have been wrong, a line each: a minute.

`python tests/gpu_probe.py [cuda|cpu]` prints FACT, then each PROBE as torch chooses (`any`) and
with each kernel forced. The numbers are the largest distances from float64; nothing here fails.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

DEVICE = sys.argv[1] if len(sys.argv) > 1 else "cuda"
KERNELS: dict[str, SDPBackend | None] = {
    "any": None, "math": SDPBackend.MATH, "flash": SDPBackend.FLASH_ATTENTION,
} | ({"efficient": SDPBackend.EFFICIENT_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
     if DEVICE == "cuda" else {})  # fmt: skip
Tensors = list[torch.Tensor]


def drawn(b: int, h: int, n: int, s: int, d: int, v: int) -> Tensors:
    """q, k and v in bfloat16, the same each time."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    shapes = (b, h, n, d), (b, h, s, d), (b, h, s, v)
    return [torch.randn(x, generator=generator, device=DEVICE).bfloat16() for x in shapes]


def off(got: Tensors, inputs: Tensors, mask: torch.Tensor | None) -> str:
    """The largest distances of o, dq, dk, dv from float64, where a row without keys gives 0."""
    q, k, v = (x.detach().double().requires_grad_() for x in inputs)
    numbers = torch.zeros(1, device=DEVICE) if mask is None else mask
    if numbers.dtype == torch.bool:
        numbers = torch.zeros(numbers.shape, device=DEVICE).masked_fill(~numbers, -math.inf)
    blind = numbers.amax(-1, keepdim=True) == -math.inf
    scores = q @ k.mT / math.sqrt(q.shape[-1]) + numbers.masked_fill(blind, 0)
    o = scores.softmax(-1).masked_fill(blind, 0) @ v
    right = [o, *torch.autograd.grad(o, (q, k, v), torch.ones_like(o))]
    names = zip(("o", "dq", "dk", "dv"), got, right, strict=False)
    return ", ".join(f"{name} {float((x - y).abs().max()):.3g}" for name, x, y in names)


def called(inputs: Tensors, mask: torch.Tensor | None, *, gradients: bool = True) -> str:
    """SDPA on these inputs, with gradients of a sum."""
    leaves = q, k, v = [x.detach().requires_grad_(gradients) for x in inputs]
    o = scaled_dot_product_attention(q, k, v, attn_mask=mask)
    got = [o.detach()]
    if gradients:
        got += torch.autograd.grad(o, leaves, torch.ones_like(o))
    return off(got, inputs, mask)


def low_scores(keys: int) -> Tensors:
    """Scores about −120 throughout: a negative log-sum-exp."""
    q, k, v = drawn(1, 2, keys, keys, 64, 64)
    q[..., 0], k[..., 0] = 1.0, -120 * math.sqrt(64)
    return [q, k, v]


def probes() -> Iterator[tuple[str, Callable[[], str]]]:
    """What is asked, and what answers."""
    for n, s, d in ((37, 37, 64), (1, 33, 72), (53, 37, 256)):
        inputs, keys = drawn(2, 4, n, s, d, d), torch.arange(s, device=DEVICE)
        mask = (keys < torch.tensor([25, 0], device=DEVICE)[:, None])[:, None, None]
        mask = mask.expand(-1, 1, n, -1).contiguous()
        numbers = torch.zeros_like(mask, dtype=torch.bfloat16).masked_fill(~mask, -math.inf)
        of = f"an item without keys, L={n} S={s} D={d}"
        yield f"{of}, a boolean mask", partial(called, inputs, mask)
        yield f"{of}, −∞ in numbers", partial(called, inputs, numbers)
    blind = torch.ones(49, 33, dtype=torch.bool, device=DEVICE).tril(33 - 49)
    yield "causal, L > S", partial(called, drawn(1, 2, 49, 33, 64, 64), blind)
    for n in (64, 192):
        full = torch.ones(n, n, dtype=torch.bool, device=DEVICE)
        yield f"scores about −120, S={n}, a mask", partial(called, low_scores(n), full)
    seen = torch.ones(37, 53, dtype=torch.bool, device=DEVICE).tril(16)
    wide = torch.zeros(37, 53, device=DEVICE).masked_fill(~seen, -math.inf)
    for name, mask in {
        "boolean": seen, "(B, 1, L, S)": seen.expand(3, 1, -1, -1), "float32": wide,
        "transposed in memory": seen.mT.contiguous().mT,
    }.items():  # fmt: skip
        yield f"mask {name}", partial(called, drawn(3, 4, 37, 53, 64, 64), mask)
    q, k, v = drawn(2, 4, 37, 37, 64, 64)
    spread = [q, *(x[:, :1].expand(-1, 4, -1, -1) for x in (k, v))]
    yield "k and v expanded over heads", partial(called, spread, None, gradients=False)


def main() -> None:
    """Print the facts and each probe as it ends."""
    facts: dict[str, Any] = {"torch": torch.__version__, "device": DEVICE}
    if DEVICE == "cuda":
        facts |= {"gpu": torch.cuda.get_device_name(), "cuda": torch.version.cuda}
        facts |= {"capability": torch.cuda.get_device_capability()}
        facts |= {"cudnn": torch.backends.cudnn.version()}
    print("FACT", json.dumps(facts), flush=True)
    for what, answer in probes():
        for kernel, backend in KERNELS.items():
            forced: AbstractContextManager[Any] = nullcontext()
            if backend is not None:
                forced = sdpa_kernel([backend])
            try:
                with forced:
                    text = answer()
            except RuntimeError as err:
                text = f"raises {' '.join(str(err).split())[:120]}"
            print(f"PROBE {kernel}: {what}: {text}", flush=True)


if __name__ == "__main__":
    main()
