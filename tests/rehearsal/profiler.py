"""torch's profiler on a simulated GPU: the kernels that ran in a session."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch

LOST = 8  # more kernels at the head of each further session of a process, as pytorch #192021 has it


class KinetoEvent:
    """An event as kineto gives them."""

    def __init__(self, name: str, begin_us: float, end_us: float, number: int, where: str) -> None:
        self._name, self._begin_us, self._end_us, self._number = name, begin_us, end_us, number
        self._where = getattr(torch.autograd.DeviceType, where)  # type: ignore[attr-defined]

    def name(self) -> str:
        """The kernel's, or that of the call that launched it."""
        return self._name

    def start_ns(self) -> int:
        """Nanoseconds."""
        return round(self._begin_us * 1000)

    def end_ns(self) -> int:
        """Nanoseconds."""
        return round(self._end_us * 1000)

    def device_type(self) -> Any:
        """Where it was."""
        return self._where

    def correlation_id(self) -> int:
        """The same for a kernel and its launch."""
        return self._number

    def is_user_annotation(self) -> bool:
        """Never: those are of the host."""
        return False


def profiler_of(gpu: Any, plain: Any) -> tuple[Any, Any]:
    """What stands in for torch.autograd.profiler's `profile` and `record_function`.

    Without use_device="cuda" it is the plain one.
    """
    sessions, marks = 0, list[tuple[str, float, float]]()

    class Profile:
        """A session. From the first one on launches are slower, as CUPTI stays attached."""

        def __new__(cls, enabled: bool = True, *, use_device: Any = None, **options: Any) -> Any:
            if use_device != "cuda":
                return plain(enabled, use_device=use_device, **options)
            return super().__new__(cls)

        def __enter__(self) -> Any:
            nonlocal sessions
            sessions += 1
            gpu.device.attached = True
            gpu.device.kernels.clear()
            gpu.device.waits.clear()
            gpu.dispatch.ops.clear()
            marks.clear()
            return self

        def __exit__(self, *_: object) -> None:
            ran = list(gpu.device.kernels)
            kept = ran[LOST * (sessions - 1) :]
            events = [KinetoEvent(k.name, k.begin_us, k.end_us, k.launch, "CUDA") for k in kept]
            events += [
                KinetoEvent("cudaLaunchKernel", k.issued_us, k.issued_us + 1, k.launch, "CPU")
                for k in ran
            ]
            events += [
                KinetoEvent("cudaStreamSynchronize", begin_us, begin_us + 1, 0, "CPU")
                for begin_us in gpu.device.waits
            ]
            events += [KinetoEvent(*mark, 0, "CPU") for mark in marks]
            ops = list(gpu.dispatch.ops)
            self.kineto_results = SimpleNamespace(
                events=lambda: events,
                experimental_event_tree=lambda: [_op(name) for name in ops],
            )

    @contextlib.contextmanager
    def record_function(name: str, args: str | None = None) -> Iterator[None]:
        begin = gpu.device.host_us
        yield
        marks.append((name, begin, gpu.device.host_us))
        gpu.device.host_us += 1  # what follows begins later

    return Profile, record_function


def _op(name: str) -> Any:
    return SimpleNamespace(name=name, tag=SimpleNamespace(name="TorchOp"), children=[])
