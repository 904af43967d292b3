"""Workers: how they begin and end, and what they say where they cannot even begin to measure."""

import contextlib
import os
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from attnbench.base.sample import Batch
from attnbench.errors import WorkerError
from attnbench.execution.process import CAN_FORK, Server, Settings, Worker
from attnbench.execution.runner import LocalRunner
from attnbench.machine import state
from attnbench.measure.clock import CaptureError, HostClock
from attnbench.measure.sampling import StoppingRule
from attnbench.measure.watch import Watch
from attnbench.schema.case import Case
from attnbench.schema.messages import (
    NOBODY,
    AskReasons,
    Check,
    CheckItem,
    Describe,
    Done,
    Heartbeat,
    Measure,
    Ready,
)  # fmt: skip
from attnbench.worker import reference, serving
from attnbench.worker.measuring import Instruments
from attnbench.worker.trial import classify
from attnbench.worker.workloads import WORKLOADS
from tests import fakegpu
from tests.conftest import lives

FAILURES: dict[str, tuple[Exception, str, str]] = {
    "no memory for the flush": (MemoryError(), "skipped", "set-up: out of memory"),
    "no graphs": (CaptureError("--timer graph needs more"), "unsupported", "--timer graph needs"),
    "anything else": (ValueError("no clock"), "error", "set-up: ValueError: no clock"),
}


class NoHeartbeat:
    def write(self, *place: object) -> None:
        pass


class NoStream:
    race = None

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
    monkeypatch.setattr(state, "idlest_cpu", lambda: None)  # this process is not to be pinned
    cases = [Case(seq_len=length) for length in (8, 16, 32)]
    cells = tuple((case, ("a", "b")) for case in cases)
    emitted: list[Any] = []
    serving._serve(
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


@pytest.mark.parametrize("sticky", [True, False])
def test_an_item_of_check_that_lost_the_device_is_the_last_of_its_process(monkeypatch, sticky):
    gpu = fakegpu.install(monkeypatch)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)

    def check_item(*_: object) -> dict[str, str]:
        try:
            gpu.fail("an illegal memory access was encountered")
        except RuntimeError as err:
            gpu.error = err if sticky else None
            return dict(zip(("status", "reason"), classify(err, "forward"), strict=True))
        return {"status": "ok"}

    monkeypatch.setattr(serving, "check_item", check_item)
    monkeypatch.setattr("os._exit", Mock(side_effect=SystemExit))
    items = (CheckItem(Case(seq_len=8), "a"), CheckItem(Case(seq_len=8), "b"))
    emitted: list[Any] = []
    with pytest.raises(SystemExit) if sticky else contextlib.nullcontext():
        serving._serve(Check(items, 0), NoHeartbeat(), emitted.append)  # type: ignore[arg-type]
    assert len(emitted) == (1 if sticky else 2)
    assert "illegal memory access" in emitted[0].reason


