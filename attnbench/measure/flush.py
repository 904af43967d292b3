"""Cold caches: read so much other memory that nothing of the last call is left in them."""

from __future__ import annotations

import os
from pathlib import Path

import torch

_CPU_FOLDER = Path("/sys/devices/system/cpu")
_TIMES_THE_CACHE = 2.0
_ASSUMED_CACHE_BYTES = 64 << 20  # where neither driver nor system tells
# Elements in a row. Long enough that the sums, the only bytes written, are few; short enough that
# CUDA's reduction gives each row to one thread block and so needs no scratch memory.
_ROW = 1 << 16
_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


class Flush:
    """Evicts the last cache of a device by reading a buffer of twice its size.

    A call only reads, and writes 4 bytes for every 256 KiB it has read: hardly a dirty line is
    left to be written back while something else is timed. It allocates nothing and may be
    captured in a CUDA graph. On CUDA it is enqueued on the current stream and not waited for.
    """

    def __init__(self, device: str) -> None:
        """Allocate the buffer; what the device does not say is taken to be 64 MiB."""
        wanted = (last_cache_bytes(device) or _ASSUMED_CACHE_BYTES) * _TIMES_THE_CACHE
        rows = -(-int(wanted) // (_ROW * 4))
        # Ones, not zeros: pages of zeros nobody has written to are one and the same page on CPU,
        # and reading them would evict nothing.
        self._data = torch.ones(rows, _ROW, dtype=torch.float32, device=device)
        self._sums = torch.empty(rows, dtype=torch.float32, device=device)

    def __call__(self) -> None:
        """Read all of the buffer."""
        torch.sum(self._data, dim=1, out=self._sums)

    @property
    def nbytes(self) -> int:
        """Size of what a call reads."""
        return self._data.nbytes


def last_cache_bytes(device: str) -> int | None:
    """Bytes of the L2 of the GPU, or of the last caches of the cores we may use; None if unknown.

    Cores in groups have a last cache for each group, which are added up.
    """
    if device == "cuda":
        return int(torch.cuda.get_device_properties(0).L2_cache_size) or None
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else {0}
    found = {name: size for core in cores for name, size in [_last_cache(core)] if size}
    return sum(found.values()) or None


def _last_cache(core: int) -> tuple[str, int | None]:
    """The last cache of a core: a name that cores sharing it agree on, and its bytes."""
    best: tuple[int, str, int] | None = None
    for index in sorted(_CPU_FOLDER.glob(f"cpu{core}/cache/index*")):
        try:
            kind, level, size, shared = (
                (index / name).read_text().strip()
                for name in ("type", "level", "size", "shared_cpu_list")
            )
            number = int(size[:-1]) * _UNITS[size[-1]]
        except (OSError, ValueError, KeyError, IndexError):
            continue
        if kind != "Instruction" and (best is None or int(level) > best[0]):
            best = int(level), shared, number
    return ("", None) if best is None else (f"L{best[0]} {best[1]}", best[2])
