"""What this machine is: the facts that a time is worthless without."""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path
from typing import Any

import torch

from attnbench.machine import allocator, host


def environment(device: str) -> dict[str, Any]:
    """Facts about the machine and the libraries, as plain JSON; unknown is null."""
    affinity = host.affinity()
    return {
        "device": device,
        "device_name": device_name(device),
        "cores": os.cpu_count() if affinity is None else len(affinity),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "memory_bytes": _memory_bytes(device),
        "caches": _cpu_caches() if device == "cpu" else _gpu_caches(),
        # Full float32 products: TF32 is off unless someone turns it on, and the run says so.
        "matmul_precision": torch.get_float32_matmul_precision(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "interop_threads": torch.get_num_interop_threads(),
        "blas": blas(),
        "affinity": host.ranges(affinity),
        "cpu_quota": host.cpu_quota(),
        "load_1m": host.load_1m(),
        "governor": host.governor(),
        "smt": host.smt(),
        "thp": host.thp(),
        "hypervisor": host.hypervisor(),
        "thread_env": host.thread_env(),
        "allocator": allocator.policy() if device == "cpu" else None,
    }


# As torch names, in the text of its build settings, the libraries that multiply for it on CPU.
_LIBRARIES = (
    ("MKL", r"Math Kernel Library Version (\S+?)(?:-|\s)"),
    ("oneDNN", r"MKL-DNN v(\S+)"),
    ("OpenBLAS", r"OpenBLAS (\d\S*)"),
)


def blas() -> str | None:
    """What multiplies matrices on CPU and its version, or None where torch does not say."""
    text = torch.__config__.show()
    found = [
        f"{name} {match[1]}" for name, words in _LIBRARIES if (match := re.search(words, text))
    ]
    named = re.search(r"BLAS_INFO=(\w+)", text)
    return ", ".join(found) or (named and named[1]) or None


def device_name(device: str) -> str:
    """The model of the processor, CPU or GPU."""
    if device == "cuda":
        return torch.cuda.get_device_name()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine() or "unknown CPU"


def reason_against_device(device: str) -> str | None:
    """Why nothing can run on the device here, or None."""
    if device == "cuda" and not torch.cuda.is_available():
        built = (
            "torch was built without CUDA" if torch.version.cuda is None else "no GPU is visible"
        )
        return f"no CUDA device here ({built}); use --device cpu"
    return None


def free_bytes(device: str) -> int | None:
    """Memory of the device that could be allocated now, or None where unknown."""
    if device == "cuda":
        free, _ = torch.cuda.mem_get_info()
        reserved = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        return int(free) + reserved
    return available_bytes()


def available_bytes() -> int | None:
    """Host memory that could be allocated now without swapping, or None where unknown."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None


def limit_memory(share: float = 0.9) -> None:
    """Let allocations beyond the memory that is there fail, so that they cost one cell.

    Without a limit Linux promises memory it does not have, and kills a process later, perhaps
    the runner or the user's own.
    """
    available = available_bytes()
    try:
        import resource

        used = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
        if available is not None:
            limit = int(used + share * available)
            resource.setrlimit(resource.RLIMIT_DATA, (limit, resource.RLIM_INFINITY))
    except (ImportError, OSError, ValueError):
        return  # no such limit on this system: the runner still survives the worker's death


def _memory_bytes(device: str) -> int | None:
    if device == "cuda":
        return int(torch.cuda.get_device_properties(0).total_memory)
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return None


def _gpu_caches() -> dict[str, int]:
    return {"L2": int(torch.cuda.get_device_properties(0).L2_cache_size)}


def _cpu_caches() -> dict[str, int]:
    cpu = min(host.affinity() or [0])
    return {f"L{level}": size for level, (_, size) in sorted(host.data_caches(cpu).items())}
