"""One worker process: started, talked to over pipes, and ended with all that it started."""

from __future__ import annotations

import contextlib
import json
import math
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from attnbench.base.heartbeat import Beacon
from attnbench.base.jsontext import read_json
from attnbench.errors import UsageError
from attnbench.machine.allocator import POLICIES, Policy, settings_for_workers

GARBLED = "it writes to a file descriptor that it does not own: its worker's results are unreadable"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How workers run: where, with which files, for how long, and how they measure.

    `processes` is how many fresh ones measure each cell; `energy` asks for joules a call, too.
    With `replace` the files may take the names of installed implementations. With `root` they are
    those of one of two versions of a repository, and import nothing from `other_root`.

    Raises:
        UsageError: a value that cannot be right, named by its flag.
    """

    device: str = "auto"
    threads: int | None = None
    files: tuple[str, ...] = ()
    seed: int = 0
    precision: float = 0.02
    min_time_s: float = 0.1
    max_time_s: float = 1.0
    timeout_s: float = 300.0
    processes: int = 1
    l2: str | None = None  # cold or warm; None: cold on a GPU, warm on a CPU
    timer: str | None = None  # events or graph, on a GPU
    energy: bool = False
    allocator: Policy = "settled"  # how glibc hands memory out, on a CPU
    replace: bool = False
    root: str | None = None
    other_root: str | None = None

    def __post_init__(self) -> None:
        for flag, name, (expected, fits) in _EXPECTED:
            value = getattr(self, name)
            if not fits(value):
                raise UsageError(f"{flag} {value!r} is not {expected}")
        if self.min_time_s > self.max_time_s:
            raise UsageError(
                f"--min-time {self.min_time_s:g} is above --max-time {self.max_time_s:g}"
            )


_Rule = tuple[str, Callable[[Any], bool]]  # what is expected, and whether a value is that


def _one_of(*names: str | None) -> _Rule:
    return " or ".join(name for name in names if name), lambda value: value in names


def _whole(low: int, high: int | None = None, *, optional: bool = False) -> _Rule:
    def fits(value: Any) -> bool:
        whole = isinstance(value, int) and low <= value and (high is None or value <= high)
        return whole or (optional and value is None)

    return f"a whole number from {low}" + (" on" if high is None else f" to {high}"), fits


def _finite(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


_POSITIVE: _Rule = "a number above 0", lambda value: _finite(value) and value > 0
_NOT_NEGATIVE: _Rule = "a number from 0 on", lambda value: _finite(value) and value >= 0
# Flag, field, what it must be.
_EXPECTED: tuple[tuple[str, str, _Rule], ...] = (
    ("--device", "device", _one_of("auto", "cpu", "cuda")),
    ("--threads", "threads", _whole(1, optional=True)),
    ("--seed", "seed", _whole(0, 2**32 - 1)),
    ("--precision", "precision", _POSITIVE),
    ("--min-time", "min_time_s", _NOT_NEGATIVE),
    ("--max-time", "max_time_s", _POSITIVE),
    ("--timeout", "timeout_s", _POSITIVE),
    ("--processes", "processes", _whole(1)),
    ("--l2", "l2", _one_of("cold", "warm", None)),
    ("--timer", "timer", _one_of("events", "graph", None)),
    ("--allocator", "allocator", _one_of(*POLICIES)),
)


class GarbledError(Exception):
    """Someone other than the harness wrote to the pipe that the worker's events come through."""


_LONGEST_LINE = 1 << 26  # bytes, far more than any record takes
_GRACE_S = 5.0  # for a process that ends to do so


class Worker:
    """One worker process and the lines it writes. Use as a context manager."""

    def __init__(self, settings: Settings, device: str) -> None:
        with contextlib.ExitStack() as begun:  # nothing is left behind if the last step fails
            self._folder = tempfile.TemporaryDirectory(
                prefix="attnbench-", ignore_cleanup_errors=True
            )
            begun.callback(self._folder.cleanup)
            path = Path(self._folder.name) / "beacon"
            self.beacon = Beacon(path)
            begun.callback(self.beacon.close)
            config = {
                "device": device,
                "threads": settings.threads,
                "files": list(settings.files),
                "beacon": str(path),
                "replace": settings.replace,
                "root": settings.root,
                "other_root": settings.other_root,
            }
            self._stderr = begun.enter_context(tempfile.TemporaryFile())
            self.process = subprocess.Popen(
                # -P: a file called torch.py in the user's folder must not become torch.
                [sys.executable, "-P", "-m", "attnbench.worker", json.dumps(config)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._stderr,
                env=environment_of(settings),
                start_new_session=True,  # an interrupt is the runner's to handle
            )
            self._held = begun.pop_all()
        self._lines: queue.Queue[bytes | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        while line := self.process.stdout.readline(_LONGEST_LINE):
            if line.endswith(b"\n") or len(line) == _LONGEST_LINE:
                self._lines.put(line)  # a death in mid-write leaves half an event, which is dropped
        self._lines.put(None)

    def send(self, request: dict[str, Any]) -> None:
        """Write one request; a worker that is gone is noticed when its events end."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(request).encode() + b"\n")
            self.process.stdin.flush()

    def event(self, timeout_s: float) -> dict[str, Any] | None:
        """The next event; None once the worker has ended.

        Raises:
            TimeoutError: nothing came in time.
            GarbledError: a line is no event.
        """
        try:
            while (line := self._lines.get(timeout=timeout_s)) == b"\n":
                pass  # each event begins with one
        except queue.Empty as err:
            raise TimeoutError from err
        if line is None:
            return None
        try:
            event = read_json(line)
        except ValueError as err:
            raise GarbledError from err
        if not isinstance(event, dict) or not isinstance(event.get("event"), str):
            raise GarbledError
        return event

    def ended(self) -> int | None:
        """The exit code of a worker whose pipe is closed; None if it had to be killed."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.process.wait(_GRACE_S)
        self.kill()
        self.process.wait()
        return None

    def settled(self) -> None:
        """Both sides have mapped the beacon: its file can go, and no kill can leave it behind."""
        self._folder.cleanup()

    def last_words(self) -> str:
        """The last line on standard error, such as the exception that ended the process."""
        self._stderr.seek(0)
        lines = self._stderr.read().decode(errors="replace").split("\n")
        return next((line.strip()[:300] for line in reversed(lines) if line.strip()), "")

    def kill(self) -> None:
        """End the process now, and whatever it started: it leads a session of its own."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self.process.wait()
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        self._held.close()


def ending(returncode: int) -> str:
    """How a process ended, in words: its exit code, or the signal that killed it."""
    if returncode >= 0:
        return f"exit code {returncode}"
    try:
        name = signal.Signals(-returncode).name
    except ValueError:
        name = "unknown signal"
    return f"killed by signal {-returncode} ({name})"


def environment_of(settings: Settings) -> dict[str, str]:
    """The environment that a process which measures is started with."""
    environment = dict(os.environ)
    root = Path(__file__).resolve().parents[2]
    if (root / "pyproject.toml").exists():  # a source tree, which -P hides if not installed
        paths = [*environment.get("PYTHONPATH", "").split(os.pathsep), str(root)]
        environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    environment |= settings_for_workers(environment, settings.allocator)
    if settings.threads is not None:
        for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
            environment[name] = str(settings.threads)
    return environment
