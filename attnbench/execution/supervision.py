"""What becomes of cells whose worker dies, hangs, or writes what cannot be read."""

from __future__ import annotations

import contextlib
import math
import signal
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from attnbench.execution.events import Working
from attnbench.execution.policy import Death, Key, Policy
from attnbench.execution.process import GARBLED, GarbledError, Settings, Worker, ending
from attnbench.schema.case import Case
from attnbench.schema.messages import (
    LATE_S,
    NOBODY,
    CellMeasured,
    Check,
    Done,
    Heartbeat,
    Measure,
    Profile,
    Result,
    Sign,
    Trace,
)
from attnbench.schema.record import Status

_POLL_S = 0.5
_LINGER_S = 3.0  # for what a cell started, such as a thread, to do its harm


Outcome = tuple[Key, Result | Death]


class Workers(Protocol):
    """Who has the worker, starts a fresh one where there is none, and ends it."""

    settings: Settings

    def worker(self) -> Worker:
        """The one that lives, or a fresh one."""

    def close(self) -> None:
        """End it."""


@dataclass
class Supervision:
    """Cells (keys) to be worked off by workers, request after request until none is left.

    `request(keys)` makes the request for what is left; `Policy` says what becomes of each cell.
    Alone, a suspect's result counts if the process lives on for `_LINGER_S`. `retried` says of who
    was tried once more what had happened before, and who else may have done it. A race ends at
    `until` by `time.perf_counter`.
    """

    runner: Workers
    cases: list[Case]
    request: Callable[[list[Key]], Measure | Profile | Trace | Check]
    deaths_each: int | None = None
    retried: dict[Key, str] = field(default_factory=dict)
    until: float = math.inf
    _before: dict[Key, list[str]] = field(default_factory=dict)  # other suspects

    def run(self, keys: list[Key]) -> Iterator[Outcome | Working]:
        """Yield a result or a Death for every key, each once, and meanwhile what a worker is at."""
        policy = Policy(dict.fromkeys(keys), self.retried, self.until < math.inf, self.deaths_each)
        while policy.open:
            asked = policy.attempt()
            worker = self.runner.worker()
            attempt = _Attempt(worker.heartbeat, asked)
            worker.send(self.request(asked))
            while isinstance(event := (yield from self._next(worker, attempt)), Result):
                key = attempt.key(event.key)
                if key is None or key not in policy.open:
                    continue
                status = event.record.status if isinstance(event, CellMeasured) else None
                verdict = policy.result(key, status, others_ran=attempt.others_ran())
                if verdict == "wait":
                    continue
                end = self._outlived(worker, key, event) if verdict == "linger" else event
                yield key, end
                if isinstance(end, Death):
                    policy.deaths[key[1]] += 1
                    event = end
                    break
            at, others_ran = attempt.at(attempt.sign()), attempt.others_ran()
            if event is not None:
                if words := worker.line.last_words(3, attempt.sign().printed):
                    event = event._replace(reason=f"{event.reason}: {words}")
                self._before |= {key: attempt.others(key[1]) for key in at if key in policy.open}
                self.runner.close()
            yield from policy.end(event, at, others_ran=others_ran)
            if policy.fresh:
                self.runner.close()

    def _outlived(self, worker: Worker, key: Key, result: Result) -> Result | Death:
        """The result of one tried again alone, if its process lives on for a while."""
        if worker.line.ends_within(_LINGER_S):
            how = f"{ending(worker.ended() or 0)}, within {_LINGER_S:g} s after it was measured"
            return Death("crashed", f"the process ended, {how}")
        if names := self._before.pop(key, []):
            named = ", ".join(names[:5] + ["…"] * (len(names) > 5))
            self.retried[key] += f"; to blame is one of: {named}"
        return result

    def _next(
        self, worker: Worker, attempt: _Attempt
    ) -> Generator[Working, None, Result | Death | None]:
        """The next result, None when the worker is done, or a Death if it ends before."""
        while True:
            try:
                event = worker.event(_POLL_S)
            except GarbledError:
                return attempt.garbled()
            except TimeoutError:
                sign = attempt.sign()
                at = attempt.at(sign)
                case = self.cases[at[0][0]] if at else None
                impl = at[0][1] if at and sign.impl != NOBODY else None
                yield Working(sign.stage, case, impl)
                timeout_s = self.runner.settings.timeout_s
                attempt.silent_s += _POLL_S  # not by a clock, which may jump
                if attempt.silent_s > min(timeout_s, sign.limit_s):
                    silent = f"no heartbeat for {timeout_s:g} s (--timeout)"
                    if sign.limit_s < timeout_s:
                        silent = f"a call did not return within {sign.limit_s:.0f} s"
                    return Death("timeout", f"{sign.stage}: {silent}")
                if time.perf_counter() > self.until + LATE_S:
                    return Death("skipped", f"{sign.stage}: --budget was used up", of_all=True)
                continue
            if event is None:
                return attempt.death(worker)
            if isinstance(event, Done):
                return None
            if isinstance(event, Result) and attempt.key(event.key):
                return event
            return attempt.garbled()


