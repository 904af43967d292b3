"""What becomes of cells whose worker died, hung or lied: a value, without a clock or a process."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from attnbench.schema.record import Status

Key = tuple[int, str]  # index of a case or item in the caller's list, implementation


class Death(NamedTuple):
    """What to record of the cells that a worker was at, or `of_all` that are left.

    Not `surely`: another may be to blame.
    """

    status: Status
    reason: str
    surely: bool = True
    of_all: bool = False


@dataclass
class Policy:
    """Which cells go into the next attempt, and how each ends. The first line that fits holds.

    | a result                                        | becomes                                   |
    |-------------------------------------------------|-------------------------------------------|
    | out of memory, after others in its process      | tried again alone: others may hold it     |
    | incorrect, after another cell                   | tried again alone: it may keep something  |
    | skipped, because a cell that waits is too large | asked again, once that one has ended      |
    | of a suspect, alone                             | counts if its process lives on            |
    | any other                                       | counts                                    |

    | the end of an attempt                           | costs                                     |
    |-------------------------------------------------|-------------------------------------------|
    | the worker is done, cells are left              | an error each                             |
    | in a race, or `of_all`                          | those it was at, or all that are left     |
    | a death, at a cell, after others                | that cell is tried once more, alone       |
    | a death, another may be to blame                | each it may have been is tried alone      |
    | a death at no cell, for the first time          | the rest is tried once more               |
    | any other death                                 | those it was at, or all that are left     |

    In a race nothing is tried again. An implementation that ended `deaths_each` workers is not
    tried any further. `suspected` has what happened before to each cell that is tried again.
    """

    open: dict[Key, None]
    suspected: dict[Key, str] = field(default_factory=dict)
    racing: bool = False
    deaths_each: int | None = None
    deaths: Counter[str] = field(default_factory=Counter)
    _alone: list[list[Key]] = field(default_factory=list)  # attempts of their own, in order
    _waiting: dict[Key, str] = field(default_factory=dict)  # in this attempt, by their status
    _incorrect: set[Key] = field(default_factory=set)  # after others
    _asked: list[Key] = field(default_factory=list)
    _may_retry: bool = True

    def __post_init__(self) -> None:
        """What failed in an earlier run is tried alone."""
        self._alone = [[key] for key in self.open if key in self.suspected]

    @property
    def fresh(self) -> bool:
        """Whether the next attempt must be in a fresh process: suspects may do harm late."""
        return bool(self._alone)

    def attempt(self) -> list[Key]:
        """What to ask the next worker for."""
        self._waiting.clear()
        alone = ([key for key in keys if key in self.open] for keys in self._alone)
        self._alone = [keys for keys in alone if keys]
        self._asked = self._alone[0] if self._alone else list(self.open)
        return self._asked

    def result(
        self, key: Key, status: Status | None, *, others_ran: bool
    ) -> Literal["take", "linger", "wait"]:
        """What to do with a result; what is taken has ended with it, or with its late death."""
        self._may_retry = True  # the worker got somewhere
        crowded = status == "oom" and len(self._asked) > 1 and others_ran
        kept = status == "incorrect" and key != self._asked[0]
        if (crowded or kept) and not self.racing:
            self._incorrect |= {key} if kept else set()
            self._waiting[key] = str(status)
            return "wait"
        if status == "skipped" and any(key[1] == waiting[1] for waiting in self._waiting):
            self._waiting[key] = status
            return "wait"
        del self.open[key]
        if key in self.suspected and len(self._asked) == 1:
            return "linger"
        if status == "ok" and key in self._incorrect:
            self.suspected[key] = "incorrect: it keeps something from an earlier case"
        return "take"

    def end(
        self, death: Death | None, at: list[Key], *, others_ran: bool
    ) -> list[tuple[Key, Death]]:
        """The cells that end with an attempt; `at` are those that the worker was at."""
        left = [key for key in self._asked if key in self.open and key not in self._waiting]
        again = [[key] for key, status in self._waiting.items() if status != "skipped"]
        self._alone += again
        at = [key for key in at if key in left]
        if death is None:  # a worker that ends well and forgets a cell is a defect of ours
            return self._ended(left, Death("error", "the worker finished without a result"))
        blamed = left if death.of_all else at or left
        suspects = [[key] for key in blamed]
        if self.racing:
            suspects = []
        elif death.surely:
            suspects = [at] if at and others_ran else []
        if suspects and len(self._asked) > len(suspects[0]):
            self._alone = suspects + self._alone
            self.suspected |= dict.fromkeys(at, f"{death.status}: {death.reason}")
            return []
        if left and not at and self._may_retry and not death.of_all:
            self._may_retry, blamed = False, []
        return self._ended(blamed, death)

    def _ended(self, keys: list[Key], death: Death) -> list[tuple[Key, Death]]:
        """These, and what is not tried any further."""
        self.deaths.update({impl for _, impl in keys})
        ends = dict.fromkeys(keys, death)
        if (most := self.deaths_each) is not None:
            over = [key for key in self.open if self.deaths[key[1]] >= most and key not in ends]
            ends |= dict.fromkeys(over, Death("skipped", f"not tried: it ended {most} workers"))
        for key in ends:
            del self.open[key]
        return list(ends.items())
