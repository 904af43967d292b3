"""What the operating system says of this machine, and its allocator, without torch.

Every fact is None where it is unknown: a file that is absent, unreadable or garbled, or another
system than Linux, costs that fact and nothing else. `root` is where /proc and /sys are mounted.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import json
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import psutil

from attnbench.machine.environment import Environment

ROOT = Path("/")
T = TypeVar("T")

_CPUS = "sys/devices/system/cpu"
_HUGE_PAGES = "sys/kernel/mm/transparent_hugepage/enabled"
_DRAINED = {True: False, False: True}  # by whether it is plugged in
_CACHE_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
# Variables that change threads and their places, allocations, instructions, or the device.
_PREFIXES = ("OMP_", "MKL_", "KMP_", "GOMP_", "OPENBLAS_", "TORCH_", "MALLOC_", "LD_PRELOAD",
             "ATEN_", "ONEDNN_", "DNNL_", "GLIBC_", "CUDA_VISIBLE", "CUDA_LAUNCH_BLOCKING",
             "NVIDIA_TF32_OVERRIDE", "PYTORCH_", "CUBLAS_")  # fmt: skip

# Variables that set how many threads libraries start, most of them as they are loaded, and the one
# that lists as JSON what attnbench set of them.
POOLS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "BLIS_NUM_THREADS",
         "NUMEXPR_NUM_THREADS", "NUMBA_NUM_THREADS")  # fmt: skip
OURS = "ATTNBENCH_POOLS"


def facts(root: Path = ROOT) -> dict[str, Any]:
    """Everything below as plain JSON, by name; takes about a millisecond.

    `smt` is whether two threads share a core, `hypervisor` whether this is a virtual machine (as
    x86 tells); `thp` are transparent huge pages: `always`, `madvise` or `never`.
    """
    flags = re.search(r"^flags\s*:(.*)$", _read(root / "proc/cpuinfo") or "", re.MULTILINE)
    pages = re.search(r"\[(\w+)\]", _read(root / _HUGE_PAGES) or "")
    return {
        "cpus": os.cpu_count(),
        "affinity": affinity(),
        "load_1m": load_1m(),
        "governor": governor(root),
        "smt": {"0": False, "1": True}.get(_read(root / _CPUS / "smt/active") or ""),
        "hypervisor": "hypervisor" in flags[1].split() if flags else None,
        "cpu_quota": cpu_quota(root),
        "throttled_us": throttled_us(root),
        "thp": pages[1] if pages else None,
        "swap_used_bytes": _known(lambda: int(psutil.swap_memory().used)),
        "on_battery": _known(lambda: _DRAINED.get(psutil.sensors_battery().power_plugged)),
        "thread_env": thread_env(),
    }


def is_here(environment: Mapping[str, Any], root: Path = ROOT) -> bool:
    """Whether this may be the machine of an environment: its device and its memory; without torch.

    True where the environment does not say.
    """
    files = [root / "proc/cpuinfo", *(root / "proc/driver/nvidia/gpus").glob("*/information")]
    names, memory = " ".join(_read(file) or "" for file in files), psutil.virtual_memory().total
    gpu = environment.get("device") == "cuda"  # whose memory is its own
    known = None if gpu else environment.get("memory_bytes")
    named = str(environment.get("device_name") or "") in names
    there = Environment({"memory_bytes": known or memory})
    return named and not there.differences(Environment({"memory_bytes": memory}))


def cell_facts(root: Path = ROOT) -> dict[str, Any]:
    """What may change from one cell to the next; cheap enough to be read beside every cell."""
    found = {"load_1m": load_1m(), "governor": governor(root), "cpu_quota": cpu_quota(root)}
    cpus = affinity() or ()
    return found | ({"pinned_cpu": str(cpus[0])} if len(cpus) == 1 else {})


def affinity() -> list[int] | None:
    """The CPUs that this process may run on."""
    try:
        return sorted(os.sched_getaffinity(0))
    except (AttributeError, OSError):  # not on this system, or refused
        return None


def ranges(numbers: Sequence[int] | None) -> str | None:
    """Write CPU numbers as the kernel does: `0-3,8`."""
    if numbers is None:
        return None
    # Within a run a number less its position in the list stays the same.
    groups = itertools.groupby(enumerate(sorted(numbers)), key=lambda pair: pair[1] - pair[0])
    runs = [[number for _, number in run] for _, run in groups]
    return ",".join("-".join(map(str, dict.fromkeys((run[0], run[-1])))) for run in runs)


def thread_env() -> dict[str, str]:
    """The environment variables that are set and rule threads, allocators, instructions, device.

    Without the numbers of threads that attnbench set.
    """
    ours = pools().items()
    set_here = sorted(pair for pair in os.environ.items() if pair not in ours)
    return {name: value for name, value in set_here if name.startswith(_PREFIXES)}


def pools() -> dict[str, str]:
    """The variables of `POOLS` that attnbench set for this process, or is to set."""
    found: dict[str, str] = json.loads(os.environ.get(OURS, "{}"))
    return found


def load_1m() -> float | None:
    """Mean number of tasks that ran or wanted to, over the last minute."""
    return _known(lambda: float(psutil.getloadavg()[0]))


def governor(root: Path = ROOT) -> str | None:
    """What sets the frequency of the CPUs in the affinity, such as `performance`; or several."""
    cpus = affinity() or range(os.cpu_count() or 1)
    files = (root / _CPUS / f"cpu{cpu}/cpufreq/scaling_governor" for cpu in cpus)
    return ", ".join(sorted({text for file in files if (text := _read(file))})) or None


def cpu_quota(root: Path = ROOT) -> float | None:
    """CPUs' worth of time that the control groups grant, the least of them; None if unbounded."""
    quotas = []
    for group in _groups(root):
        both = (_read(group / "cpu.max") or "").split()
        if len(both) != 2:
            names = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
            both = [_read(group / name) or "" for name in names]
        quota, period = map(_number, both)
        if quota and period and quota > 0 and period > 0:
            quotas.append(quota / period)
    return min(quotas, default=None)


