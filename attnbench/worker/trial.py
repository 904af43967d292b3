"""One implementation in one case: built, checked twice, probed; and how it failed, if it did."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from attnbench.api import Implementation
from attnbench.machine.state import beyond_repair, restore_clocks, settle
from attnbench.measure.counted import count_flops, watch_saved
from attnbench.measure.graph import CaptureError
from attnbench.measure.profiled import call_kept, profile_call
from attnbench.schema.case import Case
from attnbench.schema.record import Status
from attnbench.theory.costs import OPAQUE_FORMULAS
from attnbench.worker.explaining import flops_note, predicted_miss, sdpa_backend
from attnbench.worker.inputs import Tensors
from attnbench.worker.reference import Truth, Verdict, judge
from attnbench.worker.workloads import WORKLOADS, Bound


class IncorrectError(Exception):
    """The result is wrong; the message says by how much."""


class UnsettledError(Exception):
    """The process cannot be used any more; the message says for what."""


@dataclass(kw_only=True)
class Trial:
    """What is known so far about one cell of a case."""

    impl: Implementation
    case: Case
    tensors: Tensors
    bound: Bound | None = None
    verdict: Verdict = field(default_factory=Verdict)
    last_call_s: float = 0.0
    metrics: dict[str, Any] = field(default_factory=dict)
    spent_s: dict[str, float] = field(default_factory=dict)
    status: Status | None = None
    reason: str | None = None
    _meddled: dict[str, None] = field(default_factory=dict)  # in the order in which it was seen

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Charge the time to `name`; whatever is raised inside ends the trial, not the sweep."""
        begin = time.perf_counter()
        try:
            with torch.set_grad_enabled(self.bound.grad if self.bound else False):
                yield
        except Exception as err:
            self.fail(name, err)
        finally:
            try:
                self.settle()
            except Exception as err:
                self.fail(name, err)
            elapsed = time.perf_counter() - begin
            self.spent_s[name] = self.spent_s.get(name, 0.0) + elapsed

    def settle(self, *, grad: bool = True) -> None:
        """Put back what the implementation set for itself: it must not hold for the others.

        What that was is noted. `grad` is whether autograd is on where this is called.

        Raises:
            IncorrectError: it replaced a clock, so that nothing it is timed by can be believed.
            UnsettledError: something cannot be put back.
        """
        clocks, meddled = restore_clocks(), settle(grad=grad)
        if meddled:
            self._meddled |= dict.fromkeys(meddled)
            self.metrics["meddles"] = ", ".join(self._meddled)
        lasting = beyond_repair()
        if lasting:
            raise UnsettledError(f"it changed {lasting}, which attnbench could not restore")
        if clocks:
            raise IncorrectError(f"it replaces the clock, {', '.join(clocks)}")

    def fail(self, stage: str, err: Exception) -> None:
        """Turn an exception into a status with a reason, and let go of what was built."""
        self.status, self.reason = classify(err, stage)
        self.bound = None
        if self.case.device != "cuda":
            return
        if device_is_lost():
            self.status = "crashed"
        else:
            torch.cuda.empty_cache()

    def build(self) -> None:
        """Build the core and prepare what is not timed; measures the bytes it holds on to."""
        workload = WORKLOADS.get(self.case.workload)

        def bind() -> Bound:
            begin = time.perf_counter()
            bound = workload.bind(self.case, self.impl, self.tensors)
            if self.impl.compiles:
                self.metrics["compile_s"] = time.perf_counter() - begin
            return bound

        profiled = profile_call(bind, self.case.device)
        self.bound = profiled.result
        self.metrics["memory_prepared_bytes"] = profiled.kept_bytes

    def check(self, truth: Truth, *, first: bool) -> None:
        """Compare the timed callable's result with the truth.

        Memory of the outputs' size is filled with NaN and freed before the call, and so is the
        result after it: a kernel that never runs then finds no right answer lying about.
        """
        assert self.bound is not None
        before = {name: x.detach().clone() for name, x in self.tensors.items()}
        try:
            self._compare(self.bound, truth, first=first)
        finally:
            changed = self._restore(before)
        if changed:
            raise IncorrectError(f"it wrote to its input {', '.join(changed)}")

    def _compare(self, bound: Bound, truth: Truth, *, first: bool) -> None:
        def poisoned_call() -> Any:
            _poison_allocator(truth, self.case)
            begin = time.perf_counter()
            result = bound.call()
            if self.case.device == "cuda":
                torch.cuda.synchronize()
            self.last_call_s = time.perf_counter() - begin
            self.settle(grad=bound.grad)  # before the harness computes anything
            return result

        if first and not self.impl.compiles:  # a profiler around a compilation breaks it
            result, kept_bytes = call_kept(poisoned_call, self.case.device)
            retained = kept_bytes - _bytes_of(result, self.tensors)
            self.metrics["memory_retained_bytes"] = max(0, retained)
        else:
            result = poisoned_call()
        if first and self.impl.compiles:
            self.metrics["compile_s"] += self.last_call_s
        verdict = judge(bound.named(result), truth, self.case.dtype)
        self._poison(result)
        self.verdict = self.verdict.worse(verdict) if not first else verdict
        self.metrics["error_max"] = self.verdict.error_max
        self.metrics["error_rmse"] = self.verdict.error_rmse
        self.metrics["error_ratio"] = self.verdict.error_ratio
        if verdict.reason:
            raise IncorrectError(verdict.reason + ("" if first else " (after its inputs changed)"))

    def _restore(self, before: Tensors) -> list[str]:
        """Put back inputs that were written to, which the next in line needs; return which."""
        changed = [n for n, x in before.items() if not torch.equal(x, self.tensors[n].detach())]
        with torch.no_grad():
            for name in changed:
                self.tensors[name].copy_(before[name])
        return changed

    def refresh(self) -> None:
        """Redo what was prepared from the inputs."""
        assert self.bound is not None
        self.bound.refresh()

    def probe(self) -> None:
        """What one call does, outside the timed samples: predicted from sizes, then observed.

        Two calls: one counts FLOPs and what is saved for the backward pass, one is profiled.
        """
        assert self.bound is not None
        workload = WORKLOADS.get(self.case.workload)
        self.metrics |= workload.costs(self.case, self.impl)
        self.metrics |= self._dispatched(self.bound)
        why = functools.partial(workload.why_flops, self.case)
        self.metrics["flops_note"] = flops_note(self.metrics, why, compiled=self.impl.compiles)
        profiled = profile_call(self.bound.call, self.case.device)
        self.metrics |= self._memory(profiled.peak_bytes, profiled.result)
        first = sorted(profiled.kernels, key=lambda name: "attention" not in name)
        self.metrics["kernel"] = "; ".join(first[:8]) or None
        self.metrics["kernel_count"] = profiled.kernel_count
        self.metrics["sdpa_backend"] = sdpa_backend(profiled.ops)

    def _dispatched(self, bound: Bound) -> dict[str, Any]:
        """What a dispatch mode sees, from what is prepared to the end of one call.

        Nothing of compiled code: the mode would make torch.compile fall back.
        """
        if self.impl.compiles:
            bound.refresh()
            return {}
        with watch_saved() if bound.grad else contextlib.nullcontext() as saved:
            bound.refresh()
            counted, source = count_flops(bound.call, OPAQUE_FORMULAS)
        if saved:
            bound.refresh()  # a graph that was watched is not one to be timed
        return {
            "flops_counted": None if counted is None else counted // bound.units,
            "flops_counted_source": source,
            "memory_saved_bytes": saved.bytes if saved else None,
        }

    def _memory(self, peak_bytes: int, result: Any) -> dict[str, Any]:
        inputs = sum(x.numel() * x.element_size() for x in self.tensors.values())
        outputs = sum(x.numel() * x.element_size() for x in leaves(result))
        workspace = max(0, peak_bytes - outputs)
        predicted = self.metrics.get("memory_predicted_bytes")
        return {
            "memory_inputs_bytes": inputs,
            "memory_outputs_bytes": outputs,
            "memory_workspace_bytes": workspace,
            "memory_peak_bytes": inputs + self.metrics["memory_prepared_bytes"] + peak_bytes,
            "memory_predicted_miss": predicted_miss(workspace, predicted),
        }

    def _poison(self, result: Any) -> None:
        inputs = {x.untyped_storage().data_ptr() for x in self.tensors.values()}
        with torch.no_grad():
            for x in leaves(result):
                if x.untyped_storage().data_ptr() not in inputs and x.is_floating_point():
                    x.fill_(torch.nan)


