"""What is done to modules in the processes of a rehearsal, right after they have been imported."""

from __future__ import annotations

import dataclasses
import mmap
import os
import struct
import sys
import time
from typing import Any

from tests.rehearsal.profiles import PROFILES

# A rehearsal's sequences are shorter by this factor, and each token costs as many of the real ones.
SCALE = 512 / 9
_sleep = time.sleep


def install(torch: Any) -> None:
    """Simulate the GPU that ATTNBENCH_REHEARSAL names, with its faults: `H100 capture throttle`."""
    from tests.rehearsal.cuda import Gpu
    from tests.rehearsal.device import Device

    name, *faults = os.environ["ATTNBENCH_REHEARSAL"].split()
    profile = PROFILES[name]
    if memory := os.environ.get("ATTNBENCH_REHEARSAL_MEMORY"):
        profile = dataclasses.replace(profile, memory_bytes=int(memory))
    device = Device(profile, frozenset(faults), hang=lambda: _sleep(1e6))
    Gpu(device, scale=_scale()).install(setattr)
    device.host_us = 1e6 * profile.import_s
    _keep_time(device, from_us=0.0)
    os.register_at_fork(after_in_child=lambda: _keep_time(device, from_us=device.host_us))


def _keep_time(device: Any, *, from_us: float) -> None:
    """Let a file of this process hold the seconds that have passed for it."""
    folder = os.environ.get("ATTNBENCH_REHEARSAL_LOG")
    if folder is None:
        return
    command = " ".join(sys.orig_argv[1:4])[:60].replace("/", "_")
    path = os.path.join(folder, f"time-{os.getpid()}-{time.time_ns()}-{command}")
    with open(path, "wb+") as file:
        file.truncate(8)
        kept = mmap.mmap(file.fileno(), 8)
    join = getattr(type(device)._join, "plain", type(device)._join)  # not what a parent keeps

    def joined(self: Any, until_us: float) -> None:
        join(self, until_us)
        kept[:8] = struct.pack("d", (self.host_us - from_us) / 1e6)

    joined.plain = join  # type: ignore[attr-defined]
    type(device)._join = joined
    kept[:8] = struct.pack("d", (device.host_us - from_us) / 1e6)


def simulate_flex(flex: Any) -> None:
    """FlexAttention without its compiler."""
    from tests.rehearsal.flex import replace_flex

    replace_flex(flex)


def simulate_triton(helpers: Any) -> None:
    """Whether there is Triton, as the profile has it; torch's compilers have looked by now."""
    import torch.utils._triton

    triton = PROFILES[os.environ["ATTNBENCH_REHEARSAL"].split()[0]].triton
    setattr(torch.utils._triton, "has_triton", lambda: triton)  # noqa: B010 - for mypy


def quiet_host(host: Any) -> None:
    """The simulated machine has no neighbours: what this one's did is none of its business."""
    for name in ("stolen_ticks", "busy_ticks", "throttled_us"):
        setattr(host, name, lambda *_: 0.0)


def shrink_presets(presets: Any) -> None:
    """Sequences of the GPU presets from 9 tokens on, which coincide with no other size."""
    if _scale() == 1:
        return
    step = 3 if "ATTNBENCH_REHEARSAL_FEW" in os.environ else 1
    for name in ("gpu", "verify-gpu"):
        preset = presets.PRESETS.get(name)
        shrunk = [
            dataclasses.replace(axes, seq_lens=tuple(map(_shorter, axes.seq_lens))[::step])
            for axes in preset.sweeps
        ]
        presets.PRESETS._items[name] = dataclasses.replace(preset, sweeps=tuple(shrunk))


def _scale() -> float:
    return float(os.environ.get("ATTNBENCH_REHEARSAL_SCALE", "1"))


def _shorter(length: int) -> int:
    return length if length <= 16 else round(length / SCALE)


def shrink_blocks(chunked: Any) -> None:
    """Blocks as much smaller as the sequences, so that a call has as many."""
    if _scale() == 1:
        return
    scores, queries, keys = chunked.MOST["cuda"]
    small = int(scores / SCALE**2), int(queries / SCALE), int(keys / SCALE)
    chunked.MOST = chunked.MOST | {"cuda": small}
