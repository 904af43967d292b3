"""The processes of one round: started, asked one at a time, and ended with all they started."""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import IO, Any, Self

from attnbench.base.jsontext import read_json
from attnbench.errors import UsageError, WorkerError
from attnbench.execution.process import GARBLED, ending, environment_of
from attnbench.execution.settings import Settings
from attnbench.gate.decide.data import Variant, Version

_GRACE_S = 0.5
CAN_FORK = sys.platform == "linux"  # elsewhere forking after importing a BLAS is not safe


class ArmError(Exception):
    """An arm failed, died or kept silent; `arm` is which, `cell` what it was at, if anything."""

    def __init__(self, arm: Variant, reason: str, cell: int | None = None) -> None:
        super().__init__(reason)
        self.arm, self.reason, self.cell = arm, reason, cell


class Processes:
    """One fresh process an arm, all warm and alive at once. Use as a context manager.

    `sides` maps each arm to the side whose code it runs; processes are forked in this order.
    `config` is what all of them are told: device, threads, cells, seed
    (see `attnbench.gate.server`).
    """

    def __init__(
        self,
        sides: Sequence[tuple[Variant, Version, Version]],
        config: dict[str, Any],
        settings: Settings,
    ) -> None:
        self._timeout_s = settings.timeout_s
        self._pipes: dict[Variant, _Pipe] = {}
        self._servers: list[subprocess.Popen[bytes]] = []
        self._stderr: dict[Variant, IO[bytes]] = {}
        groups = [list(sides)] if CAN_FORK else [[row] for row in sides]
        try:
            for group in groups:
                self._start(group, config, settings)
        except OSError as err:
            self.end()
            raise WorkerError(f"the processes of a round cannot be started ({err})") from err
        except BaseException:
            self.end()
            raise

    def _start(
        self,
        group: list[tuple[Variant, Version, Version]],
        config: dict[str, Any],
        settings: Settings,
    ) -> None:
        theirs: list[int] = []
        arms = []
        try:
            for arm, side, other in group:
                (read, write), (answers, answer) = os.pipe(), os.pipe()
                theirs += [read, answer]
                self._pipes[arm] = _Pipe(write, answers)
                self._stderr[arm] = tempfile.TemporaryFile()  # noqa: SIM115  # closed by end()
                arms.append(
                    {
                        "arm": arm,
                        "files": list(side.files),
                        "root": side.root,
                        "other_root": other.root,
                        "read": read,
                        "write": answer,
                        "stderr": self._stderr[arm].fileno(),
                    }
                )
            command = [sys.executable, "-P", "-m", "attnbench.gate.server"]
            self._servers.append(
                subprocess.Popen(
                    [*command, json.dumps(config | {"arms": arms})],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=self._stderr[group[0][0]],
                    pass_fds=[*theirs, *(self._stderr[arm].fileno() for arm, *_ in group)],
                    env=environment_of(settings),
                    start_new_session=True,
                )
            )
        finally:
            for descriptor in theirs:
                os.close(descriptor)

    def hello(self, arm: Variant) -> dict[str, Any]:
        """What an arm says once it holds its cells ready; it names each before it builds it.

        Raises:
            ArmError: it died, or said nothing for the time of `--timeout`.
            UsageError: it runs code of the other side.
        """
        answer: dict[str, Any] = {"preparing": None}
        while "preparing" in answer:
            answer = self._answer(arm, answer["preparing"])
        if "refused" in answer:
            raise UsageError(answer["refused"])
        return answer

    def ask(
        self, arm: Variant, request: dict[str, Any], within_s: float = math.inf
    ) -> dict[str, Any]:
        """Let an arm do something, and wait for its answer.

        Raises:
            ArmError: it failed, died, or said nothing for that long, or for that of `--timeout`.
        """
        cell = request.get("cell")
        try:
            self._pipes[arm].write(request)
        except BrokenPipeError:
            raise ArmError(arm, self._death(arm), cell) from None
        answer = self._answer(arm, cell, within_s)
        if "failed" in answer:
            raise ArmError(arm, answer["failed"], cell)
        return answer

    def _answer(self, arm: Variant, cell: int | None, within_s: float = math.inf) -> dict[str, Any]:
        patience_s = min(within_s, self._timeout_s)
        try:
            line = self._pipes[arm].line(patience_s)
        except TimeoutError:
            flag = " (--timeout)" if patience_s == self._timeout_s else ""
            reason = f"timeout: no answer for {patience_s:.3g} s{flag}"
            raise ArmError(arm, reason, cell) from None
        if line is None:
            raise ArmError(arm, self._death(arm), cell)
        try:
            answer = read_json(line)
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise ArmError(arm, f"crashed: {GARBLED}", cell)
        return answer

    def _death(self, arm: Variant) -> str:
        """How an arm's process ended, as its server reports it, and its last words."""
        self._pipes[arm].close()
        how = "it ended"
        for server in self._servers:
            assert server.stdout is not None
            ready, _, _ = select.select([server.stdout], [], [], 1.0)
            rows = os.read(server.stdout.fileno(), 1 << 16).splitlines() if ready else []
            for row in map(json.loads, rows):
                if row["arm"] == arm:
                    how = ending(row["returncode"])
            if not CAN_FORK and server.poll() is not None:
                how = ending(server.returncode)
        words = self._last_words(arm)
        return f"crashed: {how}" + (f": {words}" if words else "")

    def _last_words(self, arm: Variant) -> str:
        self._stderr[arm].seek(0)
        lines = self._stderr[arm].read().decode(errors="replace").split("\n")
        return next((line.strip()[:300] for line in reversed(lines) if line.strip()), "")

    def end(self) -> None:
        """End every process of the round: those that wait for requests by themselves, the rest now.

        A server that ends by itself has seen its arms end: they leave no zombies to a container
        without an init process.
        """
        for pipe in self._pipes.values():
            pipe.close()
        for server in self._servers:
            with contextlib.suppress(subprocess.TimeoutExpired):
                server.wait(timeout=_GRACE_S)
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(server.pid, signal.SIGKILL)
            server.wait()
            if server.stdout is not None:
                server.stdout.close()
        self._servers.clear()
        for file in self._stderr.values():
            file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()


class _Pipe:
    """Lines of JSON to a process, and its answers with a deadline."""

    def __init__(self, write: int, read: int) -> None:
        self._write, self._read = write, read
        self._closed = False
        self._kept = b""

    def write(self, request: dict[str, Any]) -> None:
        """Send one line; raises BrokenPipeError if nobody reads any more."""
        os.write(self._write, json.dumps(request).encode() + b"\n")

    def line(self, timeout_s: float) -> bytes | None:
        """The next line; None if the other end is closed; raises TimeoutError."""
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._kept:
            left_s = deadline - time.monotonic()
            ready, _, _ = select.select([self._read], [], [], max(0.0, left_s))
            if not ready:
                raise TimeoutError
            more = os.read(self._read, 1 << 16)
            if not more:
                return None
            self._kept += more
        line, _, self._kept = self._kept.partition(b"\n")
        return line

    def close(self) -> None:
        """Close both ends, once."""
        if not self._closed:
            self._closed = True
            os.close(self._write)
            os.close(self._read)
