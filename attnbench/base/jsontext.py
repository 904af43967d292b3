"""JSON to typed values and back, whatever text is in it: messages of exceptions, names of files."""

from __future__ import annotations

import json
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")


def encode(value: Any) -> bytes:
    """Compact JSON of plain data, dataclasses and Structs; numbers that are not finite are null."""
    try:
        return msgspec.json.encode(value, enc_hook=_plain)
    except UnicodeEncodeError:  # lone halves of surrogate pairs, which `decode` replaces
        return json.dumps(msgspec.to_builtins(value, enc_hook=_plain)).encode()


def _plain(value: Any) -> Any:
    """Subclasses of Python's own types, such as torch's version, and NumPy's numbers."""
    if isinstance(value, str):
        return str(value)
    if hasattr(value, "item"):
        return value.item()
    raise NotImplementedError(f"{type(value).__name__} is not JSON")


def decode(text: str | bytes, kind: type[T]) -> T:
    """Parse JSON as a value of `kind`, strictly; lone halves of surrogate pairs become U+FFFD.

    Raises:
        ValueError: it is not JSON, is nested too deeply, or a field is wrong, whose path it names.
    """
    try:
        return msgspec.json.decode(text, type=kind)
    except msgspec.ValidationError:
        raise
    except (msgspec.DecodeError, RecursionError):
        found = read_json(text, parse_constant=_refuse)
        return msgspec.convert(found, kind, str_keys=True)


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")


def read_json(text: str | bytes, **options: Any) -> Any:
    """Parse JSON, with options of `json.loads`; lone halves of surrogate pairs become U+FFFD.

    No encoding can write them. They come from messages of exceptions, and from names of files that
    are not UTF-8.

    Raises:
        ValueError: it is not JSON, or nested too deeply.
    """
    if isinstance(text, bytes):
        text = text.decode()
    try:
        found = json.loads(text, **options)
        if "\\ud" in text or "\\uD" in text:  # rare: ours is ASCII, where they are escaped
            found = json.loads(writable(json.dumps(found, ensure_ascii=False)))
    except RecursionError as err:
        raise ValueError("nested too deeply") from err
    return found


def writable(text: str) -> str:
    """The text with U+FFFD for halves of surrogate pairs."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
