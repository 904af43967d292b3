"""Lines of JSON to a process and from it: deadlines, deaths, and what cannot be read."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from attnbench.execution.process import Child, Line, Settings
from tests.conftest import lives, wait_until

# A process that answers each request, until it is told how to end.
ECHO = """
import json, os, subprocess, sys, time
read, write, _ = json.loads(sys.argv[1])
requests, answers = os.fdopen(read), os.fdopen(write, "w", buffering=1)
for line in requests:
    request = json.loads(line)
    if request == "hang":
        sleeper = subprocess.Popen(["sleep", "1000"])
        print(json.dumps(sleeper.pid), file=answers)
        time.sleep(1000)
    elif request == "die":
        answers.write('{"half a li')
        sys.exit("out of ideas")
    print("", json.dumps(request), sep="\\n", file=answers)
"""


@pytest.fixture
def echo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Child, Line]]:
    (tmp_path / "echo_lines.py").write_text(ECHO)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    line = Line()
    child = Child("echo_lines", line.ends, Settings(device="cpu"), line)
    yield child, line
    child.kill()
    line.close()


def test_a_death_ends_the_answers_and_leaves_its_last_words(echo):
    child, line = echo
    line.watch(child.pid)
    line.send("die")
    assert line.receive(str, 60) is None
    assert (child.ended(), line.last_words()) == (1, "out of ideas")
    line.send("anybody?")  # noticed by the next receive alone
    assert line.receive(str, 60) is None


def test_one_that_hangs_misses_the_deadline_and_is_ended_with_what_it_started(echo):
    child, line = echo
    line.send("hang")
    sleeper = line.receive(int, 60)
    assert sleeper is not None
    with pytest.raises(TimeoutError):
        line.receive(str, 0.01)
    assert child.ended(0.01) is None
    assert child.process.returncode == -signal.SIGKILL
    wait_until(lambda: not lives(sleeper))  # a kill takes effect when the kernel gets to it
