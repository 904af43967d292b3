"""What a GPU is, and what works on it: each thing is tried once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from attnbench.api import IMPLEMENTATIONS, reason_against_compiling
from attnbench.api.loader import load_built_in
from attnbench.measure.clock import GraphClock
from attnbench.measure.sensor import GpuSensor
from attnbench.schema.case import Case, Device, Dtype, parse_mask


def describe() -> dict[str, Any]:
    """What torch and NVML say of the GPU now, and who else uses it; unknown is null.

    `problem` is what NVML does not answer; `energy_counter` whether it counts joules.
    """
    gpu, (free, total) = torch.cuda.get_device_properties(0), torch.cuda.mem_get_info()
    sensor = GpuSensor.open()
    reading, mode, energy_mj = sensor.read(), sensor.compute_mode(), sensor.energy_mj()
    facts = {
        "capability": f"{gpu.major}.{gpu.minor}",
        "processors": gpu.multi_processor_count,
        "l2_bytes": gpu.L2_cache_size,
        "memory_free_bytes": free,
        "memory_total_bytes": total,
        "driver": sensor.driver(),
        "cudnn": torch.backends.cudnn.version(),  # type: ignore[no-untyped-call]
        "problem": sensor.problem,
        "sm_mhz": reading and reading.sm_mhz,
        "power_w": reading and reading.power_w,
        "temperature_c": reading and reading.temperature_c,
        "throttle": sorted(reading.throttle) if reading and reading.throttle is not None else None,
        "other_processes": _other_processes(),
        "compute_mode": mode,
        "mig": None if mode is None else sensor.instance,
        "energy_counter": energy_mj is not None,
    }
    sensor.close()
    return facts


def _other_processes() -> int | None:
    """Processes on the GPU beside this one, which is among those listed, if any is."""
    try:
        listed = torch.cuda.list_gpu_processes()
    except Exception:  # NVML again: absent, denied, or a driver that refuses
        return None
    if "no processes" in listed:
        return 0
    count = sum(line.startswith("process") for line in listed.splitlines())
    return count - 1 if count else None  # anything else says why it cannot tell


def tried(tell: Callable[[str], None] = lambda name: None) -> Iterator[dict[str, Any]]:
    """Whether each thing works: its name, its dtype if that matters, why it does not or None.

    `tell` hears the name of each before it is tried.
    """
    load_built_in()
    for (name, dtype), trial in _trials("cuda").items():
        tell(f"{name}, {dtype}" if dtype else name)
        try:
            reason = trial()
        except Exception as err:  # whatever a library raises that does not fit this GPU
            reason = f"{type(err).__name__}: {' '.join(str(err).split())[:200]}"
        yield {"name": name, "dtype": dtype, "works": reason is None, "reason": reason}


def _trials(device: Device) -> dict[tuple[str, Dtype | None], Callable[[], str | None]]:
    """By name and dtype, what returns why it does not work, or None, or raises."""
    trials: dict[tuple[str, Dtype | None], Callable[[], str | None]] = {}
    for name in ("sdpa-flash", "sdpa-efficient", "sdpa-cudnn", "sdpa-math"):
        for dtype in ("bfloat16", "float16", "float32"):
            trials[name, dtype] = partial(runs, name, dtype, device)
    compiling = partial(reason_against_compiling, Case(device=device))
    trials["Triton and a C compiler", None] = compiling
    trials["flex", "bfloat16"] = partial(runs, "flex", "bfloat16", device)
    # The last: a capture that is refused leaves a process that is good for nothing.
    return trials | {("CUDA graphs", None): _captures}


def runs(name: str, dtype: Dtype, device: Device) -> str | None:
    """Why an implementation cannot take small causal attention, or None where it has run."""
    case = Case(device=device, dtype=dtype, seq_len=256, mask=parse_mask("causal"))
    implementation = IMPLEMENTATIONS.get(name)
    if reason := implementation.reason_against(case):
        return reason
    q_BHLD = torch.randn(
        1, case.heads, 256, case.head_dim, device=device, dtype=getattr(torch, dtype)
    )
    o_BHLV = implementation.build(case)(q_BHLD, q_BHLD, q_BHLD)
    return None if o_BHLV.isfinite().all() else "its result is not finite"


def _captures() -> None:
    """Replay a matmul; raises CaptureError."""
    a = torch.ones(64, 64, device="cuda")
    GraphClock("warm").batch(partial(torch.mm, a, a), 2)
