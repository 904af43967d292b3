"""The processes of one round: started, asked one at a time, and ended with all they started."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from attnbench.errors import UsageError, WorkerError
from attnbench.execution.process import GARBLED, Child, GarbledError, Line, Settings, ending
from attnbench.gate.decide.data import Failure, Variant, Version
from attnbench.gate.protocol import (
    CellFailed,
    Prepared,
    Preparing,
    ProcessEnded,
    Refused,
    RoundConfig,
    RoundRequest,
    VariantConfig,
)

_GRACE_S, _REPORT_S = 0.5, 1.0
CAN_FORK = sys.platform == "linux"  # elsewhere forking after importing a BLAS is not safe

T = TypeVar("T")


class ProcessError(Exception):
    """A process failed, died or kept silent; `cell` is what it was at, if anything."""

    def __init__(self, failure: Failure, cell: int | None = None) -> None:
        super().__init__(f"{failure.process}: {failure}")
        self.failure, self.cell = failure, cell


class RoundProcesses(AbstractContextManager["RoundProcesses"]):
    """One fresh process a variant, all warm and alive at once. Use as a context manager.

    `versions` has for each variant the version whose code it runs, and the other; processes are
    forked in this order. `config` makes the server's from `report` and `variants`.
    """

    def __init__(
        self,
        versions: Sequence[tuple[Variant, Version, Version]],
        config: Callable[..., RoundConfig],
        settings: Settings,
    ) -> None:
        self._timeout_s = settings.timeout_s
        self._lines: dict[Variant, Line] = {}
        self._servers: dict[Variant, tuple[Line, Child]] = {}
        try:
            for group in [versions] if CAN_FORK else [[row] for row in versions]:
                lines: dict[Variant, Line] = {variant: Line() for variant, *_ in group}
                self._lines |= lines
                variants = tuple(
                    VariantConfig(
                        variant, version.files, version.root, other.root, lines[variant].ends
                    )
                    for variant, version, other in group
                )
                report = Line()
                started = config(report=report.ends, variants=variants)
                used = [report, *lines.values()]
                child = Child("attnbench.gate.server", started, settings, used)
                self._servers |= dict.fromkeys(lines, (report, child))
        except BaseException as err:
            self.end()
            if isinstance(err, OSError):
                raise WorkerError(f"the processes of a round cannot be started ({err})") from err
            raise

    def prepared(self, variant: Variant) -> Prepared:
        """What a process says once its cells are warm; it names each before it builds it.

        Raises:
            ProcessError: it died, or said nothing for the time of `--timeout`.
            UsageError: it runs code of the other version.
        """
        answer: Any = None
        while not isinstance(answer, Prepared):
            cell = None if answer is None else answer.cell
            answer = self._receive(variant, Preparing | Prepared | Refused, cell)
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
        code, reason = "crashed", GARBLED
        try:
            answer = self._lines[variant].receive(kinds, patience_s)
            if answer is not None:
                return answer
            reason = self._death(variant)
        except TimeoutError:
            flag = " (--timeout)" if patience_s == self._timeout_s else ""
            code, reason = "timeout", f"no answer for {patience_s:.3g} s{flag}"
        except GarbledError:
            pass
        failure = Failure(variant=variant, code=code, reason=reason)  # type: ignore[arg-type]
        raise ProcessError(failure, cell)

    def _death(self, variant: Variant) -> str:
        """How a process ended, as its server reports it, and its last words."""
        line, (report, server) = self._lines[variant], self._servers[variant]
        words = line.last_words() or report.last_words()
        line.close()
        returncode = None
        try:
            while (ended := report.receive(ProcessEnded, _REPORT_S)) is not None:
                if ended.variant == variant:
                    returncode = ended.returncode
                    break
            else:  # the server itself has ended
                returncode = server.ended(_REPORT_S)
        except (TimeoutError, GarbledError):
            pass
        how = "it ended" if returncode is None else ending(returncode)
        return f"{how}: {words}" if words else how

    def end(self) -> None:
        """End every process of the round: those that wait for requests by themselves, the rest now.

        A server that ends by itself has seen its processes end: they leave no zombies to a
        container without an init process.
        """
        for line in self._lines.values():
            line.close()
        for report, server in dict.fromkeys(self._servers.values()):
            server.ended(_GRACE_S)
            server.kill()
            report.close()
        self._servers.clear()

    def __exit__(self, *_: object) -> None:
        self.end()
