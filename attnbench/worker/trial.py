"""One implementation in one case: built, checked twice, probed; and how it failed, if it did."""

from __future__ import annotations

import contextlib
import json
import math
import random
import re
import time
import traceback
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from attnbench.api import Estimate, Implementation, building_mask
from attnbench.base.parameters import shown
from attnbench.base.stats import median, robust_least
from attnbench.base.units import seconds, size
from attnbench.machine.state import beyond_repair, restore_clocks, settle
from attnbench.measure import probes
from attnbench.measure.clock import CaptureError, clock_for
from attnbench.measure.sampling import graphs_compiled
from attnbench.schema.case import Case
from attnbench.schema.record import Cell, Record, Sample, Status
from attnbench.theory.costs import OPAQUE_FORMULAS
from attnbench.worker import reference as references
from attnbench.worker.fault import fault_of
from attnbench.worker.inputs import Draw, Tensors
from attnbench.worker.reference import (
    CheckResult,
    DefinitionError,
    DroppedError,
    Reference,
    Size,
    compare_calls,
    judge,
)
from attnbench.worker.workloads import WORKLOADS, Bound
from attnbench.worker.workloads.decode import step_case

OURS = ("set-up", "inputs and reference")  # stages in which no implementation lacks the memory


class IncorrectError(Exception):
    """The result is wrong; the message says by how much."""


class BeyondDtypeError(Exception):
    """The dtype cannot hold the exact result, so that none could be right; the message has both."""


class UnsettledError(Exception):
    """The process cannot be used any more; the message says for what."""


def restore_settings(
    note: Callable[[list[str]], None] = lambda changed: None, *, grad: bool = True
) -> None:
    """Put back what an implementation set for itself: it must not hold for the others.

    `note` gets the names of what was changed; `grad` is whether autograd is on here.

    Raises:
        IncorrectError: it replaced a clock, so that nothing it is timed by can be believed.
        UnsettledError: something cannot be put back.
    """
    clocks = restore_clocks()
    note(settle(grad=grad))
    if lasting := beyond_repair():
        raise UnsettledError(f"it changed {lasting}, which attnbench could not restore")
    if clocks:
        raise IncorrectError(f"it replaces the clock, {', '.join(clocks)}")


