"""Lists as the command line writes them: commas, and doublings such as `128..8192`."""

from __future__ import annotations

from attnbench.errors import UsageError

_LARGEST = 1 << 40
_MOST_DIGITS = 20  # Python refuses to read numbers of thousands of digits


def parse_sizes(text: str, flag: str) -> list[int]:
    """Read `128,256,1024` or `128..8192` (doubling), or a mix; duplicates are dropped.

    Raises:
        UsageError: nothing given, something that is no whole number of at least 1, or a
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
