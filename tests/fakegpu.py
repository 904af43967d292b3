"""A GPU with one stream, simulated in microseconds, in place of the parts of torch.cuda in use."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch


class FakeGpu:
    """The host issues work and goes on; the device does it in order; waiting joins the two.

    `log` has one word for each thing issued; events read multiples of `tick_us`, 0 being exact.
    The queue between them holds `QUEUE` launches. While `nodes` is a list, work goes there instead,
    to be issued by a replay: a capture. An error is sticky: after `fail` every call raises it.
    """

    QUEUE = 1024
    cycles_per_us = 1410.0

    def __init__(self, tick_us: float = 0.0) -> None:
        self.tick_us = tick_us
        self.host_us = 0.0
        self.device_us = 0.0
        self.log: list[str] = []
        self.queue: deque[float] = deque([0.0] * self.QUEUE, self.QUEUE)  # when each is done
        self.nodes: list[Callable[[float], None]] | None = None
        self.current: Any = "default"
        self.resets = 0
        self.error: RuntimeError | None = None

    def fail(self, text: str) -> None:
        """Lose the context."""
        self.error = RuntimeError(f"CUDA error: {text}")
        self.answer()

    def answer(self) -> None:
        if self.error is not None:
            raise self.error

    def launch(self, name: str, *, device_us: float, host_us: float) -> None:
        self.answer()

        def issue(cost_us: float) -> None:
            self.log.append(name)
            self.host_us = max(self.host_us, self.queue[0]) + cost_us
            self.device_us = max(self.device_us, self.host_us) + device_us
            self.queue.append(self.device_us)

        issue(host_us) if self.nodes is None else self.nodes.append(issue)

    def synchronize(self, device: Any = None) -> None:
        self.answer()
        if self.nodes is not None:
            raise RuntimeError("operation not permitted when stream is capturing")
        self.log.append("wait")
        self.host_us = max(self.host_us, self.device_us)

    def sleep(self, cycles: int) -> None:
        self.launch("spin", device_us=1.0 + cycles / self.cycles_per_us, host_us=2.0)

    def flush(self) -> None:
        self.launch("flush", device_us=40.0, host_us=2.0)

    def call(self) -> None:
        self.launch("call", device_us=50.0, host_us=3.0)


class FakeEvent:
    gpu: FakeGpu
    made = 0

    def __init__(self, enable_timing: bool = False, external: bool = False) -> None:
        assert enable_timing
        FakeEvent.made += 1
        self.external = external
        self.at_us: float | None = None

    def record(self, stream: Any = None) -> None:
        gpu = self.gpu
        gpu.answer()
        assert self.external or gpu.nodes is None, "a graph would not record it"

        def issue(cost_us: float) -> None:
            gpu.log.append("event")
            gpu.host_us += cost_us
            self.at_us = max(gpu.device_us, gpu.host_us)

        issue(1.0) if gpu.nodes is None else gpu.nodes.append(issue)

    def synchronize(self) -> None:
        self.gpu.answer()
        assert self.at_us is not None
        self.gpu.log.append("wait")
        self.gpu.host_us = max(self.gpu.host_us, self.at_us)

    def elapsed_time(self, end_event: FakeEvent) -> float:
        assert self.at_us is not None
        assert end_event.at_us is not None
        assert self.gpu.host_us >= end_event.at_us, "read before the device was done"
        tick_us = self.gpu.tick_us or 1e-6
        return (end_event.at_us // tick_us - self.at_us // tick_us) * tick_us / 1000


class FakeStream:
    def wait_stream(self, stream: Any) -> None:
        pass


class FakeGraph:
    gpu: FakeGpu

    def __init__(self) -> None:
        self.nodes: list[Callable[[float], None]] = []

    def replay(self) -> None:
        self.gpu.answer()
        self.gpu.host_us += 6.0
        for node in self.nodes:
            node(0.0)

    def pool(self) -> str:
        return "pool"

    def reset(self) -> None:
        self.gpu.resets += 1


@contextlib.contextmanager
def _graph(cuda_graph: FakeGraph, pool: Any = None, stream: Any = None) -> Iterator[None]:
    """As torch's: where the body fails, ending the capture raises again and hides the reason."""
    gpu = cuda_graph.gpu
    assert gpu.current is stream
    gpu.nodes = cuda_graph.nodes
    try:
        yield
    except RuntimeError:
        raise RuntimeError("capture was invalidated")  # noqa: B904 - torch chains it alike
    finally:
        gpu.nodes = None


def install(monkeypatch: Any, gpu: FakeGpu | None = None) -> FakeGpu:
    """Put a fake GPU in place of torch.cuda's, of the flush, and of the host's clock."""
    gpu = gpu or FakeGpu()
    FakeEvent.gpu = FakeGraph.gpu = gpu
    FakeEvent.made = 0

    @contextlib.contextmanager
    def chosen(stream: Any) -> Iterator[None]:
        before, gpu.current = gpu.current, stream
        try:
            yield
        finally:
            gpu.current = before

    default = FakeStream()
    gpu.current = default
    for name, fake in {
        "Event": FakeEvent,
        "CUDAGraph": FakeGraph,
        "Stream": FakeStream,
        "graph": _graph,
        "stream": chosen,
        "_sleep": gpu.sleep,
        "synchronize": gpu.synchronize,
        "current_stream": lambda device=None: gpu.current,
        "default_stream": lambda device=None: default,
    }.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr("attnbench.measure.clock.Flush", lambda device: gpu.flush)
    monkeypatch.setattr("attnbench.measure.clock.now_ns", lambda: round(gpu.host_us * 1000))
    return gpu
