"""Memory that grows from call to call, whoever allocates it, as seen in the processes."""

from __future__ import annotations

from collections.abc import Iterable

from attnbench.base.units import size
from attnbench.gate.decide.round import Round

# In fewer rounds chance could do it: of three alike processes one grows most with probability 1/3.
LEAST_ROUNDS = 8  # (1/3)^8 = 0.015 %
FLOOR_BYTES = 4 << 20  # heaps breathe by a little
_ARMS = {"base", "candidate", "null"}


def growing(rounds: Iterable[Round], cell: int) -> tuple[str, ...]:
    """A sentence if the candidate's process grew, in every round, by more than both of the base's.

    By `FLOOR_BYTES` at least, during the turns of this cell. Nothing where that is not known.
    """
    excess, calls = [], 0
    for found in rounds:
        grown = found.facts.get("grown", {}).get(str(cell), {})
        turns = found.turns.get(cell, {})  # none in a round that was broken off
        if found.veto is None and "candidate" in turns and grown.keys() >= _ARMS:
            excess.append(grown["candidate"] - max(grown["base"], grown["null"]))
            calls = sum(len(blocks) for blocks in turns["candidate"])
    if len(excess) < LEAST_ROUNDS or min(excess) < FLOOR_BYTES:
        return ()
    least = size(min(excess))
    return (
        f"its process grows by {least} and more in {calls} blocks of calls, in each of"
        f" {len(excess)} rounds; the base's does not",
    )
