"""JSON from elsewhere, as text that can be written again."""

from __future__ import annotations

import json
from typing import Any


def read_json(text: str | bytes, **options: Any) -> Any:
    """Parse JSON, with options of `json.loads`; lone halves of surrogate pairs become U+FFFD.

    No encoding can write them. They come from messages of exceptions, and from names of files that
    are not UTF-8.

    Raises:
        ValueError: it is no JSON, or nested too deeply.
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
