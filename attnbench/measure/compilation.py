"""Whether something is still being compiled or tuned, by the counters of those who do it."""

from __future__ import annotations

import contextlib
import sys
from typing import Any

_triton_compilations = 0


def compile_activity() -> int:
    """A number that grows whenever torch.compile or Triton compiles or tunes in this process.

    Looks only at what is loaded already: who compiles nothing pays nothing. Torch's counters
    (`torch._dynamo.utils.counters`) grow with every graph captured and every Inductor pass;
    Triton's listener is called for every kernel compiled, by an autotuner, too.
    """
    counted = _triton_compilations
    with contextlib.suppress(Exception):  # private tables: absent or changed, they say nothing
        for table in _loaded("torch._dynamo.utils").counters.values():
            counted += sum(table.values())
    return counted


def listen_to_triton() -> None:
    """Count Triton's compilations from here on, where it is loaded and nobody listens yet."""
    with contextlib.suppress(Exception):
        knobs = _loaded("triton.knobs").compilation
        if getattr(knobs, "listener", None) is None:
            knobs.listener = _count


def _count(*_: Any, **__: Any) -> None:
    global _triton_compilations
    _triton_compilations += 1


def _loaded(name: str) -> Any:
    return sys.modules[name]