def device_is_lost() -> bool:
    """True after a CUDA error that no later call of this process survives."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def _poison_allocator(truth: Truth, case: Case) -> None:
    dtype = getattr(torch, case.dtype)
    held = [
        torch.full(x.shape, torch.nan, dtype=dtype, device=x.device) for x in truth.values.values()
    ]
    held.clear()


def leaves(result: Any) -> Iterator[torch.Tensor]:
    """The tensors in a result: itself, or those in its tuples and lists."""
    if isinstance(result, torch.Tensor):
        yield result
    elif isinstance(result, (tuple, list)):
        for item in result:
            yield from leaves(item)


def _bytes_of(result: Any, inputs: Tensors) -> int:
    """Bytes that live as long as a result does: its storages, but for those of the inputs."""
    given = {x.untyped_storage().data_ptr() for x in inputs.values()}
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage() for x in leaves(result)}
    return sum(storage.nbytes() for at, storage in storages.items() if at not in given)


def classify(err: Exception, stage: str) -> tuple[Status, str]:
    """The status and the one-line reason of an exception raised in `stage`."""
    try:
        text = " ".join(str(err).split())[:300]
    except Exception as worse:
        text = f"(its text cannot be shown: {type(worse).__name__})"
    if isinstance(err, IncorrectError):
        return "incorrect", text
    if isinstance(err, CaptureError):  # measurable, but not in the way that was asked for
        return "unsupported", text
    if isinstance(err, UnsettledError):
        return "error", f"{stage}: {text}"
    if out_of_memory(err):
        return "oom", f"{stage}: {text or 'out of memory'}"
    return "error", f"{stage}: {type(err).__name__}: {text}"


def out_of_memory(err: BaseException) -> bool:
    """True for Python's, the CPU allocator's and CUDA's out-of-memory errors."""
    if isinstance(err, (MemoryError, torch.cuda.OutOfMemoryError)):
        return True
    return isinstance(err, RuntimeError) and any(
        text in " ".join(map(str, err.args))
        for text in ("DefaultCPUAllocator", "out of memory", "can't allocate", "size calculation")
    )
