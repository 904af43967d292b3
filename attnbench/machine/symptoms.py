"""What is amiss with a machine, in hyperfine's manner: the fact, its number, the remedy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from attnbench.base import units

Level = Literal["ok", "warning", "fail"]
Facts = dict[str, Any]
Symptom = tuple[str, str]  # the fact with its number, and the remedy

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
    known = diagnosis["facts"] | diagnosis["meanwhile"] | {"gpu": diagnosis["gpu"]}
    for name, rule in _RULES.items():
        symptom = rule(known)
        if symptom is not None:
            fact, remedy = symptom
            yield Finding(kind="machine", name=name, level="warning", fact=fact, remedy=remedy)


def _load(facts: Facts) -> Symptom | None:
    load, cpus = facts["load_1m"], facts["cpus"]
    if load is None or not cpus or load <= LOAD_SHARE * cpus:
        return None
    return f"load {load:.2f} on {_cpus(cpus)}", "close what else runs: it takes cores in turns"


def _governor(facts: Facts) -> Symptom | None:
    if facts["governor"] in (None, "performance"):
        return None
    return (
        f"CPU frequency governor: {facts['governor']}",
        "fix the frequency: sudo cpupower frequency-set -g performance",
    )


def _quota(facts: Facts) -> Symptom | None:
    quota, threads = facts["cpu_quota"], facts["threads"]
    if quota is None or quota >= threads:
        return None
    return (
        f"a CPU quota of {quota:.3g} for {_threads(threads)}",
        f"--threads {max(1, int(quota))}, or give the container {_cpus(threads)}",
    )


def _throttled(facts: Facts) -> Symptom | None:
    if not facts["throttled_us"]:
        return None
    return (
        f"the CPU quota withheld {units.time(facts['throttled_us'])} during the self-tests",
        "fewer --threads, or a larger quota for the container",
    )


def _threads_fit(facts: Facts) -> Symptom | None:
    threads, here = facts["threads"], len(facts["affinity"] or [])
    if not here or threads <= here:
        return None
    return f"{_threads(threads)} on {_cpus(here)} of this process", f"--threads {here}"


def _smt(facts: Facts) -> Symptom | None:
    threads, here = facts["threads"], len(facts["affinity"] or [])
    if not facts["smt"] or not here or threads <= max(1, here // 2):
        return None
    return (
        f"{_threads(threads)} on {_cpus(here)} that share cores by two (SMT)",
        f"--threads {max(1, here // 2)}, one a core",
    )


def _steal(facts: Facts) -> Symptom | None:
    share = facts["steal_share"]
    if share is None or share <= STEAL_SHARE:
        return None
    return (
        f"the hypervisor gave {units.percent(share)} of the CPUs' time to others",
        "measure longer (--max-time), in several processes (--processes), or on a quiet machine",
    )


def _virtual(facts: Facts) -> Symptom | None:
    if not facts["hypervisor"]:
        return None
    return (
        "a virtual machine: neighbours may share its cores and caches",
        "judge by interleaved ratios, not by times from different moments",
    )


def _swap(facts: Facts) -> Symptom | None:
    if not facts["swap_used_bytes"]:
        return None
    return (
        f"{units.size(facts['swap_used_bytes'])} of memory are swapped out",
        "free memory, then: sudo swapoff -a && sudo swapon -a",
    )


def _thp(facts: Facts) -> Symptom | None:
    if facts["thp"] != "always":
        return None
    return (
        "transparent huge pages: always, so that luck decides which buffers get them",
        "echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled",
    )


def _battery(facts: Facts) -> Symptom | None:
    return ("running on battery", "plug it in") if facts["on_battery"] else None


def _variables(facts: Facts) -> Symptom | None:
    threads, variables = facts["threads"], facts["thread_env"]
    others = [
        f"{name}={variables[name]}"
        for name in _COUNTS
        if name in variables and variables[name].strip() != str(threads)
    ]
    if not others:
        return None
    names = " ".join(text.partition("=")[0] for text in others)
    return f"{', '.join(others)}, but {_threads(threads)} compute", f"unset {names}"


def _nvml(facts: Facts) -> Symptom | None:
    if not facts["gpu"] or not facts["gpu"]["problem"]:
        return None
    return facts["gpu"]["problem"], "without it clocks, heat and energy go unseen"


def _throttle(facts: Facts) -> Symptom | None:
    reasons = set((facts["gpu"] and facts["gpu"]["throttle"]) or ()) - _HARMLESS
    if not reasons:
        return None
    return (
        f"the GPU's clock is held down: {', '.join(sorted(reasons))}",
        "see to its cooling and power limit: nvidia-smi -q -d PERFORMANCE",
    )


def _hot(facts: Facts) -> Symptom | None:
    degrees = facts["gpu"] and facts["gpu"]["temperature_c"]
    if degrees is None or degrees < HOT_C:
        return None
    return f"the GPU is at {degrees:.0f} °C", "let it cool: it slows itself down from about here on"


def _shared(facts: Facts) -> Symptom | None:
    count = facts["gpu"] and facts["gpu"]["other_processes"]
    if not count:
        return None
    return (
        f"{count} other process{'' if count == 1 else 'es'} on the GPU",
        "end them, or take another GPU: CUDA_VISIBLE_DEVICES; see nvidia-smi",
    )


def _cpus(count: int) -> str:
    return f"{count} CPU{'' if count == 1 else 's'}"


def _threads(count: int) -> str:
    return f"{count} thread{'' if count == 1 else 's'}"


_RULES: dict[str, Callable[[Facts], Symptom | None]] = {
    "load": _load,
    "governor": _governor,
    "CPU quota": _quota,
    "throttling": _throttled,
    "threads": _threads_fit,
    "SMT": _smt,
    "steal": _steal,
    "virtual machine": _virtual,
    "swap": _swap,
    "huge pages": _thp,
    "battery": _battery,
    "thread variables": _variables,
    "NVML": _nvml,
    "GPU clock": _throttle,
    "GPU temperature": _hot,
    "GPU shared": _shared,
}
