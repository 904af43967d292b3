"""How the C library hands memory to torch on CPU: the same way in every process, and said.

glibc takes large blocks from the system and returns them at each call, which costs page faults.
From which size on depends on what the process freed before: its thresholds rise with the blocks
that it sees. The same naive attention (n = 2048, one thread) then took 94 ms in one process and
155 ms in the next. Here they stand from the start where they end up in a long process: blocks
from 32 MiB on are returned each time, and pay for it; smaller ones stay, unless 64 MiB are free at
the top of the heap.

Whether a law of growth holds is asked with the other policy, `keep`, under which the process
returns nothing: with the settled one naive takes 8 times as long at n = 2048 as at 1024 (two heads,
one thread: 61.0 ms against 7.76 ms), as its scores then reach 32 MiB, and 4.2 times with it kept.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Mapping
from typing import Literal, get_args

Policy = Literal["settled", "keep"]
POLICIES: tuple[Policy, ...] = get_args(Policy)

# The highest values that glibc's own adjustment reaches on 64-bit systems (mallopt(3):
# DEFAULT_MMAP_THRESHOLD_MAX, and twice that). Setting either ends the adjustment.
SETTLED = {
    "MALLOC_MMAP_THRESHOLD_": str(32 * 2**20),
    "MALLOC_TRIM_THRESHOLD_": str(64 * 2**20),
}

# No block of its own for any size, and a heap that shrinks for nothing short of an exabyte.
KEPT = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**60)}
_VARIABLES: dict[Policy, dict[str, str]] = {"settled": SETTLED, "keep": KEPT}


def settings_for_workers(
    environment: Mapping[str, str], wanted: Policy = "settled"
) -> dict[str, str]:
    """The variables that a worker starts with; none where the user has chosen an allocator."""
    if any(name.startswith("MALLOC_") or name == "LD_PRELOAD" for name in environment):
        return {}
    return dict(_VARIABLES[wanted])


def policy() -> str:
    """In this process: `settled`, `keep`, or `as set by the user`."""
    set_here = {name: text for name, text in os.environ.items() if name.startswith("MALLOC_")}
    for name, variables in _VARIABLES.items():
        if set_here == variables and "LD_PRELOAD" not in os.environ:
            return name
    return "as set by the user"


def give_back() -> None:
    """Return freed memory to the system, so that one case does not take it from the next."""
    with contextlib.suppress(OSError, AttributeError):  # not glibc: it has its own ways
        ctypes.CDLL(None).malloc_trim(0)
