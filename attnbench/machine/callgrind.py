"""Callgrind, Valgrind's counter of instructions: whether it is here, and how it runs a command."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

VARIABLE = "ATTNBENCH_CALLGRIND"  # tells a process that Callgrind runs it, and how its files begin


def available() -> bool:
    """Whether Valgrind is installed, on a system where we use it."""
    return sys.platform == "linux" and all(map(shutil.which, ("valgrind", "vgdb")))


def under_callgrind(command: Sequence[str], dumps: Path) -> list[str]:
    """The command, run by Callgrind, which counts nothing before the process asks.

    `dumps` is how its files begin. Importing torch uninstrumented takes 20 s of processor time
    instead of 90. Python hashes strings alike in every process: by chance it is 0.5 % of a call.
    """
    settings = f"{VARIABLE}={dumps}", "PYTHONHASHSEED=0"
    quiet = "--instr-atstart=no", "--collect-atstart=no", f"--callgrind-out-file={dumps}"
    return ["env", *settings, "valgrind", "-q", "--tool=callgrind", *quiet, *command]
