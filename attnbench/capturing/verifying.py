"""Attention that ran but that no hook saw, counted in torch's own execution trace."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch.profiler import ExecutionTraceObserver, record_function

from attnbench.capturing import hooks

_SEEN = "attnbench: seen"  # around what a hook calls, and what a compiler runs on fake tensors
_ATTENTION = re.compile(
    r"aten::(scaled_dot_product_attention|_native_multi_head_attention"
    r"|_transformer_encoder_layer_fwd|_scaled_dot_product_\w+(?<!_backward))"
)


class Watch:
    """Writes torch's execution trace into a file, from now until `unseen`; all threads."""

    def __init__(self, file: str) -> None:
        self._file = Path(file)
        hooks.around(lambda: record_function(_SEEN))
        hooks.ADAPTED["torch._dynamo.callback"] = _leave_out_compiling
        self._observer: Any = ExecutionTraceObserver().register_callback(file)
        self._observer.start()

    def unseen(self) -> dict[str, dict[str, int]]:
        """End the trace. `unseen` is how often each op of attention ran outside of the hooks."""
        self._observer.stop()
        self._observer.unregister_callback()
        nodes = {node["id"]: node for node in json.loads(self._file.read_bytes())["nodes"]}

        def outer(node: Any) -> Iterator[str]:
            while (parent := nodes.get(node["ctrl_deps"])) not in (None, node):
                node = parent
                yield node["name"]

        ops = Counter(
            node["name"]
            for node in nodes.values()
            if _ATTENTION.fullmatch(node["name"])
            and not any(name == _SEEN or _ATTENTION.fullmatch(name) for name in outer(node))
        )
        return {"unseen": ops}


def _leave_out_compiling(callback: Any) -> None:
    """Have a compiler's trial runs in the trace as seen, once the program imports one."""
    compiling: Any = record_function(_SEEN)
    callback.callback_handler.register_start_callback(lambda _: compiling.__enter__())
    callback.callback_handler.register_end_callback(lambda _: compiling.__exit__(None, None, None))
