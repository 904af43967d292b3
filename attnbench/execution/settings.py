"""How workers run, as options say it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from attnbench.errors import UsageError
from attnbench.machine.allocator import POLICIES, Policy


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How workers run: where, with which files, for how long, and how they measure.

    `processes` is how many fresh ones measure each cell; `energy` asks for joules a call, too.
    With `replace` the files may take the names of installed implementations. With `root` they are
    those of one of two versions of a repository, and import nothing from `other_root`.

    Raises:
        UsageError: a value that cannot be right, named by its flag.
    """

    device: str = "auto"
    threads: int | None = None
    files: tuple[str, ...] = ()
    seed: int = 0
    precision: float = 0.02
    min_time_s: float = 0.1
    max_time_s: float = 1.0
    timeout_s: float = 300.0
    processes: int = 1
    l2: str | None = None  # cold or warm; None: cold on a GPU, warm on a CPU
    timer: str | None = None  # events or graph, on a GPU
    energy: bool = False
    allocator: Policy = "settled"  # how glibc hands memory out, on a CPU
    replace: bool = False
    root: str | None = None
    other_root: str | None = None

    def __post_init__(self) -> None:
        for flag, name, expected, fits in _EXPECTED:
            value = getattr(self, name)
            if not fits(value):
                raise UsageError(f"{flag} {value!r} is not {expected}")
        if self.min_time_s > self.max_time_s:
            raise UsageError(
                f"--min-time {self.min_time_s:g} is above --max-time {self.max_time_s:g}"
            )


def _at_least(low: int, high: float = math.inf) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, int) and low <= value <= high


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and 0 <= value < math.inf


def _is_positive(value: Any) -> bool:
    return _is_number(value) and value > 0


# Flag, field, what is expected, and whether a value is that.
_EXPECTED: tuple[tuple[str, str, str, Callable[[Any], bool]], ...] = (
    ("--device", "device", "auto or cpu or cuda", ("auto", "cpu", "cuda").__contains__),
    ("--threads", "threads", "a whole number from 1 on", lambda v: v is None or _at_least(1)(v)),
    ("--seed", "seed", "a whole number from 0 to 4294967295", _at_least(0, 2**32 - 1)),
    ("--precision", "precision", "a number above 0", _is_positive),
    ("--min-time", "min_time_s", "a number from 0 on", _is_number),
    ("--max-time", "max_time_s", "a number above 0", _is_positive),
    ("--timeout", "timeout_s", "a number above 0", _is_positive),
    ("--processes", "processes", "a whole number from 1 on", _at_least(1)),
    ("--l2", "l2", "cold or warm", ("cold", "warm", None).__contains__),
    ("--timer", "timer", "events or graph", ("events", "graph", None).__contains__),
    ("--allocator", "allocator", " or ".join(POLICIES), POLICIES.__contains__),
)
