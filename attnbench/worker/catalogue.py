"""What a plan must know of implementations, as JSON."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from attnbench.api import FAMILIES, IMPLEMENTATIONS, implementation
from attnbench.api.loader import BUILT_IN
from attnbench.machine.facts import environment, reason_against_device
from attnbench.measure.sensor import GpuSensor
from attnbench.schema.case import DEVICES, Case, Device, parse_mask
from attnbench.schema.mask import MASKS
from attnbench.schema.messages import Catalogue, ImplementationInfo
from attnbench.schema.position import POSITIONS
from attnbench.theory.caches import CACHES
from attnbench.theory.projections import PROJECTIONS
from attnbench.theory.traits import TRAITS, impossible
from attnbench.worker.workloads import WORKLOADS

At = Callable[[str], None]


def describe(device: str, at: At = lambda stage: None) -> Catalogue:
    """The catalogue: names with what they take, and the machine. `auto` takes a GPU if any.

    `at` is called with what follows, here and below: some kernels are tried to know what they take.
    """
    reasons: dict[str, str | None] = {d: reason_against_device(d) for d in DEVICES}
    if device == "auto":
        device = "cuda" if reasons["cuda"] is None else "cpu"
    usable = reasons.get(device) is None
    return Catalogue(
        device=device,  # type: ignore[arg-type]
        devices=reasons,
        environment=_environment(device) if usable else {},
        implementations=tuple(_row(name, device, at) for name in IMPLEMENTATIONS.names()),
        families=FAMILIES,
        workloads={name: traits.doc for name, traits in TRAITS.items() if name in WORKLOADS},
        positions={name: item.line for name, item in POSITIONS.items()},
        projections={name: item.doc for name, item in PROJECTIONS.items()},
        caches={name: item.doc for name, item in CACHES.items()},
        masks={name: kind.doc for name, kind in MASKS.items()},
    )


def _environment(device: str) -> dict[str, Any]:
    found = environment(device)
    if device == "cuda":
        sensor = GpuSensor.open()
        found |= {"compute_mode": sensor.compute_mode(), "driver": sensor.driver()}
        sensor.close()
    return found


def reasons_against(
    cases: Sequence[Case], names: Sequence[str], at: At = lambda stage: None
) -> dict[str, tuple[str | None, ...]]:
    """For each implementation, case by case, why it cannot run, or null."""
    return {name: tuple(_reason(case, name, at) for case in cases) for name in names}


def _reason(case: Case, name: str, at: At) -> str | None:
    at(f"supports of {name}")
    if reason := impossible(case):
        return reason
    try:
        impl = implementation(name)
        unfit = impl.reason_against_workload(case.workload)
        return unfit or WORKLOADS.get(case.workload).reason_against(case, impl)
    except Exception as err:  # an author's `supports` that raises costs the cell, not the sweep
        return f"its supports() raised {type(err).__name__}: {' '.join(str(err).split())[:200]}"


def _shown(file: str) -> str:
    """A built-in's file as it stands in the repository, wherever that was installed."""
    built_in = sys.modules.get(BUILT_IN)
    folders = [Path(folder) for folder in built_in.__path__] if built_in else []
    return f"impls/{Path(file).name}" if Path(file).parent in folders else file


def _row(name: str, device: str, at: At) -> ImplementationInfo:
    impl = implementation(name)
    first = next((kind for kind in WORKLOADS.names() if kind in impl.workloads), "attention")
    on: Device = "cuda" if device == "cuda" else "cpu"
    mask = parse_mask("full" if "full" in impl.masks else "causal")
    probe = Case(workload=first, device=on, seq_len=256, mask=mask)
    shown: dict[str, Any] = {"doc": impl.doc.partition("\n")[0], "file": _shown(impl.file)}
    shown |= {"approximates": impl.definition is not None, "unavailable": _reason(probe, name, at)}
    fields = vars(impl) | shown
    return msgspec.convert(fields, ImplementationInfo)
