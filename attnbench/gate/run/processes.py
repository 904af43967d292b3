"""The processes of one round: started, asked one at a time, and ended with all they started."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, closing
from typing import Any, TypeVar

from attnbench.errors import UsageError, WorkerError
from attnbench.execution.process import (
    CAN_FORK,
    GARBLED,
    Child,
    Forked,
    GarbledError,
    Line,
    Server,
    Settings,
    ending,
    started,
)
from attnbench.gate.decide.data import Failure, Variant, Version, VersionName
from attnbench.gate.protocol import CellFailed, Preparation, Prepared, Refused, RoundRequest
from attnbench.schema.record import Status

_GRACE_S = 1.0

T = TypeVar("T")


class ProcessError(Exception):
    """A process failed, died or kept silent; `cell` is what it was at, if anything."""

    def __init__(self, failure: Failure, cell: int | None = None) -> None:
        super().__init__(f"{failure.process}: {failure}")
        self.failure, self.cell = failure, cell


class RoundProcesses(AbstractContextManager["RoundProcesses"]):
    """One fresh process a variant, all warm and alive at once. Use as a context manager.

    `versions` has for each variant the version whose code it runs, and the other; processes are
    forked in this order, by one server for each interpreter. `config` is made for each with
    `files`, `root` and `other_root`; `settings` are those of each version. `module` is what the
    servers run.
    """

    module = "attnbench.gate.server"

    def __init__(
        self,
        versions: Sequence[tuple[Variant, Version, Version]],
        config: Callable[..., Any],
        settings: Mapping[VersionName, Settings],
    ) -> None:
        self._timeout_s = settings["base"].timeout_s
        self._lines: dict[Variant, Line] = {}
        self._processes: dict[Variant, Child | Forked] = {}
        self._servers: dict[Variant, Server | None] = {}
        servers: dict[str | None, Server] = {}  # of each interpreter
        with contextlib.ExitStack() as begun:
            try:
                for each in settings.values() if CAN_FORK else ():  # they import torch side by side
                    if each.python not in servers:
                        servers[each.python] = begun.enter_context(Server(each, self.module))
                for variant, version, other in versions:
                    own, line = settings[version.name], begun.enter_context(closing(Line()))
                    server = servers.get(own.python)
                    process = started(self.module, own, line, server)
                    if isinstance(process, Child):
                        begun.callback(process.kill)
                    self._lines[variant], self._processes[variant] = line, process
                    self._servers[variant] = server
                    line.send(config(files=version.files, root=version.root, other_root=other.root))
            except OSError as err:
                raise WorkerError(f"the processes of a round cannot be started ({err})") from err
            self._held = begun.pop_all()

    def prepared(self, variant: Variant) -> Prepared:
        """What a process says once its cells are warm; it names each before it builds it.

        Raises:
            ProcessError: it died, or said nothing for the time of `--timeout`.
            UsageError: it runs code of the other version.
        """
        answer: Any = None
        while not isinstance(answer, Prepared):
            cell = None if answer is None else answer.cell
            answer = self._receive(variant, Preparation, cell)
            if isinstance(answer, Refused):
                raise UsageError(answer.reason)
        return answer

    def ask(
        self, variant: Variant, request: RoundRequest, kind: type[T], within_s: float = math.inf
    ) -> T:
        """Let a process do something, and wait for its answer.

        Raises:
            ProcessError: it failed, died, or said nothing for that long, or that of `--timeout`.
        """
        cell = getattr(request, "cell", None)
        self._lines[variant].send(request)
        answer = self._receive(variant, kind | CellFailed, cell, within_s)
        if isinstance(answer, CellFailed):
            failure = Failure(variant=variant, code=answer.code, reason=answer.reason)
            raise ProcessError(failure, cell)
        found: T = answer
        return found

    def _receive(
        self, variant: Variant, kinds: Any, cell: int | None, within_s: float = math.inf
    ) -> Any:
        patience_s = min(within_s, self._timeout_s)
        code: Status = "crashed"
        try:
            answer = self._lines[variant].receive(kinds, patience_s)
            if answer is not None:
                return answer
            reason = self._death(variant)
        except TimeoutError:
            flag = " (--timeout)" if patience_s == self._timeout_s else ""
            code, reason = "timeout", f"no answer for {patience_s:.3g} s{flag}"
        except GarbledError:
            reason = GARBLED
        raise ProcessError(Failure(variant=variant, code=code, reason=reason), cell)

    def _death(self, variant: Variant) -> str:
        """How a process ended, and its last words or its server's."""
        line, server = self._lines[variant], self._servers[variant]
        words = line.last_words() or (server.line.last_words() if server else "")
        line.close()
        returncode = self._processes[variant].ended(_GRACE_S)
        how = "it ended" if returncode is None else ending(returncode)
        return f"{how}: {words}" if words else how

    def __exit__(self, *_: object) -> None:
        self._held.close()
