"""What `sweep --dry-run` prints: what would be measured in which process, and for how long."""

from __future__ import annotations

from collections.abc import Iterator

from attnbench.base.units import counted
from attnbench.execution.events import Planned
from attnbench.planning.forecast import Forecast, within
from attnbench.planning.plan import Job, Plan
from attnbench.report.document import Document, Finding, Section, Sentence, Text, Value, sentence
from attnbench.schema.record import Cell
from attnbench.theory.traits import case_label


def document(planned: Planned) -> Document:
    """The plan and its forecast; of one that a total time cuts short, what fits."""
    plan, forecast = planned.plan, planned.forecast
    assert forecast is not None, "a dry run makes one"
    if forecast.limit_s is not None:
        plan = within(plan, forecast, forecast.limit_s)
    sections = [
        Section(f"process {number}", [Text([*_job(job, forecast)])])
        for number, job in enumerate(plan.jobs, start=1)
    ]
    decided = [
        Finding(
            sign="none", verdict=record.status, reason=f"{record.status}: {record.reason}",
            subject=f"{record.cell.impl} at {case_label(record.cell.case)}",
        )
        for record in plan.decided
    ]  # fmt: skip
    labels = {cell.case.case_id: case_label(cell.case) for cells in plan.passes for cell in cells}
    steps = [
        f"{step}: {', '.join(f'{count} × {labels[of]}' for of, count in calls.items())}"
        for step, calls in planned.steps.items()
    ]
    sections += [Section("Not measured", decided)] if decided else []
    sections += [Section("Steps", [Text(steps)])] if steps else []
    conclusion = Finding(sign="none", verdict="", subject="", reason=_total(plan, forecast))
    return Document(kind="plan", conclusion=conclusion, exit_code=0, sections=sections)


def _job(job: Job, forecast: Forecast) -> Iterator[Sentence]:
    """A line for each case, and one for what does not fit into memory."""
    for case, impls in job.cases:
        cells = [Cell(case=case, impl=impl) for impl in impls]
        large = [cell for cell in cells if forecast.too_large(cell)]
        fit = [cell for cell in cells if cell not in large]
        if fit:
            most = max(forecast.needs.get(cell.key) or 0 for cell in fit)
            yield sentence(
                "{case} ({took}, {most}): {names}", case=case_label(case),
                took=Value(forecast.seconds(fit), "s"), most=Value(most, "bytes"),
                names=", ".join(cell.impl for cell in fit),
            )  # fmt: skip
        for cell in large:
            yield sentence(
                "{case}: skipped: {impl}: needs {needs}, {free} free", case=case_label(case),
                impl=cell.impl, needs=Value(forecast.needs[cell.key], "bytes"),
                free=Value(forecast.free, "bytes"),
            )  # fmt: skip


def _total(plan: Plan, forecast: Forecast) -> Sentence:
    every = [cell for job in plan.jobs for cell in job.cells()]
    count = sum(not forecast.too_large(cell) for cell in every)
    text = f"{counted(count, 'cell')} to measure, {len(plan.decided) + len(every) - count}"
    text += " unsupported or skipped"
    keys, planned = {cell.key for cell in every}, [cell for cells in plan.passes for cell in cells]
    if left_out := len({cell.key for cell in planned} - keys):
        text += f"; {left_out} more, for which --max-total-time will probably not suffice"
    if not count:
        return sentence(text)
    total = forecast.total(cell for cell in planned if cell.key in keys)
    text += ": about {total} ({low} to {high}), by "
    text += "{cells} measured on machines like this one" if forecast.learned else "sizes alone"
    text += ", calibrated in {calibrated}" if forecast.learned and forecast.calibrated_s else ""
    return sentence(
        text, total=Value(total.seconds, "s"), low=Value(total.low, "s"),
        high=Value(total.high, "s"), cells=counted(forecast.learned, "cell"),
        calibrated=Value(forecast.calibrated_s, "s"),
    )  # fmt: skip
