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

    Raises:
        UsageError: pytest does not start in a version.
    """
    yield from ()
    checks = check_twice(partial(_outcomes, suite, request, settings), len(suite.tests), 1)
    environment = {
        "device": "cpu", "threads": request.settings.threads, "attnbench": __version__,
        "python": platform.python_version(), **host.facts(),
    }  # fmt: skip
    return request.begun(suite.tests, checks, environment, {})


def _outcomes(
    suite: protocol.Suite,
    request: GateRequest,
    settings: Mapping[VersionName, Settings],
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
        )  # fmt: skip
        with TestProcesses(suite, [(name, version, other)], config, settings) as processes:
            try:
                for number, why in processes.prepared(name).failures.items():
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
