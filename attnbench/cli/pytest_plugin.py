"""`pytest --attnbench-gate BASE`: the tests that use the fixture `benchmark`, timed by the gate.

Every pytest in an environment with attnbench imports this: anything else is imported where the
option is given.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from rich.console import Console

    from attnbench.gate.decide.outcome import Outcome

# How a verdict reads among the outcomes of tests: what is open must not look like a pass.
_OUTCOMES = {"ok": "passed", "improved": "passed", "not comparable": "skipped"}


def pytest_addoption(parser: pytest.Parser) -> None:
    """The gate's options: its messages name them as --base, --threshold, --budget, --output."""
    group = parser.getgroup("attnbench", "attnbench gate")
    for name, metavar, default, words in (
        (
            "gate", "BASE", None,
            "Compare the working tree with this branch, tag or commit: tests that use the fixture"
            " benchmark are timed in both, interleaved.",
        ),
        ("threshold", "SHARE", "10%", "The slowdown to be found, such as 5%% [10%%]."),
        ("budget", "TIME", "5m", "Wall time, such as 90s, after which no round begins [5m]."),
        ("output", "DIR", "results", "The folder in which each run gets one of its own [results]."),
    ):  # fmt: skip
        group.addoption(f"--attnbench-{name}", metavar=metavar, default=default, help=words)
    words = "Exit 1 if a test that the base has is missing in the working tree."
    group.addoption("--attnbench-fail-removed", action="store_true", help=words)


def pytest_configure(config: pytest.Config) -> None:
    """Without the option nothing happens."""
    if config.getoption("attnbench_gate") is None:
        return
    if config.getoption("numprocesses", None) or config.getoption("tx", None):
        raise pytest.UsageError(
            "tests that are timed run one after another: add -n 0 to --attnbench-gate"
        )
    config.pluginmanager.register(_Gate(config))


class _Gate:
    """A session of pytest that times tests in place of running them, and shows the rounds."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._outcome: Outcome | None = None
        self._table: Callable[[Console], str]
        self._stage = ""

    @property
    def _writer(self) -> Any:
        return self._config.get_terminal_writer()  # which there is once all are configured

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
        from attnbench.errors import AttnbenchError
        from attnbench.report.documents.gate import finding
        from attnbench.report.render import written

        if session.testsfailed or self._config.option.collectonly:
            return None  # pytest says what cannot be collected
        try:
            self._outcome = self._measured(session.items)
        except AttnbenchError as err:  # what the user can act on: one line
            base = self._config.getoption("attnbench_gate")
            raise pytest.UsageError(f"--attnbench-gate {base}: {err}") from err
        session.testscollected = len(self._outcome.rows)  # of which pytest shows a share
        places = {item.nodeid: item.location for item in session.items}
        for row in self._outcome.rows:
            test = row.cell.impl
            file, _, name = test.partition("::")
            place, figures = places.get(test, (file, None, name)), written.figures(finding("", row))
            # Figures come first: pytest's summary cuts what is long.
            why = f"{figures}{', ' * bool(figures)}{row.verdict}: {row.reason}"
            outcome: Any = _OUTCOMES.get(row.verdict, "failed")
            if test not in places and self._config.getoption("attnbench_fail_removed"):
                outcome = "failed"
            longrepr: Any = {"failed": why, "skipped": (place[0], None, why)}.get(outcome)
            report = pytest.TestReport(test, place, {}, outcome, longrepr, "call")
            self._config.hook.pytest_runtest_logstart(nodeid=test, location=place)
            self._config.hook.pytest_runtest_logreport(report=report)
        return True

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """End as the gate does."""
        if self._outcome is not None:
            session.exitstatus = int(self._outcome.exit_code)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """The gate's table, controls and conclusion."""
        if self._outcome is None:
            return
        from rich.console import Console

        wrapped = terminalreporter.isatty or "COLUMNS" in os.environ
        width = self._writer.fullwidth if wrapped else 10_000
        to = Console(width=width, force_terminal=self._writer.hasmarkup, highlight=False)
        self._writer.sep("=", "attnbench gate")
        self._writer.write(self._table(to))

    def _measured(self, items: list[pytest.Item]) -> Outcome:
        """What was decided of these tests, with all files of the run written."""
        from attnbench.base.units import parse_duration, parse_share
        from attnbench.errors import UsageError
        from attnbench.execution.events import follow
        from attnbench.execution.process import Settings
        from attnbench.gate.decide.data import Benchmark
        from attnbench.gate.decide.stored import keep_round
        from attnbench.gate.decide.verdict import decide
        from attnbench.gate.protocol import Suite
        from attnbench.gate.run.benchmarks import run_benchmarks
        from attnbench.gate.run.watched import Watched, comparison
        from attnbench.report.files import write_gate_files
        from attnbench.report.render import terminal
        from attnbench.store.folder import GATE, RunFolder
        from attnbench.versions import git

        asked, called = self._config.getoption, self._config.invocation_params
        if not items:
            raise UsageError("no test that was collected uses the fixture benchmark")
        root = git.repository(self._config.rootpath)
        files = dict.fromkeys(item.path.resolve() for item in items)
        if outside := [file for file in files if not file.is_relative_to(root)]:
            raise UsageError(f"{outside[0]} lies outside the repository {root}")
        promises = {
            "threshold": parse_share(asked("attnbench_threshold"), "--attnbench-threshold"),
            "budget_s": parse_duration(asked("attnbench_budget"), "--attnbench-budget"),
            "fail_removed": asked("attnbench_fail_removed"),
        }
        names = tuple(file.relative_to(root).as_posix() for file in files)
        watched = Watched(files=names, sweeps=(), base=asked("attnbench_gate"), promises=promises)
        output = called.dir.resolve() / asked("attnbench_output")
        compared = comparison(root, watched, output)
        assert compared.base is not None, "it is asked for"
        arguments = (*map(str, called.args), f"--rootdir={self._config.rootpath.resolve()}")
        with (
            RunFolder.create(GATE, output, None, self.warned) as folder,
            git.checked_out(root, compared.base.commit) as tree,
            git.temporary_folder() as scratch,
        ):
            suite = Suite(
                tests=tuple(Benchmark(impl=item.nodeid) for item in items), arguments=arguments,
                folder=str(called.dir.resolve()), scratch=str(scratch),
            )  # fmt: skip
            request = compared.request(tree, Settings(device="cpu"), {"pytest": arguments})
            request = replace(request, keep=partial(keep_round, folder), keep_going=True)
            run = follow(run_benchmarks(request, suite), self._show)
            outcome = decide(run)
            document, warnings = write_gate_files(folder.path, run, outcome)
            for warning in warnings:
                self.warned(warning)
            self._table = partial(terminal.render, document)
        return outcome

    def _show(self, event: object) -> None:
        """A dot for each round; one that is discarded is named, since it takes time."""
        from attnbench.execution.events import RoundMeasured, Warned, Working

        if isinstance(event, RoundMeasured):
            self._writer.write(".", flush=True)
            if event.discarded is not None:
                self.warned(f"round {event.number} is discarded: {event.discarded}")
        if isinstance(event, (Working, RoundMeasured)) and event.stage != self._stage:
            self._stage = event.stage
            self._writer.write(f"\n{event.stage} ", flush=True)
        if isinstance(event, Warned):
            self.warned(event.message)

    def warned(self, message: str) -> None:
        """On a line of its own."""
        self._writer.write(f"\n{message}\n", flush=True)
