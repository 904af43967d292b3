"""The folder of a gate validation: live runs with all raw times, appended when each has ended.

`live.jsonl.gz` is read by anything that reads gzip: each run is one line of JSON in a gzip member
of its own, so that a kill can harm none but the last. A line is a `gate.json`, so that any run can
be taken out and decided again with `attnbench gate --replay`.
"""

from __future__ import annotations

import gzip
import json
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

from attnbench.base.files import lock
from attnbench.base.jsontext import encode
from attnbench.errors import StoreError, UsageError
from attnbench.gate.decide.data import GateRun, Rules, Version
from attnbench.gate.decide.stored import SCHEMA, raw, run_of
from tests.validation.gate.schedule import Kind

INFO, RUNS = "selftest.json", "live.jsonl.gz"
# What must not change between the runs of a folder: other machines have other noise. The last two
# are there where they are not the usual ones.
MACHINE = (
    "device_name", "cores", "torch", "python", "cpu_capability", "blas", "hypervisor", "allocator",
    "neighbours", "seq_lens",
)  # fmt: skip
_GZIP = 16 + zlib.MAX_WBITS
Tell = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Live:
    """One gate run as it was made. `exit_code` is what it ended with then."""

    kind: Kind
    number: int
    created: str
    exit_code: int
    run: GateRun

    @property
    def cell(self) -> int | None:
        """The cell whose candidate was slowed, if any."""
        return self.kind.cell(self.number, len(self.run.cells))

    @property
    def spent_s(self) -> float:
        """Wall seconds of the whole run."""
        return float(self.run.spent["wall_s"])

    def to_json(self) -> dict[str, Any]:
        """Plain JSON: a `gate.json`, with what the validation knows of the run beside it."""
        run = self.run
        return {
            "selftest": {
                "share": self.kind.share,
                "number": self.number,
                "cell": self.cell,
                "exit_code": self.exit_code,
                "created": self.created,
            },
        } | raw(replace(run, base=_placeless(run.base), candidate=_placeless(run.candidate)))

    @classmethod
    def from_line(cls, line: bytes) -> Self:
        """Inverse of `to_json`, from its text; KeyError, TypeError or ValueError for others."""
        own = json.loads(line)["selftest"]
        return cls(
            kind=Kind(share=own["share"]),
            number=own["number"],
            created=own["created"],
            exit_code=own["exit_code"],
            run=run_of(line),
        )


def _placeless(side: Version) -> Version:
    """A side without the place of this installation, which says nothing elsewhere."""
    files = tuple(Path(file).name for file in side.files)
    return replace(side, root=Path(side.root).name, files=files)


