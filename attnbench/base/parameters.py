"""Parameters of what has a name: `window:256`, `performer:features=512:seed=1`."""

from __future__ import annotations

import re
from collections.abc import Collection, Container, Mapping
from typing import Protocol, TypeVar

import msgspec

from attnbench.base.registry import Registry, nearest
from attnbench.errors import UsageError

Value = int | float | str | tuple[float, ...]
Values = dict[str, Value]
_LARGEST = 1e12


class Parameter(msgspec.Struct, frozen=True, kw_only=True):
    """What a parameter takes: a whole number, a `real` one, `many` (`64+128`), or one of `choices`.

    One without a default must be given. Numbers lie between `least` and `most`.
    """

    default: Value | None = None
    real: bool = False
    many: bool = False
    least: float = 1
    most: float | None = None
    choices: tuple[str, ...] = ()

    def read(self, text: str) -> Value | None:
        """The value that `text` stands for, or None where it is not one."""
        if self.choices:
            return text if text in self.choices else None
        parts = text.split("+") if self.many else [text]
        try:
            numbers = [float(part) if self.real else int(part) for part in parts]
        except ValueError:
            return None
        most = _LARGEST if self.most is None else self.most
        if not all(self.least <= x <= most for x in numbers):
            return None
        return tuple(numbers) if self.many else numbers[0]

    def __str__(self) -> str:
        if self.choices:
            return f"one of {', '.join(self.choices)}"
        kind = "number" if self.real else "whole number"
        kind = f"{kind}s joined by +" if self.many else f"a {kind}"
        most = " or more" if self.most is None else f" to {self.most:g}"
        return f"{kind}, {self.least:g}{most}"


class Parametric(Protocol):
    """What takes parameters."""

    @property
    def parameters(self) -> Mapping[str, Parameter]:
        """By name, in the order in which they are written."""


T = TypeVar("T", bound=Parametric)


def base_name(text: str, known: Container[str] = ()) -> str:
    """The name without its parameters; what several files call `mine` is `a:mine` and `b:mine`.

    Where only the first part is `known`, the second is a parameter's, however it looks.
    """
    first, second = f"{text}:".split(":")[:2]
    is_value = "=" in second or not re.search(r"^[^\W\d]|[^\W\de]", second)  # a number has an e
    whole = first if is_value else f"{first}:{second}"
    return first if first in known and whole not in known else whole


def meant(text: str, known: Collection[str]) -> list[str]:
    """What `text` means: itself, or `a:mine` and `b:mine` where two files have `mine`; or none."""
    name = base_name(text, known)
    if name in known:
        return [text]
    return [full + text[len(name) :] for full in known if full.partition(":")[2] == name]


def read_name(text: str, registry: Registry[T]) -> tuple[str, T, Values]:
    """Read `name:key=value:…` of a registry: the name written shortest, the item, its values.

    Raises:
        UnknownNameError: nothing is registered under the name.
        UsageError: as `read_parameters`.
    """
    name = base_name(text, registry)
    item = registry.get(name)
    short, values = read_parameters(text, name, item.parameters, registry.kind, registry.flag)
    return short, item, values


def read_parameters(
    text: str, name: str, declared: Mapping[str, Parameter], kind: str, flag: str
) -> tuple[str, Values]:
    """Read `name:key=value:…` of this `name`; the text as it is shortest, and every value.

    A value without a key is that of the first parameter. `kind` and `flag` are for messages.
    Parameters at their default are left out of the name, so that one thing has one name.

    Raises:
        UsageError: a parameter that is unknown, given twice, missing, or not in its range.
    """
    given: Values = {}
    for number, part in enumerate(text[len(name) :].split(":")[1:]):
        key, equals, value = part.partition("=")
        if not equals and not number:
            key, value = next(iter(declared), ""), key
        if key not in declared:
            known = f"it takes {', '.join(declared)}" if declared else "it takes none"
            asked = f"'{key or value}'{nearest(key or value, declared)}"
            raise UsageError(f"{kind} '{name}' has no parameter {asked}; {known} ({flag})")
        read = declared[key].read(value)
        if read is None or key in given:
            why = f"is {declared[key]}" if read is None else "is given twice"
            raise UsageError(f"{kind} '{text}': {key} {why}, not '{value}' ({flag})")
        given[key] = read
    values: Values = {}
    for key, parameter in declared.items():
        found = given.get(key, parameter.default)
        if found is None:
            raise UsageError(f"{kind} '{name}' needs its {key}, {parameter} ({flag} {name}:…)")
        values[key] = found
    other = {key: x for key, x in values.items() if x != declared[key].default}
    first = next(iter(declared), None)
    texts = [shown(x) if key == first else f"{key}={shown(x)}" for key, x in other.items()]
    return ":".join([name, *texts]), values


def shown(value: Value) -> str:
    """A value as it is written on the command line."""
    if isinstance(value, tuple):
        return "+".join(map(shown, value))
    if not isinstance(value, float):
        return str(value)
    short = f"{value:g}"
    return short if float(short) == value else str(value)
