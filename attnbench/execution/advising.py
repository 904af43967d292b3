"""Advice measured within a budget: what is asked for, which stored run will do, and what fits."""

from __future__ import annotations

import contextlib
import json
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from attnbench.base import units
from attnbench.base.stats import CLOSE, median
from attnbench.errors import StoreError, UsageError
from attnbench.execution.process import Settings
from attnbench.execution.request import SweepRequest
from attnbench.planning.advice import beside, by_share, kernels_alone
from attnbench.planning.forecast import Forecast
from attnbench.planning.models import asked_sweeps, model_sizes
from attnbench.planning.plan import Axes, Job, Plan, jobs_of, reads_cache
from attnbench.schema.messages import ModelSizes
from attnbench.schema.record import Cell, Record
from attnbench.store.runs import load_run
from attnbench.theory.choices import DEFAULT, choices

_START_S = 1.0  # of the processes of a group, beside what the forecast has
_CALLS_S = 5.0  # in which a small call can be checked and timed
_FIRST = 0.75  # of the time that is left, for the first process: the second needs some


def request(
    axes: Mapping[str, Any], calls: Mapping[str, Any], files: Iterable[str | Path],
    budget_s: float, settings: Mapping[str, Any], **more: Any,
) -> SweepRequest:  # fmt: skip
    """The sweep of the calls asked for, the default beside each, and the layers around them.

    `axes` and `calls` are for `asked_sweeps`, which says what is raised; `more` is of the request.
    """
    asked, left_out = asked_sweeps((Axes(),), axes, **calls)
    sweeps = kernels_alone(asked)
    main = [
        a.having(
            impls=dict.fromkeys([*(a.impls or choices(a.values.get("masks", ("full",)))), DEFAULT]),
            step=a.step or "call",
        )
        for a in sweeps
    ]
    layers, model = tuple[Axes, ...](), model_sizes(None, None)
    if calls["model"] and not axes["workload"]:
        workload = "decode" if calls["step"] == "decode" else "layer"
        try:
            layers, _ = asked_sweeps((), {**axes, "workload": workload, "impls": None}, **calls)
            model = model_sizes(calls["model"], workload)
        except UsageError as err:  # a layer that has no case, as of latents
            model = ModelSizes(layers=1, notes=(str(err),))
    extra = [*beside(sweeps), *(a.having(impls=(DEFAULT,), count=0, step="") for a in layers)]
    given = {n: str(x) if isinstance(x, Path) else x for n, x in {**calls, **axes}.items() if x}
    return SweepRequest(
        sweeps=(*main, *extra), left_out=left_out, baseline=DEFAULT, max_total_time_s=budget_s,
        settings=Settings(
            ceilings="none", precision=1e-9, max_time_s=budget_s, race_s=budget_s, kept=(DEFAULT,),
            files=tuple(str(Path(file).resolve()) for file in files), reference_s=budget_s / 10,
            model=model,
            **settings,
        ),
        options={"command": "advise", "budget_s": budget_s, **given}, **more,
    )  # fmt: skip


def of_program(
    program: Sequence[str], axes: Mapping[str, Any], calls: Mapping[str, Any],
    files: Iterable[str | Path], budget_s: float, settings: Mapping[str, Any], **more: Any,
) -> SweepRequest:  # fmt: skip
    """Run a program, and ask for its calls in what it leaves of the budget, half of it at least.

    Raises:
        UsageError: there is no such program, or it called no attention that a case has.
    """
    from attnbench.execution.programs import check_program, run_program, why_nothing

    check_program(program)
    begin = time.perf_counter()
    seen, code = run_program(program)
    if not seen.get("cases"):
        why = why_nothing(seen, program)
        if seen.get("calls"):
            lacking = sorted({x for row in seen["left_out"] for x in row["problems"]})
            why = f"no case has what it called: {', '.join(lacking) or 'see attnbench capture'}"
        raise UsageError(f"nothing to advise on: {why}; the program exited with {code}")
    left_s = max(budget_s / 2, budget_s - (time.perf_counter() - begin))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "captured.json")
        file.write_text(json.dumps(seen))
        asked = request(axes, {**calls, "cases": file}, files, left_s, settings, **more)
    options = {"command": "advise", "budget_s": left_s, "program": list(program)}
    return replace(asked, program=seen, options=options)


