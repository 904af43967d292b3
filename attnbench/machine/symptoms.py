"""What a machine lacks to be fit to measure, as hyperfine says it: fact, number, remedy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from attnbench.base import units

Level = Literal["ok", "warning", "fail"]
Facts = dict[str, Any]

LOAD_SHARE = 0.25  # of the machine's CPUs
STEAL_SHARE = 0.01
HOT_C = 85.0  # data centre GPUs slow themselves down from about here on
# Normal states: nothing runs, or what runs is limited by power, as at saturation it must be.
_HARMLESS = {"idle", "power cap"}
_COUNTS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One fact with its number, judged. `limit` is what it was held against, for self-tests.

    `kind` is `test` for what was tried out and `machine` for what was read; `remedy` says what to
    do about a warning or a failure, None where all is well.
    """

    kind: Literal["test", "machine"]
    name: str
    level: Level
    fact: str
    limit: str | None = None
    remedy: str | None = None


def symptoms(diagnosis: dict[str, Any]) -> Iterator[Finding]:
    """The warnings about a machine; what is unknown warns of nothing.

    `diagnosis` holds `facts` (of the machine), `meanwhile` (of the time of the self-tests) and
    `gpu` (None on CPU), as `attnbench.worker.diagnosis` writes them.
    """
    known = diagnosis["facts"] | diagnosis["meanwhile"]
    for name, fact, remedy in (*_of_the_cpu(known), *_of_the_gpu(diagnosis["gpu"])):
        if fact:
            yield Finding(kind="machine", name=name, level="warning", fact=fact, remedy=remedy)


def _of_the_cpu(facts: Facts) -> Iterator[tuple[str, str | None, str]]:
    """Each possible symptom: its name, the fact with its number if there is one, the remedy."""
    threads, here = facts["threads"], len(facts["affinity"] or [])
    cpus, load, quota, steal = (facts[x] for x in ("cpus", "load_1m", "cpu_quota", "steal_share"))
    yield (
        "load",
        f"load {load:.2f} on {_count(cpus, 'CPU')}"
        if load is not None and cpus and load > LOAD_SHARE * cpus
        else None,
        "close what else runs: it takes cores in turns",
    )
    yield (
        "governor",
        f"CPU frequency governor: {facts['governor']}"
        if facts["governor"] not in (None, "performance")
        else None,
        "fix the frequency: sudo cpupower frequency-set -g performance",
    )
    limited = quota is not None and quota < threads
    yield (
        "CPU quota",
        f"a CPU quota of {quota:.3g} for {_count(threads, 'thread')}" if limited else None,
        f"--threads {max(1, int(quota or 1))}, or give the container {_count(threads, 'CPU')}",
    )
    withheld = facts["throttled_us"]
    yield (
        "throttling",
        f"the CPU quota withheld {units.time(withheld)} during the self-tests"
        if withheld
        else None,
        "fewer --threads, or a larger quota for the container",
    )
    crowded = here and threads > here
    yield (
        "threads",
        f"{_count(threads, 'thread')} on {_count(here, 'CPU')} of this process"
        if crowded
        else None,
        f"--threads {here}",
    )
    paired = facts["smt"] and here and threads > max(1, here // 2)
    yield (
        "SMT",
        f"{_count(threads, 'thread')} on {_count(here, 'CPU')} that share cores by two (SMT)"
        if paired
        else None,
        f"--threads {max(1, here // 2)}, one a core",
    )
    yield (
        "steal",
        f"the hypervisor gave {units.percent(steal)} of the CPUs' time to others"
        if steal is not None and steal > STEAL_SHARE
        else None,
        "measure longer (--max-time), in several processes (--processes), or on a quiet machine",
    )
    yield (
        "virtual machine",
        "a virtual machine: neighbours may share its cores and caches"
        if facts["hypervisor"]
        else None,
        "judge by interleaved ratios, not by times from different moments",
    )
    swapped = facts["swap_used_bytes"]
    yield (
        "swap",
        f"{units.size(swapped)} of memory are swapped out" if swapped else None,
        "free memory, then: sudo swapoff -a && sudo swapon -a",
    )
    yield (
        "huge pages",
        "transparent huge pages: always, so that luck decides which buffers get them"
        if facts["thp"] == "always"
        else None,
        "echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled",
    )
    yield "battery", "running on battery" if facts["on_battery"] else None, "plug it in"
    set_here = facts["thread_env"]
    others = [x for x in _COUNTS if x in set_here and set_here[x].strip() != str(threads)]
    yield (
        "thread variables",
        f"{', '.join(f'{x}={set_here[x]}' for x in others)},"
        f" but {_count(threads, 'thread')} compute"
        if others
        else None,
        f"unset {' '.join(others)}",
    )


def _of_the_gpu(gpu: Facts | None) -> Iterator[tuple[str, str | None, str]]:
    if not gpu:
        return
    yield "NVML", gpu["problem"], "without it clocks, heat and energy go unseen"
    reasons = set(gpu["throttle"] or ()) - _HARMLESS
    yield (
        "GPU clock",
        f"the GPU's clock is held down: {', '.join(sorted(reasons))}" if reasons else None,
        "see to its cooling and power limit: nvidia-smi -q -d PERFORMANCE",
    )
    degrees, others = gpu["temperature_c"], gpu["other_processes"]
    yield (
        "GPU temperature",
        f"the GPU is at {degrees:.0f} °C" if degrees is not None and degrees >= HOT_C else None,
        "let it cool: it slows itself down from about here on",
    )
    yield (
        "GPU shared",
        f"{others} other process{'' if others == 1 else 'es'} on the GPU" if others else None,
        "end them, or take another GPU: CUDA_VISIBLE_DEVICES; see nvidia-smi",
    )


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
