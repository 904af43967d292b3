"""Installs the hooks in a program of `attnbench capture` or `use`, once it has imported torch.

Its folder is first in PYTHONPATH, so that the children of the program have the hooks, too; each
process writes a file of its own. sys.path stays as the program would have it.
"""

from __future__ import annotations

import atexit
import importlib.machinery
import importlib.util
import json
import os
import runpy
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

_BEGAN_S = time.perf_counter()
_ASKED = json.loads(os.environ.get("ATTNBENCH_USE") or os.environ["ATTNBENCH_CAPTURE"])
_EVERY_S = 0.5  # a child that is killed loses no more
_MAIN = os.environ.setdefault("ATTNBENCH_CAPTURE_MAIN", str(os.getpid())) == str(os.getpid())
sys.path.remove(os.path.dirname(__file__))


def _start(_torch: Any) -> None:
    sys.meta_path.remove(_FINDER)
    sys.path.append(_ASKED["root"])
    try:
        from attnbench.capturing import hooks

        seen, active = _advised() if "picks" in _ASKED else _captured()
    except ImportError as err:
        _write({"lacks": str(err)})
        if "picks" in _ASKED:
            sys.stderr.write(f"attnbench use: the program's Python cannot load it: {err}\n")
            raise SystemExit(2) from err
        return
    finally:
        sys.path.remove(_ASKED["root"])
    more: Callable[[], dict[str, Any]] = dict
    if _ASKED.get("verify") and _MAIN:
        from attnbench.capturing.verifying import Watch

        more = Watch(os.path.join(_ASKED["folder"], "trace")).unseen

    def report() -> None:
        _write(seen.report() | more())

    def first() -> None:
        """In a child, which may be killed, or end without Python's own end."""
        if "multiprocessing.util" in sys.modules:
            sys.modules["multiprocessing.util"].Finalize(None, report, exitpriority=0)
        here = threading.current_thread() is threading.main_thread()
        if here and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:  # as a Pool ends them
            signal.signal(signal.SIGTERM, ended)
        threading.Thread(target=again, daemon=True).start()

    def ended(number: int, _frame: Any) -> None:
        report()
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    def again() -> None:
        written = 0
        while True:
            time.sleep(_EVERY_S)
            if seen.count != written:
                written = seen.count
                report()

    def forked() -> None:
        nonlocal more
        more = dict
        seen.restart(first)

    if not _MAIN:
        seen.first = first
    os.register_at_fork(after_in_child=forked)
    hooks.start(seen, active)
    atexit.register(report)


def _captured() -> tuple[Any, list[Any]]:
    from attnbench.capturing import calls, hooks

    seen = calls.Seen()
    seen.most, seen.until_s = (_ASKED[key] or float("inf") for key in ("calls", "seconds"))
    seen.began_s = _BEGAN_S
    return seen, hooks._ACTIVE


def _advised() -> tuple[Any, list[Any]]:
    """The advice of `attnbench use`. Where it cannot be used, the program does not run."""
    from attnbench.capturing import hooks
    from attnbench.dispatch import use
    from attnbench.errors import AttnbenchError
    from attnbench.schema.case import Case

    options = {name: _ASKED[name] for name in ("files", "lenient", "dry")}
    try:
        advice = [(Case.from_json(case), name) for case, name in _ASKED["picks"]]
        return use(advice, **options), hooks.ANSWERS
    except AttnbenchError as err:
        sys.stderr.write(f"attnbench use: {err}\n")
        raise SystemExit(2) from err


def _write(what: dict[str, Any]) -> None:
    """Whole or not at all: a child may be killed meanwhile."""
    file = os.path.join(_ASKED["folder"], f"{os.getpid()}.json")
    with open(f"{file}.part", "w", encoding="utf-8") as out:
        json.dump(what, out)
    os.replace(f"{file}.part", file)


_write({"lacks": ""})
_FINDER = runpy.run_path(os.path.join(os.path.dirname(__file__), "..", "imports.py"))["Finder"](
    {"torch": _start}
)
sys.meta_path.insert(0, _FINDER)
_next = importlib.machinery.PathFinder.find_spec("sitecustomize")  # that of the program's Python
if _next is not None and _next.loader is not None:
    sys.modules["sitecustomize"] = importlib.util.module_from_spec(_next)
    _next.loader.exec_module(sys.modules["sitecustomize"])
