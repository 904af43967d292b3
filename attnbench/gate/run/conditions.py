"""What else went on during a round: from counters of the system, never from its times."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, Self

from attnbench.gate.decide.data import Variant
from attnbench.machine import host

_ARMS: tuple[Variant, ...] = ("base", "candidate", "null")
_TICK_S = 0.01
# Shares of the round's wall time beyond which it is measured again.
MOST_STOLEN = 0.10  # of one CPU, by the hypervisor
MOST_FOREIGN = 0.50  # CPUs that others kept busy, on the CPUs that are ours
MOST_WITHHELD = 0.10  # by a CPU quota


class Asked(Protocol):
    """Who can be asked for the conditions of an arm's process."""

    def ask(self, arm: Variant, request: dict[str, Any]) -> dict[str, Any]:
        """The answer of an arm."""


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """Why a round counts for nothing, if so; and what was seen."""

    veto: str | None
    facts: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Sky:
    """The counters as they stood when a round began."""

    wall_s: float
    own_s: float
    stolen: float | None
    busy: float | None
    withheld_us: float | None

    @classmethod
    def look(cls, processes: Asked) -> Self:
        """Read all counters now."""
        answers = [processes.ask(arm, {"do": "conditions"}) for arm in _ARMS]
        own_s = sum(answer["cpu_ns"] for answer in answers) / 1e9 + time.process_time()
        return cls(
            wall_s=time.perf_counter(),
            own_s=own_s,
            stolen=host.stolen_ticks(),
            busy=host.busy_ticks(),
            withheld_us=host.throttled_us(),
        )

    def since(self, processes: Asked) -> Conditions:
        """What happened since then, and whether it spoils the round."""
        now = Sky.look(processes)
        wall_s = max(now.wall_s - self.wall_s, 1e-9)
        own = (now.own_s - self.own_s) / wall_s
        shares = {
            "stolen": _growth(self.stolen, now.stolen, _TICK_S / wall_s),
            "foreign": _growth(self.busy, now.busy, _TICK_S / wall_s),
            "withheld": _growth(self.withheld_us, now.withheld_us, 1e-6 / wall_s),
        }
        if shares["foreign"] is not None:
            shares["foreign"] = max(0.0, shares["foreign"] - own)
        heat = next(
            (why for arm in _ARMS if (why := processes.ask(arm, {"do": "conditions"})["veto"])),
            None,
        )
        return Conditions(
            veto=heat or why_vetoed(shares),
            facts={name: round(x, 4) for name, x in shares.items() if x is not None},
        )


def why_vetoed(shares: Mapping[str, float | None]) -> str | None:
    """Why a round with these shares of its wall time is measured again, or None."""
    for name, most, words in (
        ("stolen", MOST_STOLEN, "the hypervisor took {:.0%} of a CPU"),
        ("foreign", MOST_FOREIGN, "other processes kept {:.2g} CPUs busy"),
        ("withheld", MOST_WITHHELD, "the CPU quota withheld {:.0%}"),
    ):
        share = shares.get(name)
        if share is not None and share > most:
            return words.format(share)
    return None


def _growth(before: float | None, now: float | None, scale: float) -> float | None:
    return None if before is None or now is None else max(0.0, now - before) * scale
