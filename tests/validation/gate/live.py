"""One live gate run on known sides: the built-in naive and sdpa against themselves."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from attnbench.errors import UsageError
from attnbench.execution.process import Settings
from attnbench.gate.decide.data import GateRun, Rules, Version
from attnbench.gate.decide.verdict import decide
from attnbench.gate.run.measuring import GateListener, GateRequest
from attnbench.planning.plan import Axes
from tests.validation.gate.pool import Live
from tests.validation.gate.schedule import Todo

Measure = Callable[[GateRequest, GateListener], GateRun]

IMPLS = ("naive", "sdpa")
SEQ_LENS = (128, 256, 512, 1024)
AXES = Axes(batch_sizes=(1,), heads=(4,), seq_lens=SEQ_LENS, head_dims=(64,), impls=IMPLS)


def settings(seed: int) -> Settings:
    """One thread on the CPU: several would disturb each other on a machine of few cores."""
    return Settings(device="cpu", threads=1, seed=seed)


def side(name: str) -> Version:
    """The built-in implementation files, as either side.

    Raises:
        UsageError: they are not where the package says.
    """
    found = importlib.util.find_spec("attnbench_impls")
    near = Path(__file__).resolve().parents[3] / "impls"
    folder = Path(next(iter(found.submodule_search_locations or []))) if found else near
    files = tuple(str(folder / f"{impl}.py") for impl in IMPLS)
    for file in files:
        if not Path(file).is_file():
            raise UsageError(f"the built-in implementation {file} is missing; reinstall attnbench")
    return Version(name=name, root=str(folder), files=files)  # type: ignore[arg-type]


def request(todo: Todo, seq_lens: tuple[int, ...] = SEQ_LENS) -> GateRequest:
    """What the gate is asked for in one run of the validation: each size with all of `IMPLS`."""
    kind, cell = todo.kind, todo.kind.cell(todo.number, len(IMPLS) * len(seq_lens))
    return GateRequest(
        base=side("base"),
        candidate=side("candidate"),
        sweeps=(replace(AXES, seq_lens=seq_lens),),
        rules=Rules(threshold=kind.threshold),
        settings=settings(kind.seed(todo.number)),
        injected={} if cell is None else {cell: kind.share},
        options={"selftest": kind.label, "number": todo.number},
    )


class Listener(GateListener):
    """Passes warnings on; what else happens in a run is told when it has ended."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell

    def warned(self, message: str) -> None:
        """Pass it on."""
        self._tell(f"Warning: {message}")


def measured(
    todo: Todo,
    measure: Measure,
    tell: Callable[[str], None],
    seq_lens: tuple[int, ...] = SEQ_LENS,
) -> Live:
    """Make one gate run; what it decided is stored beside its raw data."""
    created = datetime.now(UTC).isoformat(timespec="seconds")
    run = measure(request(todo, seq_lens), Listener(tell))
    return Live(
        kind=todo.kind,
        number=todo.number,
        created=created,
        exit_code=int(decide(run).exit_code),
        run=run,
    )
