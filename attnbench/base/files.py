"""Files and folders that a kill leaves whole: made or written in one step, for one writer."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
from datetime import UTC, datetime
from pathlib import Path

from attnbench.errors import StoreError


def check_name(name: str) -> str:
    """Return `name` if it is a plain folder name.

    Raises:
        StoreError: it is empty, `latest`, hidden, or has separators or control characters.
    """
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.+-]{0,99}", name) or name == "latest":
        raise StoreError(
            f"run name {name!r} must be up to 100 letters, digits, '.', '_', '+', '-',"
            " not 'latest' (--name)"
        )
    return name


def make_folder(output: Path, name: str | None, prefix: str = "", instead: str = "") -> Path:
    """Make and return `output`/`name`; the name is a time stamp after `prefix` unless given.

    Raises:
        StoreError: the name is taken (`instead` says what else to do) or is not a plain folder
            name, or nothing can be written.
    """
    if name is None:
        name = prefix + datetime.now(UTC).strftime("%Y%m%d-%H%M%S-%f")[:-3]
    path = output / check_name(name)
    try:
        output.mkdir(parents=True, exist_ok=True)
        path.mkdir()
    except OSError as err:
        if isinstance(err, FileExistsError) and output.is_dir():
            taken = f"a run named '{name}' exists in {output}; choose another --name{instead}"
            raise StoreError(taken) from err
        raise StoreError(f"cannot write {path} ({err.strerror}); choose --output DIR") from err
    return path


def digest(file: Path) -> str:
    """The first 16 hexadecimal digits of SHA-256 of the file."""
    return hashlib.sha256(file.read_bytes()).hexdigest()[:16]


def lock(descriptor: int, path: Path) -> None:
    """Let one sweep at a time write to a folder; the lock ends with the process.

    Raises:
        StoreError: another one is writing.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as err:
        raise StoreError(f"another sweep is writing to {path}; wait until it has ended") from err
    except OSError:
        return  # a file system without such locks


def write_whole(file: Path, text: str) -> None:
    """Write a file in one step: a kill leaves the old one or the new one, never half.

    Raises:
        StoreError: the folder cannot be written.
    """
    temporary = file.parent / f".{file.name}.{os.getpid()}"
    try:
        with temporary.open("w", encoding="utf-8", errors="replace") as out:
            out.write(text)
            out.flush()
            os.fsync(out.fileno())
        temporary.replace(file)
    except OSError as err:
        with contextlib.suppress(OSError):  # the folder may be none at all
            temporary.unlink(missing_ok=True)
        raise StoreError(f"cannot write {file} ({err.strerror})") from err
