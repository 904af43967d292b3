"""Instructions of a call, counted by Callgrind: nearly exact where times are not.

Callgrind runs the process on a processor of its own making, hundreds of times slower. It has no
AVX-512, so that kernels may take another path than they are timed on. It counts what all threads of
the host execute in user mode, torch's kernels and Python alike; nothing that a GPU does.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from itertools import repeat
from pathlib import Path
from typing import Any

import torch

from attnbench.measure.watch import collector_off

_MOST_CALLS, _FLOPS = 20, 4e8  # some 10 s of an emulated processor


def instructions(call: Callable[[], Any], dumps: Path, flops: float | None = None) -> float:
    """Instructions of one call, in a process that `machine.callgrind.under_callgrind` has started.

    `dumps` is what that was given. The mean of 20 calls, after 30 by which Python has specialised
    its bytecode and torch has filled its caches; of fewer where they have many `flops` each: how
    many must not depend on the time.

    Raises:
        OSError: Callgrind does not answer, or has written nothing.
    """
    calls = max(1, min(_MOST_CALLS, int(_FLOPS / (flops or 1))))
    switches: Any = torch._C
    for _ in repeat(None, calls * 3 // 2):
        call()
    _instrument("on")
    with collector_off():
        switches._valgrind_toggle()
        for _ in repeat(None, calls):
            call()
        switches._valgrind_toggle_and_dump_stats()
    _instrument("off")
    written = sorted(dumps.parent.glob(f"{dumps.name}.*"), key=lambda file: int(file.suffix[1:]))
    lines = written[-1].read_text().splitlines() if written else []
    totals = [line for line in lines if line.startswith("totals:")]
    if not totals:
        raise OSError(f"Callgrind has written no count to {dumps}.*")
    return int(totals[0].split()[1]) / calls


def _instrument(state: str) -> None:
    """Switch what torch cannot; its own switch, of what is collected, has no effect before."""
    command = ["vgdb", f"--pid={os.getpid()}", "instrumentation", state]
    null = subprocess.DEVNULL
    asked = subprocess.Popen(command, stdin=null, stdout=null, stderr=null)
    # Not waited for in the kernel: Valgrind answers between two blocks of code that it runs.
    while asked.poll() is None:
        pass
    if asked.returncode:
        raise OSError(f"vgdb could not reach Callgrind (exit code {asked.returncode})")
