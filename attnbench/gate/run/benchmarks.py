"""Tests with the fixture `benchmark` as the cells of a gate: checked, and timed in its rounds."""

from __future__ import annotations

import math
import platform
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from attnbench.errors import UsageError
from attnbench.execution.process import Settings
from attnbench.gate.decide.data import Benchmark, Checked, GateRun, Variant, Version, VersionName
from attnbench.gate.protocol import (
    CellEntered,
    CellVerified,
    EnterCell,
    RoundRequest,
    Suite,
    TakeSample,
    VariantConfig,
    VerifyCell,
)
from attnbench.gate.run.git import temporary_folder
from attnbench.gate.run.measuring import GateListener, GateRequest, run_gate
from attnbench.gate.run.processes import ProcessError, RoundProcesses
from attnbench.machine import host
from attnbench.version import __version__

T = TypeVar("T")


def run_benchmarks(request: GateRequest, suite: Suite, listener: GateListener) -> GateRun:
    """Run the tests once in both versions, then time them in rounds; the raw data.

    Raises:
        UsageError: pytest does not start in a version, or files changed meanwhile.
        WorkerError: no process can be started.
    """
    check = partial(check_tests, suite)
    run = run_gate(request, listener, check, partial(TestProcesses, suite))
    # Tests may import what they time no earlier than when they run.
    return replace(run, options={**run.options, "loaded_alike": False})


class TestProcesses(RoundProcesses):
    """Processes that run pytest, all in the same test at the same time."""

    __test__ = False
    module = "attnbench.gate.server.benchmark"

    def __init__(
        self,
        suite: Suite,
        versions: list[tuple[Variant, Version, Version]],
        config: Callable[..., VariantConfig[Benchmark]],
        settings: Mapping[VersionName, Settings],
    ) -> None:
        self._variants = [variant for variant, *_ in versions]
        self._cell: int | None = None
        super().__init__(versions, partial(config, suite=suite), settings)

    def ask(
        self, variant: Variant, request: RoundRequest, kind: type[T], within_s: float = math.inf
    ) -> T:
        """As any process is asked; before the first sample of a test all of them enter it."""
        if isinstance(request, TakeSample) and request.cell != self._cell:
            self._cell = request.cell
            for each in self._variants:
                super().ask(each, EnterCell(request.cell), CellEntered)
        return super().ask(variant, request, kind, within_s)

    def end(self) -> None:
        """Let fixtures of the session be torn down before everything is ended."""
        for line in self._lines.values():
            line.close()
        for process in self._processes.values():
            process.ended()
        super().end()


def check_tests(
    suite: Suite, request: GateRequest, settings: Mapping[VersionName, Settings]
) -> tuple[GateRun, list[str]]:
    """Run every test once in each version; the run so far, and no warnings.

    What fails in one version alone is tried once more, in a fresh process.

    Raises:
        UsageError: pytest does not start in a version.
    """
    every = range(len(suite.tests))
    versions = (request.base, request.candidate), (request.candidate, request.base)
    with temporary_folder() as scratch:
        outcomes = partial(_outcomes, suite, settings, scratch)
        base, candidate = found = [outcomes(*both, every) for both in versions]
        apart = [n for n in every if base[n].status != candidate[n].status]
        for checked, both in zip(found, versions, strict=True):
            failed = [n for n in apart if checked[n].status not in ("ok", "absent")]
            for number, now in outcomes(*both, failed).items():
                then = f"{checked[number].status}: {checked[number].reason}"
                words = f"failed once on the {both[0].name} ({then})"
                checked[number] = replace(now, reason=words) if now.status == "ok" else now
    checks: dict[int, dict[VersionName, Checked]] = {
        number: {"base": base[number], "candidate": candidate[number]} for number in every
    }
    environment = {
        "device": "cpu", "threads": request.settings.threads, "attnbench": __version__,
        "python": platform.python_version(), **host.facts(),
    }  # fmt: skip
    return request.begun(suite.tests, checks, environment, {}), []


def _outcomes(
    suite: Suite,
    settings: Mapping[VersionName, Settings],
    scratch: Path,
    version: Version,
    other: Version,
    numbers: Iterable[int],
) -> dict[int, Checked]:
    """What became of these tests in a version: in one process, and in a fresh one after a death."""
    found: dict[int, Checked] = {}
    while left := [number for number in numbers if number not in found]:
        config = partial(
            VariantConfig,
            cells={number: suite.tests[number] for number in left},
            references=str(scratch), device="cpu", threads=settings["base"].threads,
            seed=settings["base"].seed,
            cpu=None,
        )  # fmt: skip
        with TestProcesses(suite, [(version.name, version, other)], config, settings) as processes:
            try:
                for number, why in processes.prepared(version.name).failures.items():
                    absent = why.code == "unsupported"
                    status: Any = "absent" if absent else why.code
                    found[number] = Checked(status=status, reason=why.reason)
            except ProcessError as err:
                raise UsageError(f"pytest does not run in the {version.name}: {err}") from err
            for number in left:
                if number in found:
                    continue
                try:
                    processes.ask(version.name, EnterCell(number), CellEntered)
                    processes.ask(version.name, VerifyCell(number, 1.0, 1.0), CellVerified)
                    found[number] = Checked(status="ok")
                except ProcessError as err:
                    found[number] = Checked(status=err.failure.code, reason=err.failure.reason)
                    if err.failure.code in ("crashed", "timeout"):
                        break
    return found
