"""Cold caches: read so much other memory that nothing of the last call is left in them."""

from __future__ import annotations

import torch

from attnbench.machine import host

_TIMES_THE_CACHE = 2.0
_ASSUMED_CACHE_BYTES = 64 << 20  # where neither driver nor system tells
# Elements in a row. Long enough that the sums, the only bytes written, are few; short enough that
# CUDA's reduction gives each row to one thread block and so needs no scratch memory.
_ROW = 1 << 16


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
    found = {}
    for cpu in host.affinity() or [0]:  # where that is unknown, as if there were one such cache
        level, (shared, size) = max(host.data_caches(cpu).items(), default=(0, (None, 0)))
        if shared is not None:  # else it might be counted once for each CPU
            found[level, shared] = size
    return sum(found.values()) or None
