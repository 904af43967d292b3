"""Typed values to JSON and back, whatever text is in them.

Messages of exceptions, and names of files that are not UTF-8, may hold halves of surrogate pairs,
which no encoding can write: they become U+FFFD.
"""

from __future__ import annotations

import json
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


def decode(text: str | bytes, kind: type[T]) -> T:
    """Parse JSON as a value of `kind`, strictly.

    Raises:
        ValueError: it is not JSON, is nested too deeply, or a field is wrong, whose path it names.
    """
    try:
        return msgspec.json.decode(text, type=kind)
    except RecursionError as err:
        raise ValueError("nested too deeply") from err
