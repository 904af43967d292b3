"""Processes of ours: started, talked to in lines of JSON, and ended with all that they started."""

from __future__ import annotations

import contextlib
import math
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_type_hints

import msgspec
import psutil
from msgspec import Meta

from attnbench.base.jsontext import decode, encode, plain
from attnbench.base.units import parse_memory
from attnbench.errors import AttnbenchError, UsageError
from attnbench.machine.host import OURS, POOLS, AllocatorPolicy, allocator_variables
from attnbench.schema.messages import Event, Heartbeat, ModelSizes, WorkerConfig

Count = Annotated[int, Meta(ge=1)]
Positive = Annotated[float, Meta(gt=0, le=1e9)]
Device = Annotated[str, Meta(pattern="^(auto|cpu|cuda)$", description="auto, cpu, cuda")]
L2 = Annotated[str, Meta(pattern="^(cold|warm|step)$", description="cold, warm, step")]
Timer = Annotated[str, Meta(pattern="^(events|graph)$", description="events, graph")]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How workers run: where, with which files, for how long, and how they measure.

    `threads` are those of a process, but for a sweep's, whose cases say; its runner then gives
    `library_threads` to libraries beside torch [1]. `processes` is how many fresh ones measure each
    cell; `energy` asks for joules a call, too.
    With `race_s` and `kept` cells race, a check keeps to `reference_s`, and what a `model` has
    around attention is timed, as `messages.Measure` has it.
    With `replace` the files may take the names of installed implementations. With `root` they are
    those of one of two versions of a repository, and import nothing from `other_root`. Another
    `python` than this one finds attnbench in the folder `lent`.

    Raises:
        UsageError: a value that cannot be right, named by its flag.
    """

    device: Device = "auto"
    threads: Count | None = None
    library_threads: Count | None = None
    files: tuple[str, ...] = ()
    seed: Annotated[int, Meta(ge=0, lt=2**32)] = 0
    precision: Positive = 0.02
    min_time_s: Annotated[float, Meta(ge=0, le=1e9)] = 0.1
    max_time_s: Positive = 1.0
    timeout_s: Positive = 300.0
    processes: Count = 1
    l2: L2 | None = None  # None: cold on a GPU alone; step: and where a call reads a KV cache
    timer: Timer | None = None  # on a GPU
    energy: bool = False
    memory_limit: str = "90%"  # see `machine.facts.limit_memory`
    ceilings: Literal["fresh", "cached", "none"] = "cached"  # see `execution.ceilings`
    race_s: Positive | None = None
    reference_s: Positive | None = None
    kept: tuple[str, ...] = ()
    model: ModelSizes | None = None
    prune: bool = True  # leave out what is larger than what ran out of memory
    allocator: AllocatorPolicy = "settled"  # how glibc hands memory out, on a CPU
    replace: bool = False
    root: str | None = None
    other_root: str | None = None
    python: str | None = None
    lent: str | None = None

    def __post_init__(self) -> None:
        for name, kind in get_type_hints(Settings, include_extras=True).items():
            value, flag = getattr(self, name), "--" + name.removesuffix("_s").replace("_", "-")
            try:
                msgspec.convert(value, kind)
            except msgspec.ValidationError as err:
                parts = [part for k in (kind, *get_args(kind)) for part in (k, *get_args(k))]
                listed = [part.description for part in parts if isinstance(part, Meta)]
                known = [p for p in parts if type(p) is str] or listed
                names = ", ".join(dict.fromkeys(filter(None, known)))
                why = f"one of {names}" if names else str(err).lower()
                raise UsageError(f"{flag} {value!r}: {why}") from err
        parse_memory(self.memory_limit, "--memory-limit")
        if self.min_time_s > self.max_time_s:
            raise UsageError(
                f"--min-time {self.min_time_s:g} is above --max-time {self.max_time_s:g}"
            )


GARBLED = "it writes to a file descriptor that it does not own: its worker's results are unreadable"
_LONGEST_LINE = 1 << 26  # bytes, far more than any record takes
_MOST_PRINTED, _KEPT = 1 << 26, 1 << 16  # bytes of standard error: more is cut to its end
_GRACE_S = 5.0  # for a process that ends to do so

T = TypeVar("T")


class GarbledError(Exception):
    """Someone other than the harness wrote to the pipe that a process answers through."""


class Line:
    """A conversation with one process: requests down one pipe, answers up another.

    Each is a line of JSON; empty lines are passed over. The end of what the process writes to
    standard error is kept. `ends` are the descriptors of its side: where it reads, where it writes,
    its standard error. They are handed over once it has them.
    """

    def __init__(self) -> None:
        with contextlib.ExitStack() as begun:  # nothing is left behind if a step fails
            self._stderr = begun.enter_context(tempfile.TemporaryFile())
            their_read, self._write = os.pipe()
            begun.callback(os.close, self._write)
            self._theirs = [their_read]
            begun.callback(self.hand_over)
            self._read, their_write = os.pipe()
            begun.callback(os.close, self._read)
            self._theirs.append(their_write)
            self.ends = their_read, their_write, self._stderr.fileno()
            os.set_blocking(self._read, False)
            self._held = begun.pop_all()
        self._kept = bytearray()
        self._printed = 0  # bytes, before the last request
        self._ended: int | None = None

    def hand_over(self) -> None:
        """Close the other side's pipe ends here: a process that was started has its own."""
        while self._theirs:
            os.close(self._theirs.pop())

    def watch(self, process: int) -> None:
        """Take the end of this process for that of its answers: a child may hold the pipe open."""
        with contextlib.suppress(AttributeError, OSError):  # not here: then the pipe alone says so
            self._ended = os.pidfd_open(process)
            self._held.callback(os.close, self._ended)

    def send(self, message: Any) -> None:
        """Write one line; a process that is gone is noticed when its answers end."""
        self._printed = os.fstat(self._stderr.fileno()).st_size
        rest = memoryview(encode(message) + b"\n")
        with contextlib.suppress(BrokenPipeError):
            while rest:
                rest = rest[os.write(self._write, rest) :]

    def receive(self, kind: type[T], timeout_s: float = math.inf) -> T | None:
        """The next answer; None once the other side is closed: half a line of a death is dropped.

        Raises:
            TimeoutError: nothing came in time.
            GarbledError: a line is not such an answer.
        """
        self._cut_printed()
        deadline = time.monotonic() + timeout_s
        while not (line := self._next(deadline)).strip():
            if not line:
                return None
        try:
            return decode(line, kind)
        except (ValueError, AttnbenchError) as err:
            raise GarbledError from err

    def _next(self, deadline: float) -> bytes:
        """One line with its newline; empty at the end."""
        searched = 0
        while (end := self._kept.find(b"\n", searched)) < 0:
            searched = len(self._kept)
            if searched > _LONGEST_LINE:
                raise GarbledError
            poll = select.poll()
            for descriptor in filter(None, (self._read, self._ended)):
                poll.register(descriptor, select.POLLIN)
            left_ms = 1000 * (deadline - time.monotonic())
            if not poll.poll(None if math.isinf(left_ms) else max(0.0, left_ms)):
                raise TimeoutError
            more = b""
            with contextlib.suppress(BlockingIOError):  # it has ended, and said all before
                more = os.read(self._read, 1 << 20)
            if not more:
                return b""
            self._kept += more
        line = bytes(self._kept[: end + 1])
        del self._kept[: end + 1]
        return line

    def ends_within(self, within_s: float) -> bool:
        """Whether the process ends in that time; False where that cannot be watched."""
        watched = [] if self._ended is None else [self._ended]
        return bool(select.select(watched, [], [], within_s if watched else 0)[0])

    def last_words(self, count: int = 1, since: int = 0) -> str:
        """The last lines on standard error since the last request and byte `since` of it."""
        text = plain(self._end_of_printed(since).decode(errors="replace"))
        lines = [line.strip() for line in text.split("\n") if line.strip()]
        return " | ".join(line[: 300 // count] for line in lines[-count:])

    def _end_of_printed(self, since: int = 0) -> bytes:
        size = os.fstat(file := self._stderr.fileno()).st_size
        since = since if since <= size else 0  # much was printed, and cut
        return os.pread(file, _KEPT, max(self._printed, since, size - _KEPT))

    def _cut_printed(self) -> None:
        """Of very much that was printed keep the end: the process writes on behind that."""
        file = self._stderr.fileno()
        if os.fstat(file).st_size > _MOST_PRINTED:
            end, self._printed = self._end_of_printed(), 0
            os.ftruncate(file, 0)
            os.lseek(file, 0, os.SEEK_SET)
            os.write(file, end)

    def close(self) -> None:
        """Close everything, once: a process that waits for requests ends by itself."""
        self._held.close()


class Child:
    """`python -m MODULE DESCRIPTORS`, a list of them as JSON, which leads a session of its own.

    What it prints goes to the standard error of `line`.
    """

    def __init__(
        self, module: str, descriptors: Sequence[int], settings: Settings, line: Line
    ) -> None:
        *_, stderr = line.ends
        self.python = settings.python or sys.executable
        environment = environment_of(settings) | {_MARK: uuid.uuid4().hex}
        self._mark = environment[_MARK]
        try:
            self.process = subprocess.Popen(
                # -P: a file called torch.py in the user's folder must not become torch.
                [self.python, "-P", "-m", module, encode(descriptors).decode()],
                stdin=subprocess.DEVNULL,
                stdout=stderr,
                stderr=stderr,
                pass_fds=descriptors,
                env=environment,
                start_new_session=True,  # an interrupt is for this process to handle
            )
        finally:
            line.hand_over()
        self.pid = self.process.pid

    def ended(self, within_s: float = _GRACE_S) -> int | None:
        """The exit code of one whose pipes are closed; None if it had to be killed."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            if (returncode := self.process.wait(within_s)) < 0:
                self.kill()  # what it had started it could not end
            return returncode
        self.kill()
        return None

    def kill(self) -> None:
        """End the process now, and whatever it started: that has its mark in its environment."""
        self.process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # it may be stuck in a driver
            self.process.wait(_GRACE_S)
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get(_MARK) == self._mark:
                    process.kill()


_WORKER, _MARK = "attnbench.worker", "ATTNBENCH_PROCESS"
CAN_FORK = sys.platform == "linux"  # elsewhere forking after importing a BLAS is not safe
_START_TIMEOUT_S = 120.0


class Server(contextlib.AbstractContextManager["Server"]):
    """A process that imports torch once, and then forks others. Use as a context manager.

    It starts in the background: who asks first waits. All that it forks share an address layout.
    """

    def __init__(self, settings: Settings, module: str = _WORKER) -> None:
        with contextlib.ExitStack() as begun:
            self.line = begun.enter_context(contextlib.closing(Line()))
            self._control, theirs = socket.socketpair()
            begun.callback(self._control.close)
            self._control.settimeout(_START_TIMEOUT_S)
            with theirs:
                self._child = Child(module, [theirs.fileno()], settings, self.line)
            begun.callback(self.ended)
            self._held = begun.pop_all()

    def ask(self, what: str, process: int = 0, within_s: float = 0, *ends: int) -> int | None:
        """What `attnbench.worker.forking` answers.

        Raises:
            ConnectionError: the server has ended.
            TimeoutError: it says nothing, and was ended: its answer is for no later question.
        """
        try:
            socket.send_fds(self._control, [encode([what, process, within_s])], ends)
            answer = self._control.recv(1 << 10)
        except TimeoutError as err:
            self.ended()
            silent = f"no answer for {_START_TIMEOUT_S:g} s"
            raise TimeoutError(f"{self._child.python}: {silent}") from err
        except OSError:  # it ended before it read this, or was ended
            answer = b""
        if not answer:
            returncode, words = self.ended(), self.line.last_words()
            how = "its socket was closed" if returncode is None else ending(returncode)
            raise ConnectionResetError(f"{self._child.python}: {words or how}")
        return decode(answer, int | None)  # type: ignore[arg-type]

    def lives(self) -> bool:
        """False once it has ended, and its workers with it."""
        return self._child.process.poll() is None

    def ended(self) -> int | None:
        """End it; its exit code, or None if it had to be killed."""
        self._control.close()
        return self._child.ended(_GRACE_S)

    def __exit__(self, *_: object) -> None:
        self._held.close()


class Forked:
    """A process that a server forks, to which it hands the descriptors; ended as a `Child` is."""

    def __init__(self, server: Server, ends: Sequence[int]) -> None:
        self._server = server
        self.pid = server.ask("fork", 0, 0, *ends) or 0

    def ended(self, within_s: float = _GRACE_S) -> int | None:
        """The exit code of one whose pipes are closed; None if it had to be killed."""
        try:
            returncode = self._server.ask("await", self.pid, within_s)
        except TimeoutError:
            return None  # killed with its server, which did not answer
        except OSError:
            return -signal.SIGKILL  # with its server
        if returncode is None:
            self.kill()
        return returncode

    def kill(self) -> None:
        """End the process now, and whatever it started."""
        with contextlib.suppress(OSError):
            self._server.ask("kill", self.pid)


def started(
    module: str, settings: Settings, line: Line, server: Server | None, *shared: int
) -> Child | Forked:
    """A process that talks through `line`: forked by the server, or else started from nothing.

    It also gets the descriptors that are `shared`.
    """
    descriptors = [*line.ends, *shared]
    process: Child | Forked
    try:
        if server is None:
            process = Child(module, descriptors, settings, line)
        else:
            process = Forked(server, descriptors)
    finally:
        line.hand_over()
    line.watch(process.pid)
    return process


_FROM_SETTINGS = ("threads", "files", "replace", "root", "other_root", "memory_limit")


class Worker(contextlib.AbstractContextManager["Worker"]):
    """One worker process, its line and its heartbeat. Use as a context manager.

    Without a server it is started from nothing.
    """

    def __init__(self, settings: Settings, device: str, server: Server | None = None) -> None:
        with contextlib.ExitStack() as begun:
            file = begun.enter_context(tempfile.TemporaryFile()).fileno()
            self.heartbeat = Heartbeat(file)
            begun.callback(self.heartbeat.close)
            self.line = Line()
            begun.callback(self.line.close)
            child = started(_WORKER, settings, self.line, server, file)
            begun.callback(child.kill)
            self.ended, self.send = child.ended, self.line.send
            given = {name: getattr(settings, name) for name in _FROM_SETTINGS}
            self.send(WorkerConfig(device=device, **given))
            self._held = begun.pop_all()

    def event(self, timeout_s: float) -> Event | None:
        """The next event; None once the worker has ended. Raises as `Line.receive`."""
        event: Event | None = self.line.receive(Event, timeout_s)  # type: ignore[arg-type]
        return event

    def __exit__(self, *_: object) -> None:
        self._held.close()


def ending(returncode: int) -> str:
    """How a process ended, in words: its exit code, or the signal that killed it."""
    if returncode >= 0:
        return f"exit code {returncode}"
    name = next((x.name for x in signal.Signals if x == -returncode), "unknown signal")
    return f"killed by signal {-returncode} ({name})"


def environment_of(settings: Settings) -> dict[str, str]:
    """The environment that a process which measures is started with."""
    environment = dict(os.environ)
    root = Path(__file__).resolve().parents[2]
    if settings.lent is not None:  # before its own, which may hold another attnbench
        paths = [settings.lent, environment.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    elif (root / "pyproject.toml").exists():  # a source tree, which -P hides if not installed
        paths = [*environment.get("PYTHONPATH", "").split(os.pathsep), str(root)]
        environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    environment |= allocator_variables(environment, settings.allocator)
    environment.setdefault("KINETO_LOG_LEVEL", "99")  # torch's profiler has no last words
    threads = settings.threads
    kept = environment if threads is None else {}  # what the user set, but for --threads
    number = str(threads or settings.library_threads or 1)
    ours = {name: number for name in POOLS if name not in kept}
    environment[OURS] = encode(ours).decode()
    # Of these torch takes its default, which a sweep reports: its workers set them later.
    late = ("OMP_NUM_THREADS", "MKL_NUM_THREADS") if threads is None else ()
    return environment | {name: value for name, value in ours.items() if name not in late}
