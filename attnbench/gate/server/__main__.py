"""The server of one round: imports torch once, then forks one process an arm from that state.

Usage: python -m attnbench.gate.server CONFIG, where CONFIG is JSON: device, threads, the cells, and
for each arm its files and the two pipe ends it talks through. All arms of a round share the address
layout of this process, which is drawn anew for each round; the memory they compute in is their
own. How each arm ended is written to standard output, a line each. A single arm is not forked.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from typing import Any

from attnbench.gate.server.arm import Variant
from attnbench.machine.facts import limit_memory
from attnbench.machine.state import remember, settle


def main() -> None:
    """Start the arms and wait until the last has ended."""
    config = json.loads(sys.argv[1])
    sys.dont_write_bytecode = True  # the folders of both sides stay as they are
    report = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever implementations print
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    end_with_parent()
    settle(config["threads"])
    arms = config["arms"]
    if len(arms) == 1:
        _serve(config, 0)
        return
    names = {}
    for index, arm in enumerate(arms):
        process = os.fork()
        if process == 0:
            end_with_parent()
            report.close()
            _serve(config, index)
            os._exit(0)
        names[process] = arm["arm"]
        _close(arm)
    while names:
        process, status = os.wait()
        if process in names:
            code = os.waitstatus_to_exitcode(status)
            print(
                json.dumps({"arm": names.pop(process), "returncode": code}), file=report, flush=True
            )


def _serve(config: dict[str, Any], index: int) -> None:
    for other in config["arms"][index + 1 :]:
        _close(other)
    for stream in (1, 2):
        os.dup2(config["arms"][index]["stderr"], stream)
    if config["device"] == "cpu":
        limit_memory()
    remember(config["threads"])
    try:
        Variant(config, config["arms"][index]).serve()
    except BrokenPipeError:
        pass  # the run was given up
    except BaseException:
        sys.excepthook(*sys.exc_info())
        sys.stderr.flush()
        os._exit(1)


def _close(arm: dict[str, Any]) -> None:
    os.close(arm["read"])
    os.close(arm["write"])


def end_with_parent() -> None:
    """Let the kernel kill this process when its parent ends, were it in the middle of a call.

    Linux alone has that (prctl(2), PR_SET_PDEATHSIG); elsewhere a process ends with its pipe.
    """
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


if __name__ == "__main__":
    main()
