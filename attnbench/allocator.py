"""How the C library hands memory to torch on CPU: the same way in every process, and said.

glibc takes large blocks from the system and returns them at each call, which costs page faults.
From which size on depends on what the process freed before: its thresholds rise with the blocks
that it sees. The same naive attention (n = 2048, one thread) then took 94 ms in one process and
155 ms in the next. Here they stand from the start where they end up in a long process: blocks
from 32 MiB on are returned each time, and pay for it; smaller ones stay, unless 64 MiB are free at
the top of the heap.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Mapping

# The highest values that glibc's own adjustment reaches on 64-bit systems (mallopt(3):
# DEFAULT_MMAP_THRESHOLD_MAX, and twice that). Setting either ends the adjustment.
SETTLED = {
    "MALLOC_MMAP_THRESHOLD_": str(32 * 2**20),
    "MALLOC_TRIM_THRESHOLD_": str(64 * 2**20),
}


def settings_for_workers(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that a worker starts with; none where the user has chosen an allocator."""
    if any(name.startswith("MALLOC_") or name == "LD_PRELOAD" for name in environment):
        return {}
    return dict(SETTLED)


def policy() -> str:
    """In this process: `settled`, or `as set by the user`."""
    set_here = {name: os.environ.get(name) for name in SETTLED}
    return "settled" if set_here == SETTLED else "as set by the user"


def give_back() -> None:
    """Return freed memory to the system, so that one case does not take it from the next."""
    with contextlib.suppress(OSError, AttributeError):  # not glibc: it has its own ways
        ctypes.CDLL(None).malloc_trim(0)
