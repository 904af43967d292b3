"""What a worker says where it cannot even begin to measure."""

from typing import Any

import pytest

from attnbench.execution.process import Settings, Worker
from attnbench.measure.clock import CaptureError
from attnbench.schema.case import Case
from attnbench.schema.messages import Measure, Ready
from attnbench.worker import __main__ as worker
from attnbench.worker.measuring import Instruments

FAILURES: dict[str, tuple[Exception, str, str]] = {
    "no memory for the flush": (MemoryError(), "oom", "set-up: out of memory"),
    "no graphs": (CaptureError("--timer graph needs more"), "unsupported", "--timer graph needs"),
    "anything else": (ValueError("no clock"), "error", "set-up: ValueError: no clock"),
}


class NoHeartbeat:
    def write(self, *place: object) -> None:
        pass


class NoStream:
    def stream(self) -> None:
        raise ValueError("no clock")


def instruments(err: Exception) -> NoStream:
    if isinstance(err, ValueError):
        return NoStream()
    raise err


@pytest.mark.parametrize(("err", "status", "reason"), FAILURES.values(), ids=FAILURES)
def test_a_worker_that_cannot_set_up_says_so_of_each_cell_and_lives(
    monkeypatch, err, status, reason
):
    monkeypatch.setattr(Instruments, "of", lambda request, device: instruments(err))
    cases = [Case(seq_len=length) for length in (8, 16, 32)]
    cells = tuple((case, ("a", "b")) for case in cases)
    emitted: list[Any] = []
    worker._serve(
        Measure(groups=(cells[:2], cells[2:]), seed=0, precision=1, min_time_s=0, max_time_s=1),
        NoHeartbeat(),  # type: ignore[arg-type]
        emitted.append,
    )
    keys = [(index, impl) for index in range(3) for impl in "ab"]
    assert [event.key for event in emitted] == keys
    for (index, _), event in zip(keys, emitted, strict=True):
        assert event.record.cell.case == cases[index]
        assert event.record.status == status
        assert event.record.reason.startswith(reason)


def test_an_idle_worker_ends_when_its_runner_closes_the_pipe():
    """As the system does for a runner that is killed: nobody else would end it."""
    with Worker(Settings(device="cpu"), "cpu") as started:
        assert isinstance(started.event(120), Ready)
        started.line.close()
        assert started.ended(30) == 0
