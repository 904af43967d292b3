"""Installs the hooks in the program of `attnbench capture`, as soon as it has imported torch.

Its folder is first in PYTHONPATH. The program sees the environment and the path that it would have.
"""

from __future__ import annotations

import atexit
import importlib.machinery
import importlib.util
import json
import os
import runpy
import sys
import time
from typing import Any

_BEGAN_S = time.perf_counter()
_ASKED = json.loads(os.environ.pop("ATTNBENCH_CAPTURE"))
os.environ.pop("PYTHONPATH")
if _ASKED["pythonpath"] is not None:
    os.environ["PYTHONPATH"] = _ASKED["pythonpath"]
sys.path.remove(os.path.dirname(__file__))


def _start(_torch: Any) -> None:
    sys.meta_path.remove(_FINDER)
    sys.path.append(_ASKED["root"])
    try:
        from attnbench.capturing import hooks
        from attnbench.capturing.calls import Seen
    except ImportError as err:
        _write({"lacks": str(err)})
        return
    finally:
        sys.path.remove(_ASKED["root"])
    seen, pid = Seen(), os.getpid()
    seen.most, seen.until_s = (_ASKED[key] or float("inf") for key in ("calls", "seconds"))
    seen.began_s = _BEGAN_S
    unseen: Any = dict
    if _ASKED["verify"]:
        from attnbench.capturing.verifying import Watch

        unseen = Watch(_ASKED["file"] + ".trace").unseen
    hooks.start(seen)
    atexit.register(lambda: _write(seen.report() | unseen()) if os.getpid() == pid else None)


def _write(what: dict[str, Any]) -> None:
    with open(_ASKED["file"], "w", encoding="utf-8") as out:
        json.dump(what, out)


_write({"lacks": ""})
_FINDER = runpy.run_path(os.path.join(os.path.dirname(__file__), "..", "imports.py"))["Finder"](
    {"torch": _start}
)
sys.meta_path.insert(0, _FINDER)
_next = importlib.machinery.PathFinder.find_spec("sitecustomize")  # that of the program's Python
if _next is not None and _next.loader is not None:
    sys.modules["sitecustomize"] = importlib.util.module_from_spec(_next)
    _next.loader.exec_module(sys.modules["sitecustomize"])
