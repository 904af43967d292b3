"""The colour and the marker that stand for an implementation, in every figure and table."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from attnbench.base.parameters import base_name


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
    "sdpa-mask": Look("#332288", "*"),
    "chunked": Look("#e69f00", "P"),
    "split-kv": Look("#44aa99", "d"),
    "flex": Look("#882255", "p"),
    "naive-compiled": Look("#999933", "X"),
}
_OTHER_COLOURS = ("#aa4499", "#117733", "#b8860b", "#6a3d9a", "#8c564b", "#3b7dd8")
_OTHER_MARKERS = ("^", "s", "D", "v", "P", "X", "d", "p")
_OTHERS = [Look(colour, marker) for marker in _OTHER_MARKERS for colour in _OTHER_COLOURS]
_MORE = """linear sliding-window bigbird nystrom linformer performer
    strided reformer retention dilated-window window-global gru
    linear-recurrent linear-parallel strided-fixed bigbird-flex sdpa-grouped
    sdpa-expanded sdpa-items sdpa-trimmed sdpa-varlen""".split()
KNOWN |= {name: _OTHERS.pop(0) for name in _MORE}
# Of the caches, projections or parameters of an implementation, in their order.
DASHES: tuple[Any, ...] = (
    "-", (0, (5, 2)), (0, (1.2, 1.5)), (0, (6, 2, 1.2, 2)), (0, (2.5, 1.5)), (0, (9, 3)),
)  # fmt: skip


def looks_of(names: Iterable[str]) -> dict[str, Look]:
    """Give each name its look, whatever its parameters: the built-ins their own, others by name.

    The slot comes from a hash of the name, so that an implementation keeps its look from run to
    run; only where two names of one run meet in a slot does the later one, in alphabetical order,
    move on to the next free one. Slots are shared when there are more names than slots.
    """
    bases = {name: base_name(name) for name in names}
    given, taken = dict(KNOWN), set[int]()
    for name in sorted(set(bases.values()) - set(KNOWN)):
        start = int(hashlib.sha256(name.encode()).hexdigest(), 16) % len(_OTHERS)
        slots = [(start + step) % len(_OTHERS) for step in range(len(_OTHERS))]
        slot = next((slot for slot in slots if slot not in taken), start)
        taken.add(slot)
        given[name] = _OTHERS[slot]
    return {name: given[base] for name, base in bases.items()}
