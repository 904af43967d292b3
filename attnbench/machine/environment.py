"""Environments: the facts of a machine, its software and its settings, and what differs in two.

A fact is a row of `FACTS`. A fact without a row is a setting, and serves no question.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from attnbench.base.jsontext import checksum, dumps

Role = Literal["machine", "software", "setting", "passing"]
# What a fact is, and which questions ask for it: what separates the `series` of a history, and what
# in one may be the `cause` of a change; what must be the same to `resume` a run, to resume it on
# other `nodes` of a cluster, to `merge` shards; what two times must share to be compared (`timed`),
# two runs to scatter alike (`noise`), or to be of one `code` where no commit says so; and which
# `library` is named first where environments differ.
FACTS: dict[str, tuple[Role, str]] = {
    "device": ("machine", "series resume nodes"),
    "device_name": ("machine", "series resume nodes"),
    "cores": ("machine", "series resume"),
    "memory_bytes": ("machine", ""),
    "caches": ("machine", ""),
    "node": ("machine", "node"),
    "device_index": ("setting", "node"),
    "attnbench": ("software", "cause resume nodes code merge"),
    "torch": ("software", "cause resume nodes code merge library"),
    "cuda": ("software", "cause resume nodes merge library"),
    "cudnn": ("software", "cause library"),
    "cublas": ("software", "cause"),
    "triton": ("software", "cause"),
    "driver": ("software", "cause library"),
    "power_limit_w": ("setting", "cause"),
    "max_sm_mhz": ("setting", "cause"),
    "python": ("software", "cause resume nodes code library"),
    "platform": ("software", "cause"),
    "threads": ("setting", "cause resume"),
    "blas": ("software", "cause library"),
    "cpu_capability": ("machine", "cause library"),
    "matmul_precision": ("setting", "cause resume nodes timed merge"),
    "allocator": ("setting", "cause resume nodes timed noise"),
    "thread_env": ("setting", "cause"),
    "affinity": ("setting", "cause resume"),
    "cpu_quota": ("setting", "cause resume"),
    "governor": ("setting", "cause"),
    "smt": ("setting", "cause"),
    "thp": ("setting", "cause"),
    "hypervisor": ("setting", "cause"),
    "processes": ("setting", "cause noise"),
    "min_time_s": ("setting", "cause noise"),
    "max_time_s": ("setting", "cause noise"),
    "l2": ("setting", "cause noise"),
    "timer": ("setting", "cause noise"),
    "load_1m": ("passing", ""),
    "ceilings": ("passing", ""),
}
_PAGES = 0.002  # of a machine's memory: a VM has some pages more or less from boot to boot


def asked(question: str) -> tuple[str, ...]:
    """The facts that a question asks for, or those of a role."""
    return tuple(name for name, (role, asks) in FACTS.items() if question in (role, *asks.split()))


class Difference(NamedTuple):
    """A fact with its two values; one that is not known is None."""

    name: str
    before: Any
    after: Any

    def __str__(self) -> str:
        return f"{self.name} was {self.before}, is {self.after}"


@dataclass(frozen=True)
class Environment:
    """The facts under which something was measured; what is not in it is not known."""

    facts: Mapping[str, Any]

    @property
    def key(self) -> str:
        """What names it in a run's `environments`: the same for the same lasting facts."""
        lasting = {name: value for name, value in sorted(self.facts.items()) if _lasts(name)}
        return checksum(dumps(lasting).encode())[:8]

    def differences(
        self, other: Environment, names: Iterable[str] | None = None
    ) -> tuple[Difference, ...]:
        """Those of the named facts, else of all that last; unknown and known are different."""
        every = filter(_lasts, dict.fromkeys([*self.facts, *other.facts]))
        pairs = (Difference(n, self.facts.get(n), other.facts.get(n)) for n in names or every)
        return tuple(pair for pair in pairs if not _alike(*pair))

    def same_machine(self, other: Environment) -> bool:
        """Whether the two are of machines that are alike, as far as both are known."""
        known = {n: x for n in asked("machine") if (x := self.facts.get(n)) is not None}
        both = {n: (x, y) for n, x in known.items() if (y := other.facts.get(n)) is not None}
        return "device_name" in both and all(_alike(name, *pair) for name, pair in both.items())


def _lasts(name: str) -> bool:
    return FACTS.get(name, ("setting", ""))[0] != "passing"


def _alike(name: str, x: Any, y: Any) -> bool:
    memory = name == "memory_bytes" and None not in (x, y)
    return bool(x == y or (memory and math.isclose(x, y, rel_tol=_PAGES)))