class _Attempt:
    """A request, whose cases are numbered from 0, and the worker's heartbeat meanwhile."""

    def __init__(self, heartbeat: Heartbeat, asked: list[Key]) -> None:
        self._impls: dict[int, list[str]] = {}
        for index, impl in asked:
            self._impls.setdefault(index, []).append(impl)
        self._indices = list(self._impls)
        self._heartbeat, self._closed = heartbeat, False
        self._last, self.silent_s = heartbeat.read(), 0.0  # since it last moved
        self._oom_kills = _oom_kills()
        self._names = list(dict.fromkeys(impl for _, impl in asked))

    def key(self, local: Key) -> Key | None:
        """The caller's key; None where the request had no such cell."""
        place, impl = local
        if not 0 <= place < len(self._indices) or impl not in self._impls[self._indices[place]]:
            return None
        return self._indices[place], impl

    def at(self, sign: Sign) -> list[Key]:
        """The keys that a sign points at: one cell, or all of a case, or none.

        It may point nowhere: who writes to descriptors of others may hit its file.
        """
        if not 0 <= sign.case < len(self._indices):
            return []
        index = self._indices[sign.case]
        impls = self._impls[index]
        if sign.impl != NOBODY:
            impls = impls[sign.impl : sign.impl + 1] if sign.impl >= 0 else []
        return [(index, impl) for impl in impls]

    def others_ran(self) -> bool:
        """Whether code of others than the one that the worker is at has run in its process."""
        return self.sign().begun > (self.sign().impl != NOBODY)

    def others(self, impl: str) -> list[str]:
        """Who ran in the process besides: they begin in the order in which they are asked for."""
        return [name for name in self._names[: self.sign().begun] if name != impl]

    def sign(self) -> Sign:
        """What the worker is at; what it was at when its pipe closed, if it has."""
        if not self._closed:
            sign = self._heartbeat.read()
            if sign.step != self._last.step:
                self.silent_s = 0.0
            self._last = sign
        return self._last

    def garbled(self) -> Death:
        """An event that cannot be read may be the doing of a cell before this one."""
        return Death("error", f"{self.sign().stage}: {GARBLED}", surely=False)

    def death(self, worker: Worker) -> Death:
        """What an end says; Python ends with 1 where someone closed the pipe for a later result."""
        stage = self.sign().stage
        self._closed = True  # it may go on for a while without its pipe
        returncode = worker.ended()
        if returncode is None:
            return Death("crashed", f"{stage}: it closes the pipe of its worker", surely=False)
        if returncode == -signal.SIGKILL and self._oom_kills != _oom_kills():
            status: Status = "skipped" if self.sign().impl == NOBODY else "oom"  # inputs, reference
            return Death(status, f"{stage}: killed by the system for want of memory")
        reason = f"{stage}: the process ended, {ending(returncode)}"
        # Who kills is as a rule somebody else; a cell that it was at is then tried once more.
        killed = returncode == -signal.SIGKILL and self.at(self.sign())
        return Death("crashed", reason, surely=returncode != 1 and not killed)


def _oom_kills() -> str | None:
    """The line in which Linux counts the processes that it has killed for want of memory."""
    with contextlib.suppress(OSError):
        lines = Path("/proc/vmstat").read_text().splitlines()
        return next((line for line in lines if line.startswith("oom_kill ")), None)
    return None
