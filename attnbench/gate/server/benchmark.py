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
from attnbench.gate.server.sampling import Sampler, warm_up
from attnbench.gate.server.slowdown import Call
from attnbench.gate.server.variant import digests_of_loaded
from attnbench.machine.state import pin
from attnbench.worker.trial import classify


def main(read: int, write: int) -> None:
    """Serve the requests that come after the config, until there are no more."""
    requests, answers = os.fdopen(read, "rb"), os.fdopen(write, "wb")
    if not (line := requests.readline()):
        return  # the round was given up
    config = decode(line, protocol.BenchmarksConfig)
    variant = config.variant
    load_side((), variant.root, variant.other_root)
    folder = Path(variant.root, config.folder)
    folder.mkdir(parents=True, exist_ok=True)  # the base may not have it
    os.chdir(folder)
    sys.path[:0] = [str(path) for path in (folder, folder / "src") if path.is_dir()]
    there, here = f"{variant.other_root}/", f"{variant.root}/"
    arguments = [f"{argument}/".replace(there, here)[:-1] for argument in config.arguments]
    ours = [
        f"--rootdir={Path(variant.root, config.rootdir)}",
        f"--override-ini=cache_dir={_scratch(variant, 'cache')}",
        # What was imported before pytest began is not under test.
        "-Wignore::pytest.PytestAssertRewriteWarning",
    ]
    with contextlib.suppress(BrokenPipeError):  # given up now
        code = pytest.main([*arguments, *ours], [_Serving(config, requests, answers)])
        sys.exit(int(code))


def _scratch(variant: protocol.VariantConfig[Any], name: str) -> Path:
    return Path(variant.references) / f"{os.getpid()}-{name}"


class _Serving:
    """A plugin of pytest that runs a test when it is asked to, and answers for it."""

    def __init__(
        self, config: protocol.BenchmarksConfig, requests: BinaryIO, answers: BinaryIO
    ) -> None:
        self._config, self._requests, self._answers = config.variant, requests, answers
        self._waiting: protocol.RoundRequest | None = None  # read, and for someone else
        self._owing = False  # whether a request has no answer yet
        self._served = False
        self._broken: dict[str, str] = {}  # why a file was not collected, by its node id
        self._failed: protocol.CellFailed | None = None  # what became of the present test

    @pytest.hookimpl(tryfirst=True)
    def pytest_configure(self, config: pytest.Config) -> None:
        """Collect these files, as the command line selects from them, and leave no reports."""
        config.args = list(self._config.files)
        config.option.attnbench_gate = config.option.xmlpath = None
        config.option.basetemp = str(_scratch(self._config, "tmp"))

    @pytest.hookimpl(trylast=True)
    def pytest_sessionstart(self, session: pytest.Session) -> None:
        """Take the place of pytest-benchmark: of plugins the last one provides a fixture."""
        plugins = session.config.pluginmanager
        if plugins.has_plugin("benchmark"):
            plugins.unregister(name="benchmark")
        plugins.register(_Fixtures(self))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Remember what cannot be collected, and why."""
        if report.failed:
            self._broken[report.nodeid] = _last_line(report.longreprtext)

    @pytest.hookimpl(tryfirst=True, wrapper=True)
    def pytest_runtest_makereport(self, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
        """Remember why a test is not ok: in its fixtures, itself, or after it."""
        report = yield
        if self._failed is None and not report.passed:
            why = call.excinfo.value if call.excinfo else None
            if report.skipped:
                self._failed = protocol.CellFailed("skipped", " ".join(str(why).split()))
            elif isinstance(why, Exception):
                self._failed = protocol.CellFailed(*classify(why, report.when))
            else:
                text = f"{report.when}: {_last_line(report.longreprtext)}"
                self._failed = protocol.CellFailed("error", text)
        return report

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Say what is ready, then run a test whenever that is asked for."""
        config = self._config
        items = {item.nodeid: item for item in session.items}
        tests = {number: cell.impl for number, cell in config.cells.items()}
        failures = {n: self._missing(test) for n, test in tests.items() if test not in items}
        try:
            refuse_other_version(
                ", ".join(config.files), Path(config.root), Path(config.other_root)
            )
        except UsageError as err:
            self._answer(protocol.Refused(str(err)))
            return True
        if config.cpu is not None:
            pin(config.cpu)
        self._sampler = Sampler(config.device, config.threads)
        self._answer(protocol.Prepared(failures, digests_of_loaded(config.root)))
        ended: dict[int, protocol.CellFailed | None] = {}
        while (request := self._next()) is not None:
            if isinstance(request, protocol.EnterCell):
                ended[request.cell] = self._run(items[tests[request.cell]], session)
            elif isinstance(request, protocol.VerifyCell):
                self._answer(ended[request.cell] or protocol.CellVerified(1.0))
            else:
                self._answer(self._counters())
        self._served = True
        return True

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self) -> None:
        """Once fixtures are torn down, end: a summary that nobody reads may take a second."""
        if self._served:
            os._exit(0)

    def sample(self, call: Call, renew: Callable[[], Call] | None) -> None:
        """Inside a test: say that it has come this far, and take samples until it may go on."""
        warm_up(call, self._config.device)
        self._answer(protocol.CellEntered())
        while isinstance(request := self._next(), protocol.TakeSample | protocol.ReadCounters):
            if isinstance(request, protocol.TakeSample):
                self._answer(self._sampler.take(request, call, renew))
            else:
                self._answer(self._counters())
        self._waiting, self._owing = request, False

    def _run(self, item: pytest.Item, session: pytest.Session) -> protocol.CellFailed | None:
        """Run a test to its end, and answer the request that it came to no answer of.

        What has a wider scope than its module stays for the tests after it, whichever they are.
        """
        self._failed = None
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=session)
        if self._owing:
            self._failed = self._failed or protocol.CellFailed(
                "error", "it has ended without calling the fixture benchmark"
            )
            self._answer(self._failed)
        elif self._failed is None:
            try:  # some import no earlier than when they run
                root, other = Path(self._config.root), Path(self._config.other_root)
                refuse_other_version(item.nodeid, root, other)
            except UsageError as err:
                self._failed = protocol.CellFailed("error", str(err))
        return self._failed

    def _missing(self, test: str) -> protocol.CellFailed:
        """Why there is no such test; `unsupported` where nothing is broken."""
        broken = (why for of, why in self._broken.items() if test.startswith(of))
        if (why := next(broken, None)) is not None:
            return protocol.CellFailed("error", f"collection: {why}")
        return protocol.CellFailed("unsupported", "there is no such test")

    def _next(self) -> protocol.RoundRequest | None:
        """The next request; None after the last."""
        request, self._waiting = self._waiting, None
        if request is None and (line := self._requests.readline()):
            request = decode(line, protocol.RoundRequest)  # type: ignore[arg-type]
        self._owing = request is not None
        return request

    def _answer(self, answer: protocol.RoundAnswer) -> None:
        self._answers.write(encode(answer) + b"\n")
        self._answers.flush()
        self._owing = False

    def _counters(self) -> protocol.CountersRead:
        return protocol.CountersRead(time.process_time_ns(), None)


