"""English that ships with Python: the docstrings of the standard library, split by file."""

from __future__ import annotations

import ast
import hashlib
import sysconfig
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

# Not in every installation, or not the library's own.
LEFT_OUT = {"site-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo", "ensurepip"}
HELD_OUT = 0.1  # of the files: for validation


@dataclass(frozen=True, kw_only=True)
class Text:
    """Bytes to train on and bytes of other files to judge by, as uint8 tensors (bytes)."""

    train: torch.Tensor
    held_out: torch.Tensor
    bytes_per_word: float  # of the held-out text, white space counted; words are what it parts
    sha256: str


def docstrings(source: bytes) -> list[str]:
    """The docstrings of a module, its classes and its functions."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of escapes such as \d in old sources
        tree = ast.parse(source)
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = (ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, documented))
    return [text for text in found if text]


def is_held_out(name: str) -> bool:
    """Whether the file called `name` is for validation: by its name's hash, so the same always."""
    return int(hashlib.sha256(name.encode()).hexdigest(), 16) % 1000 < 1000 * HELD_OUT


def split(files: Iterable[tuple[str, bytes]]) -> Text:
    """The text of (name, source), in the order of names' hashes; a docstring counts once."""
    parts: dict[bool, list[bytes]] = {True: [], False: []}
    seen: set[str] = set()
    for name, source in sorted(files, key=lambda file: hashlib.sha256(file[0].encode()).digest()):
        new = [text for text in docstrings(source) if text not in seen]
        seen.update(new)
        parts[is_held_out(name)] += [f"{text}\n\n".encode() for text in new]
    train, held_out = b"".join(parts[False]), b"".join(parts[True])
    return Text(
        train=torch.frombuffer(bytearray(train), dtype=torch.uint8),
        held_out=torch.frombuffer(bytearray(held_out), dtype=torch.uint8),
        bytes_per_word=len(held_out) / len(held_out.split()),
        sha256=hashlib.sha256(train + b"\0" + held_out).hexdigest(),
    )


@cache
def standard_library() -> Text:
    """The text of the Python that runs this."""
    return split(_sources(Path(sysconfig.get_path("stdlib"))))


def _sources(root: Path) -> Iterator[tuple[str, bytes]]:
    for path in root.rglob("*.py"):
        name = path.relative_to(root)
        if not LEFT_OUT & set(name.parts):
            yield name.as_posix(), path.read_bytes()
