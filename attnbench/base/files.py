"""Files that a kill leaves whole: written in one step, locked for one writer, plainly named."""

from __future__ import annotations

import contextlib
import os
import re
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


def lock(descriptor: int, path: Path, who: str = "sweep") -> None:
    """Let one process at a time write to a folder; the lock ends with the process.

    Raises:
        StoreError: another one, `who`, is writing.
    """
    try:
        import fcntl

        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except ImportError:
        return  # no such locks on this system
    except BlockingIOError as err:
        raise StoreError(f"another {who} is writing to {path}; wait until it has ended") from err
    except OSError:
        return  # a file system without locks, such as some network ones


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
