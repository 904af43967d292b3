"""`pytest --attnbench-gate BASE`: the tests that use the fixture `benchmark`, timed by the gate.

Every pytest in an environment with attnbench imports this: anything else is imported where the
option is given.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from attnbench.gate.decide.data import GateCell, GateRun, Round
    from attnbench.gate.decide.outcome import Outcome
    from attnbench.gate.run.benchmarks import Suite
    from attnbench.gate.run.watched import Comparison

# How a verdict reads among the outcomes of tests: what is open must not look like a pass.
_OUTCOMES = {
    "ok": "passed",
    "improved": "passed",
    "not comparable": "skipped",
    "not timed": "skipped",
}
# The gate's flags in sentences, and what stands for them here.
_FLAGS = {
    "--base": "--attnbench-gate",
    "--threshold": "--attnbench-threshold",
    "--budget": "--attnbench-budget",
    "--output": "--attnbench-output",
    "--keep-going": "leaving out -x",
}


def pytest_addoption(parser: pytest.Parser) -> None:
    """The gate's options, by their names there."""
    group = parser.getgroup("attnbench", "attnbench gate")
    for name, default, words in (
        (
            "gate", None,
            "Compare the working tree with this branch, tag or commit: tests that use the fixture"
            " benchmark are timed in both, interleaved.",
        ),
        ("threshold", "10%", "The slowdown to be found, such as 5% [10%]."),
        ("budget", "5m", "Wall time, such as 90s or 10m, after which no round begins [5m]."),
        ("output", "results", "The folder in which each run gets one of its own [results]."),
    ):  # fmt: skip
        metavar = {"gate": "BASE", "output": "DIR"}.get(name, name.upper())
        group.addoption(f"--attnbench-{name}", metavar=metavar, default=default, help=words)


def pytest_configure(config: pytest.Config) -> None:
    """Without the option nothing happens."""
    if config.getoption("attnbench_gate") is not None:
        with _one_line():
            config.pluginmanager.register(_Gate(config))


@contextmanager
def _one_line() -> Iterator[None]:
    """What the user can act on is a usage error of pytest; flags are named as they are here."""
    from attnbench.errors import AttnbenchError

    try:
        yield
    except AttnbenchError as err:
        raise pytest.UsageError(_flags(str(err))) from err


def _flags(text: str) -> str:
    """The text with the gate's flags as they are here."""
    for flag, own in _FLAGS.items():
        text = text.replace(flag, own)
    return text


