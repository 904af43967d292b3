"""Counters of the processor and the system over some calls, by Linux's perf_event_open(2)."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import platform
import struct
import sys
from collections.abc import Callable
from itertools import repeat
from typing import Any, Literal

# Refused by the kernel's settings, not in this machine (a virtual one, say), not of this system.
Why = Literal["forbidden", "unsupported", "no-perf"]

# Type and number of each event, as in linux/perf_event.h: 0 is the processor's, 1 the kernel's own.
EVENTS = {
    "instructions": (0, 1),
    "cycles": (0, 0),
    "cache-misses": (0, 3),
    "page-faults": (1, 2),
    "context-switches": (1, 3),
    "task-clock-ns": (1, 1),
}
_CALL_NUMBER = {"x86_64": 298, "aarch64": 241}.get(platform.machine())
_ENABLE, _DISABLE, _RESET = 0x2400, 0x2401, 0x2403  # ioctls of the same header
_DISABLED, _EXCLUDE_KERNEL, _EXCLUDE_HYPERVISOR = 1, 1 << 5, 1 << 6
_WHY: dict[int, Why] = {errno.EACCES: "forbidden", errno.EPERM: "forbidden",
                            errno.ENOSYS: "no-perf"}  # fmt: skip


def count(call: Callable[[], Any], calls: int) -> dict[str, tuple[float | None, Why | None]]:
    """What one call counts, the mean of `calls`, in the thread that calls; null with the reason.

    The processor's counters are of user mode alone, which `perf_event_paranoid` up to 2 allows.
    """
    with contextlib.ExitStack() as opened:
        found = {name: _open(*event) for name, event in EVENTS.items()}
        descriptors = [value for value in found.values() if isinstance(value, int)]
        for descriptor in descriptors:
            opened.callback(os.close, descriptor)
        for request in (_RESET, _ENABLE):
            for descriptor in descriptors:
                fcntl.ioctl(descriptor, request, 0)
        for _ in repeat(None, calls):
            call()
        for descriptor in descriptors:
            fcntl.ioctl(descriptor, _DISABLE, 0)
        return {
            name: (struct.unpack("q", os.read(value, 8))[0] / calls, None)
            if isinstance(value, int)
            else (None, value)
            for name, value in found.items()
        }


def _open(kind: int, number: int) -> int | Why:
    """The descriptor of an event, or why there is none."""
    if sys.platform != "linux" or _CALL_NUMBER is None:
        return "no-perf"
    flags = _DISABLED | (0 if kind else _EXCLUDE_KERNEL | _EXCLUDE_HYPERVISOR)
    # struct perf_event_attr as it first was: type, size, config, three of sampling, flags, rest
    attributes = struct.pack("IIQQQQQIIQ", kind, 64, number, 0, 0, 0, flags, 0, 0, 0)
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = libc.syscall(_CALL_NUMBER, attributes, 0, -1, -1, 0)
    if descriptor >= 0:
        return int(descriptor)
    return _WHY.get(ctypes.get_errno(), "unsupported")
