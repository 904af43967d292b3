"""Run tests in a process of their own, forked from one that has loaded what takes seconds."""

from __future__ import annotations

import multiprocessing
import os
import sys
from pathlib import Path

import pytest

TIMEOUT_S = 120.0
PASSED, FAILED = 0, 1  # exit codes of pytest; any other says that it could not run the tests
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(
    ["torch", "pandas", "scipy.stats", "matplotlib.figure", "hypothesis", "pytest"]
)


def run_tests(copy: Path, tests: list[str], *, mutated: bool) -> tuple[int, str]:
    """The exit code of pytest in a copy of the tree, and what it printed.

    Of a variant the first failure is enough; one that takes too long is a failure, too.
    """
    log = copy / "pytest.log"
    arguments = ["-q", "-p", "no:cacheprovider", "--tb=short", "-rfE", *["-x"] * mutated, *tests]
    process = PROCESSES.Process(target=_pytest, args=(copy, log, arguments))
    process.start()
    process.join(TIMEOUT_S if mutated else None)
    if process.exitcode is None:
        process.kill()
        process.join()
        return FAILED, ""
    return process.exitcode, log.read_text(errors="replace")


def _pytest(copy: Path, log: Path, arguments: list[str]) -> None:
    with log.open("w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    os.chdir(copy)
    os.environ["PYTHONPATH"] = str(copy)  # workers import the copy, too
    if "-x" in arguments:  # a variant leaves no bytecode behind
        os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
        sys.dont_write_bytecode = True
    sys.path.insert(0, str(copy))
    for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
        del sys.modules[name]
    sys.exit(pytest.main(arguments))
