"""Lists and amounts as people write them: `a,b`, `128..8192` (doubling), `10%`, `2m30s`."""

from __future__ import annotations

import math
import re

from attnbench.errors import UsageError

_LARGEST = 1 << 40
_DURATION = re.compile(
    r"(?:(?P<h>[\d.]+)\s*h)?\s*(?:(?P<m>[\d.]+)\s*m(?:in)?)?\s*(?:(?P<s>[\d.]+)\s*s?)?", re.ASCII
)
_SECONDS = {"h": 3600.0, "m": 60.0, "s": 1.0}
_MOST_DIGITS = 20  # Python refuses to read numbers of thousands of digits


def parse_sizes(text: str, flag: str) -> list[int]:
    """Read `128,256,1024` or `128..8192` (doubling), or a mix; duplicates are dropped.

    Raises:
        UsageError: nothing given, a part that is not a whole number of at least 1, or a
            doubling that does not land on its end.
    """
    sizes: list[int] = []
    for part in parse_names(text, flag):
        first, dots, last = part.partition("..")
        start = _size(first, part, flag)
        sizes += _doubling(start, _size(last, part, flag), flag) if dots else [start]
    return list(dict.fromkeys(sizes))


def parse_names(text: str, flag: str) -> list[str]:
    """Read `naive,sdpa`; duplicates are dropped.

    Raises:
        UsageError: an empty list or an empty element.
    """
    names = [part.strip() for part in text.split(",")]
    if not all(names):
        raise UsageError(f"{flag} has an empty element in {text!r}; write it as a,b,c")
    return list(dict.fromkeys(names))


def parse_numbers(text: str, flag: str) -> list[float]:
    """Read `10,2.5`; duplicates are dropped.

    Raises:
        UsageError: nothing given, or a part that is not a number above 0.
    """
    parts = parse_names(text, flag)
    numbers = {part: _number(part) for part in parts}
    for part, number in numbers.items():
        if not number:
            raise UsageError(f"{flag} takes numbers above 0 such as 10,2.5, not {part!r}")
    return list(dict.fromkeys(number for number in numbers.values() if number))


def parse_share(text: str, flag: str) -> float:
    """Read `10%`, `10 %` or `0.1` as 0.1.

    Raises:
        UsageError: something else, or a number below 0.
    """
    number = text.strip()
    percent = number.endswith("%")
    value = _number(number.removesuffix("%").strip())
    if value is None:
        raise UsageError(f"{flag} takes a share such as 10% or 0.1, not {text[:40]!r}")
    return value / 100 if percent else value


def parse_duration(text: str, flag: str) -> float:
    """Read `90s`, `5m`, `2m30s`, `1h` or plain seconds: the time in seconds.

    Raises:
        UsageError: something else.
    """
    found = _DURATION.fullmatch(text.strip())
    written = {unit: part for unit, part in found.groupdict().items() if part} if found else {}
    numbers = [_number(part) for part in written.values()]
    if not numbers or None in numbers:
        raise UsageError(f"{flag} takes a time such as 90s, 5m or 2m30s, not {text[:40]!r}")
    return sum(_SECONDS[unit] * float(part) for unit, part in written.items())


def _number(text: str) -> float | None:
    """A finite number from 0 on in plain or scientific notation, else None."""
    try:
        value = float(text) if text.isascii() and "_" not in text else math.nan
    except ValueError:
        return None
    return value if 0 <= value < math.inf else None


def _size(text: str, part: str, flag: str) -> int:
    digits = text.strip()
    if not (digits.isascii() and digits.isdecimal()) or not digits.strip("0"):
        raise UsageError(
            f"{flag} takes whole numbers of at least 1, such as 128,256 or 128..8192, not {part!r}"
        )
    if len(digits) > _MOST_DIGITS or int(digits) > _LARGEST:
        raise UsageError(f"{flag} is at most 2^40, not {part[:40]!r}")
    return int(digits)


def _doubling(start: int, end: int, flag: str) -> list[int]:
    sizes = [start]
    while sizes[-1] < end:
        sizes.append(sizes[-1] * 2)
    if sizes[-1] != end or end < start:
        below = sizes[-2] if len(sizes) > 1 else start
        raise UsageError(
            f"{flag} {start}..{end} doubles and must land on its end: {start}..{below}"
            f" or {start}..{sizes[-1] if sizes[-1] > start else start * 2}"
        )
    return sizes
