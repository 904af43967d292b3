"""Runs the tests of one version under pytest; their fixture `benchmark` takes the samples.

Usage: python -m attnbench.gate.server.benchmark DESCRIPTORS, as `python -m attnbench.gate.server`.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import time
from collections.abc import Callable, Generator
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

if __name__ == "__main__":
    gc.disable()  # as in attnbench.gate.server

import pytest

from attnbench.api.loader import load_side, refuse_other_version
from attnbench.base.jsontext import decode, encode
from attnbench.errors import UsageError
from attnbench.gate import protocol
from attnbench.gate.decide.data import Benchmark
from attnbench.gate.server.sampling import Sampler, warm_up
from attnbench.gate.server.variant import digests_of_loaded
from attnbench.machine.state import pin
from attnbench.measure.clock import Call


def main(read: int, write: int) -> None:
    """Serve the requests that come after the config, until there are no more."""
    requests, answers = os.fdopen(read, "rb"), os.fdopen(write, "wb")
    if not (line := requests.readline()):
        return  # the round was given up
    config = decode(line, protocol.VariantConfig[Benchmark])
    suite = config.suite
    assert suite is not None, "cells are tests"
    load_side((), config.root, config.other_root)
    folder, *arguments = (
        f"{text}/".replace(f"{config.other_root}/", f"{config.root}/")[:-1]
        for text in (suite.folder, *suite.arguments)
    )
    Path(folder).mkdir(parents=True, exist_ok=True)  # the base may not have it
    os.chdir(folder)
    sys.path[:0] = [path for path in (folder, f"{folder}/src") if os.path.isdir(path)]
    scratch = Path(suite.scratch, str(os.getpid()))
    ours = [
        f"--basetemp={scratch}-tmp",
        f"--override-ini=cache_dir={scratch}-cache",
        # What was imported before pytest began is not under test.
        "-Wignore::pytest.PytestAssertRewriteWarning",
    ]
    with contextlib.suppress(BrokenPipeError):  # given up now
        code = pytest.main([*arguments, *ours], [_Serving(config, requests, answers)])
        sys.exit(int(code))


class _Serving:
    """A plugin of pytest that runs a test when it is asked to, and answers for it."""

    def __init__(
        self, config: protocol.VariantConfig[Benchmark], requests: BinaryIO, answers: BinaryIO
    ) -> None:
        self._config, self._requests, self._answers = config, requests, answers
        self._waiting: protocol.RoundRequest | None = None  # read, and for someone else
        self._owing = False  # whether a request has no answer yet
        self._served = False
        self._broken: dict[str, str] = {}  # why a file was not collected, by its node id
        self._failed: protocol.CellFailed | None = None  # what became of the present test

    @pytest.hookimpl(tryfirst=True)
    def pytest_configure(self, config: pytest.Config) -> None:
        """Collect these files, as the command line selects from them, and leave no reports."""
        self._asked, config.args = config.args, list(self._config.files)
        config.option.attnbench_gate = config.option.xmlpath = None

    @pytest.hookimpl(trylast=True)
    def pytest_sessionstart(self, session: pytest.Session) -> None:
        """Take the place of pytest-benchmark: of plugins the last one provides a fixture."""
        plugins = session.config.pluginmanager
        if plugins.has_plugin("benchmark"):
            plugins.unregister(name="benchmark")
        plugins.register(_Fixtures(self))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Remember what cannot be collected, and why: the last line, which pytest marks with E."""
        if report.failed:
            last = report.longreprtext.strip().rpartition("\n")[2]
            self._broken[report.nodeid] = last.removeprefix("E").strip()[:300]

    @pytest.hookimpl(tryfirst=True, wrapper=True)
    def pytest_runtest_makereport(self, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
        """Remember why a test is not ok: in its fixtures, itself, or after it."""
        report = yield
        if self._failed is None and not report.passed:
            text = call.excinfo.exconly() if call.excinfo else report.longreprtext
            reason = " ".join(f"{report.when}: {text}".split())[:300]
            self._failed = protocol.CellFailed("skipped" if report.skipped else "error", reason)
        return report

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Say what is ready, then run a test whenever that is asked for."""
        config = self._config
        items = {item.nodeid: item for item in session.items}
        tests = {number: cell.impl for number, cell in config.cells.items()}
        failures = {}
        for number, test in tests.items():
            if test not in items:
                failures[number] = protocol.CellFailed("unsupported", "there is no such test")
                for why in (why for of, why in self._broken.items() if test.startswith(of)):
                    failures[number] = protocol.CellFailed("error", f"collection: {why}")
        if foreign := self._of_other_version(", ".join(config.files)):
            self._answer(protocol.Refused(foreign))
            return True
        if config.cpu is not None:
            pin(config.cpu)
        self._sampler = Sampler(config.device, config.threads)
        listed = self._selected(session) if config.listing else ()
        self._answer(protocol.Prepared(failures, digests_of_loaded(config.root), listed))
        ended: dict[int, protocol.CellFailed | None] = {}
        while (request := self._next()) is not None:
            if isinstance(request, protocol.EnterCell):
                ended[request.cell] = self._run(items[tests[request.cell]], session)
            elif isinstance(request, protocol.VerifyCell):
                self._answer(ended[request.cell] or protocol.CellVerified(1.0))
        self._served = True
        return True

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self) -> None:
        """Once fixtures are torn down, end: a summary that nobody reads may take a second."""
        if self._served:
            os._exit(0)

    def sample(self, call: Call, renew: Callable[[], Call] | None = None) -> Any:
        """Inside a test: say that it has come this far, and take samples until it may go on.

        Returns the result of one more call.
        """
        warm_up(call, self._config.device)
        self._answer(protocol.CellEntered())
        while isinstance(request := self._next(), protocol.TakeSample):
            self._answer(self._sampler.take(request, call, renew))
        self._waiting, self._owing = request, False
        return call()

    def _selected(self, session: pytest.Session) -> tuple[str, ...]:
        """What the command line selects here, in files, too, that the other version has not."""
        found = list[Any]()
        for argument in self._asked:
            with contextlib.suppress(pytest.UsageError):  # this version has not what it names
                found += session.perform_collect([argument])
        used = (x.nodeid for x in found if "benchmark" in getattr(x, "fixturenames", ()))
        return tuple(dict.fromkeys(used))

    def _run(self, item: pytest.Item, session: pytest.Session) -> protocol.CellFailed | None:
        """Run a test to its end, and answer the request that it came to no answer of.

        What has a wider scope than its module stays for the tests after it, whichever they are.
        """
        self._failed = None
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=session)
        if self._failed is None:
            why = self._of_other_version(item.nodeid)  # some import no earlier than when they run
            if self._owing:
                why = "it has ended without calling the fixture benchmark"
            self._failed = protocol.CellFailed("error", why) if why else None
        if self._owing and self._failed:
            self._answer(self._failed)
        return self._failed

    def _of_other_version(self, what: str) -> str | None:
        try:
            refuse_other_version(what, Path(self._config.root), Path(self._config.other_root))
        except UsageError as err:
            return str(err)
        return None

    def _next(self) -> protocol.RoundRequest | None:
        """The next request but for counters, which are answered; None after the last."""
        request, self._waiting = self._waiting, None
        while request is None and (line := self._requests.readline()):
            request = decode(line, protocol.RoundRequest)  # type: ignore[arg-type]
            if isinstance(request, protocol.ReadCounters):
                self._answer(protocol.CountersRead(time.process_time_ns(), None))
                request = None
        self._owing = request is not None
        return request

    def _answer(self, answer: protocol.RoundAnswer) -> None:
        self._answers.write(encode(answer) + b"\n")
        self._answers.flush()
        self._owing = False


class _Fixtures:
    """The plugin whose fixture `benchmark` goes before those of others."""

    def __init__(self, serving: _Serving) -> None:
        self._serving = serving

    @pytest.fixture
    def benchmark(self) -> _Benchmark:
        """What the test times."""
        return _Benchmark(self._serving)


class _Benchmark:
    """The fixture as tests know it from pytest-benchmark with `--benchmark-disable`."""

    enabled, disabled, stats = False, True, None

    def __init__(self, serving: _Serving) -> None:
        self._serving, self._used = serving, False
        self.extra_info = dict[str, Any]()

    def __call__(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Time `function(*args, **kwargs)`, and return its result."""
        return self.pedantic(function, args, kwargs)

    def pedantic(
        self,
        target: Callable[..., Any],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        setup: Callable[[], Any] | None = None,
        **ignored: int,
    ) -> Any:
        """Time `target`; before each call `setup`, which is not timed.

        It returns None, or the arguments of the call: (args, kwargs). How often anything is called
        is not for the test to say: `rounds`, `warmup_rounds` and `iterations` count for nothing.
        """
        if unknown := ignored.keys() - {"rounds", "warmup_rounds", "iterations"}:
            raise TypeError(f"benchmark.pedantic takes no {', '.join(sorted(unknown))} here")
        if self._used:
            raise RuntimeError("the fixture benchmark can be called once in a test")
        self._used = True
        if setup is None:
            return self._serving.sample(partial(target, *args, **kwargs or {}))

        def renew() -> Call:
            positional, named = setup() or (args, kwargs or {})
            return partial(target, *positional, **named)

        return self._serving.sample(lambda: renew()(), renew)


if __name__ == "__main__":
    from attnbench.gate.server import benchmark  # under its own name, for pytest's sake
    from attnbench.worker.forking import become

    become(benchmark.main)
