"""What crosses between processes: frozen typed values, one line of JSON each."""

from __future__ import annotations

import msgspec


class Ends(msgspec.Struct, frozen=True):
    """The descriptors a process talks through: where requests come from, and where answers go.

    What it prints belongs to `stderr`.
    """

    read: int
    write: int
    stderr: int


class WorkerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker is started with; `heartbeat` is the path of its file."""

    ends: Ends
    device: str
    heartbeat: str
    threads: int | None = None
    files: tuple[str, ...] = ()
    replace: bool = False
    root: str | None = None
    other_root: str | None = None
