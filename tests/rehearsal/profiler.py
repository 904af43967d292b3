"""torch's profiler on the simulated GPU: the kernels, launches and waits of a session."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch

from tests.rehearsal.device import Device


def _event(name: str, begin_us: float, end_us: float, number: int, where: str) -> Any:
    return SimpleNamespace(
        name=lambda: name,
        start_ns=lambda: round(begin_us * 1000),
        end_ns=lambda: round(end_us * 1000),
        device_type=lambda: getattr(torch.autograd.DeviceType, where),  # type: ignore[attr-defined]
        correlation_id=lambda: number,
        is_user_annotation=lambda: False,
    )


def profiler_of(device: Device, ops: Any, plain: Any) -> tuple[Any, Any]:
    """`profile` and `record_function` of torch.autograd.profiler; without a GPU the plain one."""
    marks: list[Any] = []

    class Profile:
        def __new__(cls, enabled: bool = True, *, use_device: Any = None, **options: Any) -> Any:
            if use_device != "cuda":
                return plain(enabled, use_device=use_device, **options)
            return super().__new__(cls)

        def __enter__(self) -> Any:
            for seen in (device.kernels, device.waits, ops, marks):
                seen.clear()
            return self

        def __exit__(self, *_: object) -> None:
            events = list(marks)
            for k in device.kernels:
                events.append(_event(k.name, k.begin_us, k.end_us, k.launch, "CUDA"))
                at_us = k.issued_us
                events.append(_event("cudaLaunchKernel", at_us, at_us + 1, k.launch, "CPU"))
            events += [_event("cudaStreamSynchronize", at, at + 1, 0, "CPU") for at in device.waits]
            tag = SimpleNamespace(name="TorchOp")
            tree = [SimpleNamespace(name=name, tag=tag, children=[]) for name in ops]
            self.kineto_results = SimpleNamespace(
                events=lambda: events, experimental_event_tree=lambda: tree
            )

    @contextlib.contextmanager
    def record_function(name: str, args: str | None = None) -> Iterator[None]:
        begin_us = device.host_us
        yield
        marks.append(_event(name, begin_us, device.host_us, 0, "CPU"))
        device.host_us += 1  # what follows begins later

    return Profile, record_function
