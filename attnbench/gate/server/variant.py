"""The process of one variant: holds cells ready, and times one of them whenever it is asked."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from pathlib import Path
from typing import Any, BinaryIO

import torch

from attnbench.api import implementation
from attnbench.api.loader import is_installed, load_side, refuse_other_version
from attnbench.base.files import digest
from attnbench.base.jsontext import decode, encode
from attnbench.errors import UsageError
from attnbench.gate import protocol
from attnbench.gate.server.sampling import Sampler, warm_up
from attnbench.machine.facts import limit_memory
from attnbench.machine.state import adopt, beyond_repair, pin, remember, restore_clocks, settle
from attnbench.measure.clock import Call
from attnbench.measure.sensor import GpuSensor, must_discard
from attnbench.schema.record import Cell
from attnbench.worker.inputs import Draw, Tensors
from attnbench.worker.reference import Reference, judge
from attnbench.worker.trial import IncorrectError, classify, device_is_lost, restore_settings
from attnbench.worker.workloads import WORKLOADS, Bound

_VERIFY_DRAWS = 5
_HIDING_CYCLES = 2_000_000  # a millisecond, in which the host can issue a call


def main(read: int, write: int) -> None:
    """Serve the requests that come after the config, until there are no more."""
    requests, answers = os.fdopen(read, "rb"), os.fdopen(write, "wb")
    if not (line := requests.readline()):
        return  # the round was given up
    config = decode(line, protocol.VariantConfig[Cell])
    if config.device == "cpu":
        limit_memory()
    remember(config.threads)
    with contextlib.suppress(BrokenPipeError):  # given up now
        VariantProcess(config, requests, answers).serve()


class VariantProcess:
    """Answers requests, one line of JSON each, until its pipe is closed."""

    def __init__(
        self, config: protocol.VariantConfig[Cell], requests: BinaryIO, answers: BinaryIO
    ) -> None:
        self._config, self._requests, self._answers = config, requests, answers
        self._warm: dict[int, tuple[Bound, Tensors]] = {}  # right, and called until warm
        self._last: tuple[Any, ...] = ()  # case, seed, and their reference

    def serve(self) -> None:
        """Prepare every cell, say so, and take samples."""
        config = self._config
        try:
            load_side(config.files, config.root, config.other_root)
            adopt(folder=True)
            restore_clocks()
            settle()
            self._sampler = Sampler(config.device, config.threads)
            self._sensor = GpuSensor.open() if config.device == "cuda" else None
            failures = self._prepare_all()
            # Some import no earlier than when they build, or are first called.
            roots = (Path(root).resolve() for root in (config.root, config.other_root))
            refuse_other_version(", ".join(config.files), *roots)
        except UsageError as err:
            self._answer(protocol.Refused(str(err)))
            return
        if config.cpu is not None:
            settle()
            pin(config.cpu)
        self._answer(protocol.Prepared(failures, digests_of_loaded(config.root)))
        for line in self._requests:
            request: protocol.RoundRequest = decode(line, protocol.RoundRequest)  # type: ignore[arg-type]
            try:
                try:
                    answer = self._served(request)
                finally:
                    restore_settings()
            except Exception as err:
                answer = protocol.CellFailed(*classify(err, str(request.__struct_config__.tag)))
            self._answer(answer)

    def _answer(self, answer: protocol.RoundAnswer) -> None:
        self._answers.write(encode(answer) + b"\n")
        self._answers.flush()

    def _prepare_all(self) -> dict[int, protocol.CellFailed]:
        """Prepare all cells, each announced; return those that cannot be timed, and why."""
        failures = {}
        for number, cell in self._config.cells.items():
            self._answer(protocol.Preparing(number))
            try:
                self._prepare(number, cell)
            except Exception as err:
                failures[number] = protocol.CellFailed(*classify(err, "build and check"))
            if beyond_repair() or device_is_lost():
                break  # the cells after it are not to blame, and the round is broken off
        return failures

    def _prepare(self, number: int, cell: Cell) -> None:
        workload = WORKLOADS.get(cell.case.workload)
        settle()
        tensors = workload.tensors(cell.case)
        workload.fill(cell.case, tensors, Draw(seed=self._config.seed))
        impl = implementation(cell.impl)
        reference = self._reference(cell, tensors, self._config.seed)
        with torch.set_grad_enabled(cell.case.needs_grad):
            bound = workload.bind(cell.case, impl, tensors)
        with torch.set_grad_enabled(bound.grad):
            _judge(cell, bound, reference)
            # Three processes share a GPU: what the reference worked in is for the others.
            torch.cuda.empty_cache()
            warm_up(bound.call, self._config.device)
        restore_settings()
        self._warm[number] = bound, tensors

    def _reference(self, cell: Cell, tensors: Tensors, seed: int) -> Reference:
        """The float64 reference; of plain attention one for all cells in a row of the same case."""
        impl, workload = implementation(cell.impl), WORKLOADS.get(cell.case.workload)
        if impl.definition is not None:
            return workload.truth(cell.case, tensors, impl)
        if self._last[:2] != (cell.case, seed):
            self._last = cell.case, seed, workload.truth(cell.case, tensors)
        reference: Reference = self._last[2]
        return reference

    def _served(self, request: protocol.RoundRequest) -> protocol.RoundAnswer:
        if isinstance(request, protocol.ReadCounters):
            reading = self._sensor.read() if self._sensor is not None else None
            return protocol.CountersRead(time.process_time_ns(), must_discard(reading))
        if isinstance(request, protocol.VerifyCell):
            return self._verified(request)
        assert isinstance(request, protocol.TakeSample), "tests are entered, cells are sampled"
        bound, _ = self._warm[request.cell]
        with torch.set_grad_enabled(bound.grad):
            return self._sampler.take(request, bound.call)

    def _verified(self, request: protocol.VerifyCell) -> protocol.CellVerified:
        """After the timing: overwrite the inputs in place, and see that the result is still right.

        And how many times as long a call takes whose inputs have just changed as the fastest timed
        one: a call that kept its result has to work again. One reading proves nothing, since a
        call may be interrupted or the clock stand still: inputs are changed until a reading is
        within `remembered`, at most a few times, and the fastest call counts.
        """
        cell, seed = self._config.cells[request.cell], self._config.seed + 1
        workload, (bound, tensors) = WORKLOADS.get(cell.case.workload), self._warm[request.cell]
        changed_us: list[float] = []
        for draw in range(_VERIFY_DRAWS):
            workload.fill(cell.case, tensors, Draw(seed=seed + draw))
            with torch.set_grad_enabled(bound.grad):
                bound.refresh()
            reference = self._reference(cell, tensors, seed) if draw == 0 else None
            with torch.set_grad_enabled(bound.grad):
                changed_us += [us for us in [self._first_us(bound.call)] if us > 0]
                if reference is not None:
                    _judge(cell, bound, reference, " (after the timing, once its inputs changed)")
            if changed_us and min(changed_us) <= request.remembered * request.fastest_us:
                break
        return protocol.CellVerified(min(changed_us, default=0.0) / request.fastest_us)

    def _first_us(self, call: Call) -> float:
        """The time of the next call, in µs: a GPU's clocks make one before those that they time."""
        if self._config.device == "cpu":
            return self._sampler.clock.batch(call, 1).time_us
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        torch.cuda._sleep(_HIDING_CYCLES)  # type: ignore[no-untyped-call]
        begin.record()
        call()
        end.record()
        end.synchronize()
        ms: float = begin.elapsed_time(end)
        return 1000 * ms


def _judge(cell: Cell, bound: Bound, reference: Reference, when: str = "") -> None:
    result = bound.call()
    restore_settings(grad=bound.grad)  # before the harness computes anything
    verdict = judge(bound.named(result), reference, cell.case.dtype)
    if verdict.reason:
        raise IncorrectError(verdict.reason + when)


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