class _Fixtures:
    """The plugin whose fixture `benchmark` goes before those of others."""

    def __init__(self, serving: _Serving) -> None:
        self._serving = serving

    @pytest.fixture
    def benchmark(self, request: pytest.FixtureRequest) -> _Benchmark:
        """What the test times."""
        return _Benchmark(self._serving, request.node)


class _Benchmark:
    """The fixture as tests know it from pytest-benchmark with `--benchmark-disable`.

    How often anything is called is not for the test to say: rounds and iterations count for
    nothing.
    """

    enabled, disabled = False, True
    stats = group = None

    def __init__(self, serving: _Serving, node: Any) -> None:
        self._serving, self._used = serving, False
        self.name, self.fullname, self.extra_info = node.name, node.nodeid, dict[str, Any]()

    def __call__(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Time `function(*args, **kwargs)`, and return its result."""
        return self._timed(partial(function, *args, **kwargs))

    def pedantic(
        self,
        target: Callable[..., Any],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        setup: Callable[[], Any] | None = None,
        teardown: Callable[..., Any] | None = None,
        rounds: int = 1,
        warmup_rounds: int = 0,
        iterations: int = 1,
    ) -> Any:
        """Time `target`; before and after each call `setup` and `teardown`, which are not timed.

        `setup` returns None, or the arguments of the call: (args, kwargs).
        """
        if setup is None and teardown is None:
            return self._timed(partial(target, *args, **kwargs or {}))
        given: Any = None

        def end() -> None:
            nonlocal given
            if given is not None and teardown is not None:
                teardown(*given[0], **given[1])
            given = None

        def renew() -> Call:
            nonlocal given
            end()
            given = (setup() if setup is not None else None) or (args, kwargs or {})
            return partial(target, *given[0], **given[1])

        try:
            return self._timed(lambda: renew()(), renew)
        finally:
            end()

    def _timed(self, call: Call, renew: Callable[[], Call] | None = None) -> Any:
        if self._used:
            raise RuntimeError("the fixture benchmark can be called once in a test")
        self._used = True
        self._serving.sample(call, renew)
        return call()


def _last_line(text: str) -> str:
    """The last line of a report: the error, which pytest marks with an E."""
    lines = [line.removeprefix("E").strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else "no reason given"


if __name__ == "__main__":
    from attnbench.gate.server import benchmark  # under its own name, for pytest's sake
    from attnbench.worker.forking import become

    become(benchmark.main)
