"""Workers and servers that a signal does not end, and servers that answer late or never."""

from __future__ import annotations

import signal
from collections.abc import Callable

import psutil
import pytest

from attnbench.execution import process, runner
from attnbench.execution.process import CAN_FORK, Forked, Line, Server, Settings
from attnbench.execution.runner import LocalRunner
from tests.conftest import run_script

pytestmark = pytest.mark.skipif(not CAN_FORK, reason="no forking here")

STUCK = """
import os, subprocess, time
from attnbench.worker import forking

forking._PATIENCE_S = 0.1
kill, alive = os.kill, set()
quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}  # none holds what is read here
pairs = [[subprocess.Popen(["sleep", "600"], **quiet) for _ in "ab"] for _ in range(4)]
held = {child.pid for child, _ in pairs}  # by a driver
os.kill = lambda process, number: process in held or kill(process, number)
forking._kill_others(alive)
assert alive == held, (alive, held)
os.kill = kill
forking._kill_others(alive)
assert all(os.path.exists(f"/proc/{process}") for process in held), "they are not tried for ever"
forking._kill_others(set())
assert not any(os.path.exists(f"/proc/{each.pid}") for pair in pairs for each in pair)
"""


def test_a_child_that_a_driver_holds_is_left_after_a_while_and_the_others_are_ended():
    ended = run_script(STUCK)
    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.fixture
def mute(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Server]:
    """A server that answers so many seconds after it was asked, of which half a one is waited."""

    def made(answers_s: float, but: str = "") -> Server:
        monkeypatch.setenv("ATTNBENCH_MUTE_S", str(answers_s))
        monkeypatch.setenv("ATTNBENCH_MUTE_ANSWERS", but)
        monkeypatch.setattr(process, "_GRACE_S", 0.1)
        server = Server(Settings(), "tests.mute")
        server._control.settimeout(0.5 if not but else 30)
        return server

    return made


@pytest.mark.parametrize("answers_s", [600.0, 1.0])
def test_a_server_that_does_not_answer_in_time_is_ended_and_serves_no_later_question(
    mute, answers_s
):
    with mute(answers_s) as server:
        with pytest.raises(TimeoutError, match="no answer for"):
            server.ask("kill", 1)
        assert not server.lives()
        with pytest.raises(ConnectionError):  # and not the answer to the first
            server.ask("await", 1)


def test_a_worker_whose_server_is_silent_is_not_said_to_be_killed_and_is_ended(mute):
    with mute(600.0, but="fork") as server:
        line = Line()
        worker = Forked(server, line.ends)
        server._control.settimeout(0.5)
        found = psutil.Process(worker.pid)
        assert worker.ended(0.0) is None
        psutil.wait_procs([found], timeout=60)
        assert not found.is_running()
        assert worker.ended(0.0) == -signal.SIGKILL, "now it is known to have ended"
        line.hand_over()
        line.close()


def test_a_runner_whose_server_is_silent_goes_on_with_another(mute, monkeypatch):
    silent, made = [mute(600.0)], list[Server]()

    def server(settings: Settings) -> Server:
        made.append(silent.pop() if silent else Server(settings))
        return made[-1]

    monkeypatch.setattr(runner, "Server", server)
    with LocalRunner(Settings(device="cpu")) as running:
        assert running.catalogue().device == "cpu"
    assert len(made) == 2
