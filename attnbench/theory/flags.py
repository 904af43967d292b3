"""The command line of one case: the inverse of the axis flags of `sweep` and `profile`."""

from __future__ import annotations

import shlex
from typing import Any

from attnbench.schema.axes import AXES
from attnbench.schema.case import DEFAULTS, FOLLOWS, Case
from attnbench.schema.mask import MASKS
from attnbench.schema.position import POSITIONS
from attnbench.theory.caches import CACHES
from attnbench.theory.projections import PROJECTIONS
from attnbench.theory.traits import TRAITS

# What axes with names take, each with a line on it.
DOCS: dict[str, dict[str, str]] = {
    "workloads": {name: traits.doc for name, traits in TRAITS.items()},
    "positions": {name: item.line for name, item in POSITIONS.items()},
    "projections": {name: item.doc for name, item in PROJECTIONS.items()},
    "caches": {name: item.doc for name, item in CACHES.items()},
    "masks": {name: kind.doc for name, kind in MASKS.items()},
}


def case_flags(case: Case, auto: str = "cpu") -> list[str]:
    """The flags that make `sweep` expand to this case alone; always `--seq-lens`.

    `auto` is the device that is taken where none is named. What goes without saying is left out.
    """
    row, traits = case.to_json(), TRAITS.get(case.workload)
    plain: dict[str, Any] = {**DEFAULTS, "device": auto}
    for name, axis in AXES.items():
        if axis.follows or axis.applies(case.workload):
            plain[name] = row[axis.follows] if axis.follows else axis.default
    plain["seq_len"] = None
    if traits.causal:
        plain["mask"] = "causal"
    if not traits.heads:  # one head, as wide as it is
        plain |= {"heads": case.heads, "head_dim": case.head_dim, "value_dim": case.value_dim}
    elif AXES["width"].applies(case.workload):
        plain["width"] = case.heads * case.head_dim
        if case.model_width != plain["width"]:  # with both, neither follows from the width
            plain |= {"heads": None, "head_dim": None}
    flags = {name: axis.flag for name, axis in AXES.items()}
    flags = {"workload": "--workload", **flags, "device": "--device"}
    asked = [n for n in flags if row[n] != plain[n] and row[n] is not None]
    return [text for name in asked for text in (flags[name], str(row[name]))]


def case_text(case: Case) -> str:
    """What `--case` takes for this case: what differs from the defaults, or its length."""
    row = case.to_json()
    default = DEFAULTS | {name: row[source] for name, source in FOLLOWS.items()}
    differing = {n: x for n, x in row.items() if n in AXES and x != default[n]}
    parts = [f"{AXES[name].symbol or name}={value}" for name, value in differing.items()]
    own = [f"workload={case.workload}"] * (case.workload != "attention")
    return ",".join([*own, *parts]) or f"n={case.seq_len}"


def profile_command(case: Case, impl: str, auto: str = "cpu") -> str:
    """The command that shows where the time of one cell goes."""
    return shlex.join(["attnbench", "profile", impl, *case_flags(case, auto)])
