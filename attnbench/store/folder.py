"""The folder of a run, a gate run or a profile: made, locked, appended to, and found by name."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import re
import shlex
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

from attnbench.base import files
from attnbench.base.jsontext import decode, sealed, unsealed
from attnbench.base.registry import nearest
from attnbench.errors import StoreError

NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]{0,99}")  # of a folder: it needs no quotes
RECENT = ("latest", "previous")  # names that stand for the last run, and the one before it


@dataclass(frozen=True, kw_only=True)
class Kind:
    """What a folder holds: its files, and what messages say of it.

    `file` is written in one step, `journal` line by line as results come; with `alone` either of
    them can be loaded without the rest. `prefix` begins names that are time stamps. `resume` is
    said after a line that could not be written, `replay` where a journal is left without its file:
    what is kept, and the command that takes the folder. `ignored`: git is to leave it alone.
    """

    noun: str
    command: str
    file: str
    journal: str = ""
    prefix: str = ""
    alone: bool = True
    ignored: bool = False
    resume: str = ""
    replay: str = ""


SWEEP = Kind(
    noun="run", command="attnbench sweep", file="run.json", journal="records.jsonl", alone=False,
    resume="the records so far are kept, continue with: attnbench sweep --resume",
)  # fmt: skip
GATE = Kind(
    noun="gate run", command="attnbench gate", file="gate.json", journal="rounds.jsonl",
    prefix="gate-", ignored=True,
    replay="the rounds so far are kept; decide from them: attnbench gate --replay",
)  # fmt: skip
PROFILE = Kind(
    noun="profile", command="attnbench profile IMPL", file="profile.json", prefix="profile-"
)
COMPARISON = Kind(noun="comparison", command="attnbench compare A B", file="compare.html")


class RunFolder(contextlib.AbstractContextManager["RunFolder"]):
    """A folder of some kind, opened once and handed on.

    Left by an exception, one that was made is removed again if there is nothing in it to load.
    """

    def __init__(self, kind: Kind, path: Path, file: Path | None = None) -> None:
        self.kind, self.path, self.file = kind, path, file or path / kind.file
        self.journal = path / kind.journal
        self._descriptor = -1  # of the journal, while it is open
        self._made: list[Path] = []
        self._say: Callable[[str], None] = print

    @classmethod
    def create(
        cls, kind: Kind, output: Path, name: str | None, say: Callable[[str], None] = print
    ) -> Self:
        """Make the folder `output`/`name`; the name is a time stamp unless given.

        `say` shows, in the end, how to finish a journal that has not become its file.

        Raises:
            StoreError: the name is taken or not a plain folder name, or nothing can be written.
        """
        stamp = kind.prefix + datetime.now(UTC).strftime("%Y%m%d-%H%M%S-%f")[:-3]
        path, new = output / check_name(stamp if name is None else name), not output.exists()
        try:
            output.mkdir(parents=True, exist_ok=True)
            for again in itertools.count(2):
                try:
                    path.mkdir()
                    break
                except FileExistsError:
                    if name is not None:
                        raise
                    path = output / f"{stamp}-{again}"  # another began in the same millisecond
        except OSError as err:
            if isinstance(err, FileExistsError) and output.is_dir():
                hint = f", or continue it with --resume {name}" if kind.resume else ""
                taken = f"a run named '{name}' exists in {output}; choose another --name{hint}"
                raise StoreError(taken) from err
            raise StoreError(f"cannot write {path} ({err.strerror}); choose --output DIR") from err
        if kind.ignored:
            with contextlib.suppress(OSError):
                (path / ".gitignore").write_text("*\n", encoding="utf-8")
        made = cls(kind, path)
        made._made, made._say = [path, output] if new else [path], say
        return made

    @classmethod
    def find(cls, text: str, output: Path, kind: Kind, *others: Kind) -> Self:
        """The folder named by itself, its file, its name in `output`, or one of `RECENT`.

        It may be of one of the other kinds, unless it is named by `RECENT`.

        Raises:
            StoreError: there is none; the message names the nearest, or how to make one.
        """
        noun = kind.noun
        if text in RECENT:
            known, back = cls.all_in(kind, output), RECENT.index(text)
            if len(known) > back:
                return known[-1 - back]
            only = f"only {known[0].path.name}" if known else f"no {noun}"
            raise StoreError(f"{only} in {output} yet; make one with: {kind.command}")
        if not text.strip():
            raise StoreError(
                f"a {noun} without a name: name a folder, a {noun} in {output}, or latest"
            )
        places = Path(text), output / text
        for place, each in itertools.product(places, (kind, *others)):
            if (found := cls._at(place, each, any_name=not others)) is not None:
                return found
        for place in filter(os.path.isdir, places):
            raise StoreError(f"{place} is not a {noun}: no {kind.file}")
        names = [folder.path.name for folder in cls.all_in(kind, output)]
        listed = ", ".join(names[-8:]) or f"none; make one with: {kind.command}"
        listed += f" and {len(names) - 8} more" * (len(names) > 8)
        raise StoreError(f"no {noun} '{text}' in {output}{nearest(text, names)}; {noun}s: {listed}")

    @classmethod
    def _at(cls, place: Path, kind: Kind, any_name: bool) -> Self | None:
        names = [kind.file, kind.journal] if kind.alone and kind.journal else [kind.file]
        # Unlike those of Path, these functions are False where a name is too long.
        if (place.name in names or (any_name and kind.alone)) and os.path.isfile(place):
            return cls(kind, place.parent, place)
        there = (place / name for name in names if os.path.exists(place / name))
        return next((cls(kind, place, file) for file in there), None)

    @classmethod
    def all_in(cls, kind: Kind, output: Path) -> list[Self]:
        """The folders of a kind in `output` that can be read, the oldest first as recorded."""
        found = []
        for file in output.glob(f"*/{kind.file}"):
            with contextlib.suppress(OSError, ValueError):  # naming it says what is wrong
                head = decode(unsealed(files.read(file)), dict[str, Any])
                found.append((str(head.get("created", "")), file.parent))
        return [cls(kind, path) for _, path in sorted(found)]

    @property
    def begun(self) -> bool:
        """Whether the journal has a line."""
        return os.path.isfile(self.journal) and os.path.getsize(self.journal) > 0

    def lock(self) -> Self:
        """Open the journal, to which nobody else writes until it is closed.

        What a kill left of an unfinished last line is cut off.

        Raises:
            StoreError: another process writes to it, or it cannot be written.
        """
        # Never through a link, which may lead out of the folder.
        how = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
        try:
            self._descriptor = os.open(self.journal, how, 0o666)
            files.lock(self._descriptor, self.path)
            with files.open_file(self.journal) as lines:
                complete = sum(len(line) for line in lines if line.endswith(b"\n"))
            os.truncate(self._descriptor, complete)
        except (OSError, StoreError) as err:
            self.close()
            if isinstance(err, StoreError):
                raise
            linked = "is a symbolic link, through which nothing is written"
            why = linked if err.errno == errno.ELOOP else f"cannot be appended to ({err.strerror})"
            raise StoreError(f"{self.journal} {why}") from err
        return self

    def append(self, *lines: str) -> None:
        """Write lines so that they survive a kill or a power cut from here on.

        Raises:
            StoreError: as `lock`; the disk is full or the folder has gone.
        """
        if self._descriptor < 0:
            self.lock()
        left = memoryview("".join(f"{line}\n" for line in lines).encode())
        try:
            while left:
                left = left[os.write(self._descriptor, left) :]
            os.fsync(self._descriptor)
            if not os.fstat(self._descriptor).st_nlink:
                raise StoreError(f"{self.journal} was removed while it was written to")
        except OSError as err:
            kept = f"; {self.kind.resume} {shlex.quote(str(self.path))}" if self.kind.resume else ""
            raise StoreError(f"cannot append to {self.journal} ({err.strerror}){kept}") from err

    def write(self, text: str) -> None:
        """Write the file in one step: a kill leaves the old one or the new one, never half.

        Raises:
            StoreError: the folder cannot be written.
        """
        files.write_whole(self.file, sealed(text) + "\n")

    def close(self) -> None:
        """Close the journal, which others may lock from now on."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1

    def __exit__(self, raised: type[BaseException] | None, *_: object) -> None:
        self.close()
        if not self._made or os.path.isfile(self.file):
            return
        if self.begun:
            self._say(f"{self.kind.replay} {shlex.quote(str(self.path))}")
        elif raised:
            path, *output = self._made
            shutil.rmtree(path, ignore_errors=True)
            with contextlib.suppress(OSError):
                for folder in output:
                    folder.rmdir()


def check_name(name: str) -> str:
    """Return `name` if it is a plain folder name.

    Raises:
        StoreError: it is empty, in `RECENT`, hidden, or has separators or control characters.
    """
    if not NAME.fullmatch(name) or name in RECENT:
        raise StoreError(
            f"run name {name!r} must be up to 100 letters, digits, '.', '_', '+', '-',"
            " not 'latest' or 'previous' (--name)"
        )
    return name