@dataclass(kw_only=True)
class Trial:
    """What is known so far about one cell of a case.

    `checks_alone`: no memory is measured, and what is wrong goes to `metrics["fault"]`, for people.
    What takes longer than `brief_s` is `brief`: no call is made that does not check or time it. The
    `shortest` of several lengths that share rounds tells what a call takes for one token, if it is
    a built-in: nobody said that another one takes that length, and it may end the process.
    """

    impl: Implementation
    case: Case
    tensors: Tensors
    checks_alone: bool = False
    bound: Bound | None = None
    result: CheckResult = field(default_factory=CheckResult)
    last_call_s: float = 0.0
    calls: int = 0
    brief_s: float = math.inf
    shortest: bool = False
    metrics: dict[str, Any] = field(default_factory=dict)
    spent_s: dict[str, float] = field(default_factory=dict)
    status: Status | None = None
    reason: str | None = None
    _first_inputs: Tensors | None = None
    _firsts: dict[str, torch.Tensor] = field(default_factory=dict)
    _why_not_counted: str | None = None
    _brief: dict[str, Any] = field(default_factory=dict)  # what a probe would have seen
    _graphs: int = 0  # that dynamo had compiled before this was built

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
                self.restore_settings()
            except Exception as err:
                self.fail(name, err)
            self.spent_s[name] = self.spent_s.get(name, 0.0) + time.perf_counter() - begin

    @property
    def brief(self) -> bool:
        """Whether its first call took so long that no more are made than must be."""
        return bool(self._brief)

    def restore_settings(self, *, grad: bool = True) -> None:
        """As the function of that name; the row says what the implementation changed."""

        def note(changed: list[str]) -> None:
            if changed:
                before = self.metrics.get("meddles", "").split(", ")
                self.metrics["meddles"] = ", ".join(dict.fromkeys(filter(None, before + changed)))

        restore_settings(note, grad=grad)

    def fail(self, stage: str, err: Exception) -> None:
        """Turn an exception into a status with a reason, and let go of what was built."""
        self.status, self.reason = classify(err, stage)
        self.bound = None
        if isinstance(err, DroppedError):
            self.metrics |= err.metrics
        fault = raised(err, stage, self.impl.file)
        if stage == "reference" and self.status == "error":  # where definitions run, and no more
            does = self.reason.removeprefix("reference: ").removeprefix("DefinitionError: ")
            raises = "" if isinstance(err, DefinitionError) else "raises "
            self.reason = f"the definition of {self.impl.name} {raises}{does}"
            fault |= {"code": "definition", "type": self.reason.partition(": ")[0]}
        if self.checks_alone and self.status == "error":
            self.metrics["fault"] = fault
        if self.case.device != "cuda":
            return
        if device_is_lost():
            self.status = "crashed"
        else:
            torch.cuda.empty_cache()

    def record(self, samples: Iterable[Sample] = ()) -> Record:
        """What became of the cell, once that is known; samples where it is ok."""
        assert self.status is not None
        values = self.impl.values.items()
        self.metrics["parameters"] = ", ".join(f"{k}={shown(v)}" for k, v in values) or None
        return Record(
            cell=Cell(case=self.case, impl=self.impl.name),
            status=self.status,
            reason=self.reason,
            samples=tuple(samples),
            metrics=self.metrics,
            spent_s={stage: round(seconds, 6) for stage, seconds in self.spent_s.items()},
        )

    def build(self) -> None:
        """Build the core and prepare what is not timed; measures the bytes it holds on to."""
        workload = WORKLOADS.get(self.case.workload)
        self._graphs = graphs_compiled()
        builds_s: list[float] = []  # decode builds for each step

        def build(case: Case) -> Any:
            begin = time.perf_counter()
            core = self.impl.build(case)
            if case.device == "cuda":
                torch.cuda.synchronize()
            builds_s.append(time.perf_counter() - begin)
            return core

        def bind() -> Bound:
            begin = time.perf_counter()
            builds_s.clear()
            bound = workload.bind(self.case, replace(self.impl, build=build), self.tensors)
            if self.impl.compiles:
                self.metrics.setdefault("compile_s", time.perf_counter() - begin)
            return bound

        if self.checks_alone:
            self.bound = bind()
            return
        # Twice: the first may load or compile what it builds with, which is not its time.
        for _ in range(2):
            self.bound = None
            building_mask.reset()
            built = probes.call_kept(bind, self.case.device)
            self.bound = built.result
            self.metrics.setdefault("memory_prepared_bytes", built.kept_bytes)
            self.metrics["mask_build_us"] = building_mask.spent_us
            self.metrics["build_us"] = 1e6 * sum(builds_s) / built.result.units
            if building_mask.spent_us is None and (self.impl.compiles or sum(builds_s) > 1):
                break

    def check(self, reference: Reference, *, first: bool) -> None:
        """Compare the timed callable's result with the reference, if the dtype can hold that.

        Memory of the outputs' size is filled with NaN and freed before the call, and so is the
        result after it: a kernel that never runs then finds no right answer lying about. The first
        time it is called twice, and the first result judged after the second call.
        """
        assert self.bound is not None
        if reason := reference.beyond(self.case.dtype):
            raise BeyondDtypeError(reason)
        before = {name: x.detach().clone() for name, x in self.tensors.items()}
        wrong = None
        try:
            self._compare(self.bound, reference, first=first)
        except IncorrectError as err:
            wrong = err  # which may follow from what it did to its inputs
        finally:
            # The next implementation needs the inputs as they were.
            changed = [n for n, x in before.items() if not torch.equal(x, self.tensors[n].detach())]
            with torch.no_grad():
                for name in changed:
                    self.tensors[name].copy_(before[name])
        if changed:
            if self.checks_alone:
                self.metrics["fault"] = {"code": "wrote-input", "tensor": changed[0]}
            raise IncorrectError(f"it wrote to its input {', '.join(changed)}") from wrong
        if wrong is not None:
            raise wrong
        self._first_inputs = before if self.checks_alone else None

    def _compare(self, bound: Bound, reference: Reference, *, first: bool) -> None:
        def poisoned_call(poison: float = math.nan, bound: Bound = bound) -> Any:
            dtype = getattr(torch, self.case.dtype)
            part = reference.drawn
            held = [
                x.new_full(part.whole(name, x) if part else x.shape, poison, dtype=dtype)
                for name, x in reference.values.items()
            ]
            held.clear()
            # Each call has random numbers of its own: after each the generators are put back.
            seed = zlib.crc32(f"{self.case.case_id} {first} {poison}".encode())
            random.seed(seed)
            torch.manual_seed(seed)
            references.on_block()  # a sign of life, from which a call's own limit counts
            begin = time.perf_counter()
            result = bound.call()
            if self.case.device == "cuda":
                torch.cuda.synchronize()
            self.last_call_s = time.perf_counter() - begin
            self.calls += 1
            self.restore_settings(grad=bound.grad)  # before the harness computes anything
            return result

        inputs = {probes.address(x) for x in self.tensors.values()}
        # A profiler around a compilation breaks it.
        if first and not self.impl.compiles and not self.checks_alone:
            profiled = probes.call_kept(poisoned_call, self.case.device)
            result, kept_bytes = profiled.result, profiled.kept_bytes
            if self.last_call_s > self.brief_s and self.case.device == "cpu":
                self._brief = kernels_of(profiled) | self._memory(result, profiled.peak_bytes)
            storages = {probes.address(x): x.untyped_storage() for x in leaves(result)}
            own = sum(storage.nbytes() for at, storage in storages.items() if at not in inputs)
            kept_bytes = kept_bytes if kept_bytes is None else max(0, kept_bytes - own)
            self.metrics["memory_retained_bytes"] = kept_bytes
        else:
            result = poisoned_call()
        if first and self.impl.compiles:
            self.metrics["compile_s"] += self.last_call_s
            if graphs := graphs_compiled():
                self.metrics["compiled"] = "yes" if graphs > self._graphs else "no"
        outputs, again, differing, kept = bound.named(result), None, None, False
        if first and not self.brief:
            again = poisoned_call(1.0)  # what is read before it was written differs, too
            if self.case.workload == "attention":
                one, other = ({probes.address(x) for x in leaves(r)} for r in (result, again))
                how = "declared" if self.impl.reuses_output else "yes"
                self.metrics["reuses_output"] = how if (one & other) - inputs else "no"
            exact, differing = compare_calls(outputs, bound.named(again), reference)
            self.metrics["deterministic"] = "yes" if exact else "no"
        found = differing or judge(outputs, reference, self.case.dtype)
        if self.checks_alone and found.reason and (differing or not first):
            pair = (outputs, bound.named(again)) if first else None
            kept = self._keeps(poisoned_call, pair, reference)
        del again
        if differing and self.checks_alone:
            end = self.case.seq_len + self.case.query_tokens
            slots = self.case.workload == "decode" and step_case(self.case, end).mask.lengths
            why = "cache-slots" if slots else "call-before"
            state = {"code": "state", "explained": [why]}
            self.metrics["fault"] = differing.fault | (state if kept else {})
        elif self.checks_alone:
            self._look_into(outputs, reference, wrong=found.reason is not None, kept=kept)
        elif found.reason and not differing:
            fault: dict[str, Any] = dict(found.fault)  # of a part, no more is looked into
            if reference.drawn is None:
                fault = fault_of(self.case, self.tensors, outputs, reference, None, self.impl)
            self.metrics["fault"] = json.dumps(fault)
        with torch.no_grad():
            for x in leaves(result):
                if probes.address(x) not in inputs and x.is_floating_point():
                    x.fill_(torch.nan)
        self.result = self.result.worse(found) if not first else found
        for name in ("error_max", "error_rmse", "error_ratio"):
            self.metrics[name] = getattr(self.result, name)
        if found.reason:
            raise IncorrectError(found.reason + ("" if first else " (after its inputs changed)"))

    def _keeps(
        self, call: Callable[..., Any], pair: tuple[Tensors, Tensors] | None, reference: Reference
    ) -> bool:
        """Whether a result depends on the call before, and not on chance.

        A `pair` of results that differ comes again from a new build, or the second of it from a
        third call. Without one a result was wrong: is it right after a call on the same inputs?
        """
        assert self.bound is not None
        fresh = WORKLOADS.get(self.case.workload).bind(self.case, self.impl, self.tensors)
        third, *other = (
            bound.named(call(poison, bound))
            for poison, bound in ((2.0, self.bound), (3.0, fresh), (4.0, fresh))
        )
        if pair is None:
            either = (judge(x, reference, self.case.dtype) for x in (third, other[0]))
            return any(found.reason is None for found in either)
        alike = [
            all(torch.equal(x, known[name]) for name, x in got.items())
            for got, known in ((third, pair[1]), *zip(other, pair, strict=True))
        ]
        return alike[0] or all(alike[1:])

    def _look_into(
        self, outputs: Tensors, reference: Reference, *, wrong: bool, kept: bool
    ) -> None:
        """Say what is wrong; a result that was right before and is still the same was kept.

        So is one that is NaN throughout: the harness has overwritten the first result by that.
        """
        if not wrong:
            self._firsts = {n: x.detach().flatten()[:4096].clone() for n, x in outputs.items()}
            return
        fault = fault_of(self.case, self.tensors, outputs, reference, self._first_inputs, self.impl)
        if "at" in fault:
            name = fault["tensor"]
            first, now = self._firsts.get(name), outputs[name].detach().flatten()[:4096]
            if first is not None and (now.isnan().all() or torch.equal(now, first)):
                fault |= {"code": "kept-result", "explained": []}
            elif kept and not str(fault["explained"]).startswith("['kept-"):
                fault["explained"] = ["call-before"]
        self.metrics["fault"] = fault

    def measure_distance(self, name: str, exact: torch.Tensor) -> None:
        """Note how far the output is from that of exact attention, in the root mean square.

        Relative to the exact output's own; for the inputs as they are now.
        """
        assert self.bound is not None
        self.bound.refresh()
        o = self.bound.named(self.bound.call())["o"].detach().double()
        self.metrics[name] = Size.of(o - exact).rms / Size.of(exact).rms

    def costs(self) -> dict[str, Any]:
        """What sizes alone say: FLOPs, least traffic, and the workspace.

        Only an exact one is `memory_predicted_bytes`; an `Estimate` only says what has to be free.
        """
        found: dict[str, Any] = WORKLOADS.get(self.case.workload).costs(self.case, self.impl)
        if self.impl.definition is not None and self.impl.useful is None:
            found["flops_useful"] = None  # what it executes may be in vain
        for name, value in found.items():
            if value is not None and (not isinstance(value, int) or value < 0):
                raise ValueError(f"{name} must be a whole number, 0 or more, not {value!r}")
        found["memory_bound_bytes"] = most = found["memory_predicted_bytes"]
        if isinstance(most, Estimate):
            found |= {"memory_bound_bytes": int(most), "memory_predicted_bytes": None}
        return found

    def probe(self) -> None:
        """What one call does, outside the timed samples: predicted from sizes, then observed.

        Two calls: one counts FLOPs and what is saved for the backward pass, the other shows its
        memory and, on CPU, its kernels; on CUDA `profile` does, in another process.
        """
        assert self.bound is not None
        self.metrics |= self.costs()
        if self.last_call_s > self.brief_s and self._brief:
            self._why_not_counted = f"not counted: a call takes {seconds(self.last_call_s)}"
            self.metrics |= self._brief | {"flops_note": self._flops_note()}
            return
        self.metrics |= self._dispatched(self.bound)
        self.metrics["flops_note"] = self._flops_note()
        if self.metrics.get("memory_retained_bytes") and self.last_call_s < 0.5:
            self.metrics["new_inputs_us"] = self._on_new_inputs()
        if self.case.device == "cuda":
            self.metrics |= self._memory(*probes.call_at_peak(self.bound.call))
            return
        profiled = probes.profile_call(self.bound.call, self.case.device)
        self.metrics |= self._memory(profiled.result, profiled.peak_bytes)
        self._name_kernels(profiled)
        if self.metrics["sdpa_backend"]:
            self.metrics["sdpa_shapes"] = probes.sdpa_shapes(self.bound.call)

    def _on_new_inputs(self) -> float | None:
        """Time of a call whose inputs changed since the call before (µs, per token of a decode).

        None where a repeated call takes about as long: eight of each, in turn, all lie above the
        others, and a fifth above in the median. What was computed from the inputs may be kept by
        their address and version, which writing to them raises.
        """
        assert self.bound is not None
        bound = self.bound

        def call_us(*, changed: bool) -> float:
            if changed:
                with torch.no_grad():
                    for x in self.tensors.values():
                        x.mul_(1)
                bound.refresh()
            begin = time.perf_counter()
            bound.call()
            if self.case.device == "cuda":
                torch.cuda.synchronize()
            return 1e6 * (time.perf_counter() - begin) / bound.units

        new_us, repeated_us = zip(
            *((call_us(changed=True), call_us(changed=False)) for _ in range(8)), strict=True
        )
        kept = min(new_us) > max(max(repeated_us), 1.2 * median(repeated_us))
        return median(new_us) if kept else None

    def warm_us(self) -> float | None:
        """The same call again and again (µs, per token of a decode); None where that takes long."""
        if self.bound is None or self.last_call_s > 0.5:
            return None
        clock, call = clock_for(self.case.device, l2="warm"), self.bound.call
        with torch.set_grad_enabled(self.bound.grad):
            us = [clock.batch(call, 1).own_us for _ in range(8 if self.last_call_s > 0.02 else 40)]
        return robust_least(us[3:]) / self.bound.units

    def overhead_us(self) -> float | None:
        """The same call for one token (µs); None where it fails."""
        one, workload = replace(self.case, seq_len=1, kv_len=1), WORKLOADS.get(self.case.workload)
        if self.bound is None or workload.reason_against(one, self.impl):
            return None
        with contextlib.suppress(Exception), torch.set_grad_enabled(self.bound.grad):
            tensors = workload.tensors(one)
            workload.fill(one, tensors, Draw(seed=1))
            call, clock = workload.bind(one, self.impl, tensors).call, clock_for("cpu", l2="warm")
            return robust_least([clock.batch(call, 100).own_us for _ in range(8)][1:])
        return None

    def profile(self) -> None:
        """Name the kernels of a second call, where nothing is timed: the first may compile."""
        assert self.bound is not None
        begin = time.perf_counter()
        self.bound.call()
        if self.impl.compiles:
            self.metrics["compile_s"] += time.perf_counter() - begin
        self._name_kernels(probes.profile_call(self.bound.call, self.case.device))

    def _name_kernels(self, profiled: probes.Profiled) -> None:
        self.metrics |= kernels_of(profiled)
        # Under another context compiled code would be compiled again.
        if self.bound and "math" in (self.metrics["sdpa_backend"] or "") and not self.impl.compiles:
            self.metrics["sdpa_reason"] = why_math(self.bound.call)

    def _dispatched(self, bound: Bound) -> dict[str, Any]:
        """What a dispatch mode sees, from what is prepared to the end of one call.

        Nothing of compiled code: the mode would make torch.compile fall back.
        """
        if self.impl.compiles:
            bound.refresh()
            return {}
        counted, source, saved_bytes = None, None, None
        with probes.watch_saved() if bound.grad else contextlib.nullcontext() as saved:
            bound.refresh()
            try:
                counted, source = probes.count_flops(bound.call, OPAQUE_FORMULAS)
            except Exception as err:  # a formula's; one of the call itself comes up again
                self._why_not_counted = classify(err, "not counted")[1]
        if saved:
            bound.refresh()  # a graph that was watched is not one to be timed
            saved_bytes = saved.bytes if self._why_not_counted is None else None
        return {
            "flops_counted": None if counted is None else counted // bound.units,
            "flops_counted_source": source,
            "memory_saved_bytes": saved_bytes,
        }

    def _memory(self, result: Any, peak_bytes: int | None) -> dict[str, Any]:
        inputs = sum(x.nbytes for x in self.tensors.values())
        outputs = sum(x.nbytes for x in leaves(result))
        held = inputs + (self.metrics["memory_prepared_bytes"] or 0)
        return {
            "memory_inputs_bytes": inputs,
            "memory_outputs_bytes": outputs,
            "memory_workspace_bytes": None if peak_bytes is None else max(0, peak_bytes - outputs),
            "memory_peak_bytes": None if peak_bytes is None else held + peak_bytes,
        }

    def _flops_note(self) -> str | None:
        """Where useful, executed and counted FLOPs disagree, and why; None where they agree."""
        useful, executed, counted, source = (
            self.metrics.get(f"flops_{name}")
            for name in ("useful", "executed", "counted", "counted_source")
        )
        notes = []

        def add(flops: int, what: str, of: int, name: str, *more: str) -> None:
            exact = self.impl.definition is None
            found = WORKLOADS.get(self.case.workload).why_flops(self.case, flops) if exact else []
            reasons = [*found, *more]
            why = f" ({', '.join(reasons)})" if reasons else ""
            notes.append(f"{what} {flops / of:.3g} x the {name} FLOPs{why}")

        if useful and executed and executed != useful:
            add(executed, "executes", useful, "useful")
        formula = source == "formula"
        seen = "torch's formula for the opaque op:" if formula else "the matmuls dispatched:"
        if counted is None:
            compiled = self.impl.compiles
            nothing = "not counted: compiled code" if compiled else "torch counted no matmul"
            notes.append(self._why_not_counted or nothing)
        elif executed and counted != executed:
            add(counted, seen, executed, "executed")
        elif useful and executed is None and counted != useful:
            add(counted, seen, useful, "useful", "what it executes is not declared")
        return "; ".join(notes) or None


