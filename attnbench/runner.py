"""Starts workers, watches them, and turns their deaths into records."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Self

from attnbench.beacon import NOBODY, Beacon, Sign
from attnbench.case import Case
from attnbench.errors import ExitCode, UsageError, WorkerError
from attnbench.plan import Group
from attnbench.record import Cell, Record, Status

Key = tuple[int, str]  # index of a case or item within the request, implementation
_POLL_S = 0.5
_START_TIMEOUT_S = 120.0


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How workers run: where, with which files, for how long."""

    device: str = "auto"
    threads: int | None = None
    files: tuple[str, ...] = ()
    seed: int = 0
    precision: float = 0.02
    min_time_s: float = 0.1
    max_time_s: float = 1.0
    timeout_s: float = 300.0


@dataclass(frozen=True)
class Death:
    """What to record of the cells that a worker was at when it ended."""

    status: Status
    reason: str


@dataclass
class Spent:
    """Wall seconds outside the cells: starting processes and loading what they need."""

    start_up_s: float = 0.0
    processes: int = 0


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
            }
            self._stderr = begun.enter_context(tempfile.TemporaryFile())
            self.process = subprocess.Popen(
                # -P: a file called torch.py in the user's folder must not become torch.
                [sys.executable, "-P", "-m", "attnbench.worker", json.dumps(config)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._stderr,
                env=_environment(settings),
                start_new_session=True,  # an interrupt is the runner's to handle
            )
            self._held = begun.pop_all()
        self._lines: queue.Queue[bytes | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.endswith(b"\n"):  # a death in mid-write leaves half an event
                self._lines.put(line)
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
        """
        try:
            line = self._lines.get(timeout=timeout_s)
        except queue.Empty as err:
            raise TimeoutError from err
        if line is None:
            return None
        event: dict[str, Any] = json.loads(line)
        return event

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


class LocalRunner:
    """Runs groups in worker processes on this machine: the interface is `run(groups)`.

    `watch(case, impl, stage)` is told what the worker is at, a few times a second.
    """

    def __init__(
        self,
        settings: Settings,
        watch: Callable[[Case | None, str | None, str], None] = lambda case, impl, stage: None,
    ) -> None:
        self.settings = settings
        self.spent = Spent()
        self.warnings: list[str] = []
        self.user_names: list[str] = []
        self._watch = watch
        self._device = settings.device
        self._idle: Worker | None = None

    def catalogue(self) -> dict[str, Any]:
        """Names, capabilities and the machine; fixes the device where it was `auto`.

        Raises:
            UsageError: the device is not there, or a user's file does not load.
        """
        catalogue: dict[str, Any] = self._ask({"do": "describe", "device": self._device})[
            "catalogue"
        ]
        self._device = catalogue["device"]
        reason = catalogue["devices"].get(self._device)
        if reason:
            raise UsageError(reason)
        return catalogue

    def reasons(self, cases: list[Case], names: list[str]) -> dict[tuple[str, str], str | None]:
        """Why an implementation cannot take a case, by (case_id, implementation)."""
        rows = [case.to_json() for case in cases]
        answer = self._ask({"do": "reasons", "cases": rows, "names": names})["reasons"]
        return {
            (case.case_id, name): reason
            for name in names
            for case, reason in zip(cases, answer[name], strict=True)
        }

    def run(self, groups: tuple[Group, ...] | list[Group]) -> Iterator[Record]:
        """Measure the groups and yield a record for every cell, whatever becomes of it."""
        for group in groups:
            keys = {(i, impl): None for i, (_, impls) in enumerate(group.cases) for impl in impls}
            cases = [case for case, _ in group.cases]
            request = partial(self._measure_request, [len(heat) for heat in group.heats])
            for (index, impl), result in self._supervise(keys, cases, request):
                if isinstance(result, Death):
                    cell = Cell(case=cases[index], impl=impl)
                    yield Record(cell=cell, status=result.status, reason=result.reason)
                else:
                    yield Record.from_line(result)
            self.close()  # the next group gets a fresh process

    def check(self, items: list[tuple[Case, str, dict[str, Any]]]) -> Iterator[tuple[int, Any]]:
        """Check (case, implementation, draw) items; yield (index, result) for each."""

        def request(remaining: list[Key], cases: list[Case]) -> dict[str, Any]:
            rows = [
                {"case": cases[i].to_json(), "impl": impl, "draw": items[i][2]}
                for i, impl in remaining
            ]
            return {"do": "check", "items": rows, "seed": self.settings.seed}

        keys: dict[Key, None] = {(i, impl): None for i, (_, impl, _) in enumerate(items)}
        for (index, _), result in self._supervise(keys, [case for case, *_ in items], request):
            if isinstance(result, Death):
                result = {"status": result.status, "reason": result.reason, "metrics": {}}
            yield index, result

    def close(self) -> None:
        """End the worker that is kept for the next request, if any."""
        if self._idle is not None:
            self._idle.__exit__()
            self._idle = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _measure_request(
        self, lengths: list[int], remaining: list[Key], cases: list[Case]
    ) -> dict[str, Any]:
        """What remains of a group, in its heats; `lengths` counts the cases of each heat."""
        rows: dict[int, list[str]] = {}
        for index, impl in remaining:
            rows.setdefault(index, []).append(impl)
        heats, first = [], 0
        for length in lengths:
            left = [i for i in range(first, first + length) if i in rows]
            heats.append([{"case": cases[i].to_json(), "impls": rows[i]} for i in left])
            first += length
        settings = self.settings
        return {
            "do": "measure",
            "heats": [heat for heat in heats if heat],
            "seed": settings.seed,
            "rule": {
                "precision": settings.precision,
                "min_time_s": settings.min_time_s,
                "max_time_s": settings.max_time_s,
            },
        }

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        worker = self._worker()
        worker.send(request)
        answer = self._wait(worker)
        self._wait(worker)  # done
        return answer

    def _wait(self, worker: Worker) -> dict[str, Any]:
        try:
            event = worker.event(_START_TIMEOUT_S)
        except TimeoutError as err:
            raise WorkerError(f"a worker said nothing for {_START_TIMEOUT_S:.0f} s") from err
        if event is None:
            ending = _ending(worker.process.wait())
            words = worker.last_words()
            raise WorkerError(
                f"a worker ended before it measured anything ({ending})"
                + (f": {words}" if words else f"; it was started with {sys.executable}")
            )
        if event["event"] == "failed":
            error = UsageError if event["exit_code"] == ExitCode.USAGE else WorkerError
            raise error(event["message"])
        return event

    def _worker(self) -> Worker:
        if self._idle is None:
            begin = time.perf_counter()
            try:
                self._idle = Worker(self.settings, self._device)
            except OSError as err:
                raise WorkerError(f"a worker cannot be started ({err})") from err
            ready = self._wait(self._idle)
            self._idle.settled()
            self.warnings, self.user_names = ready["warnings"], ready["user_names"]
            self.spent.start_up_s += time.perf_counter() - begin
            self.spent.processes += 1
        return self._idle

    def _supervise(
        self,
        keys: dict[Key, None],
        cases: list[Case],
        request: Callable[[list[Key], list[Case]], dict[str, Any]],
    ) -> Iterator[tuple[Key, Any]]:
        """Yield a result or a Death for every key; a dead worker is replaced for the rest."""
        while keys:
            worker = self._worker()
            remaining = list(keys)
            oom_kills = _oom_kills()
            worker.send(request(remaining, cases))
            local = _LocalKeys(remaining)
            watch = _Watch(worker.beacon, self.settings.timeout_s)
            death: Death | None = None
            while death is None:
                try:
                    event = worker.event(_POLL_S)
                except TimeoutError:
                    sign = watch.read()
                    self._watch(*local.named(sign, cases), sign.stage)
                    if watch.overdue():
                        death = Death("timeout", watch.reason())
                    continue
                if event is None:
                    worker.process.wait()
                    death = _death(worker.process.returncode, watch.read(), oom_kills)
                elif event["event"] == "result":
                    key = local.key(*event["key"])
                    if keys.pop(key, _ABSENT) is not _ABSENT:
                        yield key, event["result"]
                elif event["event"] == "done":
                    break
            if death is None:
                for key in list(keys):  # a worker that forgets a cell is a defect of ours
                    yield key, Death("error", "the worker finished without a result")
                return
            blamed = [key for key in local.at(watch.read()) if key in keys] or list(keys)
            self.close()
            for key in blamed:
                del keys[key]
                yield key, death


_ABSENT = object()


class _LocalKeys:
    """A request numbers its cases from 0; this maps those numbers back to the caller's keys."""

    def __init__(self, remaining: list[Key]) -> None:
        self._impls: dict[int, list[str]] = {}
        for index, impl in remaining:
            self._impls.setdefault(index, []).append(impl)
        self._indices = list(self._impls)

    def key(self, local: int, impl: str) -> Key:
        return self._indices[local], impl

    def at(self, sign: Sign) -> list[Key]:
        """The keys that a sign points at: one cell, or all of a case, or none."""
        if sign.case == NOBODY:
            return []
        index = self._indices[sign.case]
        impls = self._impls[index]
        return [(index, impl) for impl in (impls if sign.impl == NOBODY else [impls[sign.impl]])]

    def named(self, sign: Sign, cases: list[Case]) -> tuple[Case | None, str | None]:
        keys = self.at(sign)
        if not keys:
            return None, None
        return cases[keys[0][0]], None if sign.impl == NOBODY else keys[0][1]


@dataclass
class _Watch:
    """Notices a beacon that has not moved for too long."""

    beacon: Beacon
    timeout_s: float
    _last: Sign | None = None
    _since: float = field(default_factory=time.monotonic)

    def read(self) -> Sign:
        sign = self.beacon.read()
        if self._last is None or sign.step != self._last.step:
            self._last, self._since = sign, time.monotonic()
        return sign

    def overdue(self) -> bool:
        return time.monotonic() - self._since > self.timeout_s

    def reason(self) -> str:
        stage = self._last.stage if self._last else "start-up"
        return f"{stage}: no sign of life for {self.timeout_s:g} s (--timeout)"


def _death(returncode: int, sign: Sign, oom_kills: int | None) -> Death:
    now = _oom_kills()
    killed = returncode == -signal.SIGKILL
    if killed and oom_kills is not None and now is not None and now > oom_kills:
        return Death("oom", f"{sign.stage}: killed by the system for want of memory")
    return Death("crashed", f"{sign.stage}: the process ended, {_ending(returncode)}")


def _ending(returncode: int) -> str:
    if returncode >= 0:
        return f"exit code {returncode}"
    try:
        name = signal.Signals(-returncode).name
    except ValueError:
        name = "unknown signal"
    return f"killed by signal {-returncode} ({name})"


def _oom_kills() -> int | None:
    """How many processes Linux has killed for want of memory since it started."""
    try:
        for line in Path("/proc/vmstat").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    except OSError:
        pass
    return None


def _environment(settings: Settings) -> dict[str, str]:
    environment = dict(os.environ)
    if settings.threads is not None:
        for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
            environment[name] = str(settings.threads)
    return environment
