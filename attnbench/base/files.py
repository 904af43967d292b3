"""Files and folders that a kill leaves whole: made or written in one step, for one writer."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from attnbench.base.jsontext import checksum
from attnbench.errors import StoreError, UsageError


def cache_folder() -> Path:
    """Where attnbench keeps what can be made again; a relative XDG_CACHE_HOME is ignored, by XDG.

    Raises:
        FileNotFoundError: the user's home directory is not known.
    """
    if os.path.isabs(given := os.environ.get("XDG_CACHE_HOME", "")):
        return Path(given, "attnbench")
    try:
        return Path.home() / ".cache" / "attnbench"
    except RuntimeError as err:
        reason = "no home directory is known; set XDG_CACHE_HOME"
        raise FileNotFoundError(errno.ENOENT, reason) from err


def open_file(file: Path) -> BinaryIO:
    """Open a file of a user to read, without waiting: a pipe may have no writer.

    Raises:
        OSError: there is none, it cannot be read, or it is a pipe, a device or a folder.
    """
    descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    raise OSError(errno.EINVAL, "not a regular file", str(file))


def read(file: Path) -> bytes:
    """All of a user's file; raises as `open_file`."""
    with open_file(file) as source:
        return source.read()


@contextlib.contextmanager
def reading(file: Path | str, whose: str = "", hint: str = "") -> Iterator[None]:
    """Say in one line what is wrong with a file that is read and parsed meanwhile.

    Raises:
        StoreError: it cannot be read or is damaged; `whose` it should be, and what to do.
    """
    try:
        yield
    except OSError as err:
        raise StoreError(f"{file} cannot be read ({err.strerror}){hint}") from err
    except (ValueError, UsageError) as err:
        why = " ".join(str(err).split())
        raise StoreError(f"{file} is damaged{whose}: {why:.300}{hint}") from err


def digest(file: Path) -> str:
    """The first 16 hexadecimal digits of SHA-256 of the file; raises as `open_file`."""
    return checksum(read(file))


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


def emptied(folder: Path) -> Path:
    """Make a folder anew; a link in its place is removed, and never followed.

    Raises:
        OSError: it cannot be removed or made.
    """
    if folder.is_symlink():
        folder.unlink()
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    return folder


def write_whole(file: Path, text: str) -> None:
    """Write a file in one step: a kill leaves the old one or the new one, never half.

    Raises:
        StoreError: the folder cannot be written.
    """
    temporary = file.parent / f".{file.name:.200}.{os.getpid()}"
    try:
        temporary.unlink(missing_ok=True)  # of another process, or a link that leads elsewhere
        with temporary.open("x", encoding="utf-8", errors="replace") as out:
            out.write(text)
            out.flush()
            os.fsync(out.fileno())
        temporary.replace(file)
    except OSError as err:
        with contextlib.suppress(OSError):  # the folder may be none at all
            temporary.unlink(missing_ok=True)
        raise StoreError(f"cannot write {file} ({err.strerror})") from err
