"""The folder of a gate validation: live runs with all raw times, appended when each has ended.

`live.jsonl.gz` holds a line of JSON for each run, and is replaced as a whole when one is added. A
line is a `gate.json`, so that any run can be taken out and decided again with
`attnbench gate --replay`.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

from attnbench.base.files import write_whole
from attnbench.base.jsontext import encode
from attnbench.errors import StoreError, UsageError
from attnbench.gate.decide.data import GateRun, Rules, Version
from attnbench.gate.decide.stored import raw, run_of
from tests.validation.gate.schedule import Kind

INFO, RUNS = "selftest.json", "live.jsonl.gz"
# What must not change between the runs of a folder: other machines have other noise. The last two
# are there where they are not the usual ones.
MACHINE = (
    "device_name", "cores", "torch", "python", "cpu_capability", "blas", "hypervisor", "allocator",
    "neighbours", "seq_lens",
)  # fmt: skip


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
        stored = raw(replace(run, base=_placeless(run.base), candidate=_placeless(run.candidate)))
        return {
            "selftest": {
                "share": self.kind.share,
                "number": self.number,
                "cell": self.cell,
                "exit_code": self.exit_code,
                "created": self.created,
            },
        } | (stored | {"schema": 1})  # a line has no checksum

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
    """One folder of live runs. Reading it writes nothing; `begin` comes before `append`."""

    def __init__(self, path: Path, info: dict[str, Any] | None, runs: list[Live]) -> None:
        self.path, self.info, self.runs = path, info, runs

    @classmethod
    def open(cls, path: Path) -> Self:
        """Read a folder, or promise one where there is none.

        Raises:
            StoreError: something else is there, or it is damaged.
        """
        info = _read_info(path)
        if info is None:
            if path.exists() and (not path.is_dir() or any(path.iterdir())):
                raise StoreError(f"{path} is no gate validation (no {INFO}); choose another --name")
            return cls(path, None, [])
        return cls(path, info, _runs(path / RUNS))

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

    def begin(self, environment: Mapping[str, Any]) -> None:
        """Make the folder if need be.

        Raises:
            StoreError: it cannot be written.
        """
        if self.info is not None:
            return
        self.info = {"identity": identity(environment), "environment": dict(environment)}
        with contextlib.suppress(OSError):  # writing says why
            self.path.mkdir(parents=True, exist_ok=True)
        write_whole(self.path / INFO, json.dumps(self.info, indent=1) + "\n")

    def append(self, live: Live) -> None:
        """Write one run so that it survives a kill from here on.

        Raises:
            StoreError: the disk is full.
        """
        file = self.path / RUNS
        new = file.with_suffix(".new")
        try:
            before = file.read_bytes() if file.exists() else b""
            new.write_bytes(before + gzip.compress(encode(live.to_json()) + b"\n", 9, mtime=0))
            new.replace(file)
        except OSError as err:
            raise StoreError(
                f"cannot write {file} ({err.strerror}); the runs so far are kept"
            ) from err
        self.runs.append(live)


def identity(environment: Mapping[str, Any]) -> dict[str, Any]:
    """What runs must share to be counted together: the machine, and how the gate decides."""
    rules = asdict(Rules()) | {"looks": list(Rules().looks)}
    del rules["threshold"], rules["budget_s"]  # each kind has a threshold of its own
    return {name: environment.get(name) for name in MACHINE} | {"schema": 1} | rules


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


def _runs(file: Path) -> list[Live]:
    """Every run in the file, if it is there.

    Raises:
        StoreError: it cannot be read, or is damaged.
    """
    try:
        return [Live.from_line(line) for line in gzip.decompress(file.read_bytes()).splitlines()]
    except FileNotFoundError:
        return []
    except (OSError, EOFError, zlib.error, KeyError, TypeError, ValueError, UsageError) as err:
        raise StoreError(f"{file} is damaged ({type(err).__name__}: {err})") from err


def counted(runs: Iterable[Live]) -> dict[Kind, int]:
    """How many runs there are of each kind."""
    found: dict[Kind, int] = {}
    for live in runs:
        found[live.kind] = found.get(live.kind, 0) + 1
    return found


def of_kind(runs: Iterable[Live], kind: Kind) -> Iterator[Live]:
    """The runs of one kind, in their order."""
    return (live for live in runs if live.kind == kind)
