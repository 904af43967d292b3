"""The facts about machine and libraries without which a time means nothing."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import resource
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
import torch

from attnbench.base.units import parse_memory
from attnbench.machine import host

_OF_THE_HOST = ("cpu_quota", "load_1m", "governor", "smt", "thp", "hypervisor", "thread_env")


def environment(device: str) -> dict[str, Any]:
    """Facts about the machine and the libraries, as plain JSON; unknown is null."""
    affinity = host.affinity()
    if device == "cuda":
        gpu = torch.cuda.get_device_properties(0)
        memory_bytes, caches = int(gpu.total_memory), {"L2": int(gpu.L2_cache_size)}
    else:
        memory_bytes = int(psutil.virtual_memory().total)
        data_caches = sorted(host.data_caches(min(affinity or [0])).items())
        caches = {f"L{level}": size for level, (_, size) in data_caches}
    system = host.facts()
    return {
        "device": device,
        "device_name": device_name(device),
        "cores": os.cpu_count() if affinity is None else len(affinity),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        **(gpu_libraries() if device == "cuda" else {}),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "memory_bytes": memory_bytes,
        "caches": caches,
        # Full float32 products: TF32 is off unless someone turns it on, and the run says so.
        "matmul_precision": torch.get_float32_matmul_precision(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "interop_threads": torch.get_num_interop_threads(),
        "blas": blas(),
        "affinity": host.ranges(affinity),
        **{name: system[name] for name in _OF_THE_HOST},
        "allocator": host.allocator_policy() if device == "cpu" else None,
    }


def gpu_libraries() -> dict[str, str | None]:
    """Versions of what computes on a GPU; cuBLAS and Triton are asked of their packages."""
    cudnn, found = torch.backends.cudnn.version(), {}  # type: ignore[no-untyped-call]
    for distribution in metadata.distributions():
        name = (distribution.name or "").replace("_", "-").lower()
        if match := re.fullmatch(r"(?:nvidia-)?(cublas|triton|pytorch-triton)(?:-cu\d+)?", name):
            found[match[1].removeprefix("pytorch-")] = distribution.version
    if cudnn is not None:  # 91002 is 9.10.2, and 8907 was 8.9.7
        major = 10_000 if cudnn >= 90_000 else 1000
        cudnn = f"{cudnn // major}.{cudnn % major // 100}.{cudnn % 100}"
    return {"cudnn": cudnn, "cublas": found.get("cublas"), "triton": found.get("triton")}


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


def last_cache_bytes(device: str) -> int | None:
    """Bytes of the L2 of the GPU, or of the last caches of the cores we may use; None if unknown.

    Caches of several groups of cores are added up.
    """
    if device == "cuda":
        return int(torch.cuda.get_device_properties(0).L2_cache_size) or None
    found = {}
    for cpu in host.affinity() or [0]:  # where that is unknown, as if there were one such cache
        level, (shared, size) = max(host.data_caches(cpu).items(), default=(0, (None, 0)))
        if shared is not None:  # else it might be counted once for each CPU
            found[level, shared] = size
    return sum(found.values()) or None


def reason_against_device(device: str) -> str | None:
    """Why nothing can run on the device here, or None."""
    if device != "cuda" or torch.cuda.is_available():
        return None
    built = "no GPU is visible" if torch.version.cuda else "torch was built without CUDA"
    return f"no CUDA device here ({built}); use --device cpu"


_gpu_limit_bytes: list[int] = []  # what this process may take of the GPU's memory, if limited


def free_bytes(device: str) -> int | None:
    """Memory of the device that this process could allocate now, or None where unknown.

    The least of what is free, what the control groups leave, and what its own limit does.
    """
    if device == "cuda":
        free, _ = torch.cuda.mem_get_info()
        found = [int(free) + torch.cuda.memory_reserved(), *_gpu_limit_bytes]
        return max(0, min(found) - torch.cuda.memory_allocated())
    found = [] if (left := host.memory_left()) is None else [left]
    with contextlib.suppress(AttributeError, OSError, ValueError, KeyError):
        found.append(int(psutil.virtual_memory().available))
        limit, _ = resource.getrlimit(resource.RLIMIT_DATA)
        used = int(psutil.Process().memory_info().data)
        found += [limit - used] if limit != resource.RLIM_INFINITY else []
    return max(0, min(found)) if found else None


def limit_memory(limit: str = "90%", device: str = "cpu") -> None:
    """Let allocations of this process beyond a limit fail, so that they cost one cell.

    From now on it may take so much, or that share of what is free. Without a limit Linux promises
    memory it does not have, and kills a process later. Of a GPU the caching allocator is limited;
    CUDA reserves more addresses than the host has memory.
    """
    wanted, free = parse_memory(limit, "--memory-limit"), free_bytes(device)
    if not wanted or free is None:
        return
    # No such limit on this system: the runner still survives the worker's death.
    with contextlib.suppress(AttributeError, OSError, ValueError):
        most = int(wanted * free if wanted <= 1 else wanted)
        if device == "cuda":
            total = torch.cuda.get_device_properties(0).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, most / total))
            _gpu_limit_bytes[:] = [most]
        else:
            most += psutil.Process().memory_info().data
            resource.setrlimit(resource.RLIMIT_DATA, (most, resource.RLIM_INFINITY))
