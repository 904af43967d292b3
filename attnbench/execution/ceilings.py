"""The ceilings of a machine, kept for a day in the user's cache folder for later sweeps.

A file is named by all that they depend on: what was asked, the environment, and since when the
machine runs, as a virtual one may be on another host after that, and machines may share a home.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from attnbench.base.files import cache_folder, read, write_whole
from attnbench.base.jsontext import checksum, decode, dumps, sealed, unsealed
from attnbench.base.stats import robust_least
from attnbench.errors import StoreError
from attnbench.execution.events import Warned
from attnbench.machine import limits
from attnbench.machine.environment import Environment
from attnbench.schema.record import Record

Facts = dict[str, Any]
_BOOT = Path("/proc/sys/kernel/random/boot_id")  # Linux makes one up each time it starts


def recalled(facts: Facts, asked: object) -> Generator[Warned, None, Facts]:
    """The facts with ceilings of the last day, marked as `cached`, where such are kept."""
    try:
        kept = decode(unsealed(read(file := _file(facts, asked))), Facts)
        measured = min(of["measured"] for of in kept["ceilings"].values())
        age = datetime.now(UTC) - datetime.fromisoformat(measured)
        if timedelta() <= age < timedelta(days=1):
            return facts | {"ceilings": kept["ceilings"] | {"cached": True}}
    except OSError:
        pass  # there is none; and `keep` says what is wrong with the folder
    except (AttributeError, KeyError, TypeError, ValueError) as err:
        why = f"the machine's ceilings are measured again: {err!s:.200}"
        yield Warned(f"{file} is not used, {why}")
    return facts


def keep(found: Facts, facts: Facts, asked: object) -> Iterator[Warned]:
    """Write ceilings in one step, unless one is unknown for want of memory."""
    if not all(of.get("read_gbps") for of in found.values()):
        return
    try:
        (file := _file(facts, asked)).parent.mkdir(parents=True, exist_ok=True)
        write_whole(file, sealed(dumps({"ceilings": found})))
    except (OSError, StoreError) as err:
        yield Warned(f"the machine's ceilings are not kept for later sweeps: {err}")


def _file(facts: Facts, asked: object) -> Path:
    boot = _BOOT.read_text() if _BOOT.exists() else None
    name = checksum(dumps([1, asked, Environment(facts).key, boot]).encode())
    return cache_folder() / "ceilings" / f"{name}.json"


def exceeded(record: Record, facts: Facts) -> bool:
    """Whether the low end of a cell's samples is beyond what ceilings of the cache allow."""
    case, threads = record.cell.case, record.cell.case.threads
    if not record.kept or not limits.ceilings_of(facts, threads).cached:
        return False
    least_us = robust_least(sample.own_us for sample in record.kept)
    why = limits.suspect(facts, case.dtype, threads, least_us, record.metrics, cached=True)
    return why is not None
