"""What stands in for torch.cuda, pynvml and the host's clocks while a GPU is simulated."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
import torch.utils._triton
from torch.autograd import profiler
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_map_only

from attnbench.machine import host
from tests.rehearsal import device as simulated
from tests.rehearsal.device import CACHE_BYTES, CAPABILITY, MEMORY_BYTES, MHZ, NAME, Device
from tests.rehearsal.tensors import CUDA, Dispatch, OnGpu

SDPA = "scaled_dot_product_attention"
DEVICE = Device()  # of this process


class Stream(simulated.Stream):
    def wait_stream(self, stream: Any) -> None:
        self.ready_us = max(self.ready_us, stream.ready_us)


class Event(simulated.Event):
    def __init__(self, enable_timing: bool = False, external: bool = False) -> None:
        self.external = external

    def record(self, stream: Any = None) -> None:
        if DEVICE.current.capturing and not self.external:
            raise RuntimeError("CUDA error: a captured event cannot be timed")
        DEVICE.record(self)

    def synchronize(self) -> None:
        DEVICE.wait(self.at_us)

    def elapsed_time(self, end_event: Any) -> float:
        return DEVICE.elapsed_ms(self, end_event)


class CUDAGraph(simulated.Graph):
    def capture_begin(self, *args: Any, **options: Any) -> None:
        if DEVICE.current is DEVICE.default:
            raise RuntimeError("CUDA graphs must be captured on a non-default stream.")
        DEVICE.current.capturing = self

    def capture_end(self) -> None:
        DEVICE.current.capturing = None

    def replay(self) -> None:
        DEVICE.replay(self)

    def reset(self) -> None:
        self.nodes.clear()

    def pool(self) -> Any:
        return 0, 1


DEVICE.default = DEVICE.current = Stream()


@contextlib.contextmanager
def _stream(stream: Any) -> Iterator[None]:
    before, DEVICE.current = DEVICE.current, stream
    try:
        yield
    finally:
        DEVICE.current = before


def _memory_stats(device: Any = None) -> dict[str, Any]:
    return {
        "requested_bytes.all.current": DEVICE.live, "requested_bytes.all.peak": DEVICE.peak,
        "allocation.all.allocated": DEVICE.driver_calls, "num_device_alloc": DEVICE.driver_calls,
        "num_alloc_retries": 0,
    }  # fmt: skip


def _nvml() -> SimpleNamespace:
    """What pynvml answers: the GPU is cool, at its power cap, free for every process."""
    return SimpleNamespace(
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetHandleByUUID=lambda uuid: "gpu",
        nvmlDeviceGetClockInfo=lambda handle, kind: MHZ,
        nvmlDeviceGetPowerUsage=lambda handle: 350_000,
        nvmlDeviceGetTemperature=lambda handle, sensor: 55,
        nvmlDeviceGetCurrentClocksThrottleReasons=lambda handle: 0x4,
        # In millijoules, counted every 100 ms.
        nvmlDeviceGetTotalEnergyConsumption=lambda handle: int(DEVICE.host_us // 1e5 * 35_000),
        nvmlDeviceGetComputeMode=lambda handle: 0,
        nvmlSystemGetDriverVersion=lambda: "simulated",
    )


_PROPERTIES = SimpleNamespace(
    name=NAME, total_memory=MEMORY_BYTES, uuid="5c3a1e70-0000-4000-8000-00000000a77e",
    major=CAPABILITY[0], minor=CAPABILITY[1], L2_cache_size=CACHE_BYTES, multi_processor_count=132,
)  # fmt: skip
_TORCH_CUDA: dict[str, Any] = {
    "Stream": Stream,
    "Event": Event,
    "CUDAGraph": CUDAGraph,
    "stream": _stream,
    "current_stream": lambda device=None: DEVICE.current,
    "default_stream": lambda device=None: DEVICE.default,
    "synchronize": lambda device=None: DEVICE.wait(),
    "memory_stats": _memory_stats,
    "reset_peak_memory_stats": lambda device=None: setattr(DEVICE, "peak", DEVICE.live),
    "memory_reserved": lambda device=None: DEVICE.reserved,
    "memory_allocated": lambda device=None: DEVICE.live,
    "mem_get_info": lambda device=None: (MEMORY_BYTES - DEVICE.reserved, MEMORY_BYTES),
    "set_per_process_memory_fraction": lambda fraction, device=None: None,
    "empty_cache": lambda: setattr(DEVICE, "reserved", DEVICE.live),
    "get_device_properties": lambda device=None: _PROPERTIES,
    "get_device_name": lambda device=None: NAME,
    "get_device_capability": lambda device=None: CAPABILITY,
    "list_gpu_processes": lambda device=None: "GPU:0\nno processes are running",
    "is_available": lambda: True,
    "is_initialized": lambda: True,
    "is_bf16_supported": lambda including_emulation=True: True,
    "is_current_stream_capturing": lambda: DEVICE.current.capturing is not None,
    "device_count": lambda: 1,
    "current_device": lambda: 0,
    "set_device": lambda device: None,
    "manual_seed_all": lambda seed: None,
    "_sleep": lambda cycles: DEVICE.launch(simulated.KERNEL_US + cycles / MHZ),
    "_lazy_init": lambda: None,
}


def _clocks() -> dict[str, Callable[..., Any]]:
    """Functions of `time`: the simulated host's, which does nothing but issue and wait."""
    real_sleep = time.sleep

    def seconds() -> float:
        DEVICE.host_us += simulated.READ_US
        return DEVICE.host_us / 1e6

    def nanoseconds(clock: int = 0, /) -> int:
        return round(seconds() * 1e9)

    def sleep(seconds: float, /) -> None:
        try:
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            DEVICE.host_us += 1e6 * seconds
        else:  # a child, which takes its own time
            real_sleep(seconds)

    names = ("perf_counter", "process_time", "thread_time")
    found: dict[str, Callable[..., Any]] = dict.fromkeys(names, seconds)
    found |= {f"{name}_ns": nanoseconds for name in names}
    return found | {"clock_gettime_ns": nanoseconds, "sleep": sleep}


