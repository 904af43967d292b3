"""The self-tests of `attnbench doctor`, in a worker."""

from __future__ import annotations

from typing import Any

from attnbench.execution.events import Events
from attnbench.execution.process import Settings
from attnbench.execution.runner import LocalRunner
from attnbench.machine import host


def examine(*, device: str, threads: int | None) -> Events[dict[str, Any]]:
    """Run the self-tests in a worker, which takes about 20 s: what they say, in plain JSON.

    Yields each test before it runs.

    Raises:
        UsageError: the device is not there.
        WorkerError: the worker ended, or hung.
    """
    with LocalRunner(Settings(device=device, threads=threads)) as runner:
        runner.catalogue()  # fixes the device where it was `auto`
        diagnosis = yield from runner.diagnose()
    # The worker's own variables say what --threads made of them; these are what the user set.
    diagnosis["facts"] |= {"thread_env": host.thread_env()}
    return diagnosis
