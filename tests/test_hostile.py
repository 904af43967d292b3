"""Implementations that do harm, in real processes: each has its fate, others have their times."""

import contextlib
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from attnbench.execution.process import CAN_FORK, Line, Settings
from attnbench.execution.runner import LocalRunner
from tests import hostile
from tests.conftest import COMMAND, TINY, environment, exported, wait_until

FILE = hostile.__file__
SWEPT = (
    "segfaults-later", "closes-descriptors", "aborts", "dies-with-a-child", "prints", "raises",
    "leaves-a-daemon", "returns-twice", "leaks",
)  # fmt: skip

pytestmark = pytest.mark.skipif(not CAN_FORK, reason="no forking here")


class Marked:
    """Processes that have a variable of their own in their environment, which others inherit."""

    def __init__(self) -> None:
        self.variables = {"ATTNBENCH_TEST": uuid.uuid4().hex}

    def alive(self, text: str = "") -> set[int]:
        """Those whose command line has the text."""
        found = set()
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                mine = self.variables.items() <= process.environ().items()
                if mine and text in " ".join(process.cmdline()):
                    found.add(process.pid)
        return found - {os.getpid()}


@pytest.fixture
def marked() -> Iterator[Marked]:
    """Nothing of a test outlives it, whatever comes of it."""
    processes = Marked()
    yield processes
    for process in processes.alive():
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


@pytest.mark.slow
def test_each_has_its_fate_the_innocent_have_times_and_nothing_is_left(tmp_path, marked):
    names = ",".join(("naive", *SWEPT, "sdpa"))
    ran = subprocess.run(
        [*COMMAND, "sweep", "--impl", FILE, "--impls", names, "--seq-lens", "16", *TINY[:4],
         "--min-time", "0.2", "--max-time", "0.2", "--timeout", "60", "--name", "r"],
        cwd=tmp_path, env=environment(TMPDIR=str(tmp_path), **marked.variables),
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    rows = {row["impl"]: row for row in exported(tmp_path / "results" / "r")}
    assert ran.returncode == 0, ran.stderr
    assert {name: row["status"] for name, row in rows.items() if name in ("naive", "sdpa")} == {
        "naive": "ok", "sdpa": "ok"
    }  # fmt: skip
    found = [rows[name] for name in SWEPT if rows[name]["status"] not in hostile.FATES[name]]
    assert [(row["impl"], row["status"], row["reason"]) for row in found] == []
    says = "the process ended, killed by signal 6 (SIGABRT): assertion failed: the reason of the"
    assert says in rows["aborts"]["reason"]
    assert rows["dies-with-a-child"]["reason"].count("SIGABRT") == 1
    assert "\x1b" not in ran.stdout + ran.stderr + rows["raises"]["reason"]
    assert marked.alive() == set()
    assert {path.name for path in tmp_path.iterdir()} == {"results"}


HARMFUL = """
import pathlib
from attnbench.api import attention
from tests import hostile
hostile.leaves_a_session(None, None)
hostile.leaves_a_daemon(None, None)
attention("mine")(lambda q, k, v, *, causal, scale: v)
pathlib.Path(__file__).with_suffix(".begun").touch()
{then}
"""


def test_nothing_outlives_a_killed_runner_were_it_in_the_middle_of_a_call(tmp_path, marked):
    file = tmp_path / "k.py"
    file.write_text(HARMFUL.format(then="hostile.hangs_with_the_gil(None, None)"))
    command = [*COMMAND, "list", "--impl", str(file)]
    with subprocess.Popen(command, env=environment(**marked.variables)) as runner:
        wait_until(lambda: len(marked.alive("sleep")) == 2 and file.with_suffix(".begun").exists())
        runner.kill()
    wait_until(lambda: not marked.alive())


def test_what_a_killed_server_left_is_ended_and_the_next_serves(tmp_path, marked, monkeypatch):
    (tmp_path / "k.py").write_text(HARMFUL.format(then=""))
    for name, value in marked.variables.items():
        monkeypatch.setenv(name, value)
    with LocalRunner(Settings(device="cpu", files=(str(tmp_path / "k.py"),))) as runner:
        runner.worker()
        assert runner._server is not None
        wait_until(lambda: len(marked.alive("sleep")) == 2)
        before = marked.alive("sleep")
        os.kill(runner._server._child.pid, signal.SIGKILL)
        assert runner.worker().event(60) is None
        runner.close()
        assert runner.catalogue().device == "cpu"
        assert not before & marked.alive("sleep")
    assert marked.alive() == set()


STARTS_A_WORKER = """
import sys
from attnbench.execution.process import Settings, Worker
with Worker(Settings(device="cpu", files=(sys.argv[1],)), "cpu") as worker:
    worker.event(1000)
"""


def test_a_worker_without_a_server_dies_with_its_runner_too(tmp_path, marked):
    file = tmp_path / "k.py"
    file.write_text("import ctypes\nctypes.PyDLL(None).sleep(100_000)\n")
    command = [sys.executable, "-c", STARTS_A_WORKER, str(file)]
    with subprocess.Popen(command, env=environment(**marked.variables)) as runner:
        wait_until(lambda: [x for x in marked.alive("attnbench.worker") if _sleeps(x)])
        runner.kill()
    wait_until(lambda: not marked.alive())


def _sleeps(process: int) -> bool:
    """In the call of its file: nothing else in a worker that starts sleeps by the clock."""
    with contextlib.suppress(OSError):
        return "nanosleep" in Path(f"/proc/{process}/wchan").read_text()
    return False


# The line to a process.


def test_a_process_has_ended_when_it_has_whoever_holds_its_pipe():
    """And what it wrote before is read first."""
    line = Line()
    script = "import os, sys; os.write(int(sys.argv[1]), b'\"last\"\\n')"
    held, end = os.pipe()
    holds = subprocess.Popen(["cat"], stdin=held, pass_fds=line.ends[1:2])
    ends = subprocess.Popen(
        [sys.executable, "-c", script, str(line.ends[1])], pass_fds=line.ends[1:2]
    )
    line.hand_over()
    line.watch(ends.pid)
    assert line.receive(str, 60) == "last"
    assert line.receive(str, 60) is None
    assert (ends.wait(), holds.poll()) == (0, None), "the pipe was closed"
    os.close(end)
    os.close(held)
    holds.wait(60)
    line.close()


def test_of_much_output_the_end_is_kept():
    line = Line()
    *_, stderr = line.ends
    os.ftruncate(stderr, 1 << 27)
    os.lseek(stderr, 0, os.SEEK_END)
    os.write(stderr, b"first\x07\nsecond\nthird\n \nfourth\n")
    with pytest.raises(TimeoutError):
        line.receive(str, 0.01)
    assert os.fstat(stderr).st_size < 1 << 17
    os.write(stderr, b"fifth\n")
    assert line.last_words() == "fifth"
    assert line.last_words(3) == "third | fourth | fifth"
    begun = os.fstat(stderr).st_size
    assert line.last_words(3, begun) == "", "another had said it"
    os.write(stderr, b"sixth\n")
    assert line.last_words(3, begun) == "sixth"
    assert line.last_words(3, 1 << 40) == "fourth | fifth | sixth", "cut since"
    line.send("a request")
    assert line.last_words(3) == "", "what was said before it does not belong to it"
    line.hand_over()
    line.close()
