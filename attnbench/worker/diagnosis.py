"""Self-tests of measuring on one device, facts of the machine, and what works on its GPU."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from attnbench.api import IMPLEMENTATIONS, reason_against_compiling
from attnbench.api.loader import load_built_in
from attnbench.machine import host
from attnbench.machine.facts import environment
from attnbench.measure import selfcheck
from attnbench.measure.clock import Flush, GraphClock, clock_for
from attnbench.measure.sampling import StoppingRule
from attnbench.measure.sensor import GpuSensor
from attnbench.measure.watch import CounterMarks
from attnbench.schema.case import Case, Device, Dtype, parse_mask

# 500 rounds, so that 5 % stand out on a busy machine, too; or 1.6 s for each of the three.
_SLOWDOWN = StoppingRule(
    precision=float("inf"), min_time_s=0.0, max_time_s=0.8, min_samples=500, patience=2.0
)


def diagnose(device: str, tell: Callable[[str], None] = lambda words: None) -> dict[str, Any]:
    """Run every self-test on `device` (`cpu` or `cuda`); takes about 16 s, on a GPU longer.

    `tell` hears in words what is tested before it is. A test that raises leaves `{"raised": …}`.
    `facts` are of the machine as the tests began; `meanwhile` is what happened beside them; `gpu`
    says what the GPU is and what works on it, None on CPU.
    """
    facts = environment(device) | host.facts()
    marks = CounterMarks.now()
    tests: dict[str, Any] = {}
    with torch.no_grad():
        for name, (words, test) in (_ON_GPU if device == "cuda" else _ON_CPU).items():
            tell(words)
            try:
                tests[name] = test(device)
            except Exception as err:  # whatever a broken driver raises costs this test alone
                tests[name] = {"raised": _in_a_line(err)}
    gpu = describe() if device == "cuda" else None  # while it is still warm
    wall_s, shares = time.perf_counter() - marks.begin, marks.shares()
    withheld = shares["throttled_share"]
    if gpu is not None:
        gpu["works"] = list(tried(tell))
    return {
        "facts": facts,
        "gpu": gpu,
        "meanwhile": {
            "wall_s": round(wall_s, 3),
            "steal_share": shares["stolen_share"],
            "throttled_us": withheld and withheld * wall_s * 1e6,
        },
        "tests": tests,
    }


def _in_a_line(err: Exception) -> str:
    return f"{type(err).__name__}: {' '.join(str(err).split())[:200]}"


def _clock(device: str) -> Any:
    warm = clock_for(device, l2="warm")
    if device == "cpu":
        return selfcheck.resolution(warm)
    # Of about 0 to 8 µs, in steps finer than most ticks.
    delays = [partial(torch.cuda._sleep, 97 * i) for i in range(128)]
    return selfcheck.resolution(warm, batches=300, delays=delays)


def _cold(device: str) -> Any:
    """Read what takes plainly longer from memory than from the cache.

    On CPU as much as torch reads in one thread: to start others would hide the difference.
    """
    if device == "cuda":
        read = walk()
    else:
        read = partial(torch.sum, torch.randn(1 << 15), 0, out=torch.empty(()))
    cold, warm = clock_for(device, l2="cold"), clock_for(device, l2="warm")
    return selfcheck.cold_and_warm(cold, warm, read)


def _planted(device: str) -> Any:
    """Repeat some microseconds of work 20 or 21 times.

    On a GPU a product that lasts longer than the host needs to issue the next. On CPU what runs in
    one thread: two threads that wait for each other on a busy machine are a matter of noise, which
    is another test.
    """
    if device == "cuda":
        unit = _product(1024, device)
    else:
        data = torch.randn(8192)
        unit = partial(torch.exp, data, out=torch.empty_like(data))
    return selfcheck.slowdown(clock_for(device, l2="warm"), unit, _SLOWDOWN)


def _noise(device: str) -> Any:
    return selfcheck.noise(clock_for(device), _product(2048 if device == "cuda" else 256, device))


def _product(width: int, device: str) -> Callable[[], Any]:
    a = torch.randn(width, width, device=device)
    return partial(torch.mm, a, a, out=torch.empty_like(a))


def _launch(device: str) -> Any:
    """Twenty kernels in a row: it takes longer to issue them than the flush lasts."""
    add = partial(torch.zeros(1, device=device).add_, 1)
    cold, warm = clock_for(device, l2="cold"), clock_for(device, l2="warm")
    return selfcheck.launch(cold, warm, lambda: [add() for _ in range(20)], Flush(device))


# What each self-test tests, and how.
_ON_CPU: dict[str, tuple[str, Callable[[str], Any]]] = {
    "clock": ("the clock", _clock),
    "cold": ("cold and warm reads", _cold),
    "planted": ("an injected slowdown", _planted),
    "noise": ("the noise, for 10 s", _noise),
}
_ON_GPU = _ON_CPU | {"launch": ("what the flush hides", _launch)}


def walk(device: str = "cuda") -> Callable[[], Any]:
    """Running sums down 1024 rows: on a GPU as many loads, each of which waits for the one before.

    torch's kernel (ScanUtils.cuh, `tensor_kernel_scan_outer_dim`) gives each column a thread, and
    the thread stores a sum before it loads the next row, as the two might overlap: a row takes a
    latency (0.32 µs of rows that lie in memory, torch issue 122170). That of memory is about twice
    that of an L2 (400 and 200 cycles on V100, A100 and H100: PMC10448217, table 3), where an H200's
    memory has nearly the bandwidth of its L2. And a thousand of them are far above a launch.
    """
    rows = torch.randn(1024, 128, device=device)  # 512 KiB, which any L2 of now holds
    return partial(torch.cumsum, rows, 0, out=torch.empty_like(rows))


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
            reason = _in_a_line(err)
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
