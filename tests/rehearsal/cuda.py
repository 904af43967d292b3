"""What stands in for torch.cuda, pynvml and the host's clocks while a GPU is simulated.

Each stand-in takes what the original takes; `tests/test_rehearsal.py` compares their signatures.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
import time
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn import functional

from tests.rehearsal import device as simulated
from tests.rehearsal.device import Device
from tests.rehearsal.tensors import CUDA, Dispatch, OnGpu

UUID = "5c3a1e70-0000-4000-8000-00000000a77e"


class Gpu:
    """One simulated GPU with all that stands in front of it in this process."""

    def __init__(self, device: Device, *, scale: float = 1.0) -> None:
        self.device, self.dispatch = device, Dispatch(device, scale=scale)
        self.initialized = False
        self.compiled = itertools.count()
        self.bytes_before = 0

    def use(self) -> Device:
        """The device; whoever asks first waits for its context."""
        if not self.initialized:
            self.initialized = True
            self.device.host_us += self.device.profile.context_s * 1e6
        return self.device

    # torch.cuda, by name.

    def replacements(self) -> dict[str, Any]:
        """Functions and classes to stand where torch.cuda has those names."""
        gpu, profile = self, self.device.profile

        class Stream:
            """A queue of work."""

            queue: simulated.Stream

            def __new__(cls, device: Any = None, priority: int = 0, **kwargs: Any) -> Any:
                made = super().__new__(cls)
                made.queue = simulated.Stream()
                return made

            def wait_stream(self, stream: Any) -> None:
                self.queue.ready_us = max(self.queue.ready_us, stream.queue.ready_us)

            def synchronize(self) -> None:
                gpu.use().synchronize()

            def query(self) -> bool:
                return self.queue.ready_us <= gpu.device.host_us

            def wait_event(self, event: Any) -> None:
                self.queue.ready_us = max(self.queue.ready_us, event.mark.at_us or 0.0)

        class Event:
            """A mark in a stream."""

            timing: bool
            external: bool
            mark: simulated.Event

            def __new__(
                cls,
                enable_timing: bool = False,
                blocking: bool = False,
                interprocess: bool = False,
                external: bool = False,
            ) -> Any:
                made = super().__new__(cls)
                made.timing, made.external, made.mark = enable_timing, external, simulated.Event()
                return made

            def record(self, stream: Any = None) -> None:
                if gpu.device.current.capturing is not None and not self.external:
                    raise RuntimeError("CUDA error: a captured event cannot be timed")
                gpu.use().record(self.mark)

            def synchronize(self) -> None:
                gpu.use().wait_event(self.mark)

            def query(self) -> bool:
                return (self.mark.at_us or 0.0) <= gpu.device.host_us

            def wait(self, stream: Any = None) -> None:
                pass  # within one stream nothing is to be waited for

            def elapsed_time(self, end_event: Any) -> float:
                if not (self.timing and end_event.timing):
                    raise RuntimeError("Both events must be created with enable_timing")
                return gpu.use().elapsed_ms(self.mark, end_event.mark)

        class CUDAGraph:
            """What was captured."""

            graph: simulated.Graph

            def __new__(cls, keep_graph: bool = False) -> Any:
                made = super().__new__(cls)
                made.graph = simulated.Graph()
                return made

            def capture_begin(
                self,
                pool: Any = None,
                capture_error_mode: str = "global",
                check_input_liveness: bool = False,
            ) -> None:
                gpu.use().begin_capture(self.graph, gpu.device.current)

            def capture_end(self) -> None:
                gpu.device.end_capture(gpu.device.current)

            def replay(self) -> None:
                gpu.use().replay(self.graph)

            def reset(self) -> None:
                self.graph.nodes.clear()

            def pool(self) -> Any:
                return 0, 1

        default = Stream()
        default.queue = gpu.device.default
        streams = [default]

        @contextlib.contextmanager
        def stream(stream: Any) -> Iterator[None]:
            streams.append(stream)
            gpu.device.current = stream.queue
            try:
                yield
            finally:
                streams.pop()
                gpu.device.current = streams[-1].queue

        def memory_stats(device: Any = None) -> dict[str, Any]:
            at = gpu.device
            return {
                "requested_bytes.all.current": at.live,
                "requested_bytes.all.peak": at.peak,
                "allocated_bytes.all.current": at.live,
                "reserved_bytes.all.current": at.reserved,
                "allocation.all.allocated": at.device_allocs,
                "num_alloc_retries": at.retries,
                "num_device_alloc": at.device_allocs,
                "num_ooms": at.ooms,
            }

        def reset_peak_memory_stats(device: Any = None) -> None:
            gpu.device.peak = gpu.device.live

        def mem_get_info(device: Any = None) -> tuple[int, int]:
            return profile.memory_bytes - gpu.use().reserved, profile.memory_bytes

        def properties(device: Any = None) -> Any:
            major, minor = profile.capability
            return types.SimpleNamespace(
                name=profile.name, total_memory=profile.memory_bytes, uuid=UUID, major=major,
                minor=minor, L2_cache_size=profile.cache_bytes, multi_processor_count=100,
            )  # fmt: skip

        def sleep(cycles: int) -> None:
            if cycles < 0:  # what a rehearsal does to lose the device
                gpu.device.lost = True
            gpu.use().sleep(cycles)

        def synchronize(device: Any = None) -> None:
            gpu.use().synchronize()

        def of_the_device(value: Any) -> Callable[..., Any]:
            def function(device: Any = None) -> Any:
                return value

            return function

        return {
            "Stream": Stream,
            "Event": Event,
            "CUDAGraph": CUDAGraph,
            "stream": stream,
            "current_stream": lambda device=None: streams[-1],
            "default_stream": lambda device=None: default,
            "synchronize": synchronize,
            "memory_stats": memory_stats,
            "reset_peak_memory_stats": reset_peak_memory_stats,
            "memory_reserved": lambda device=None: gpu.device.reserved,
            "memory_allocated": lambda device=None: gpu.device.live,
            "mem_get_info": mem_get_info,
            "set_per_process_memory_fraction": lambda fraction, device=None: None,
            "empty_cache": lambda: gpu.device.empty_cache(),
            "get_device_properties": properties,
            "get_device_name": of_the_device(profile.name),
            "get_device_capability": of_the_device(profile.capability),
            "list_gpu_processes": of_the_device("GPU:0\nno processes are running"),
            "is_available": lambda: True,
            "is_initialized": lambda: gpu.initialized,
            "is_bf16_supported": lambda including_emulation=True: True,
            "is_current_stream_capturing": lambda: gpu.device.current.capturing is not None,
            "device_count": lambda: 1,
            "current_device": lambda: 0,
            "set_device": lambda device: None,
            "manual_seed_all": lambda seed: None,
            "manual_seed": lambda seed: None,
            "_sleep": sleep,
        }

    def clocks(self) -> dict[str, Callable[..., Any]]:
        """Functions of `time`: the simulated host's, which does nothing but issue and wait."""

        def seconds() -> float:
            return self.device.read_clock() / 1e6

        def nanoseconds() -> int:
            return round(self.device.read_clock() * 1000)

        def sleep(seconds: float, /) -> None:
            if _has_children():  # what it waits for takes its own time
                real_sleep(seconds)
            else:
                self.device.host_us += 1e6 * seconds

        names = ("perf_counter", "process_time", "thread_time")
        found: dict[str, Callable[..., Any]] = dict.fromkeys(names, seconds)
        found |= dict.fromkeys([f"{name}_ns" for name in names], nanoseconds)
        return found | {"clock_gettime_ns": lambda clk_id, /: nanoseconds(), "sleep": sleep}

    # Beside torch.cuda.

    def sdpa(
        self,
        query: Any,
        key: Any,
        value: Any,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Any:
        """SDPA with the backend that a GPU of this kind would take."""
        plain = functional_sdpa
        given: dict[str, Any] = {"attn_mask": attn_mask, "is_causal": is_causal, "scale": scale}
        given["enable_gqa"] = enable_gqa
        if not isinstance(query, OnGpu):
            return plain(query, key, value, **given)
        backend = self._backend(query, attn_mask, enable_gqa)
        if query.shape[-1] != value.shape[-1]:  # for which the CPU has but this one
            backend = "math"
        if backend == "math" and is_causal:  # whose mask C++ would make on the CPU
            shape = query.shape[-2], key.shape[-2]
            mask = torch.ones(*shape, dtype=torch.bool, device=CUDA).tril()
            given |= {"attn_mask": mask, "is_causal": False}
        switches = torch.backends.cuda
        before = switches.flash_sdp_enabled(), switches.math_sdp_enabled()
        switches.enable_flash_sdp(backend != "math")
        switches.enable_math_sdp(backend == "math")
        self.dispatch.fused = None if backend == "math" else backend
        if backend == "cudnn":
            plan = f"cudnn {[tuple(x.shape) for x in (query, key, value)]} {query.dtype}"
            self.device.first_use(plan, self.device.profile.plan_s)
        try:
            return plain(query, key, value, **given)
        finally:
            switches.enable_flash_sdp(before[0])
            switches.enable_math_sdp(before[1])

    def _backend(self, query: Any, attn_mask: Any, gqa: bool) -> str:
        half, switches = query.dtype in (torch.float16, torch.bfloat16), torch.backends.cuda
        masked, newest = attn_mask is not None, self.device.profile.capability >= (9, 0)
        if newest and switches.cudnn_sdp_enabled() and half and query.shape[-1] <= 128:
            return "cudnn"
        if switches.flash_sdp_enabled() and half and not masked and query.shape[-1] <= 256:
            return "flash"
        if switches.mem_efficient_sdp_enabled() and query.dtype != torch.float64 and not gqa:
            return "efficient"
        if switches.cudnn_sdp_enabled() and half and query.shape[-1] <= 128:
            return "cudnn"
        if switches.math_sdp_enabled():
            return "math"
        raise RuntimeError("No available kernel. Aborting execution.")

    def compile(self, model: Any = None, **options: Any) -> Any:
        """torch.compile: the function itself, after the time that compiling takes."""
        from torch._dynamo import utils

        number = next(self.compiled)

        def compiled(*args: Any) -> Any:
            key = f"compiled {number} {[tuple(x.shape) for x in args]}"
            if key not in self.device._seen:
                utils.counters["stats"]["unique_graphs"] += 1
                found = self._on_disk(f"{model.__qualname__} {key.partition('[')[2]}")
                self.device.first_use(key, 3.0 if found else self.device.profile.compile_s)
            return model(*args)

        return compiled

    def _on_disk(self, key: str) -> bool:
        """Whether an earlier process of this rehearsal has compiled it: inductor keeps kernels."""
        folder = os.environ.get("ATTNBENCH_REHEARSAL_LOG")
        if folder is None:
            return False
        name = "".join(x if x.isalnum() else "_" for x in key.rstrip("0123456789"))[:150]
        path = os.path.join(folder, f"inductor-{name}")
        known = os.path.exists(path)
        with open(path, "a"):
            return known

    def install(self, patch: Callable[[Any, str, Any], None]) -> None:
        """Put everything in its place; `patch(owner, name, value)` sets an attribute."""
        from torch.autograd import profiler

        from tests.rehearsal import nvml
        from tests.rehearsal.profiler import profiler_of

        for name, fake in self.replacements().items():
            patch(torch.cuda, name, fake)
        for name, clock in self.clocks().items():
            patch(time, name, clock)
        patch(torch.cuda, "_lazy_init", lambda: self.use() and None)
        patch(torch._C, "_host_emptyCache", lambda: None)
        patch(torch.version, "cuda", "12.8")
        patch(torch, "compile", self.compile)
        for name in ("tensor", "as_tensor"):  # which no dispatch mode sees
            patch(torch, name, _from_host(getattr(torch, name)))
        patch(torch.Tensor, "to", _to(torch.Tensor.to))
        patch(torch.Tensor, "cuda", lambda self, *_, **__: self.to(CUDA))
        patch(torch, "Generator", Generator)
        patch(torch, "load", _load)
        patch(torch, "save", _save)
        patch(functional, "scaled_dot_product_attention", self.sdpa)
        session, mark = profiler_of(self, profiler.profile)
        patch(profiler, "profile", session)
        patch(profiler, "record_function", mark)
        patch(nvml, "GPU", self.device)
        sys.modules["pynvml"] = nvml
        self.dispatch.__enter__()


functional_sdpa, real_sleep = functional.scaled_dot_product_attention, time.sleep
_plain_load, _plain_save = torch.load, torch.save


def _has_children() -> bool:
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def _from_host(make: Callable[..., Any]) -> Callable[..., Any]:
    def made(data: Any, *, device: Any = None, **options: Any) -> Any:
        requires_grad = options.pop("requires_grad", False)
        found = make(data, **options)
        if device is not None and torch.device(device).type == "cuda":
            found = found.to(CUDA)
        return found.requires_grad_() if requires_grad else found

    return made


def _to(plain: Callable[..., Any]) -> Callable[..., Any]:
    """`to` with the number of the GPU, which torch would ask a driver for."""

    def to(self: Any, *args: Any, **kwargs: Any) -> Any:
        args = tuple(CUDA if isinstance(x, str) and x == "cuda" else x for x in args)
        if kwargs.get("device") == "cuda":
            kwargs["device"] = CUDA
        return plain(self, *args, **kwargs)

    return to


class Generator(torch.Generator):
    """Random numbers, which are the CPU's here."""

    def __new__(cls, device: Any = "cpu") -> Any:
        return super().__new__(cls, "cpu")  # type: ignore[call-arg]


def _load(f: Any, map_location: Any = None, **kwargs: Any) -> Any:
    found = _plain_load(f, map_location="cpu", **kwargs)
    if map_location is None or torch.device(map_location).type != "cuda":
        return found
    return torch.utils._pytree.tree_map(
        lambda x: x.to(CUDA) if isinstance(x, torch.Tensor) else x, found
    )


def _save(obj: Any, f: Any, **kwargs: Any) -> None:
    host = torch.utils._pytree.tree_map(lambda x: x.cpu() if isinstance(x, OnGpu) else x, obj)
    _plain_save(host, f, **kwargs)
