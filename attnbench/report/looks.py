"""The colour and the marker that stand for an implementation, a cache or a projection."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Look:
    """A colour (hex) and a matplotlib marker."""

    colour: str
    marker: str


# Okabe & Ito's palette (distinct with any colour vision) for what is drawn most often, three of
# Tol's "muted" after it. Markers differ too, so that the plots survive a black-and-white printer.
KNOWN: dict[str, Look] = {
    "naive": Look("#000000", "o"),
    "naive-heads": Look("#7f7f7f", "s"),
    "sdpa": Look("#0072b2", "D"),
    "sdpa-math": Look("#56b4e9", "v"),
    "sdpa-flash": Look("#d55e00", "^"),
    "sdpa-efficient": Look("#009e73", "<"),
    "sdpa-cudnn": Look("#cc79a7", ">"),
    "sdpa-mask": Look("#332288", "h"),
    "chunked": Look("#e69f00", "P"),
    "split-kv": Look("#44aa99", "d"),
    "flex": Look("#882255", "p"),
    "naive-compiled": Look("#999933", "X"),
}

# Caches have other colours than implementations: Tol's "high contrast".
CACHES: dict[str, Look] = {
    "rerun": Look("#bb5566", "s"),
    "none": Look("#ddaa33", "v"),
    "concat": Look("#004488", "^"),
    "static": Look("#000000", "o"),
    "sliding": Look("#44aa99", "D"),
    "paged": Look("#882255", "P"),
    "int8": Look("#117733", "X"),
    "int8-head": Look("#999933", "d"),
    "latent": Look("#cc6677", "*"),
}

PROJECTIONS: dict[str, Look] = {
    "fused": Look("#000000", "o"),
    "separate": Look("#004488", "^"),
    "per-head": Look("#ddaa33", "v"),
    "mla": Look("#cc6677", "*"),
    "pruned": Look("#44aa99", "D"),
    "tied": Look("#882255", "P"),
    "tied-layers": Look("#999933", "X"),
}
LINES = {"cache": CACHES, "projection": PROJECTIONS}  # by the column that tells lines apart

_OTHER_COLOURS = ("#aa4499", "#117733", "#b8860b", "#6a3d9a", "#8c564b", "#3b7dd8")
_OTHER_MARKERS = ("*", "d", "H", "8", "P", "^", "s", "v")
OTHERS = tuple(
    Look(colour, marker) for marker in _OTHER_MARKERS for colour in _OTHER_COLOURS
)  # fmt: skip


def looks_of(names: Iterable[str], known: Mapping[str, Look] = KNOWN) -> dict[str, Look]:
    """Give each name its look: the built-ins their own, any other one that its name decides.

    The slot comes from a hash of the name, so that an implementation keeps its look from run to
    run; only where two names of one run meet in a slot does the later one, in alphabetical order,
    move on to the next free one. Slots are shared when there are more names than slots.
    """
    wanted = set(names)
    given = {name: known[name] for name in sorted(wanted & set(known))}
    taken: set[int] = set()
    for name in sorted(wanted - set(known)):
        start = int(hashlib.sha256(name.encode()).hexdigest(), 16) % len(OTHERS)
        slots = [(start + step) % len(OTHERS) for step in range(len(OTHERS))]
        slot = next((slot for slot in slots if slot not in taken), start)
        taken.add(slot)
        given[name] = OTHERS[slot]
    return given
