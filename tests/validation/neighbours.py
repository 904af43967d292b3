"""Other work beside a measurement: processes that spin and sleep, started and ended here."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from attnbench.execution.events import follow
from attnbench.execution.process import Settings
from attnbench.execution.request import SweepRequest
from attnbench.execution.session import sweep
from attnbench.planning.plan import Axes

# Spins for 0.2 to 4 s, sleeps as long, and so on; ends with its parent.
_CODE = """
import os, random, sys, time
random.seed(int(sys.argv[1]))
parent = os.getppid()
while os.getppid() == parent:
    until = time.perf_counter() + random.uniform(0.2, 4)
    while time.perf_counter() < until:
        pass
    time.sleep(random.uniform(0.2, 4))
"""


@contextmanager
def neighbours(count: int, seed: int = 0) -> Iterator[None]:
    """Have so many processes spin and sleep for random 0.2 to 4 s meanwhile."""
    started = []
    try:
        for number in range(count):
            command = [sys.executable, "-c", _CODE, str(1000 * seed + number)]
            started.append(subprocess.Popen(command))
        yield
    finally:
        for process in started:
            process.kill()
        for process in started:
            process.wait()


@contextmanager
def swept_beside(count: int, axes: Axes, settings: Settings) -> Iterator[Path]:
    """The run of a sweep beside so many neighbours, who stay; in a folder that is gone then."""
    with tempfile.TemporaryDirectory() as folder, neighbours(count, settings.seed):
        asked = SweepRequest(sweeps=(axes,), settings=settings, output=Path(folder), name="run")
        path = follow(sweep(asked))
        assert path is not None, "no dry run was asked for"
        yield path
