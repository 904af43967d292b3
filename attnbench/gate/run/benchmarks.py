"""Tests with the fixture `benchmark` as the cells of a gate: checked, and timed in its rounds."""

from __future__ import annotations

import math
import platform
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from attnbench.errors import UsageError
from attnbench.execution.events import Events
from attnbench.execution.process import Settings
from attnbench.gate import protocol
from attnbench.gate.decide.data import Benchmark, Checked, GateRun, Variant, Version, VersionName
from attnbench.gate.run.measuring import GateRequest, check_twice, run_gate
from attnbench.gate.run.processes import ProcessError, RoundProcesses
from attnbench.machine import host
from attnbench.version import __version__

T = TypeVar("T")


def run_benchmarks(request: GateRequest, suite: protocol.Suite) -> Events[GateRun]:
    """Run the tests once in both versions, then time them in rounds; the raw data.

    Raises:
        UsageError: pytest does not start in a version, or files changed meanwhile.
        WorkerError: no process can be started.
    """
    check = partial(check_tests, suite)
    run = yield from run_gate(request, check, partial(TestProcesses, suite))
    # Tests may import what they time no earlier than when they run.
    return replace(run, options={**run.options, "loaded_alike": False})


class TestProcesses(RoundProcesses):
    """Processes that run pytest, all in the same test at the same time."""

    __test__ = False
    module = "attnbench.gate.server.benchmark"

    def __init__(
        self,
        suite: protocol.Suite,
        versions: list[tuple[Variant, Version, Version]],
        config: Callable[..., protocol.VariantConfig[Benchmark]],
        settings: Mapping[VersionName, Settings],
    ) -> None:
        self._cell: int | None = None
        super().__init__(versions, partial(config, suite=suite), settings)

    def ask(
        self,
        variant: Variant,
        request: protocol.RoundRequest,
        kind: type[T],
        within_s: float = math.inf,
    ) -> T:
        """As any process is asked; before the first sample of a test all of them enter it."""
        if isinstance(request, protocol.TakeSample) and request.cell != self._cell:
            self._cell = request.cell
            for each in self._lines:
                super().ask(each, protocol.EnterCell(request.cell), protocol.CellEntered)
        return super().ask(variant, request, kind, within_s)

    def __exit__(self, *_: object) -> None:
        """Let fixtures of the session be torn down before everything is ended."""
        for line in self._lines.values():
            line.close()
        for process in self._processes.values():
            process.ended()
        super().__exit__()


def check_tests(
    suite: protocol.Suite, request: GateRequest, settings: Mapping[VersionName, Settings]
) -> Events[GateRun]:
    """Run every test once in each version; the run so far, with nothing to warn of.

    Tests that only the base has are listed, and not run.

    Raises:
        UsageError: pytest does not start in a version.
    """
    yield from ()
    selected: dict[VersionName, tuple[str, ...]] = {}  # by the command line
    run = partial(_outcomes, suite, request, settings, selected)
    checks = check_twice(run, len(suite.tests), 1)
    environment = {
        "device": "cpu", "threads": request.settings.threads, "attnbench": __version__,
        "python": platform.python_version(), **host.facts(),
    }  # fmt: skip
    absent = Checked(status="absent", reason="there is no such test")
    left = {cell.impl for cell in suite.tests}.union(selected["candidate"])
    removed = [Benchmark(impl=test) for test in selected["base"] if test not in left]
    for number, _ in enumerate(removed, start=len(suite.tests)):
        checks[number] = {"base": Checked(status="skipped", reason="not run"), "candidate": absent}
    return request.begun((*suite.tests, *removed), checks, environment, {})


def _outcomes(
    suite: protocol.Suite,
    request: GateRequest,
    settings: Mapping[VersionName, Settings],
    selected: dict[VersionName, tuple[str, ...]],
    name: VersionName,
    numbers: Iterable[int],
) -> dict[int, Checked]:
    """What became of these tests in a version: in one process, and in a fresh one after a death."""
    version, other = request.base, request.candidate
    if name == "candidate":
        version, other = other, version
    found: dict[int, Checked] = {}
    while left := [number for number in numbers if number not in found]:
        config = partial(
            protocol.VariantConfig,
            cells={number: suite.tests[number] for number in left},
            device="cpu", threads=settings["base"].threads, seed=settings["base"].seed, cpu=None,
            listing=True,
        )  # fmt: skip
        with TestProcesses(suite, [(name, version, other)], config, settings) as processes:
            try:
                prepared = processes.prepared(name)
                selected[name] = prepared.tests
                for number, why in prepared.failures.items():
                    status: Any = "absent" if why.code == "unsupported" else why.code
                    found[number] = Checked(status=status, reason=why.reason)
            except ProcessError as err:
                raise UsageError(f"pytest does not run in the {name}: {err}") from err
            for number in [number for number in left if number not in found]:
                try:
                    processes.ask(name, protocol.EnterCell(number), protocol.CellEntered)
                    verify = protocol.VerifyCell(number, 1.0, 1.0)
                    processes.ask(name, verify, protocol.CellVerified)
                    found[number] = Checked(status="ok")
                except ProcessError as err:
                    found[number] = Checked(status=err.failure.code, reason=err.failure.reason)
                    if err.failure.code in ("crashed", "timeout"):
                        break
    return found