class _Gate:
    """A session of pytest that times tests in place of running them, and listens to the rounds."""

    def __init__(self, config: pytest.Config) -> None:
        from attnbench.base.units import parse_duration, parse_share
        from attnbench.errors import UsageError
        from attnbench.gate.run import git
        from attnbench.gate.run.watched import Watched, comparison

        self._config, asked = config, config.getoption
        if asked("numprocesses", None) or asked("tx", None):
            raise UsageError(
                "tests that are timed run one after another: add -n 0 to --attnbench-gate"
            )
        promises = {
            "threshold": parse_share(asked("attnbench_threshold"), "--threshold"),
            "budget_s": parse_duration(asked("attnbench_budget"), "--budget"),
        }
        found = Watched(files=(), sweeps=(), base=asked("attnbench_gate"), promises=promises)
        found.rules("cpu")  # what cannot be is refused before anything is collected
        results = config.invocation_params.dir.resolve() / asked("attnbench_output")
        self._compared = comparison(git.repository(config.rootpath), found, results)
        self._run: GateRun | None = None
        self._outcome: Outcome | None = None
        self._words = ""

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        """Keep the tests that use the fixture."""
        kept = [item for item in items if "benchmark" in getattr(item, "fixturenames", ())]
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = kept

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        """Time the tests, and report each as pytest reports what it has run."""
        if session.testsfailed or self._config.option.collectonly:
            return None  # pytest says what cannot be collected
        with _one_line():
            self._run, self._outcome = self._measured(session.items)
        for item, row in zip(session.items, self._outcome.rows, strict=True):
            why = _flags(f"{row.verdict}: {row.reason}")
            outcome: Any = _OUTCOMES.get(row.verdict, "failed")
            longrepr: Any = {"failed": why, "skipped": (str(item.path), None, why)}.get(outcome)
            report = pytest.TestReport(item.nodeid, item.location, {}, outcome, longrepr, "call")
            item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
            item.ihook.pytest_runtest_logreport(report=report)
        return True

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """End as the gate does."""
        if self._outcome is not None:
            session.exitstatus = int(self._outcome.exit_code)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """The gate's table, controls and conclusion."""
        if self._run is None or self._outcome is None:
            return
        from rich.console import Console

        from attnbench.report.gate import outputs

        writer = self._config.get_terminal_writer()
        width = writer.fullwidth if terminalreporter.isatty else 10_000
        to = Console(width=width, force_terminal=writer.hasmarkup, highlight=False)
        writer.sep("=", "attnbench gate")
        writer.write(_flags(outputs.terminal(self._run, self._outcome, self._folder, to)))

    def _measured(self, items: list[pytest.Item]) -> tuple[GateRun, Outcome]:
        from attnbench.base.files import make_folder
        from attnbench.errors import UsageError
        from attnbench.execution.process import Settings
        from attnbench.gate.decide.stored import NAME, ROUNDS, keep_round
        from attnbench.gate.decide.verdict import decide
        from attnbench.gate.run.benchmarks import run_benchmarks
        from attnbench.gate.run.worktree import checked_out
        from attnbench.report.gate import outputs

        if not items:
            raise UsageError(
                "no test that was collected uses the fixture benchmark: there is nothing to time"
                " (--attnbench-gate)"
            )
        compared, suite = self._selected(items)
        folder = make_folder(Path(self._config.getoption("attnbench_output")), None, "gate-")
        try:
            assert compared.base is not None, "it is asked for"
            with checked_out(compared.root, compared.base.commit) as tree:
                options = {"pytest": suite.arguments}
                request = compared.request(tree, Settings(device="cpu"), options)
                going = not self._config.getoption("maxfail")
                request = replace(request, keep=partial(keep_round, folder), keep_going=going)
                run = run_benchmarks(request, suite, self)
            outcome = decide(run)
            if warning := outputs.write_all(folder, run, outcome):
                self.warned(warning)
        finally:
            with suppress(OSError):
                if (folder / ROUNDS).exists() and not (folder / NAME).exists():
                    self.warned(f"rounds are kept: attnbench gate --replay {folder}")
                if any(folder.iterdir()):  # something was measured
                    (folder / ".gitignore").write_text("*\n", encoding="utf-8")
                else:
                    folder.rmdir()
        self._folder = folder
        return run, outcome

    def _selected(self, items: list[pytest.Item]) -> tuple[Comparison, Suite]:
        """What is compared, with the files of these tests, which are in the suite."""
        from attnbench.errors import UsageError
        from attnbench.gate.decide.data import Benchmark
        from attnbench.gate.run.benchmarks import Suite

        root, invocation = self._compared.root, self._config.invocation_params
        files = dict.fromkeys(item.path.resolve() for item in items)
        if outside := [file for file in files if not file.is_relative_to(root)]:
            raise UsageError(
                f"{outside[0]} lies outside the repository {root}, so that no base has it"
                " (--attnbench-gate)"
            )
        there = invocation.dir.resolve()
        suite = Suite(
            tests=tuple(Benchmark(impl=item.nodeid) for item in items),
            arguments=tuple(map(str, invocation.args)),
            folder=str(there.relative_to(root)) if there.is_relative_to(root) else ".",
            rootdir=str(self._config.rootpath.resolve().relative_to(root)),
        )
        named = tuple(file.relative_to(root).as_posix() for file in files)
        watched = replace(self._compared.watched, files=named)
        return replace(self._compared, watched=watched), suite

    # A listener of `attnbench.gate.run.measuring`.

    def stage(self, words: str) -> None:
        """Name the part of the run that begins."""
        if words != self._words:
            self._words = words
            self._config.get_terminal_writer().write(f"\n{words} ", flush=True)

    def planned(self, cells: tuple[GateCell, ...]) -> None:
        """Pytest has said how many tests there are."""

    def round_measured(self, found: Round, number: int, words: str) -> None:
        """A dot for each round; one that is discarded is named, since it takes time."""
        self._config.get_terminal_writer().write(".", flush=True)
        if found.discarded is not None:
            self.warned(f"round {number} counts for nothing: {found.discarded}")
        self.stage(words)

    def warned(self, message: str) -> None:
        """On a line of its own."""
        self._config.get_terminal_writer().write(f"\n{_flags(message)}\n", flush=True)
