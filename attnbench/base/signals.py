"""Signals that end a process, handled for a while as Ctrl-C is: what is open is closed first."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

# What CI, systemd and Slurm send to a job that is cancelled; what a terminal sends when it closes.
ENDING = (signal.SIGTERM, signal.SIGHUP)


class EndedError(SystemExit):
    """Such a signal arrived; the exit code is as a shell reports it."""


def end(number: int, frame: FrameType | None) -> None:
    """Handle a signal: end the process.

    Raises:
        EndedError: always.
    """
    raise EndedError(128 + number)


@contextlib.contextmanager
def handled(numbers: tuple[signal.Signals, ...], handler: Any) -> Iterator[None]:
    """Handle signals in another way for a while. Only the main thread may; others leave them."""
    numbers = numbers if threading.current_thread() is threading.main_thread() else ()
    before = {number: signal.getsignal(number) for number in numbers}
    # None was not set from Python and cannot be put back; what nohup ignores stays ignored.
    ours = {number: old for number, old in before.items() if old not in (None, signal.SIG_IGN)}
    try:
        for number in ours:
            signal.signal(number, handler)
        yield
    finally:
        for number, old in ours.items():
            signal.signal(number, old)
