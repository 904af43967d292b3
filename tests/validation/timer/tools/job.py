"""What a timing tool is asked for, what it calls, and how it writes down what it found."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import torch

from attnbench.api import IMPLEMENTATIONS
from attnbench.api.loader import load_built_in
from attnbench.measure.selfcheck import Spin
from attnbench.schema.case import Case
from attnbench.worker.inputs import Draw
from attnbench.worker.workloads import WORKLOADS

Call = Callable[[], Any]


@dataclass(kw_only=True)
class Job:
    """The cells to time, and until when.

    `spawned_s` is when the process was started and `tail_s` what it takes to end, in seconds of
    `time.monotonic`, which all processes of a machine share. A cell is a dict with a `name` and
    either `impl` and `case`, or `spin_us`, the length of a wait. `result` is the file to write.
    """

    device: str
    threads: int
    seed: int
    budget_s: float
    tail_s: float
    spawned_s: float
    cells: list[dict[str, Any]]
    result: str
    ready_s: float = 0.0
    found: dict[str, dict[str, Any]] = field(default_factory=dict)

    @classmethod
    def from_text(cls, text: str) -> Self:
        """Read the JSON that the starter passes on."""
        return cls(**json.loads(text))

    def prepare(self) -> dict[str, Call]:
        """Build what is called, by the cells' names; what remains of the budget is for timing."""
        load_built_in()
        calls = {cell["name"]: _call(cell, self.seed) for cell in self.cells}
        self.ready_s = time.monotonic()
        return calls

    def left_s(self) -> float:
        """Seconds of the budget that are left for timing; none at all gives 0."""
        return max(0.0, self.spawned_s + self.budget_s - self.tail_s - time.monotonic())

    def time_each(self, calls: dict[str, Call], tool: Callable[[Call, float], Any]) -> None:
        """Let `tool(call, seconds)` time one cell after the other, on equal shares of the rest.

        It returns a dict for `found`; one that raises costs the cell alone.
        """
        for index, (name, call) in enumerate(calls.items()):
            share_s = max(_LEAST_S, self.left_s() / (len(calls) - index))
            begin = time.monotonic()
            try:
                self.found[name] = tool(call, share_s)
            except Exception as err:
                self.found[name] = {"error": described(err)}
            self.found[name]["whole_s"] = time.monotonic() - begin

    def write(self, **facts: Any) -> None:
        """Write what was found, with `facts` about the tool."""
        ends = {"ready_s": self.ready_s, "end_s": time.monotonic()}
        text = json.dumps(ends | {"cells": self.found} | facts)
        Path(self.result).write_text(text)


_LEAST_S = 0.01


def as_its_users_do(job: Job) -> None:
    """Set what every tool is given alike: the number of threads, and no autograd."""
    torch.set_num_threads(job.threads)
    torch.set_grad_enabled(False)


def found(times_s: Sequence[float], calls: int, median_s: float) -> dict[str, Any]:
    """What a tool says of a cell: seconds per call of each sample, in order, and its median."""
    return {
        "times_us": [time * 1e6 for time in times_s],
        "calls": calls,
        "own_us": {"median": median_s * 1e6},
    }


def described(err: Exception) -> str:
    """An exception in one line."""
    return " ".join(f"{type(err).__name__}: {err}".split())[:300]


def _call(cell: dict[str, Any], seed: int) -> Call:
    if "spin_us" in cell:
        return Spin(cell["spin_us"])
    case = Case.from_json(cell["case"])
    workload = WORKLOADS.get(case.workload)
    tensors = workload.tensors(case)
    workload.fill(case, tensors, Draw(seed=seed))
    return workload.bind(case, IMPLEMENTATIONS.get(cell["impl"]), tensors).call
