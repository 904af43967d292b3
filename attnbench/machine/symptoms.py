"""What a machine lacks to be fit to measure, as hyperfine says it: fact, number, remedy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from attnbench.base import units
from attnbench.base.units import counted

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
        yield Finding(kind="machine", name=name, level="warning", fact=fact, remedy=remedy)


def _of_the_cpu(facts: Facts) -> Iterator[tuple[str, str, str]]:
    """Each symptom: its name, the fact with its number, the remedy."""
    threads, here = facts["threads"], len(facts["affinity"] or [])
    cpus, load, quota, steal = (facts[x] for x in ("cpus", "load_1m", "cpu_quota", "steal_share"))
    computing, on_here = counted(threads, "thread"), f"on {counted(here, 'CPU')}"
    if load is not None and cpus and load > LOAD_SHARE * cpus:
        fact = f"load {load:.2f} on {counted(cpus, 'CPU')}"
        yield "load", fact, "close what else runs: it shares the cores"
    if facts["governor"] not in (None, "performance"):
        remedy = "fix the frequency: sudo cpupower frequency-set -g performance"
        yield "governor", f"CPU frequency governor: {facts['governor']}", remedy
    if quota is not None and quota < threads:
        give = f"--threads {max(1, int(quota))}, or give the container {counted(threads, 'CPU')}"
        yield "CPU quota", f"a CPU quota of {quota:.3g} for {computing}", give
    if facts["throttled_us"]:
        fact = f"the CPU quota withheld {units.time(facts['throttled_us'])} during the self-tests"
        yield "throttling", fact, "fewer --threads, or a larger quota for the container"
    if here and threads > here:
        yield "threads", f"{computing} {on_here} of this process", f"--threads {here}"
    if facts["smt"] and here and threads > max(1, here // 2):
        fact = f"{computing} {on_here} that share cores by two (SMT)"
        yield "SMT", fact, f"--threads {max(1, here // 2)}, one a core"
    if steal is not None and steal > STEAL_SHARE:
        fact = f"the hypervisor gave {units.percent(steal)} of the CPUs' time to others"
        longer = "measure longer (--max-time), in several processes (--processes)"
        yield "steal", fact, f"{longer}, or on a quiet machine"
    if facts["hypervisor"]:
        fact = "a virtual machine: neighbours may share its cores and caches"
        remedy = "judge by interleaved ratios, not by times from different moments"
        yield "virtual machine", fact, remedy
    if facts["swap_used_bytes"]:
        fact = f"{units.size(facts['swap_used_bytes'])} of memory are swapped out"
        yield "swap", fact, "free memory, then: sudo swapoff -a && sudo swapon -a"
    if facts["thp"] == "always":
        fact = "transparent huge pages: always, so that luck decides which buffers get them"
        remedy = "echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled"
        yield "huge pages", fact, remedy
    if facts["on_battery"]:
        yield "battery", "running on battery", "plug it in"
    set_here = facts["thread_env"]
    others = [x for x in _COUNTS if x in set_here and set_here[x].strip() != str(threads)]
    if others:
        fact = f"{', '.join(f'{x}={set_here[x]}' for x in others)}, but {computing} compute"
        yield "thread variables", fact, f"unset {' '.join(others)}"


def _of_the_gpu(gpu: Facts | None) -> Iterator[tuple[str, str, str]]:
    if not gpu:
        return
    if gpu["problem"]:
        yield "NVML", gpu["problem"], "without it clocks, temperature and energy go unseen"
    if reasons := set(gpu["throttle"] or ()) - _HARMLESS:
        fact = f"the GPU's clock is held down: {', '.join(sorted(reasons))}"
        remedy = "see to its cooling and power limit: nvidia-smi -q -d PERFORMANCE"
        yield "GPU clock", fact, remedy
    degrees, others = gpu["temperature_c"], gpu["other_processes"]
    if degrees is not None and degrees >= HOT_C:
        remedy = "let it cool: it slows itself down from about here on"
        yield "GPU temperature", f"the GPU is at {degrees:.0f} °C", remedy
    if others:
        fact = f"{others} other process{'' if others == 1 else 'es'} on the GPU"
        remedy = "end them, or take another GPU: CUDA_VISIBLE_DEVICES; see nvidia-smi"
        yield "GPU shared", fact, remedy
    if gpu["compute_mode"] not in (None, "default"):
        remedy = "the gate keeps three processes on it at once: sudo nvidia-smi -c DEFAULT"
        yield "compute mode", f"the GPU's compute mode: {gpu['compute_mode']}", remedy
