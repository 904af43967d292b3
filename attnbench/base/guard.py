"""Whoever watches a run, or reads what it says, must not be able to end it."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, cast

T = TypeVar("T")


class Guard:
    """Stands for an object none of whose methods raises an Exception: `failed` gets it."""

    def __init__(self, of: object, failed: Callable[[Exception], object]) -> None:
        self._of, self._failed = of, failed

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._of, name)

        def call(*args: Any, **options: Any) -> Any:
            try:
                return found(*args, **options)
            except Exception as err:
                return self._failed(err)

        return call if callable(found) else found


@contextlib.contextmanager
def guarded(listener: T) -> Iterator[T]:
    """The listener, none of whose methods raises an Exception; the first is reported at the end.

    It goes to the listener's own `warned`, or is a Python warning where that raises as well.
    """
    failures: dict[str, Exception] = {}
    try:
        yield cast(T, Guard(listener, lambda err: failures.setdefault("first", err)))
    finally:
        for err in failures.values():
            text = f"progress was not shown to the end ({type(err).__name__}: {err!s:.200})"
            try:
                cast(Any, listener).warned(f"{text}; what was measured is not affected")
            except Exception:
                warnings.warn(text, RuntimeWarning, stacklevel=3)