# Of a control group, in versions 2 and 1: the limit, what is in use, and how much of that is files
# that were read once, which the kernel drops before it kills.
_MEMORY_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def memory_left(root: Path = ROOT) -> int | None:
    """Bytes that the control groups still grant, the least of them; None without any."""
    left = []
    for group, names in itertools.product(_groups(root, "memory"), _MEMORY_FILES):
        limit, used = (_number(_read(group / name)) for name in names[:2])
        if limit is not None and used is not None:
            lines = (_read(group / "memory.stat") or "").splitlines()
            stat = dict(line.partition(" ")[::2] for line in lines)
            left.append(max(0, int(limit - used + (_number(stat.get(names[2])) or 0))))
    return min(left, default=None)


def throttled_us(root: Path = ROOT) -> int | None:
    """Microseconds for which the control groups have held their processes back so far: the most."""
    units_per_us = {"throttled_usec": 1, "throttled_time": 1000}
    counts = []
    for group in _groups(root):
        for line in (_read(group / "cpu.stat") or "").splitlines():
            name, _, text = line.partition(" ")
            value = _number(text)
            if name in units_per_us and value is not None:
                counts.append(int(value) // units_per_us[name])
    return max(counts, default=None)


def stolen_ticks(root: Path = ROOT) -> float | None:
    """Ticks (1/100 s) that the hypervisor gave to others so far while a CPU here had work.

    The mean over the CPUs in the affinity, so that it can be held against wall time.
    """
    rows = _tick_rows(root)
    return None if rows is None else sum(row[7] for row in rows) / len(rows)


def idlest_cpu(look_s: float = 0.1, root: Path = ROOT) -> int | None:
    """The CPU in the affinity that worked least over a short look; None of fewer than two.

    Of several the last, since interrupts mostly go to the first. It is a glance and no forecast,
    but two processes that pin themselves will not share a CPU beside an idle one.
    """
    cpus, before = affinity() or [], _tick_rows(root)
    if len(cpus) < 2 or before is None:
        return None
    time.sleep(look_s)
    after = _tick_rows(root) or before
    work = [
        sum(b) - sum(a) - (b[3] - a[3]) - (b[4] - a[4]) for a, b in zip(before, after, strict=True)
    ]
    return min(zip(work, cpus, strict=True), key=lambda found: (found[0], -found[1]))[1]


def busy_ticks(root: Path = ROOT) -> float | None:
    """Ticks (1/100 s) that the CPUs in the affinity have spent on work so far, summed.

    Whoever's work it was; not idle, not waiting for a disk, and not stolen.
    """
    rows = _tick_rows(root)
    return None if rows is None else float(sum(sum(row[:3]) + sum(row[5:7]) for row in rows))


def _tick_rows(root: Path) -> list[list[int]] | None:
    """Ticks of each CPU in the affinity (of each there is, where that is unknown), steal eighth.

    None unless every one has its row. Source: proc(5), /proc/stat.
    """
    rows: dict[str, list[int]] = {}
    for line in (_read(root / "proc/stat") or "").splitlines():
        if not line.startswith("cpu"):
            break  # what follows may be long, and is read at every round
        name, *texts = line.split()
        counts = [count for text in texts[:8] if (count := _number(text)) is not None]
        if len(counts) == 8:
            rows[name] = [int(count) for count in counts]
    rows.pop("cpu", None)  # the sum over all
    cpus = affinity()
    wanted = list(rows) if cpus is None else [f"cpu{cpu}" for cpu in cpus]
    return [rows[name] for name in wanted] if wanted and rows.keys() >= set(wanted) else None


@functools.lru_cache(maxsize=8)
def _groups(root: Path, controller: str = "cpu") -> tuple[Path, ...]:
    """The folders of this process's control groups that rule CPU time or memory, and all above.

    In a container the path may be that of the host, which is not there: what is above it is.
    """
    found: list[Path] = []
    for line in (_read(root / "proc/self/cgroup") or "").splitlines():
        controllers, _, path = line.partition(":")[2].partition(":")
        if controllers and controller not in controllers.split(","):
            continue
        for name in (controller, controllers) if controllers else ("", "unified"):
            mount = root / "sys/fs/cgroup" / name
            here = mount / path.strip("/")
            found += [here, *(above for above in here.parents if above.is_relative_to(mount))]
    return tuple(dict.fromkeys(group for group in found if os.path.isdir(group)))


def data_caches(cpu: int, root: Path = ROOT) -> dict[int, tuple[str | None, int]]:
    """By level: the CPUs that share this one's cache, as the kernel writes them, and its bytes."""
    found = {}
    for index in sorted((root / _CPUS).glob(f"cpu{cpu}/cache/index*")):
        kind, level = _read(index / "type"), _number(_read(index / "level"))
        size = _read(index / "size") or ""
        size_bytes = int(_number(size[:-1]) or 0) * _CACHE_UNITS.get(size[-1:], 0)
        if kind in ("Data", "Unified") and level and size_bytes > 0:
            found[int(level)] = _read(index / "shared_cpu_list"), size_bytes
    return found


# How glibc hands memory to torch. It returns large blocks to the system at each call, which costs
# page faults; from which size on depends on what the process freed before. The same naive attention
# took 94 ms in one process and 155 ms in the next. `settled` begins where glibc's own adjustment
# ends in a long process (mallopt(3)): blocks from 32 MiB on are returned each time. `keep`, under
# which laws of growth are judged, returns nothing, so that a step at 32 MiB is no growth.
AllocatorPolicy = Literal["settled", "keep"]
MALLOC_VARIABLES: dict[AllocatorPolicy, dict[str, str]] = {
    "settled": {
        "MALLOC_MMAP_THRESHOLD_": str(32 * 2**20),
        "MALLOC_TRIM_THRESHOLD_": str(64 * 2**20),
    },
    "keep": {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**60)},
}


