"""The axes of a case, the rows of `axes.toml`: all that is said of one follows from its row."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from attnbench.base import units

READ: dict[str, Callable[[str, str], Any]] = {
    "names": units.parse_names, "sizes": units.parse_sizes, "threads": units.parse_threads,
    "scales": units.parse_scales, "caps": partial(units.parse_scales, word="none"),
    "sinks": units.parse_names,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Axis:
    """A field of a case that a sweep varies; `axes.toml` says what each attribute is.

    `field` is as the JSON of a case writes it, and the name of its column.
    """

    field: str
    flag: str = ""
    kind: str = "names"
    default: Any = None
    follows: str | None = None
    of: Sequence[str] | None = None
    symbol: str = ""
    plain: Any = None
    unsaid: str = ""
    size: bool = False
    minor: bool = False
    beside: bool = False
    help: str = ""
    meaning: str = ""
    order: Sequence[int] = (0, 0)

    @property
    def keyword(self) -> str:
        """What `attnbench.sweep` and presets call it."""
        return self.flag[2:].replace("-", "_")

    def shown(self, default: str = "") -> str:
        """Its help, with the default, or another that a command has."""
        default = default or (f"as {AXES[self.follows].flag[2:]}" if self.follows else self.default)
        return f"{self.help} [{default}]" if default else self.help

    def read(self, text: str, flag: str = "") -> Any:
        """Its values as they are written on the command line.

        Raises:
            UsageError: it takes no such values; the message names the flag.
        """
        return tuple(READ[self.kind](text, flag or self.flag))

    def applies(self, workload: str) -> bool:
        """Whether the workload has it."""
        return self.of is None or workload in self.of

    def text(self, row: Any) -> str:
        """`n=128`, `causal`; nothing where it is unknown, or equals the axis that it follows."""
        value = row[self.field]
        if units.is_unknown(value) or (self.follows and value == row[self.follows]):
            return ""
        text = f"{value:g}" if isinstance(value, float) else str(value)
        return f"{self.symbol}={text}" if self.symbol else text


_TABLE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
AXES = {name: Axis(field=name, **row) for name, row in _TABLE.items()}
KEYWORDS = {axis.keyword: axis for axis in AXES.values()}