# flash_fwd_kernel, fmha_cutlassF_…, cudnn_generated_fort_native_sdpa_…, _attn_fwd
_ATTENTION = "attention|attn|flash|fmha|sdpa"


def kernels_of(profiled: probes.Profiled) -> dict[str, Any]:
    """What ran, as columns: of the names at most eight, attention first, and how many there were.

    Where the profiler lost some, which is not to be mended, there is a note instead.
    """
    found = {
        "kernel": None,
        "kernel_count": profiled.kernel_count,
        "device_waits": profiled.device_waits,
        "sdpa_backend": sdpa_backend(profiled.ops),
    }
    if profiled.kernels is None:
        return found | {"kernel_note": "the profiler lost kernels of the call, or saw none"}
    first = sorted(profiled.kernels, key=lambda name: not re.search(_ATTENTION, name, re.I))
    return found | {"kernel": "; ".join(first[:8]) or None}


def sdpa_backend(ops: Iterable[str]) -> str | None:
    """The backends of SDPA among the ops: `flash`, `math`, `efficient`, `cudnn`; None without SDPA.

    The math path leaves no kernel of its own name, and its backward pass no op either.
    """
    named = r"aten::_scaled_dot_product_(?:(\w+?)_attention|attention_(math))"
    found = (re.match(named, name) for name in ops)
    return "; ".join(sorted({match[1] or match[2] for match in found if match})) or None