def allocator_variables(environment: Mapping[str, str], policy: AllocatorPolicy) -> dict[str, str]:
    """The variables that a worker starts with; none where the user has chosen an allocator."""
    if any(name.startswith("MALLOC_") or name == "LD_PRELOAD" for name in environment):
        return {}
    return dict(MALLOC_VARIABLES[policy])


def allocator_policy() -> str:
    """In this process: `settled`, `keep`, or `as set by the user`."""
    set_here = {k: x for k, x in os.environ.items() if k.startswith(("MALLOC_", "LD_PRELOAD"))}
    found = (name for name, variables in MALLOC_VARIABLES.items() if set_here == variables)
    return next(found, "as set by the user")


def return_freed_memory() -> None:
    """Return freed memory to the system, so that one case does not take it from the next."""
    with contextlib.suppress(OSError, AttributeError):  # not glibc: it has its own ways
        ctypes.CDLL(None).malloc_trim(0)


def _known(read: Callable[[], T]) -> T | None:
    """What psutil tells; None where this system does not have it or refuses."""
    try:
        return read()
    except (AttributeError, OSError, RuntimeError, ValueError, psutil.Error):
        return None


def _read(file: Path) -> str | None:
    try:
        return file.read_text(encoding="utf-8", errors="replace").strip()
    except (OSError, ValueError):  # ValueError: a garbled path with a zero byte in it
        return None


def _number(text: str | None) -> float | None:
    """A finite number of at least −1, or None: nothing that is read here may be less."""
    try:
        value = float(text or "")
    except ValueError:
        return None
    return value if -1 <= value < float("inf") else None
