"""A callable captured in a CUDA graph, with the events that time it inside."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import repeat
from typing import Any

import torch

Call = Callable[[], Any]

_WARM_UPS = 3  # as torch's documentation on graphs does


class CaptureError(RuntimeError):
    """The callable, or this torch, cannot be timed with `--timer graph`; says why in one line."""


@dataclass(frozen=True, kw_only=True)
class Captured:
    """A callable in a graph, `calls` times over, and once in a graph of its own.

    `pairs` are the events around the timed stretches of the first graph. `alone` holds one call
    without events and is None where it was not asked for. Keeps the callable alive: the graphs
    read its tensors.
    """

    call: Call
    calls: int
    graph: torch.cuda.CUDAGraph
    alone: torch.cuda.CUDAGraph | None
    pairs: tuple[tuple[torch.cuda.Event, torch.cuda.Event], ...]

    def stream_us(self) -> float:
        """Stream time of the last replay per call; the replay must have ended."""
        stream_ms = sum(float(begin.elapsed_time(end)) for begin, end in self.pairs)
        return stream_ms * 1000 / self.calls

    def reset(self) -> None:
        """Free the graphs and the memory they hold."""
        self.graph.reset()
        if self.alone is not None:
            self.alone.reset()


def capture(call: Call, calls: int, *, flush: Call | None, alone: bool) -> Captured:
    """Capture `calls` calls: with a `flush`, each behind it and between events of its own.

    Without one, a single pair of events stands around all of them, as in a batch that is timed
    eagerly. `alone` asks for the graph of one call, too.

    Captured is what the call enqueues on the current stream. It must therefore not wait for the
    device, copy to pageable host memory, decide by values on the device (`.item()`, `nonzero`),
    or enqueue on a stream that does not wait for this one. Autograd's backward runs on the stream
    of its forward: both in one call are captured, and so is a backward pass whose forward ran on
    the stream that captures, which is the current one unless that is the default stream. Of a
    forward on the default stream the backward cannot be captured.

    Raises CaptureError; out of memory, and what the call raises without a capture, pass.
    """
    outer = stream = torch.cuda.current_stream()
    if outer == torch.cuda.default_stream():  # which cannot capture
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(outer)
    failure: BaseException | None = None
    # Around all that follows: a capture that fails leaves torch on the capture's stream.
    with torch.cuda.stream(stream):
        for _ in repeat(None, _WARM_UPS):
            if flush is not None:
                flush()
            call()
        torch.cuda.synchronize()
        together = calls if flush is None else 1  # calls between two events
        pairs = [(external_event(), external_event()) for _ in range(calls // together)]
        graph, single = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph() if alone else None
        try:
            with torch.cuda.graph(graph, stream=stream):
                for begin, end in pairs:
                    if flush is not None:
                        flush()
                    begin.record()
                    for _ in repeat(None, together):
                        call()
                    end.record()
            if single is not None:  # never replayed at the same time: they may share memory
                with torch.cuda.graph(single, pool=graph.pool(), stream=stream):
                    call()
        except Exception as err:
            failure = _explained(err)
    if failure is not None:  # raised here, it does not hold on to the frames of its cause
        raise failure
    outer.wait_stream(stream)
    return Captured(call=call, calls=calls, graph=graph, alone=single, pairs=tuple(pairs))


def external_event() -> torch.cuda.Event:
    """An event that a graph records anew at each replay; CaptureError where torch has none."""
    try:
        return torch.cuda.Event(enable_timing=True, external=True)  # type: ignore[no-untyped-call]
    except TypeError:
        raise CaptureError(
            f"--timer graph needs events that a graph can record (Event(external=True)), which "
            f"torch {torch.__version__} does not have; use --timer events"
        ) from None


def _explained(err: BaseException) -> BaseException:
    """The error to raise for a capture that failed: named after what broke it first."""
    while err.__context__ is not None:  # ending a broken capture raises again
        err = err.__context__
    if isinstance(err, torch.cuda.OutOfMemoryError):
        return err.with_traceback(None)
    text = " ".join(str(err).split())[:200]
    return CaptureError(
        f"--timer graph: the call cannot be captured in a CUDA graph "
        f"({type(err).__name__}: {text}); use --timer events"
    )