def why_math(call: Callable[[], Any]) -> str | None:
    """Why SDPA takes its math path, as torch warns; None where the call itself asks for that."""
    refused = sdpa_kernel(
        [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION]
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with contextlib.suppress(RuntimeError), refused:
            call()
    texts = dict.fromkeys(str(of.message).partition(" (Triggered")[0].strip() for of in caught)
    if not any("not used because" in text for text in texts):
        return None
    return " ".join(x for x in texts if not x.endswith(":"))[:300] or "torch gives no reason"


def device_is_lost() -> bool:
    """True after a CUDA error that no later call of this process survives."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def leaves(result: Any) -> Iterator[torch.Tensor]:
    """The tensors in a result: itself, or those in its tuples and lists."""
    if isinstance(result, torch.Tensor):
        yield result
    elif isinstance(result, (tuple, list)):
        for item in result:
            yield from leaves(item)


def raised(err: Exception, stage: str, file: str) -> dict[str, Any]:
    """What was raised, and the last line of the implementation's own file that it passed."""
    lines = [x.lineno for x in traceback.extract_tb(err.__traceback__) if x.filename == file]
    fault = {"code": "raised", "type": type(err).__name__, "stage": stage}
    return fault | ({"line": lines[-1], "file": file} if lines else {})


def classify(err: Exception, stage: str) -> tuple[Status, str]:
    """The status and the one-line reason of an exception raised in `stage`."""
    text = " ".join(str(err).split())[:300]
    if isinstance(err, IncorrectError):
        return "incorrect", text
    # Measurable, but not in the way that was asked for.
    if isinstance(err, (CaptureError, BeyondDtypeError)):
        return "unsupported", text
    if isinstance(err, DroppedError):
        return "skipped", text
    if isinstance(err, UnsettledError):
        return "error", f"{stage}: {text}"
    if _out_of_memory(err):
        asked = re.search(r"tried to allocate (\d+) bytes", text)
        said = f"asked for {size(int(asked[1]))}" if asked else text or "out of memory"
        return "skipped" if stage in OURS else "oom", f"{stage}: {said}"
    return "error", f"{stage}: {type(err).__name__}: {text}"


_NO_MEMORY = ("DefaultCPUAllocator", "out of memory", "can't allocate", "size calculation",
              "ALLOC_FAILED", "ALLOCATION_FAILED", "insufficient workspace")  # fmt: skip


def _out_of_memory(err: BaseException) -> bool:
    """True for out-of-memory errors of Python, of torch's allocators, of cuBLAS and of cuDNN."""
    if isinstance(err, (MemoryError, torch.cuda.OutOfMemoryError)):
        return True
    return isinstance(err, RuntimeError) and any(
        text in " ".join(map(str, err.args)) for text in _NO_MEMORY
    )
