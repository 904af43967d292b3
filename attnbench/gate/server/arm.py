"""One arm: a process that holds a side's cells ready, and times one of them when it is its turn."""

from __future__ import annotations

import contextlib
import json
import math
import os
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from attnbench.api import IMPLEMENTATIONS
from attnbench.api.loader import is_installed, load_side, refuse_foreign
from attnbench.base.files import digest
from attnbench.errors import UsageError
from attnbench.gate.server.plant import followed_by_sleep, slowed_block_us
from attnbench.machine.state import adopt, beyond_repair, remember, restore_clocks, settle
from attnbench.measure.clock import Clock, clock_for
from attnbench.measure.nvml import GpuSensor, must_discard
from attnbench.measure.watch import collector_off
from attnbench.schema.record import Cell
from attnbench.worker.inputs import Draw, Tensors
from attnbench.worker.reference import Reference, Size, judge
from attnbench.worker.trial import IncorrectError, classify, restore_settings
from attnbench.worker.workloads import WORKLOADS, Bound

_WARM_CALLS, _WARM_S = 3, 0.02
_BLOCK_US = 1000.0
_VERIFY_DRAWS = 5


@dataclass(frozen=True, kw_only=True)
class Ready:
    """A cell that was built, found right, and called until warm."""

    cell: Cell
    bound: Bound
    tensors: Tensors


