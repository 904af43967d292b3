"""What a program can call for its attention, in a line, and what it calls by default."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from attnbench.schema.case import Case

WORDS: dict[str, dict[str, Any]] = tomllib.loads(
    Path(__file__).with_suffix(".toml").read_text("utf-8")
)
DEFAULT = "sdpa"
TRANSFORMERS = "transformers 5.24"


def as_transformers(case: Case) -> str:
    """The implementation that calls SDPA as transformers does with this case.

    Where heads share keys it passes `enable_gqa` if there is no mask and D = V ≤ 256; else it packs
    the heads of a group for a single query, and copies keys to all heads for more
    (integrations/sdpa_attention.py).
    """
    shared = case.kv_heads < case.heads
    plain = case.unmasked or (case.mask.text == "causal" and case.seq_len == case.kv_len)
    if not shared or (plain and case.head_dim == case.value_dim <= 256):
        return DEFAULT
    return "sdpa-grouped" if case.seq_len == 1 else "sdpa-expanded"


def choices(masks: Iterable[str]) -> list[str]:
    """What is tried under masks such as `padding:512+128`."""
    asked = tuple(text.partition(":")[0] for text in masks)
    return [name for name, row in WORDS.items() if {*asked} & {*row.get("masks", asked)}]