def stored(plan: Plan, runs: Iterable[Path], settings: Settings) -> Path | None:
    """The first of these runs that tried all that is asked of every call; None of files.

    What read its cache warm does not answer for a step.
    """
    counts = Counter(cell.case.case_id for cell in plan.cells)
    asked = {cell.key for cell in plan.cells if counts[cell.case.case_id] > 1}
    defaults = {(case_id, DEFAULT) for case_id, _ in asked}
    for path in () if settings.files else runs:
        with contextlib.suppress(StoreError):  # a damaged one is not what was asked about
            run = load_run(path)
            if settings.model and not (run.info.get("settings") or {}).get("model"):
                continue  # from before the rest of a model was timed
            known = {
                record.cell.key: record
                for record in run.records
                if not (record.samples and settings.l2 == "step" and reads_cache(record.cell.case))
                or record.metrics.get("l2") == "cold"
            }
            if asked <= known.keys() and all(known[key].samples for key in defaults):
                return path
    return None


def check_budget(budget_s: float, started_s: float) -> None:
    """Refuse a budget that was spent before anything could be called.

    Raises:
        UsageError: with a budget that is worth a try.
    """
    if started_s + _START_S > budget_s:
        raise UsageError(
            f"--budget {units.seconds(budget_s)} is too short: starting took"
            f" {units.seconds(started_s)}; give at least {units.seconds(2 * started_s + _CALLS_S)}"
        )


def check_called(records: Sequence[Record], budget_s: float) -> None:
    """Refuse a budget in which the default could not be checked and timed.

    Raises:
        UsageError: with a budget that is enough.
    """
    late = {
        record.metrics.get("needs_s", budget_s): record for record in records
        if record.cell.impl == DEFAULT
        and (record.status == "timeout" or record.metrics.get("dropped") == "budget")
    }  # fmt: skip
    if late and not any(record.samples for record in records):
        needs_s = max(late)
        raise UsageError(
            f"--budget {units.seconds(budget_s)} is too short to check and time {DEFAULT}"
            f" ({late[needs_s].reason}); give at least {units.seconds(2 * max(needs_s, budget_s))}"
        )


def racing(
    jobs: Iterable[Job], forecast: Forecast, left_s: Callable[[], float],
    counts: Mapping[str, int], declined: dict[str, float], seen: Sequence[Record],
) -> Iterator[Job]:  # fmt: skip
    """The jobs of `by_share`, each with the time at which its race ends; last what no step calls.

    Cases that do not fit are `declined`, by their ids, with the seconds that they would take. Where
    the default lost, by the records `seen`, it meets what beat it in a fresh process once more: two
    of the same code differ by a few percent, which no number of rounds within one shows.
    """
    calls, others = list[Job](), list[Job]()
    for group in (group for job in jobs for group in job.groups):
        called = any(case.case_id in counts for case, _ in group)
        (calls if called else others).append(Job(groups=(group,)))

    def again() -> list[Job]:
        return [replace(job, process=1) for job in jobs_of(_to_confirm(seen))]

    turns: list[tuple[float, Callable[[], list[Job]]]]
    layers = [job for job in others if job.cases[0][0].workload != "attention"]
    turns = [(_FIRST, lambda: calls), (_FIRST, again), (_FIRST, lambda: others)]
    turns.append((1.0, lambda: [replace(job, process=1) for job in layers]))
    for share, waiting in turns:
        for job, seconds in by_share(waiting(), forecast, lambda: left_s() - _START_S, counts):
            now = time.perf_counter()
            if seconds > 0:
                yield replace(job, timed_until=now + share * seconds, until=now + seconds)
            elif not job.process:
                declined |= {case.case_id: round(_START_S - seconds, 3) for case, _ in job.cases}


def _to_confirm(seen: Sequence[Record]) -> Iterator[Cell]:
    """The default of each case in which it was behind, and what did not lose there."""
    timed = {r.cell: median(sample.own_us for sample in r.kept) for r in seen if r.samples}
    lost = {r.cell for r in seen if r.metrics.get("lost_to")}
    for default in (cell for cell in timed if cell.impl == DEFAULT):
        rivals = {cell: us for cell, us in timed.items() if cell.case == default.case}
        if default in lost or timed[default] > CLOSE * min(rivals.values()):
            yield from (cell for cell in rivals if cell == default or cell not in lost)
