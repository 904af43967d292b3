"""One generic registry: everything that can be named and extended lives in one of these."""

from __future__ import annotations

import contextlib
import difflib
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Generic, TypeVar

from attnbench.errors import UnknownNameError, UsageError

T = TypeVar("T")


def nearest(name: str, known: Iterable[str], cutoff: float = 0.5) -> str:
    """Return a hint `, did you mean 'x'?`, or the empty string when nothing is close."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff)
    return f", did you mean '{close[0]}'?" if close else ""


def unknown(
    kind: str, name: str, known: Iterable[str], flag: str = "", hint: str | None = None
) -> UnknownNameError:
    """Build the error for an unknown `name`: the fact, the nearest or a hint, the valid values."""
    where = f" ({flag})" if flag else ""
    hint = nearest(name, known) if hint is None else hint
    listed = ", ".join(dict.fromkeys(known)) or "none"
    error = UnknownNameError(f"unknown {kind} '{name}'{where}{hint}; known: {listed}")
    error.asked = kind, name, list(known), flag
    return error


def require(kind: str, names: Iterable[str], known: Iterable[str], flag: str = "") -> None:
    """Raise the error of the first of the names that is not known."""
    for name in names:
        if name not in known:
            raise unknown(kind, name, known, flag)


class Registry(Generic[T]):
    """Names to items, in order of registration. A duplicate raises; so does an unknown name.

    `kind` and `flag` are what the messages call the thing and the option that names it; `items`
    are those that it begins with.
    """

    def __init__(self, kind: str, flag: str = "", items: Mapping[str, T] = {}) -> None:
        self.kind, self.flag = kind, flag
        self._items = dict(items)
        self._replaceable: set[str] = set()

    def add(self, name: str, item: T) -> T:
        """Register `item` under `name`.

        Raises:
            UsageError: the name is not one word of at most 100 letters, or already taken.
        """
        if not re.fullmatch(r"\w[\w.-]{0,99}", name):
            raise UsageError(
                f"{self.kind} name {name!r:.120} must be one word of up to 100 letters, digits,"
                " '_', and after the first '-' or '.'"
            )
        if name in self._items and name not in self._replaceable:
            raise UsageError(f"{self.kind} '{name}' is already registered; choose another name")
        self._replaceable.discard(name)
        self._items[name] = item
        return item

    def get(self, name: str) -> T:
        """Return the item called `name`.

        Raises:
            UnknownNameError: nothing is registered under it; the message names the nearest.
        """
        require(self.kind, [name], self._items, self.flag)
        return self._items[name]

    def remove(self, name: str) -> None:
        """Forget `name`; for tests and for files that replace an installed namesake."""
        self._items.pop(name, None)

    def rename(self, names: Mapping[str, str]) -> None:
        """Call items otherwise, each in its place; no two of them the same."""
        self._items = {names.get(name, name): item for name, item in self._items.items()}

    @contextlib.contextmanager
    def changed_as_one(self, replaceable: Iterable[str] = ()) -> Iterator[None]:
        """Take everything that is registered within, or nothing at all where it raises.

        Each of the `replaceable` names may be taken once more, and keeps its place.
        """
        before = dict(self._items)
        self._replaceable = set(replaceable)
        try:
            yield
        except BaseException:
            self._items = before
            raise
        finally:
            self._replaceable = set()

    def names(self) -> list[str]:
        """All registered names, in order of registration."""
        return list(self._items)

    def items(self) -> Iterator[tuple[str, T]]:
        """Pairs of name and item, in order of registration."""
        return iter(self._items.items())

    def __contains__(self, name: object) -> bool:
        return name in self._items

    def __len__(self) -> int:
        return len(self._items)
