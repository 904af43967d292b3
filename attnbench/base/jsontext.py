"""Typed values to JSON and back, whatever text is in them; and checksums, to notice a change.

Messages of exceptions, and names of files that are not UTF-8, may hold halves of surrogate pairs,
which no encoding can write, and characters that steer a terminal or turn the order of what is
read: they become U+FFFD.
"""

from __future__ import annotations

import hashlib
import json
import re
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")


def encode(value: Any) -> bytes:
    """Compact JSON of plain data, dataclasses and Structs; numbers that are not finite are null."""
    try:
        return msgspec.json.encode(value, enc_hook=_plain)
    except UnicodeEncodeError:
        return encode(json.loads(dumps(msgspec.to_builtins(value, enc_hook=_plain))))


def _plain(value: Any) -> Any:
    """Subclasses of Python's own types, such as torch's version, and NumPy's numbers."""
    if isinstance(value, str):
        return str(value)
    if hasattr(value, "item"):
        return value.item()
    raise NotImplementedError(f"{type(value).__name__} is not JSON")


def dumps(value: Any, **options: Any) -> str:
    """JSON of plain data, with options of `json.dumps`."""
    text = json.dumps(value, ensure_ascii=False, **options)
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


_MARKS = "\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff"  # C1, lines, direction
_STEERING = re.compile(f"[\0-\x08\x0b-\x1f\ud800-\udfff{_MARKS}]")
# The same within JSON, where it may be escaped; an escaped backslash escapes nothing.
_ESCAPED = re.compile(
    r"(\\\\)|\\[bfr]|\\u(?i:00[0189][0-9a-f]|007f|061c|20(?:0[ef]|2[89a-e]|6[6-9])|feff)"
    f"|[{_MARKS}]"
)


def plain(text: str) -> str:
    """The text with U+FFFD for what would steer a terminal, or turn the order of what is read."""
    return _STEERING.sub("\ufffd", text)


def decode(text: str | bytes, kind: type[T]) -> T:
    """Parse JSON as a value of `kind`, strictly; its texts are as `plain` makes them.

    Raises:
        ValueError: it is not JSON, is nested too deeply, or a field is wrong, whose path it names.
    """
    whole = text if isinstance(text, str) else text.decode()
    if not whole.isascii() or "\\" in whole or "\x7f" in whole:
        whole = _ESCAPED.sub(lambda found: found[1] or "\ufffd", whole)
    try:
        return msgspec.json.decode(whole, type=kind)
    except RecursionError as err:
        raise ValueError("nested too deeply") from err


_SEAL = re.compile(rb',"checksum":"([0-9a-f]{16})"}\n?\Z')


def checksum(data: bytes) -> str:
    """The first 16 hexadecimal digits of SHA-256."""
    return hashlib.sha256(data).hexdigest()[:16]


def sealed(text: str) -> str:
    """A JSON object that has fields, with one more at its end: a checksum of all before it."""
    body = text.rstrip().removesuffix("}").rstrip()
    return f'{body},"checksum":"{checksum(body.encode())}"}}'


def unsealed(data: bytes) -> bytes:
    """The object without its checksum, which must be that of the rest.

    Raises:
        ValueError: something was changed since it was written, or it is not JSON.
    """
    if (seal := _SEAL.search(data, max(0, len(data) - 64))) is None:
        decode(data, dict[str, Any])  # says what is wrong with a file that is not ours
        raise ValueError("it was changed since it was written: its checksum is missing or damaged")
    data = data[: seal.start()]
    if checksum(data) != seal[1].decode():
        raise ValueError("it was changed since it was written: its checksum does not fit")
    return data + b"}"
