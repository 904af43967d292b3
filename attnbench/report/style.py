"""How an implementation looks everywhere: one colour and one marker, whatever else is drawn."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any


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
    "flex": Look("#882255", "p"),
    "naive-compiled": Look("#999933", "X"),
}

# Caches have other colours than implementations: Tol's "high contrast".
CACHES: dict[str, Look] = {
    "rerun": Look("#bb5566", "s"),
    "none": Look("#ddaa33", "v"),
    "concat": Look("#004488", "^"),
    "static": Look("#000000", "o"),
}

PROJECTIONS: dict[str, Look] = {
    "fused": Look("#000000", "o"),
    "separate": Look("#004488", "^"),
    "per-head": Look("#ddaa33", "v"),
}
LINES = {"cache": CACHES, "projection": PROJECTIONS}  # by the column that tells lines apart

_OTHER_COLOURS = ("#44aa99", "#aa4499", "#117733", "#b8860b", "#6a3d9a", "#8c564b", "#3b7dd8")
_OTHER_MARKERS = ("*", "d", "H", "8", "P", "^", "s", "v")
OTHERS = tuple(
    Look(colour, marker) for marker in _OTHER_MARKERS for colour in _OTHER_COLOURS
)  # fmt: skip


def looks(names: Iterable[str], known: Mapping[str, Look] = KNOWN) -> dict[str, Look]:
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


RC: Any = {  # matplotlib's stubs list every key; a plain dict of them is refused
    "font.family": "DejaVu Sans",
    "font.size": 8.5,
    "axes.titlesize": 9,
    "axes.labelsize": 8.5,
    "axes.edgecolor": "#555555",
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e4e4e4",
    "grid.linewidth": 0.6,
    "xtick.color": "#555555",
    "ytick.color": "#555555",
    "xtick.labelcolor": "#222222",
    "ytick.labelcolor": "#222222",
    "xtick.minor.size": 0,
    "lines.linewidth": 1.4,
    "lines.markersize": 4.5,
    "savefig.facecolor": "white",
    "svg.hashsalt": "attnbench",  # the same data give the same file
}
QUIET = "#777777"  # guide lines, references and notes
