"""What happens in a session, as events that it yields, to be shown.

A record is an event as well: it is on disk before it is yielded.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import NamedTuple, TypeVar

from attnbench.planning.forecast import Forecast
from attnbench.planning.plan import Plan
from attnbench.schema.case import Case

T = TypeVar("T")
Events = Generator[object, None, T]  # what happens, and in the end the result


class Starting(NamedTuple):
    """Workers import torch: for two seconds there is nothing else to do."""


class Planned(NamedTuple):
    """The plan is made; `path` is where records go, None for a dry run.

    `forecast` knows how long cells will take, where that was asked for. `steps` are those of
    `steps_of`.
    """

    plan: Plan
    path: Path | None
    forecast: Forecast | None = None
    steps: Mapping[str, Mapping[str, int]] = {}


class Total(NamedTuple):
    """How many checks, or cells of a gate, there are."""

    number: int


class Working(NamedTuple):
    """What is going on; of a worker a few times a second, with the cell it is at."""

    stage: str
    case: Case | None = None
    impl: str | None = None


class RoundMeasured(NamedTuple):
    """A round of a gate was measured; why it is discarded, if so, and what is going on now."""

    number: int
    discarded: str | None
    stage: str


class Warned(NamedTuple):
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
