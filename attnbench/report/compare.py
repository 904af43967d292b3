"""What a comparison says: the parts of its page, its Markdown and the terminal; all as JSON."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from attnbench.analysis.compare import Comparison
from attnbench.analysis.compare.elsewhere import Elsewhere
from attnbench.analysis.compare.same import ALPHA, VERDICTS, Compared, Row
from attnbench.analysis.compare.sources import Source
from attnbench.base import units
from attnbench.base.stats import median
from attnbench.gate.decide.data import Checked
from attnbench.gate.decide.exact import compare as exact_differences
from attnbench.report import parts
from attnbench.report.labels import labels
from attnbench.report.parts import Part, Section
from attnbench.report.render.tables import value_text
from attnbench.report.render.written import clean as flat
from attnbench.schema.record import Cell
from attnbench.theory.flags import profile_command
from attnbench.version import __version__

HEADER = ("cell", "verdict", "change", f"{100 * (1 - ALPHA):g} % interval", "before", "after")
NOTABLE = math.log(1.1)  # of a group's shift that is worth a sentence
_NAMED = 8  # cells of which the same is said


def section(found: Comparison) -> Section:
    """All that is to be shown of a comparison; what differs between the environments first."""
    if found.same:
        own = list(_same(found, found.same))
        title = units.tally((row.verdict for row in found.same.rows), VERDICTS)
    else:
        assert found.elsewhere is not None, "a comparison is the one or the other"
        own = list(_elsewhere(found, found.elsewhere))
        count = len(found.elsewhere.reversals)
        title = (
            f"measured on different machines: {count or 'no'} order reversal{'s' * (count != 1)}"
        )
    differs = [
        flat(f"{name}: {value_text(name, before)} → {value_text(name, after)}")
        for name, before, after in found.environment
    ]
    environment = [Part(title="The environments differ", sentences=differs)] if differs else []
    facts = f"before: {_title(found.before)}", f"after:  {_title(found.after)}"
    return Section(title=title, facts=facts, parts=[*environment, *own])


def _same(found: Comparison, same: Compared) -> Iterator[Part]:
    cells = [Cell(case=row.case, impl=row.impl) for row in same.rows if row.case]
    common, own = labels(cells)
    # Other tools' cells go by their own names.
    names = {row.key: flat(row.label) for row in same.rows}
    names |= dict(zip((cell.key for cell in cells), own, strict=True))
    lines = {
        row.key: (
            names[row.key], row.verdict, units.change(row.ratio),
            units.change_interval(row.low, row.high),
            units.time(row.before_us), units.time(row.after_us),
        )
        for row in same.rows
    }  # fmt: skip
    changed = [row for row in same.rows if row.verdict in ("slower", "faster")]
    changed.sort(key=lambda row: -(row.ratio or 0))
    sentences = [f"all cells: {common}"] if common else []
    title = "Changed" if changed else "No cell is seen to have changed"
    if seen := [row.high / row.ratio - 1 for row in same.rows if row.ratio and row.high]:
        least = units.brief_percent(median(seen))
        sentences.append(
            f"in half of the {len(seen)} cells that could be compared, a change of ± {least} would"
            " have been one"
        )
        title += f"; what is below ± {least} these runs cannot show" * (not changed)
    auto, files = "cuda" if found.after.environment.get("cuda") else "cpu", _files(found.after)
    yield Part(
        title=title,
        sentences=sentences, header=HEADER, rows=[lines[row.key] for row in changed],
        text_columns=2,
        commands=[profile_command(r.case, r.impl, auto) + files for r in changed if r.case],
    )  # fmt: skip
    yield Part(
        title="Common to all cells", sentences=[*_common(same)],
        commands=[_gate(found, same, changed)],
    )  # fmt: skip
    against = [(names[r.key], flat(r.reason)) for r in same.rows if r.verdict == "not comparable"]
    yield from _gathered("Not comparable", "why", against)
    yield from _gathered("What repeats exactly", "differs", _exact(found, names))
    yield Part(
        title="All cells", header=HEADER, rows=list(lines.values()), text_columns=2, folded=True
    )


def _gathered(title: str, column: str, found: Iterable[tuple[str, str]]) -> Iterator[Part]:
    """What is said of cells, a row for each text with the cells that it is said of."""
    of: dict[str, list[str]] = {}
    for name, text in found:
        of.setdefault(text, []).append(name)
    rows = [
        (
            text,
            ", ".join(names[:_NAMED]) + f" and {len(names) - _NAMED} more" * (len(names) > _NAMED),
        )
        for text, names in of.items()
    ]
    if rows:
        yield Part(title=title, header=(column, "cells"), rows=rows, text_columns=2)


def _files(source: Source) -> str:
    """The flags of a run's own files of implementations."""
    return "".join(f" --impl {shlex.quote(file)}" for file in source.settings.get("files") or ())


