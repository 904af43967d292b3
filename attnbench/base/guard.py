"""Whoever watches a run must not be able to end it."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any, TypeVar, cast

T = TypeVar("T")


class _Guard:
    def __init__(self, listener: Any) -> None:
        self._listener = listener
        self.failure: Exception | None = None  # the first

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._listener, name)

        def call(*args: Any, **options: Any) -> Any:
            try:
                return method(*args, **options)
            except Exception as err:
                self.failure = self.failure or err

        return call


@contextlib.contextmanager
def guarded(listener: T) -> Iterator[T]:
    """The listener, none of whose methods raises an Exception; the first is reported at the end.

    It goes to the listener's own `warned`, or is a Python warning where that raises as well.
    """
    guard = _Guard(listener)
    try:
        yield cast(T, guard)
    finally:
        if (err := guard.failure) is not None:
            text = f"progress was not shown to the end ({type(err).__name__}: {err!s:.200})"
            try:
                cast(Any, listener).warned(f"{text}; what was measured is not affected")
            except Exception:
                warnings.warn(text, RuntimeWarning, stacklevel=3)
