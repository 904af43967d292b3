"""A walk in which each load needs the one before: it takes the latency of where the data lies."""

import torch
import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]

_LINE = 16  # int64 in a cache line of 128 bytes


@triton.jit
def _walk(links, end, STEPS: tl.constexpr):
    at = tl.load(links)
    for _ in range(STEPS):
        at = tl.load(links + at)
    tl.store(end, at)


def walk(steps):
    """A callable that visits `steps` cache lines once each, in random order."""
    order = torch.randperm(steps)
    links = torch.zeros(steps * _LINE, dtype=torch.int64)
    links[order * _LINE] = order.roll(-1) * _LINE
    on_device = links.cuda()
    end = torch.zeros(1, dtype=torch.int64, device="cuda")
    return lambda: _walk[(1,)](on_device, end, STEPS=steps, num_warps=1, num_stages=1)