class Pool:
    """One folder of live runs. Reading it writes nothing; `writing` is a context to append in."""

    def __init__(self, path: Path, info: dict[str, Any] | None, runs: list[Live]) -> None:
        self.path, self.info, self.runs = path, info, runs
        self._descriptor: int | None = None

    @classmethod
    def open(cls, path: Path, tell: Tell) -> Self:
        """Read a folder, or promise one where there is none.

        Raises:
            StoreError: something else is there, or it is damaged.
        """
        info = _read_info(path)
        if info is None:
            if path.exists() and (not path.is_dir() or any(path.iterdir())):
                raise StoreError(f"{path} is no gate validation (no {INFO}); choose another --name")
            return cls(path, None, [])
        members, left = _members(path / RUNS)
        if left:
            tell(f"Warning: the last run in {path / RUNS} is half-written, and left out")
        return cls(path, info, [_live(line, path / RUNS) for line in members])

    def same(self, environment: Mapping[str, Any]) -> None:
        """Let only runs of one machine and one set of rules into a folder.

        Raises:
            StoreError: the folder holds runs of another; the message says what differs.
        """
        now = identity(environment)
        then = now if self.info is None else self.info["identity"]
        differs = [
            f"{name} {then.get(name)!r} there, {now.get(name)!r} here"
            for name in sorted({*now, *then})
            if then.get(name) != now.get(name)
        ]
        if differs:
            raise StoreError(
                f"{self.path} holds runs made otherwise ({'; '.join(differs)}); choose another"
                " --name"
            )

    @contextmanager
    def writing(self, environment: Mapping[str, Any]) -> Iterator[None]:
        """Make the folder if need be, lock it, and cut off what a kill left of a last run.

        Raises:
            StoreError: it cannot be written, or another validation writes there.
        """
        file = self.path / RUNS
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            lock(self._descriptor, self.path, "validation")
            os.truncate(self._descriptor, file.stat().st_size - _members(file)[1])
            if self.info is None:
                self.info = _write_info(self.path, environment)
            yield
        except OSError as err:
            raise StoreError(f"cannot write {file} ({err.strerror})") from err
        finally:
            if self._descriptor is not None:
                os.close(self._descriptor)
                self._descriptor = None

    def append(self, live: Live) -> None:
        """Write one run so that it survives a kill from here on.

        Raises:
            StoreError: the disk is full.
        """
        assert self._descriptor is not None, "append only within writing()"
        view = memoryview(gzip.compress(encode(live.to_json()) + b"\n", 9, mtime=0))
        try:
            while view:
                view = view[os.write(self._descriptor, view) :]
            os.fsync(self._descriptor)
        except OSError as err:
            raise StoreError(
                f"cannot append to {self.path / RUNS} ({err.strerror}); the runs so far are kept"
            ) from err
        self.runs.append(live)


def identity(environment: Mapping[str, Any]) -> dict[str, Any]:
    """What runs must share to be counted together: the machine, and how the gate decides."""
    rules = asdict(Rules()) | {"looks": list(Rules().looks)}
    del rules["threshold"], rules["budget_s"]  # each kind has a threshold of its own
    return {name: environment.get(name) for name in MACHINE} | {"schema": SCHEMA} | rules


def _read_info(path: Path) -> dict[str, Any] | None:
    try:
        info = json.loads((path / INFO).read_text(encoding="utf-8"))
        if not isinstance(info["identity"], dict):
            raise ValueError("identity is no object")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, KeyError, TypeError) as err:
        raise StoreError(f"{path / INFO} cannot be read ({type(err).__name__}: {err})") from err
    return dict(info)


def _write_info(path: Path, environment: Mapping[str, Any]) -> dict[str, Any]:
    info = {"identity": identity(environment), "environment": dict(environment)}
    temporary = path / f".{INFO}.{os.getpid()}"
    temporary.write_text(json.dumps(info, indent=1) + "\n", encoding="utf-8")
    temporary.replace(path / INFO)
    return info


def _live(line: bytes, file: Path) -> Live:
    try:
        return Live.from_line(line)
    except (KeyError, TypeError, ValueError, UsageError) as err:
        raise StoreError(f"{file} is damaged ({type(err).__name__}: {err})") from err


def _members(file: Path) -> tuple[list[bytes], int]:
    """Every complete gzip member's text, and how many bytes of an unfinished one follow.

    Raises:
        StoreError: what is there is not gzip.
    """
    try:
        data = file.read_bytes()
    except FileNotFoundError:
        return [], 0
    except OSError as err:
        raise StoreError(f"{file} cannot be read ({err.strerror})") from err
    texts: list[bytes] = []
    while data:
        member = zlib.decompressobj(wbits=_GZIP)
        try:
            text = member.decompress(data)
        except zlib.error as err:
            raise StoreError(f"{file} is damaged after {len(texts)} runs ({err})") from err
        if not member.eof:
            return texts, len(data)
        texts.append(text)
        data = member.unused_data
    return texts, 0


def counted(runs: Iterable[Live]) -> dict[Kind, int]:
    """How many runs there are of each kind."""
    found: dict[Kind, int] = {}
    for live in runs:
        found[live.kind] = found.get(live.kind, 0) + 1
    return found


def of_kind(runs: Iterable[Live], kind: Kind) -> Iterator[Live]:
    """The runs of one kind, in their order."""
    return (live for live in runs if live.kind == kind)
