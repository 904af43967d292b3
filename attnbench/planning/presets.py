"""Presets: ready lists of sweeps by name, the tables of `presets.toml`."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attnbench.base.registry import Registry
from attnbench.machine.host import AllocatorPolicy
from attnbench.planning.plan import Axes


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A named list of sweeps, and how to measure them unless something else is asked for.

    `min_time_s` and `max_time_s` are the time budget of a cell. `device` is where it runs unless
    one is named: a preset for a GPU does not fall back to a CPU.
    """

    doc: str
    sweeps: tuple[Axes, ...]
    max_time_s: float
    min_time_s: float = 0.05
    allocator: AllocatorPolicy = "settled"
    device: str = "auto"


PRESETS: Registry[Preset] = Registry("preset", "--preset")


def _preset(*, sweeps: list[dict[str, Any]], shared: dict[str, Any], **rest: Any) -> Preset:
    rows = ({name: text for name, text in (shared | row).items() if text} for row in sweeps)
    return Preset(sweeps=tuple(Axes(**row) for row in rows), **rest)


for _name, _table in tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8")).items():
    PRESETS.add(_name, _preset(**_table))