class Variant:
    """Answers requests for turns, one line of JSON each, until its pipe is closed."""

    def __init__(self, config: dict[str, Any], arm: dict[str, Any]) -> None:
        self._requests = os.fdopen(arm["read"], "r")
        self._answers = os.fdopen(arm["write"], "w")
        self._config, self._arm = config, arm
        self._clock: Clock | None = None
        self._sensor: GpuSensor | None = None
        self._ready: dict[int, Ready] = {}
        self._slowed: dict[tuple[int, float], Callable[[], Any]] = {}

    def serve(self) -> None:
        """Prepare every cell, say so, and take turns."""
        try:
            self._load()
            failures = self._prepare_all()
            self._refuse_late_imports()
        except UsageError as err:
            self._answer(refused=str(err))
            return
        if self._config["cpu"] is not None:
            settle()
            pin_all_threads(self._config["cpu"])
            remember()
        self._answer(failures=failures, digests=digests_of_loaded(self._arm["root"]))
        for line in self._requests:
            request = json.loads(line)
            try:
                try:
                    answer = self._served(request)
                finally:
                    restore_settings()
            except Exception as err:
                status, reason = classify(err, request["do"])
                answer = {"failed": f"{status}: {reason}"}
            self._answer(**answer)

    def _load(self) -> None:
        load_side(self._arm["files"], self._arm["root"], self._arm["other_root"])
        adopt(folder=True)
        restore_clocks()
        settle()
        device = self._config["device"]
        self._clock = clock_for(device, l2=self._config["l2"], timer=self._config["timer"])
        self._sensor = GpuSensor.open() if device == "cuda" else None

    def _prepare_all(self) -> dict[str, str]:
        """Prepare all cells, each told before; return those that cannot be timed, and why."""
        failures = {}
        for number in self._config["cells"]:
            self._answer(preparing=int(number))
            reason = self._prepare(number)
            if reason is not None:
                failures[number] = reason
            if beyond_repair():
                break  # the cells after it are not to blame, and the round is broken off
        return failures

    def _served(self, request: dict[str, Any]) -> dict[str, Any]:
        if request["do"] == "conditions":
            reading = self._sensor.read() if self._sensor is not None else None
            heat = must_discard(reading) if reading is not None else None
            return {"cpu_ns": time.process_time_ns(), "veto": heat}
        if request["do"] == "verify":
            return self._verify(request["cell"], request["fastest_us"], request["remembered"])
        return self._serve_turn(request)

    def _verify(self, number: int, fastest_us: float, remembered: float) -> dict[str, Any]:
        """After the timing: overwrite the inputs in place, and see that the result is still right.

        And how many times as long a call takes whose inputs have just changed as the fastest timed
        one (`fastest_us`): a call that kept its result has to work again. One reading proves
        nothing, since a call may be interrupted: where it is beyond `remembered`, inputs are
        changed several times, and the fastest call counts.
        """
        ready, seed = self._ready[number], self._config["seed"] + 1
        self._overwrite(ready, seed)
        truth = self._truth(ready.cell, ready.tensors, seed)
        with torch.set_grad_enabled(ready.bound.grad):
            changed_us = self._once_us(ready)
            result = ready.bound.call()
            restore_settings(grad=ready.bound.grad)
            verdict = judge(ready.bound.named(result), truth, ready.cell.case.dtype)
            if verdict.reason:
                raise IncorrectError(
                    f"{verdict.reason} (after the timing, once its inputs changed)"
                )
            for more in range(1, _VERIFY_DRAWS):
                if changed_us <= remembered * fastest_us:
                    break
                self._overwrite(ready, seed + more)
                changed_us = min(changed_us, self._once_us(ready))
        return {"changed_ratio": changed_us / fastest_us}

    def _overwrite(self, ready: Ready, seed: int) -> None:
        """Fill the inputs with other numbers, where they are, and redo what was prepared."""
        workload = WORKLOADS.get(ready.cell.case.workload)
        workload.fill(ready.cell.case, ready.tensors, Draw(seed=seed))
        with torch.set_grad_enabled(ready.bound.grad):
            ready.bound.refresh()

    def _once_us(self, ready: Ready) -> float:
        assert self._clock is not None
        return self._clock.block(ready.bound.call, 1).time_us

    def _serve_turn(self, request: dict[str, Any]) -> dict[str, Any]:
        number = request["cell"]
        ready = self._ready[number]
        with torch.set_grad_enabled(ready.bound.grad), collector_off():
            if request["do"] == "estimate":
                return {"each_us": self._estimate_us(ready.bound.call)}
            ns = self._turn(number, request["calls"], request["blocks"], request["planted"])
            return {"ns": ns, "resident": resident_bytes()}

    def _prepare(self, number: str) -> str | None:
        """Build a cell, check its result, warm it up; return why it cannot be timed."""
        cell = Cell.from_json(self._config["cells"][number])
        workload = WORKLOADS.get(cell.case.workload)
        try:
            settle()
            tensors = workload.tensors(cell.case)
            workload.fill(cell.case, tensors, Draw(seed=self._config["seed"]))
            truth = self._truth(cell, tensors, self._config["seed"])
            impl = IMPLEMENTATIONS.get(cell.impl)
            with torch.set_grad_enabled(cell.case.needs_grad):
                bound = workload.bind(cell.case, impl, tensors)
            with torch.set_grad_enabled(bound.grad):
                result = bound.call()
                restore_settings(grad=bound.grad)  # before the harness computes anything
                verdict = judge(bound.named(result), truth, cell.case.dtype)
                if verdict.reason:
                    return f"incorrect: {verdict.reason}"
                _warm(bound.call)
            restore_settings()
        except Exception as err:
            status, reason = classify(err, "build and check")
            return f"{status}: {reason}"
        self._ready[int(number)] = Ready(cell=cell, bound=bound, tensors=tensors)
        return None

    def _refuse_late_imports(self) -> None:
        """Some import no earlier than when they build, or are first called."""
        root, other = (Path(self._arm[name]).resolve() for name in ("root", "other_root"))
        refuse_foreign(", ".join(self._arm["files"]), root, other)

    def _truth(self, cell: Cell, tensors: Tensors, seed: int) -> Reference:
        """The float64 reference, computed by whichever process needs it first, then read."""
        file = Path(self._config["truths"]) / f"{cell.case.case_id}-{seed}.pt"
        if not file.exists():
            truth = WORKLOADS.get(cell.case.workload).truth(cell.case, tensors)
            allowed = {name: (size.max, size.rms) for name, size in truth.allowed.items()}
            own = file.with_suffix(f".{os.getpid()}")
            torch.save({"values": truth.values, "allowed": allowed}, own)
            own.replace(file)
        kept = torch.load(file, map_location=cell.case.device, weights_only=True)
        sizes = {name: Size(max=high, rms=rms) for name, (high, rms) in kept["allowed"].items()}
        return Reference(values=kept["values"], allowed=sizes)

    def _turn(self, number: int, calls: int, blocks: int, planted: float | None) -> list[int]:
        """One untimed call, since the caches are another's, then blocks: nanoseconds a call."""
        assert self._clock is not None
        clock, call = self._clock, self._ready[number].bound.call
        if planted and self._config["device"] == "cuda":
            call, planted = self._sleepy(number, planted), None
        call()
        return [
            round(1000 * slowed_block_us(call, calls, planted, clock))
            if planted
            else round(1000 * clock.block(call, calls).time_us)
            for _ in range(blocks)
        ]

    def _estimate_us(self, call: Callable[[], Any]) -> float:
        assert self._clock is not None
        call()
        once_us = max(min(self._clock.block(call, 1).time_us for _ in range(2)), 0.1)
        if once_us >= _BLOCK_US:
            return once_us
        return max(self._clock.block(call, math.ceil(_BLOCK_US / once_us)).time_us, 0.01)

    def _sleepy(self, number: int, share: float) -> Callable[[], Any]:
        """The call of a cell, slowed on the device; made once, since that takes measuring."""
        key = number, share
        if key not in self._slowed:
            assert self._clock is not None
            call = self._ready[number].bound.call
            self._slowed[key] = followed_by_sleep(call, share, self._clock)
        return self._slowed[key]

    def _answer(self, **fields: Any) -> None:
        self._answers.write(json.dumps(fields) + "\n")
        self._answers.flush()


def pin_all_threads(cpu: int) -> None:
    """Let every thread of this process run on `cpu` alone; those that they start inherit it."""
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
            os.sched_setaffinity(int(thread), [cpu])


def resident_bytes() -> int | None:
    """Memory of this process that is in RAM, whoever allocated it; None off Linux."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    except (OSError, ValueError):
        return None


def _warm(call: Callable[[], Any]) -> None:
    begin, calls = time.perf_counter(), 0
    while calls < _WARM_CALLS and (calls == 0 or time.perf_counter() - begin < _WARM_S):
        call()
        calls += 1


def digests_of_loaded(root: str) -> dict[str, str]:
    """A hash of each module file below `root` that this process has loaded, by relative path.

    Not of what is installed, be it in an environment that lies in the repository.
    """
    files = {Path(f) for m in list(sys.modules.values()) if (f := getattr(m, "__file__", None))}
    here = Path(root).resolve()
    return {
        str(file.relative_to(here)): digest(file)
        for file in sorted(files)
        if file.is_relative_to(here) and not is_installed(file) and file.is_file()
    }
