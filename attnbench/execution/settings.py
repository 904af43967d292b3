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
        for flag, name, (expected, fits) in _EXPECTED:
            value = getattr(self, name)
            if not fits(value):
                raise UsageError(f"{flag} {value!r} is not {expected}")
        if self.min_time_s > self.max_time_s:
            raise UsageError(
                f"--min-time {self.min_time_s:g} is above --max-time {self.max_time_s:g}"
            )


_Rule = tuple[str, Callable[[Any], bool]]  # what is expected, and whether a value is that


def _one_of(*names: str | None) -> _Rule:
    return " or ".join(name for name in names if name), lambda value: value in names


def _whole(low: int, high: int | None = None, *, optional: bool = False) -> _Rule:
    def fits(value: Any) -> bool:
        whole = isinstance(value, int) and low <= value and (high is None or value <= high)
        return whole or (optional and value is None)

    return f"a whole number from {low}" + (" on" if high is None else f" to {high}"), fits


def _finite(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


_POSITIVE: _Rule = "a number above 0", lambda value: _finite(value) and value > 0
_NOT_NEGATIVE: _Rule = "a number from 0 on", lambda value: _finite(value) and value >= 0
# Flag, field, what it must be.
_EXPECTED: tuple[tuple[str, str, _Rule], ...] = (
    ("--device", "device", _one_of("auto", "cpu", "cuda")),
    ("--threads", "threads", _whole(1, optional=True)),
    ("--seed", "seed", _whole(0, 2**32 - 1)),
    ("--precision", "precision", _POSITIVE),
    ("--min-time", "min_time_s", _NOT_NEGATIVE),
    ("--max-time", "max_time_s", _POSITIVE),
    ("--timeout", "timeout_s", _POSITIVE),
    ("--processes", "processes", _whole(1)),
    ("--l2", "l2", _one_of("cold", "warm", None)),
    ("--timer", "timer", _one_of("events", "graph", None)),
    ("--allocator", "allocator", _one_of(*POLICIES)),
)