def _common(same: Compared) -> Iterator[str]:
    """The shift, what is known of such shifts, and what unpaired runs cannot prove."""
    known = "how much is usual between runs of equal code is not known here yet"
    if same.spread.shifts:
        usual = max(map(abs, same.spread.shifts))
        known = f"between earlier runs of equal code up to ± {_percent(usual)}"
    yield f"all times together: {units.change(math.exp(same.shift.run))} ({known})"
    own = [abs(value) for value in same.shift.groups.values()]
    if own and max(own) > NOTABLE:
        count = sum(value > NOTABLE for value in own)
        yield (
            f"{count} of {len(own)} groups of cells that are measured together moved by more than"
            f" {_percent(NOTABLE)} beside that, up to {_percent(max(own))}"
        )
    runs = same.spread.runs
    source = f"{runs} earlier runs" if runs else "a default: fewer than two earlier runs"
    yield (
        f"beside that the typical cell differs by ± {_percent(same.spread.typical)} from run to run"
        f" of equal code (standard deviation; {source})"
    )
    yield (
        "the changes of cells are beside these shifts. Runs that are not paired cannot tell whether"
        " the machine or a change common to all of the cells moved them, nor see a change within a"
        " cell's interval. What could, where both versions can be run:"
    )


def _percent(log: float) -> str:
    return units.brief_percent(math.exp(log) - 1)


def _gate(found: Comparison, same: Compared, changed: Sequence[Row]) -> str:
    base = found.before.code or "REF"
    if not any(row.case for row in same.rows):  # tests, of pytest-benchmark's
        return f"pytest --attnbench-gate {base}"
    sizes = sorted({row.case.seq_len for row in changed if row.case})
    flags = ["--impls", ",".join(dict.fromkeys(row.impl for row in changed))] if changed else []
    flags += ["--seq-lens", ",".join(map(str, sizes))] if changed else []
    return shlex.join(["attnbench", "gate", "--base", base, *flags]) + _files(found.after)


def _exact(found: Comparison, names: dict[Any, str]) -> Iterator[tuple[str, str]]:
    for key, name in names.items():
        records = found.before.cells[key].record, found.after.cells[key].record
        if records[0] and records[1] and records[0].status == records[1].status == "ok":
            old, new = (Checked(status="ok", metrics=r.metrics) for r in records if r)  # type: ignore[arg-type]
            differs = exact_differences(old, new, 0)
            for text in (*differs.failures, *differs.notes):
                yield name, flat(text)


def _elsewhere(found: Comparison, apart: Elsewhere) -> Iterator[Part]:
    def both(values: Sequence[float | None], text: Callable[[float | None], str]) -> str:
        return f"{text(values[0])} → {text(values[1])}"

    yield Part(
        title="Changes of order" if apart.reversals else "No change of order",
        sentences=(
            f"{found.before.name} is of {_machine(found.before)}, {found.after.name} of"
            f" {_machine(found.after)}: times of different machines are not divided",
            *(
                f"{r.ahead} beats {r.behind} in {found.before.name} ({units.ratio(r.ratios[0])}),"
                f" {r.behind} beats {r.ahead} in {found.after.name}"
                f" ({units.ratio(1 / r.ratios[1])}): {r.label}"
                for r in apart.reversals
            ),
        ),
    )
    if apart.slopes:
        yield Part(
            title="Growth with n",
            sentences=("slopes of ln time over ln n, of the sizes that both have",),
            header=("implementation", "case", "n", "slope"),
            rows=tuple(
                (s.impl, s.label, f"{s.sizes[0]}–{s.sizes[-1]}", both(s.exponents, units.digits))
                for s in apart.slopes
            ),
            text_columns=2,
        )
    common, names = parts.shortened([f"{s.impl} {s.label}" for s in apart.standings])
    yield Part(
        title="Standings",
        sentences=(
            f"all cells: {common}",
            f"rank within the case; speed: time of {apart.baseline} / its time; share: of the rate"
            " of a large matmul there",
        ),
        header=("cell", "rank", "speed", "share"),
        rows=[
            (name, f"{s.ranks[0]} → {s.ranks[1]}", both(s.speeds, units.ratio),
             both(s.shares, units.percent))
            for name, s in zip(names, apart.standings, strict=True)
        ],
    )  # fmt: skip


def _machine(source: Source) -> str:
    return str(source.environment.get("device_name") or "an unnamed device")


def _title(source: Source) -> str:
    """`quick-1, 2026-11-23 06:31 UTC, AMD EPYC, torch 2.13.0`."""
    facts = [source.name, units.moment(source.created) if source.created else None]
    facts += [_machine(source), *(f"torch {x}" for x in [source.environment.get("torch")] if x)]
    facts += [f"at {source.code[:10]}"] if source.code else []
    return flat(", ".join(fact for fact in facts if fact))


def as_json(comparisons: Sequence[Comparison]) -> dict[str, Any]:
    """Everything as plain JSON; shifts and spreads are natural logarithms."""
    found = [
        {
            "before": _source(one.before),
            "after": _source(one.after),
            "environment": [{"name": n, "before": a, "after": b} for n, a, b in one.environment],
            "same": one.same
            and {
                "shift": one.same.shift.run,
                "spread": {"typical": one.same.spread.typical, "runs": one.same.spread.runs},
                "earlier_shifts": one.same.spread.shifts,
                "rows": [vars(r) | {"case": r.case and r.case.to_json()} for r in one.same.rows],
            },
            "elsewhere": one.elsewhere,
        }
        for one in comparisons
    ]
    head = {"kind": "attnbench compare", "schema": 1, "attnbench": __version__}
    return {**head, "comparisons": found}


def _source(source: Source) -> dict[str, Any]:
    names = ("name", "created", "code")
    return {name: getattr(source, name) for name in names} | {"path": str(source.path)}
