"""Ways to run attnbench in tests: in this process without a worker, or for real."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hypothesis
import msgspec
import pytest
from click.testing import CliRunner, Result

from attnbench.cli import pytest_plugin
from attnbench.cli.commands import main
from attnbench.execution.events import Events, T
from attnbench.execution.process import Settings
from attnbench.execution.runner import LocalRunner
from attnbench.planning.plan import Job
from attnbench.schema import messages
from attnbench.schema.case import Case
from attnbench.schema.messages import Catalogue
from attnbench.schema.record import Record
from tests import synthetic

Cli = Callable[..., Result]
Refused = Callable[..., None]

# Every core has a test process of its own: threads of torch would only wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
hypothesis.settings.register_profile(
    "busy", deadline=None
)  # no test depends on the machine's speed
hypothesis.settings.load_profile("busy")
# What sweeps keep for later ones (ceilings of the machine): tests neither find nor leave any.
_CACHE = tempfile.TemporaryDirectory(prefix="attnbench-cache-")
os.environ["XDG_CACHE_HOME"] = _CACHE.name
os.environ.pop("COLUMNS", None)  # xdist sets it; tests read tables that are not wrapped

# A shell starts what it runs in the background with interrupts ignored, and so would every process
# that a test starts and interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


SLOW = pytest.StashKey[list[pytest.Item]]()


@pytest.hookimpl(tryfirst=True)  # before -m leaves them out
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    config.stash[SLOW] = [item for item in items if item.get_closest_marker("slow")]


@pytest.fixture
def cli() -> Cli:
    """`cli("sweep", "--dry-run")` runs the command line in this process."""
    return lambda *args: CliRunner().invoke(main, [str(arg) for arg in args])


def parsed(line: str) -> None:
    """See that a printed command line is one, of ours or of pytest; of a sweep with --dry-run."""
    program, *args = shlex.split(line)
    if program == "pytest":
        parser: Any = argparse.ArgumentParser()
        parser.getgroup = lambda *_: SimpleNamespace(addoption=parser.add_argument)
        pytest_plugin.pytest_addoption(parser)
        parser.parse_args(args)
    elif program == "attnbench":
        args += ["--dry-run"] if args[0] == "sweep" else []
        main.commands[args[0]].make_context(args[0], args[1:])


@pytest.fixture
def assert_refused() -> Refused:
    """Assert that a result is one error line with exit code 2, and that `says` is in it."""

    def check(result: Result, *says: str, exit_code: int = 2) -> None:
        lines = result.stderr.splitlines()
        assert [line[:7] for line in lines] == ["Error: "], (result.stderr, result.exception)
        assert result.exit_code == exit_code
        assert result.stdout == ""
        assert [text for text in says if text not in lines[0]] == [], lines[0]

    return check


def yielding(result: T, *events: object) -> Events[T]:
    """A session in which this happens, and what it returns."""
    yield from events
    return result


@pytest.fixture(scope="session")
def recorded_catalogue() -> Catalogue:
    """What a real worker says of this installation, on a machine without a GPU."""
    with LocalRunner(Settings(device="cpu")) as runner:
        catalogue = runner.catalogue()
    catalogue.devices["cuda"] = "no CUDA device here (recorded); use --device cpu"
    return catalogue


@pytest.fixture
def idle_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """No counter of the system moves, whatever runs beside the tests.

    For each test that fakes the clock: what other work takes is seen by counters, never by the
    clock, and where these are the machine's own, a neighbour has samples discarded.
    """
    from attnbench.machine import host
    from attnbench.measure.watch import Watch

    for name in ("stolen_ticks", "busy_ticks", "throttled_us", "load_1m"):
        monkeypatch.setattr(host, name, lambda *_: 0.0)
    defaults = Watch.__init__.__kwdefaults__ or {}
    still: dict[str, Any] = {
        "stolen_ticks": lambda: 0.0,
        "throttled_us": lambda: 0.0,
        "interruptions": lambda: 0,
    }
    still |= {"probe_us": lambda: 26.0, "worked_ns": dict, "calm_turns": 0}
    for name, fake in still.items():
        assert name in defaults, f"a Watch has no {name} any more: what does it read instead?"
        monkeypatch.setitem(defaults, name, fake)


@pytest.fixture
def imagined_worker(monkeypatch: pytest.MonkeyPatch, recorded_catalogue: Catalogue) -> None:
    """No process is started: the catalogue is a recorded one, and every cell is `ok` at once."""

    def answer(runner: LocalRunner, request: messages.Request, kind: Any) -> Any:
        match request:
            case messages.Describe(device):
                device = "cpu" if device == "auto" else device
                changes: Any = {"device": device}
                return msgspec.structs.replace(recorded_catalogue, **changes)
            case messages.MeasureCeilings(_, dtypes):
                return messages.Facts({"matmul_tflops": dict.fromkeys(dtypes, 0.1)})
            case messages.AskReasons(cases, names):
                return messages.Reasons({name: (None,) * len(cases) for name in names})
            case messages.AskNeeds(cases, names):
                return messages.Needs({name: (1 << 20,) * len(cases) for name in names}, 1 << 30)
        raise AssertionError(request)

    def run(runner: LocalRunner, jobs: Iterable[Job]) -> Iterator[Record]:
        for job in jobs:
            [(key, facts)] = runner.environments.items()
            ceilings = {"1": {"matmul_tflops": {"float32": 0.1}}}
            runner.environments[key] = {"ceilings": ceilings} | facts
            for cell in job.cells():
                record = synthetic.ok(cell.case, cell.impl)
                yield replace(record, process=job.process, environment=key)

    monkeypatch.setattr(LocalRunner, "start", lambda runner: None)
    monkeypatch.setattr(LocalRunner, "_ask", answer)
    monkeypatch.setattr(LocalRunner, "run", run)


def collector(records: list[Record]) -> Any:
    """A reporter that keeps what a worker would report of its cells."""
    from attnbench.worker.checking import Reporter

    return Reporter(at=lambda *_: None, record=lambda _, record: records.append(record))


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """The built-in implementations, and one thread: on small tensors more wait for each other."""
    import torch

    from attnbench.api.loader import load_built_in

    load_built_in()
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def tried(case: Case, name: str) -> Any:
    """The trial of a cell, built and probed on one draw."""
    import torch

    from attnbench.api import implementation
    from attnbench.api.loader import load_built_in
    from attnbench.worker.inputs import Draw
    from attnbench.worker.trial import Trial
    from attnbench.worker.workloads import WORKLOADS

    load_built_in()
    workload = WORKLOADS.get(case.workload)
    tensors = workload.tensors(case)
    workload.fill(case, tensors, Draw(seed=1))
    trial = Trial(impl=implementation(name), case=case, tensors=tensors)
    trial.build()
    assert trial.bound is not None
    with torch.set_grad_enabled(trial.bound.grad):
        trial.probe()
    return trial


def probed(case: Case, name: str) -> dict[str, Any]:
    """What a worker would find of a cell beside its times: costs, and what one call does."""
    metrics: dict[str, Any] = tried(case, name).metrics
    return metrics


COMMAND = [sys.executable, "-m", "attnbench"]
# Cells that cost little: what they measure is not looked at.
TINY = ("--head-dims", "8", "--heads", "2", "--min-time", "0.001", "--max-time", "0.01")


def run_attnbench(*args: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run attnbench as a user would, in a process of its own with real workers."""
    return ran([*COMMAND, *map(str, args)], cwd)


def run_script(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python code in an interpreter that has imported nothing yet."""
    return ran([sys.executable, "-c", script, *arguments])


def ran(command: list[str], cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """What a command printed and how it ended."""
    return subprocess.run(
        command, cwd=cwd, env=environment(), capture_output=True, text=True, timeout=300,
        check=False,
    )  # fmt: skip


def environment(**variables: str) -> dict[str, str]:
    """This process's environment, with the source tree found from anywhere."""
    root = str(Path(__file__).resolve().parent.parent)
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths)} | variables


def wait_until(holds: Callable[[], Any]) -> Any:
    """What it returns as soon as that is something; give up loudly."""
    end = time.monotonic() + 120
    while not (found := holds()):
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)
    return found


def lives(process: int) -> bool:
    """Whether a process is there, and not only waits for someone to collect it."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:  # gone
        return False


def exported(run: Path) -> list[dict[str, Any]]:
    """The rows of `attnbench export --format json`, made in this process."""
    result = CliRunner().invoke(main, ["export", str(run), "--format", "json"])
    assert result.exit_code == 0, result.stderr
    rows: list[dict[str, Any]] = json.loads(result.stdout)
    return rows
