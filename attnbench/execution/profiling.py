"""One cell profiled, from what was asked for to the files of its profile."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msgspec.structs import replace as altered

from attnbench.errors import AttnbenchError, ExitCode, UsageError
from attnbench.execution.process import Settings
from attnbench.execution.runner import LocalRunner
from attnbench.machine.limits import ceilings_of
from attnbench.planning.plan import Axes, check_names, expand, mismatch, named
from attnbench.schema.case import Case
from attnbench.schema.messages import Catalogue, Trace
from attnbench.schema.profile import FILE, TRACE, Note, Op, Profile, write_profile
from attnbench.schema.record import Cell
from attnbench.theory.traits import impossible

CaseOf = Callable[[Catalogue], Case]
_ABOVE = 1.05  # of a ceiling: no rate of an op is higher, but for the noise of both
_RANGE = "attnbench-call"  # the NVTX range around a call: measure.ops.CALL


class NotProfiledError(AttnbenchError):
    """The cell has no profile: its result is wrong, or it failed; the status decides the code."""

    def __init__(self, message: str, status: str) -> None:
        super().__init__(message)
        self.exit_code = ExitCode.FINDING if status == "incorrect" else ExitCode.USAGE


@dataclass(frozen=True, kw_only=True)
class Subject:
    """What is profiled: an implementation, and how its processes run; `label` names the version."""

    impl: str
    label: str
    settings: Settings


def case_of(axes: Axes, impl: str) -> CaseOf:
    """What makes the one case of `axes`, once a worker has said what there is.

    Raises, when called:
        UsageError: unknown names, or a case that makes no sense.
    """

    def make(catalogue: Catalogue) -> Case:
        check_names([axes], catalogue)
        case, *more = expand(axes, catalogue.device, catalogue.environment["threads"])
        reason = "it is more than one case" if more else mismatch(axes, case) or impossible(case)
        if reason:
            raise UsageError(f"{impl} cannot be profiled: {reason}")
        return case

    return make


def profile_subject(subject: Subject, case: CaseOf, folder: Path) -> Profile:
    """Profile one cell in fresh processes and write `profile.json` and the trace into `folder`.

    The machine's ceilings are measured afterwards.

    Raises:
        UsageError: an unknown name, or one that cannot take the case.
        NotProfiledError: its result is wrong, it failed, or its trace would be too large.
    """
    with LocalRunner(subject.settings) as runner:
        catalogue = runner.catalogue()
        impl = _one(subject.impl, catalogue)
        cell = Cell(case=case(catalogue), impl=impl)
        if cell.case.device != catalogue.device:
            raise UsageError(f"the case is of {cell.case.device} (--device {catalogue.device})")
        if why := runner.reasons([cell])[cell.key]:
            raise UsageError(f"{impl} cannot be profiled: {why}")
        runner.renew()  # it planned: the cell gets a fresh process
        file = folder.resolve() / TRACE
        found = runner.trace(
            Trace(
                case=cell.case,
                impl=impl,
                seed=subject.settings.seed,
                file=str(file),
                label=subject.label,
            )
        )
        if found.profile is None:
            status = "too large a trace" if found.status == "skipped" else found.status
            raise NotProfiledError(f"{impl} has no profile: {status}: {found.reason}", found.status)
        for _ in range(2):  # on a busy machine a ceiling may come out too low once
            ceilings = runner.ceilings([cell.case.dtype], cell.case.threads)
            ops = tuple(with_share(op, cell.case.dtype, ceilings) for op in found.profile.ops)
            above = [op for op in ops if (op.share or 0) > _ABOVE]
            if not above:
                break
    figures = [{"op": op.name, "share": op.share, "ceiling": op.ceiling} for op in above]
    profile = altered(
        found.profile,
        environment=catalogue.environment,
        ceilings=ceilings,
        ops=ops,
        notes=(*found.profile.notes, *(Note("suspect", each) for each in figures)),  # type: ignore[arg-type]
        commands=commands(subject.settings, folder) if cell.case.device == "cuda" else {},
    )
    write_profile(folder, profile)
    return profile


def _one(text: str, catalogue: Catalogue) -> str:
    """The implementation as cells name it."""
    names = named([text], catalogue, flag="")
    if len(names) > 1:
        raise UsageError(f"{text} is {len(names)} implementations; name one: {names[0]}")
    return names[0]


def with_share(op: Op, dtype: str, ceilings: Mapping[str, Any]) -> Op:
    """The op with its share of the ceiling that binds: FLOPs of a large matmul, or memory.

    Data of one execution that fit into the last cache may never touch the memory: for them only
    the other ceiling counts, as where the size of the cache is unknown.
    """
    measured = ceilings_of({"ceilings": dict(ceilings)})
    peak = measured.matmul_tflops.get(dtype)
    stream = max(measured.read_gbps or 0.0, measured.copy_gbps or 0.0)
    least: dict[Any, float] = {}
    if op.flops and peak:
        least["matmul"] = op.flops / peak / 1e6
    cache = measured.cache_bytes
    if op.bytes and stream and cache is not None and op.bytes / op.count > cache:
        least["memory"] = op.bytes / stream / 1e3
    if not least or not op.self_us:
        return op
    binding = max(least, key=lambda name: least[name])
    return altered(op, share=least[binding] / op.self_us, ceiling=binding)


def commands(settings: Settings, folder: Path) -> dict[str, str]:
    """The command lines that show this cell in NVIDIA's profilers: a timeline, and each kernel.

    Both start `attnbench.worker.calling`, which makes some calls of the cell in ranges of NVTX.
    Empty for an environment that attnbench is lent to: it is gone by then.
    """
    if settings.lent is not None:
        return {}
    alone = [settings.python or sys.executable, "-m", "attnbench.worker.calling"]
    alone += [str(folder / FILE), *settings.files]
    tools = {
        "nsys": "nsys profile --trace=cuda,nvtx,cublas,cudnn --capture-range=cudaProfilerApi"
        " --capture-range-end=stop --output",
        "ncu": f"ncu --set full --nvtx --nvtx-include {_RANGE}/ --export",
    }
    return {
        name: f"{start} {shlex.join([str(folder / name), *alone])}" for name, start in tools.items()
    }
