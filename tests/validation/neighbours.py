"""Other work beside a measurement: processes that spin and sleep, started and ended here."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

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