class RefusingClock(HostClock):
    """Cannot capture what stands second among the calls."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error, self.calls = error, dict[int, None]()

    def batch(self, call: Any, calls: int) -> Batch:
        self.calls[id(call)] = None
        if list(self.calls).index(id(call)) == 1:
            self.broken = True
            raise self.error
        return Batch(time_us=5000.0, e2e_us=5000.0)


@pytest.mark.parametrize(
    ("error", "status"),
    [(CaptureError("refused"), "unsupported"), (torch.cuda.OutOfMemoryError("full"), "oom")],
)
@pytest.mark.usefixtures("one_thread", "idle_machine")
def test_a_worker_whose_capture_failed_reports_that_cell_and_leaves_the_others(
    monkeypatch, error, status
):
    """To a fresh process, which is asked for what has no record."""
    rule = StoppingRule(precision=1.0, min_time_s=0.0, max_time_s=0.01)
    clock = RefusingClock(error)
    kit = Instruments(rule=rule, clock=clock, watch=Watch())
    monkeypatch.setattr(Instruments, "of", lambda request, device: kit)
    monkeypatch.setattr(state, "idlest_cpu", lambda: None)
    monkeypatch.setattr("os._exit", Mock(side_effect=SystemExit))
    emitted: list[Any] = []
    names = ("naive", "sdpa", "chunked")
    asked = Measure(
        groups=(((Case(seq_len=8), names),),), seed=0, precision=1, min_time_s=0, max_time_s=1
    )
    with pytest.raises(SystemExit):
        serving._serve(asked, NoHeartbeat(), emitted.append)  # type: ignore[arg-type]
    assert [x.record.status for x in emitted] == [status]
    assert len(clock.calls) == 2, "a call was timed after the capture had failed"


def test_a_worker_shows_life_for_each_case_that_it_is_asked_about():
    """As long as all of them together may take: some kernels are tried in each."""
    heartbeat, emitted = Mock(), list[Any]()
    cases = tuple(Case(seq_len=length) for length in (8, 16, 32))
    serving._serve(AskReasons(cases, ("a", "b")), heartbeat, emitted.append)
    stages = [call.args[-1] for call in heartbeat.write.mock_calls]
    assert stages == ["supports of a"] * 3 + ["supports of b"] * 3
    assert set(emitted[0].reasons) == {"a", "b"}


@pytest.mark.usefixtures("one_thread")
def test_a_worker_shows_life_for_each_block_of_a_reference(tmp_path, monkeypatch):
    """One of a long sequence takes longer than anybody is waited for."""
    with (tmp_path / "heartbeat").open("w+b") as file:
        heartbeat = Heartbeat(file.fileno())
    monkeypatch.setattr(reference, "on_block", heartbeat.beat)
    monkeypatch.setattr(reference, "_BLOCK_ELEMENTS", {"cpu": 64})
    heartbeat.write(3, NOBODY, "reference")
    before = heartbeat.read()
    case = Case(seq_len=16)
    reference.plain_attention(case, WORKLOADS.get("attention").tensors(case))
    after = heartbeat.read()
    assert after.step >= before.step + 16
    assert after[1:] == before[1:]


def test_it_is_known_where_standard_error_was_when_a_cell_began(tmp_path):
    with (tmp_path / "heartbeat").open("w+b") as file:
        heartbeat = Heartbeat(file.fileno())
    with (tmp_path / "printed").open("w+b", buffering=0) as printed:
        kept = os.dup(2)
        os.dup2(printed.fileno(), 2)
        try:
            for impl, stage in ((0, "build"), (0, "check"), (1, "build"), (0, "samples")):
                heartbeat.write(0, impl, stage)
                os.write(2, b"said\n")
                expected = {"build": 10 * impl, "check": 0, "samples": 15}[stage]
                assert heartbeat.read().printed == expected
            os.close(2)
            heartbeat.write(0, 1, "samples")  # there is none any more
        finally:
            os.dup2(kept, 2)
            os.close(kept)
    assert heartbeat.read().printed == 15


def test_an_idle_worker_ends_when_its_runner_closes_the_pipe():
    """As the system does for a runner that is killed: nobody else would end it."""
    with Worker(Settings(device="cpu"), "cpu") as started:
        assert isinstance(started.event(120), Ready)
        started.line.close()
        assert started.ended(30) == 0


KERNEL = """
import os, pathlib, subprocess, time, torch
from attnbench.api import attention
sleeper = subprocess.Popen(["sleep", "1000"], start_new_session=True)
threads = len(os.listdir("/proc/self/task"))
pathlib.Path(__file__).with_suffix(f".{os.getpid()}").write_text(f"{sleeper.pid} {threads}")
attention("mine")(lambda q, k, v, *, causal, scale: os._exit(7))
"""


@pytest.fixture(scope="module")
def forked(tmp_path_factory) -> tuple[dict[int, tuple[int, int]], list[Any], int]:
    """Two workers that were forked one after the other: by id a process of each and its threads."""
    file = tmp_path_factory.mktemp("forked") / "k.py"
    file.write_text(KERNEL)
    settings = Settings(device="cpu", files=(str(file),))
    with Server(settings) as server:
        events = []
        for _ in range(2):
            with Worker(settings, "cpu", server) as started:
                events.append(started.event(120))
                started.send(Describe("cpu"))
                started.event(120)
                events.append(started.event(120))
        server.ask("kill", 1)  # none of its own
        server_id = server._child.process.pid
    found = {int(x.suffix[1:]): x.read_text().split() for x in file.parent.glob("k.*[0-9]")}
    return {i: (int(a), int(b)) for i, (a, b) in found.items()}, events, server_id


@pytest.mark.skipif(not CAN_FORK, reason="no forking here")
class TestForked:
    def test_each_worker_is_a_process_that_loads_the_files_itself_and_serves(self, forked):
        found, events, server = forked
        assert len(found) == 2
        assert server not in found
        assert [type(event) for event in events] == [Ready, Done] * 2

    def test_nothing_has_been_computed_before_the_fork(self, forked):
        """The main thread and the one that reads requests: a pool of threads dies in a fork."""
        found, _, _ = forked
        assert {threads for _, threads in found.values()} <= {1, 2}

    def test_a_worker_that_has_ended_leaves_nothing_behind(self, forked):
        found, _, server = forked
        assert not [x for i, (sleeper, _) in found.items() for x in (i, sleeper) if lives(x)]
        assert not lives(server)

    def test_a_server_that_cannot_begin_says_why(self, tmp_path, monkeypatch):
        (tmp_path / "torch.py").write_text("raise ImportError('no such luck')")
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        with LocalRunner(Settings(device="cpu")) as runner:
            says = r"ended before it measured anything \(exit code 1\): ImportError: no such luck"
            with pytest.raises(WorkerError, match=says):
                runner.catalogue()
