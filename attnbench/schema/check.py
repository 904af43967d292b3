"""What `attnbench check` asks and finds: an item of the battery, its result, ways to fail."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from attnbench.schema.case import Case

CHANCE = ("random", "unwritten")  # codes of faults that a second call may not show


@dataclass(frozen=True, kw_only=True)
class Item:
    """One check: a name for people, the case, and how its inputs are drawn.

    Or, as `draw["property"]`, which of `worker.properties` is to hold.
    `brief` items are also run for implementations that compile, which takes many seconds a case.
    """

    name: str
    case: Case
    draw: dict[str, Any] = field(default_factory=dict)
    brief: bool = False


@dataclass(frozen=True, kw_only=True)
class CheckResult:
    """One implementation in one item: `ok`, `unsupported`, `left` out, or how it failed."""

    item: Item
    impl: str
    status: str
    reason: str | None
    metrics: dict[str, Any]

    @property
    def failed(self) -> bool:
        """True for everything but a right result and an honest refusal."""
        return self.status not in ("ok", "unsupported", "left")

    @property
    def fault(self) -> dict[str, Any]:
        """What `worker.fault` says of a wrong result; empty where it says nothing."""
        return self.metrics.get("fault") or {}

    @property
    def code(self) -> str:
        """The code of its fault, or else its status."""
        return str(self.fault.get("code", self.status))


@dataclass(frozen=True, kw_only=True)
class Failure:
    """One way in which one implementation fails: the simplest check that shows it comes first.

    `explained` is the code of what explains its fault (see `worker.fault`). `pattern` are features
    that all of the failed checks have, and `passed_alike` of those that passed. Where
    results or scores are off by one factor, `ratios` are its least and its largest value, and
    `factors` what it may be.
    """

    impl: str
    explained: str | None
    results: tuple[CheckResult, ...]
    pattern: tuple[str, ...]
    passed_alike: int
    ratios: tuple[float, float] | None = None
    factors: tuple[str, ...] = ()

    @property
    def first(self) -> CheckResult:
        """The check to be shown in full."""
        return self.results[0]
