"""Reads the JSON that pytest-benchmark writes; what is not that is refused in one line."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from attnbench.errors import UsageError

FLAG = "--pytest-benchmark"
# What of `machine_info` says that it is another machine. The present frequency is not among it.
_MACHINE = (
    "node", "machine", "processor", "system", "release", "python_implementation",
    "python_implementation_version", "python_version",
)  # fmt: skip
_CPU = ("brand_raw", "arch", "count", "l2_cache_size", "l3_cache_size")


@dataclass(frozen=True, kw_only=True)
class Bench:
    """One benchmark in one file: its fastest and its median round in seconds a call."""

    min_s: float
    median_s: float
    rounds: int
    timer: str | None = None


@dataclass(frozen=True, kw_only=True)
class BenchmarkFile:
    """One file: one process, its benchmarks by full name.

    `written` is when it was saved, None where it does not say; `machine` the facts of
    `machine_info` that two files of one machine share.
    """

    path: Path
    written: datetime | None
    machine: Mapping[str, Any]
    benches: Mapping[str, Bench]


def files_of(text: str) -> list[Path]:
    """The files of one side: a file, a list of them with commas, or a folder of .json files.

    Raises:
        UsageError: a folder without any.
    """
    found: list[Path] = []
    for part in text.split(","):
        path = Path(part.strip())
        inside = sorted(path.rglob("*.json")) if path.is_dir() else [path]
        if not inside:
            raise UsageError(f"there is no .json file in {path} ({FLAG})")
        found += inside
    return found


def read_files(paths: Sequence[Path]) -> list[BenchmarkFile]:
    """The files of one side, the earliest first.

    Raises:
        UsageError: one cannot be read, is none of pytest-benchmark's, holds no benchmark, or two
            are the same: a copy is no second process.
    """
    files = [_read(path) for path in paths]
    for number, file in enumerate(files):
        for other in files[:number]:
            if (file.written, file.benches) == (other.written, other.benches):
                raise UsageError(
                    f"{other.path} and {file.path} hold the same run, which proves no more than"
                    f" one of them ({FLAG})"
                )
    earliest = datetime.min.replace(tzinfo=UTC)
    return sorted(files, key=lambda file: file.written or earliest)


def _read(path: Path) -> BenchmarkFile:
    try:
        found = json.loads(path.read_bytes())
    except OSError as err:
        raise UsageError(f"{path} cannot be read ({err.strerror}; {FLAG})") from err
    except (ValueError, RecursionError) as err:
        raise UsageError(f"{path} is no JSON ({_line(err)}; {FLAG})") from err
    try:
        return BenchmarkFile(
            path=path,
            written=_moment(found.get("datetime")),
            machine=dict(_machine(found["machine_info"])),
            benches=_benches(found["benchmarks"]),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as err:
        said = f"it lacks {err}" if isinstance(err, KeyError) else _line(err)
        raise UsageError(
            f"{path} was not written by pytest-benchmark ({said}; {FLAG}); write one with:"
            f" pytest --benchmark-json {path.name}"
        ) from err


def _benches(rows: list[dict[str, Any]]) -> dict[str, Bench]:
    benches: dict[str, Bench] = {}
    for row in rows:
        name = str(row["fullname"])
        if name in benches:
            raise ValueError(f"{name} stands in it twice")
        benches[name] = _bench(name, row)
    if not benches:
        raise ValueError("it holds no benchmark")
    return benches


def _bench(name: str, row: dict[str, Any]) -> Bench:
    stats = row["stats"]
    times = [stats["min"], stats["median"], *(stats.get("data") or ())]
    if not all(type(time) in (int, float) and 0 < time < math.inf for time in times):
        raise ValueError(f"a time of {name} is no time")
    timer = (row.get("options") or {}).get("timer")
    return Bench(
        min_s=float(stats["min"]),
        median_s=float(stats["median"]),
        rounds=int(stats["rounds"]),
        timer=None if timer is None else str(timer),
    )


def _machine(info: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    cpu = info.get("cpu") or {}
    yield from ((name, info.get(name)) for name in _MACHINE)
    yield from ((f"cpu {name}", cpu.get(name)) for name in _CPU)


def _moment(text: Any) -> datetime | None:
    """When a file was written; older versions wrote the time without its zone, which was UTC."""
    try:
        found = datetime.fromisoformat(text)
    except (TypeError, ValueError):
        return None
    return found if found.tzinfo else found.replace(tzinfo=UTC)


def _line(err: Exception) -> str:
    return " ".join(str(err).split())[:160]