def _sdpa(plain: Callable[..., Any]) -> Callable[..., Any]:
    """SDPA with the backend that an H100 would take, computed by the CPU's flash or math kernel."""

    def sdpa(
        query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0,
        is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
    ) -> Any:  # fmt: skip
        math = False
        if isinstance(query, OnGpu):
            # The CPU's fused kernel has one head dim.
            math = _math(query, attn_mask, enable_gqa) or query.shape[-1] != value.shape[-1]
            if math and is_causal:  # C++ would make its mask on the CPU
                shape = query.shape[-2], key.shape[-2]
                attn_mask = torch.ones(*shape, dtype=torch.bool, device=CUDA).tril()
                is_causal = False
        backend = SDPBackend.MATH if math else SDPBackend.FLASH_ATTENTION
        with sdpa_kernel(backend) if isinstance(query, OnGpu) else contextlib.nullcontext():
            return plain(
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale,
                enable_gqa=enable_gqa,
            )  # fmt: skip

    return sdpa


def _math(query: Any, attn_mask: Any, gqa: bool) -> bool:
    """Whether none of the fused kernels that are enabled takes it."""
    half, on = query.dtype in (torch.float16, torch.bfloat16), torch.backends.cuda
    cudnn = on.cudnn_sdp_enabled() and half and query.shape[-1] <= 128
    flash = on.flash_sdp_enabled() and half and attn_mask is None and query.shape[-1] <= 256
    efficient = on.mem_efficient_sdp_enabled() and query.dtype != torch.float64 and not gqa
    if not (cudnn or flash or efficient or on.math_sdp_enabled()):
        raise RuntimeError("No available kernel. Aborting execution.")
    return not (cudnn or flash or efficient)


def _profile(plain: Callable[..., Any]) -> Callable[..., Any]:
    """The CPU's profiler, which sees no kernels."""
    return lambda enabled=True, *, use_device=None, **options: plain(enabled, **options)


def install() -> None:
    """Put the simulated GPU in the place of CUDA, and leave out this machine's neighbours."""
    quiet = dict.fromkeys(("stolen_ticks", "busy_ticks", "throttled_us"), lambda *_: 0.0)
    replaced: list[tuple[Any, dict[str, Any]]] = [
        (torch.cuda, _TORCH_CUDA),
        (time, _clocks()),
        (torch._C, {"_host_emptyCache": lambda: None}),
        (torch.version, {"cuda": "12.8"}),
        (torch.utils._triton, {"has_triton": lambda: False}),  # nothing is compiled for it
        (host, quiet),
        # No dispatch mode sees these two.
        (torch, {name: _from_host(getattr(torch, name)) for name in ("tensor", "as_tensor")}),
        (torch, {"Generator": lambda device="cpu", make=torch.Generator: make()}),
        (torch, {"load": _load(torch.load), "save": _save(torch.save)}),
        (torch.Tensor, {"to": _to(torch.Tensor.to), "cuda": lambda x, *_, **__: x.to(CUDA)}),
        (functional, {SDPA: _sdpa(getattr(functional, SDPA))}),
        (profiler, {"profile": _profile(profiler.profile)}),
    ]
    for owner, stand_ins in replaced:
        for name, stand_in in stand_ins.items():
            setattr(owner, name, stand_in)
    sys.modules["pynvml"] = _nvml()  # type: ignore[assignment]
    Dispatch(DEVICE).__enter__()


def _from_host(make: Callable[..., Any]) -> Callable[..., Any]:
    def made(data: Any, *, device: Any = None, **options: Any) -> Any:
        found = make(data, **options)
        gpu = device is not None and torch.device(device).type == "cuda"
        return found.to(CUDA) if gpu else found

    return made


def _to(plain: Callable[..., Any]) -> Callable[..., Any]:
    """`to` with the number of the GPU, which torch would ask a driver for."""

    def to(self: Any, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = tree_map_only(str, lambda x: CUDA if x == "cuda" else x, (args, kwargs))
        return plain(self, *args, **kwargs)

    return to


def _load(plain: Callable[..., Any]) -> Callable[..., Any]:
    def load(f: Any, map_location: Any = "cpu", **kwargs: Any) -> Any:
        found = plain(f, map_location="cpu", **kwargs)
        return tree_map_only(torch.Tensor, lambda x: x.to(map_location), found)

    return load


def _save(plain: Callable[..., Any]) -> Callable[..., Any]:
    def save(obj: Any, f: Any, **kwargs: Any) -> None:
        plain(tree_map_only(OnGpu, lambda x: x.cpu(), obj), f, **kwargs)

    return save
