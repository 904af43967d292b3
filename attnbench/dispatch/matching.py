"""Which implementation was advised for a call: the rule, and where advice is read from."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from attnbench.api import Implementation, implementation
from attnbench.api.loader import load_built_in, load_entry_points, load_file
from attnbench.base.parameters import meant
from attnbench.errors import UsageError
from attnbench.planning.caselist import listed
from attnbench.planning.plan import expand
from attnbench.schema.case import Case

FACTOR = 2  # how far a length, or a batch, may be from the advised one


@dataclass(frozen=True, eq=False)
class Pick:
    """An implementation for a case; `text` names both."""

    case: Case
    impl: Implementation
    text: str


def picks_of(advice: Any, files: Iterable[str | Path], output: str | Path) -> list[Pick]:
    """The picks of a run, by its folder or name, or of cases with the implementation for each.

    Raises:
        UsageError: it is neither, names what does not exist, or an implementation cannot be used.
        StoreError: there is no such run.
    """
    load_built_in()
    load_entry_points()
    names = [name for file in files for name in load_file(str(file))]
    if isinstance(advice, str | Path):
        from attnbench.analysis.advice import picks
        from attnbench.store import folder, runs

        run = runs.load_run(folder.RunFolder.find(str(advice), Path(output), folder.SWEEP).path)
        pairs: Any = picks(run)
    else:
        pairs = advice.items() if isinstance(advice, Mapping) else advice
    found = [pick for case, name in pairs for pick in _picks(case, str(name), names)]
    if not found:
        raise UsageError("the advice has no case; attnbench advise makes it, or {case: name}")
    return found


def _picks(given: Any, name: str, names: list[str]) -> Iterable[Pick]:
    """A text says nothing of the device, and holds on each."""
    impl, cases = implementation(next(iter(meant(name, names)), name)), [given]
    devices: Any = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
    if isinstance(given, Mapping):
        devices = [given["call"]["device"]] if "call" in given else devices
        given = ",".join(f"{k}={v}" for k, v in given.items() if k not in ("call", "count"))
    if isinstance(given, str):
        (axes,) = listed([given], None, {})
        cases = [case for device in devices for case in expand(axes, device)]
    if impl.reuses_output:
        raise UsageError(f"{name} returns the same memory at each call; a program keeps results")
    for case in cases:
        if case.workload != "attention":
            raise UsageError(f"a case of {case.workload} is of no single call; give its attention")
        reason = impl.reason_against_workload("attention") or impl.reason_against(case)
        if reason and len(cases) == 1:
            raise UsageError(f"{name} cannot take {text_of(case)}: {reason}")
        yield Pick(case, impl, f"{impl.name} for {text_of(case)}")


def text_of(case: Case, lengths: bool = True) -> str:
    """A case as `--case` takes it, with or without its lengths."""
    own: dict[str, Any] = {"B": case.batch, "L": case.seq_len, "S": case.kv_len} if lengths else {}
    own |= {"H": case.heads, "G": case.kv_heads, "D": case.head_dim, "V": case.value_dim}
    mask = case.mask.text if lengths else _mask(case)[0]
    own |= {"dtype": case.dtype, "mask": mask, "pass": case.pass_}
    return ",".join(f"{name}={value}" for name, value in own.items())


def _mask(case: Case) -> tuple[str, bool]:
    """Its kind, and whether it is causal; one that hides nothing is full."""
    return ("full", False) if case.unmasked else (case.mask.name, case.mask.after == 0)


def _kind(case: Case) -> tuple[Any, ...]:
    sizes = case.heads, case.kv_heads, case.head_dim, case.value_dim
    scores = case.softcap, case.sinks, case.seq_len == 1
    return case.device, case.dtype, case.needs_grad, _mask(case), *sizes, *scores


def matching(case: Case, picks: Iterable[Pick]) -> Pick | str:
    """The pick for a call, or why there is none.

    All but B, L and S must be equal. Of these each may be off by a factor of 2; the nearest is
    taken, by the sum of the logarithms, and the first of equals. A single query matches no case of
    several.
    """

    def distance(pick: Pick) -> float:
        own = ((x.batch, x.seq_len, x.kv_len) for x in (case, pick.case))
        apart = [abs(math.log2(a / b)) for a, b in zip(*own, strict=True)]
        return sum(apart) if max(apart) <= math.log2(FACTOR) else math.inf

    alike = [pick for pick in picks if _kind(pick.case) == _kind(case)]
    near = min(alike, key=distance, default=None)
    text = text_of(replace(case, layout="BHLD"), lengths=False)
    if near is None:
        return f"no case has {text}"
    return near if distance(near) < math.inf else f"no case has near lengths: {text}"
