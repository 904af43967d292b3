"""What happens in a session, as events that it yields to whoever shows them.

A record is an event as well: it is on disk before it is yielded.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from attnbench.planning.forecast import Forecast
from attnbench.planning.plan import Plan
from attnbench.schema.case import Case

T = TypeVar("T")
Events = Generator[object, None, T]  # what happens, and in the end the result


@dataclass(frozen=True)
class Starting:
    """Workers import torch: for two seconds there is nothing else to do."""


@dataclass(frozen=True)
class Planned:
    """The plan is made; `path` is where records go, None for a dry run.

    `forecast` knows how long cells will take: in a dry run, or where time is limited.
    """

    plan: Plan
    path: Path | None
    forecast: Forecast | None = None


@dataclass(frozen=True)
class Stage:
    """A part of a gate begins."""

    words: str


@dataclass(frozen=True)
class Total:
    """How many checks, or cells of a gate, there are."""

    count: int


@dataclass(frozen=True)
class Working:
    """What a worker is at, a few times a second."""

    case: Case | None
    impl: str | None
    stage: str


@dataclass(frozen=True)
class RoundMeasured:
    """A round of a gate was measured, or is discarded; `words` say how far the gate has come."""

    number: int
    discarded: str | None
    words: str


@dataclass(frozen=True)
class Warned:
    """Something the user should know that stops nothing."""

    message: str


def warn(event: object) -> None:
    """Make a Python warning of a warning; show nothing else."""
    if isinstance(event, Warned):
        warnings.warn(event.message, RuntimeWarning, stacklevel=4)


def follow(
    events: Events[T],
    show: Callable[[object], object] = warn,
    output: Callable[[object], object] = lambda event: None,
) -> T:
    """Pull all events, show each, and return the result; where this raises, the session ends.

    What `show` raises ends nothing: the first is reported as a warning at the end. `output` has
    each event before, and may raise.
    """
    failure: Exception | None = None
    with contextlib.closing(events):
        try:
            while True:
                output(event := next(events))
                try:
                    show(event)
                except Exception as err:
                    failure = failure or err
        except StopIteration as end:
            result: T = end.value
            return result
        finally:
            if failure is not None:
                _report(failure, show)


def _report(failure: Exception, show: Callable[[object], object]) -> None:
    text = f"progress was not shown to the end ({type(failure).__name__}: {failure!s:.200})"
    try:
        show(Warned(f"{text}; what was measured is not affected"))
    except Exception:
        warnings.warn(text, RuntimeWarning, stacklevel=3)
